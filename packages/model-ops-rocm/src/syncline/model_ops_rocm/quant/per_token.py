"""fp8 with one float32 scale per row: encode and decode; knows no layout and no region.

Unit: a row is the last dimension, the domain of one scale. scale = amax / max in float32, 1 where
that quotient is 0 (a row of zeros, or one whose amax / max underflows: its codes are all zero);
code = x / scale, clamped to +-max, rounded to nearest even.
Source: ROCm/aiter e4048607a `aiter/ops/quant.py` pertoken_quant. Differs: it clamps before the
cast. AITER relies on the cast, which makes NaN of an overflow for e4m3fnuz always and for e4m3fn in
PyTorch before 2.13; an overflow needs a scale that rounded down, so one in the subnormal range.
Not the HIP kernels' numbers: they multiply by an approximate reciprocal of the scale.
"""

from typing import Final

import torch

from syncline.model_ops_rocm.checks import refuse, require_float

FP8_MAX: Final[dict[torch.dtype, float]] = {
    torch.float8_e4m3fn: 448.0,
    torch.float8_e4m3fnuz: 240.0,
}


def per_token_fp8_encode(
    x: torch.Tensor, dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., K] -> codes of `dtype` [..., K] and float32 scales [..., 1].

    A row with an infinity or a NaN gets the scale NaN and codes of 0, so decoding it cannot give a
    plausible number; the caller who must not store such a row checks the scale.
    """
    require_float("per_token_fp8_encode", "x", x)
    limit = _max_of("per_token_fp8_encode", dtype)
    x32 = x.float()
    # Divide by a tensor: by a Python float, a GPU would multiply by the reciprocal.
    max_value = torch.full((), limit, dtype=torch.float32, device=x.device)
    scale = x32.abs().amax(dim=-1, keepdim=True) / max_value
    scale.masked_fill_(scale == 0, 1.0).masked_fill_(~scale.isfinite(), float("nan"))
    quotient = torch.where(scale.isfinite(), x32 / scale, 0.0)
    return quotient.clamp_(-limit, limit).to(dtype), scale


def per_token_fp8_decode(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """codes [..., K] and scales [..., 1] -> float32 [..., K], code * scale."""
    _max_of("per_token_fp8_decode", codes.dtype)
    if scale.shape != (*codes.shape[:-1], 1):
        refuse(
            "per_token_fp8_decode",
            "scale",
            f"have shape {[*codes.shape[:-1], 1]}",
            list(scale.shape),
        )
    return codes.float() * scale


def _max_of(op: str, dtype: torch.dtype) -> float:
    if dtype not in FP8_MAX:
        refuse(op, "dtype", f"be one of {[str(known) for known in FP8_MAX]}", dtype)
    return FP8_MAX[dtype]
