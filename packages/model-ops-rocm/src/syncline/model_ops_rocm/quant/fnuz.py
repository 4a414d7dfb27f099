"""e4m3fn weights as e4m3fnuz ones: one type in, another out, so it cannot happen twice.

Unit: codes with their scale. A byte means half as much in e4m3fnuz, so the scale doubles. The
numbers stay exactly what they were, but that -0 becomes 0: its byte, 0x80, is the NaN of the other
type. The NaNs of e4m3fn, 0x7F and 0xFF, become that NaN. The input is left as it is.
Source: ROCm/ATOM ffdf3bb5d `atom/model_ops/utils.py` normalize_e4m3fn_to_e4m3fnuz. Differs: there
the input is changed in place, 0x7F and 0xFF become 240 and -240, an e8m0 scale of 0 is not doubled
and one of 254 stays, which halves the numbers. Here a scale that cannot be doubled is refused.
"""

from dataclasses import dataclass

import torch

from syncline.model_ops_rocm.quant.e8m0 import E8M0_NAN
from syncline.model_ops_rocm.quant.minifloat import E4M3FNUZ

_SCALE_DTYPES = (torch.float32, torch.float8_e8m0fnu)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class E4m3fnWeight:
    """Codes of e4m3fn and the scale they are multiplied by: float32, or powers of two in e8m0."""

    codes: torch.Tensor
    scale: torch.Tensor

    def __post_init__(self) -> None:
        _check("E4m3fnWeight", self.codes, self.scale, torch.float8_e4m3fn)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class E4m3fnuzWeight:
    """Codes of e4m3fnuz and the scale they are multiplied by: float32, or e8m0."""

    codes: torch.Tensor
    scale: torch.Tensor

    def __post_init__(self) -> None:
        _check("E4m3fnuzWeight", self.codes, self.scale, torch.float8_e4m3fnuz)


def to_e4m3fnuz(weight: E4m3fnWeight) -> E4m3fnuzWeight:
    """The same numbers in new tensors of the other type.

    ValueError, also for a weight that is e4m3fnuz already, and for a finite scale whose double its
    type does not hold (float32 from 2^127 on, e8m0 254). Looks at the scales on the host.
    """
    if not isinstance(weight, E4m3fnWeight):
        raise ValueError(
            f"to_e4m3fnuz: weight must be an E4m3fnWeight, got {type(weight).__name__}"
        )
    scale = _doubled(weight.scale)
    raw = weight.codes.view(torch.uint8)
    is_nan = (raw & 0x7F) == 0x7F
    codes = torch.where(raw == 0x80, 0, raw)
    codes = torch.where(is_nan, E4M3FNUZ.nan_code or 0, codes).to(torch.uint8)
    return E4m3fnuzWeight(codes=codes.view(torch.float8_e4m3fnuz), scale=scale)


def _doubled(scale: torch.Tensor) -> torch.Tensor:
    if scale.dtype == torch.float32:
        doubled = scale * 2
        lost = scale.isfinite() & ~doubled.isfinite()
        top = "finite after doubling, or not finite before"
    else:
        byte = scale.view(torch.uint8)
        lost = byte == E8M0_NAN - 1
        doubled = torch.where(byte == E8M0_NAN, byte, byte + 1).view(scale.dtype)
        top = f"at most {E8M0_NAN - 2}, or {E8M0_NAN}"
    if bool(lost.any()):
        raise ValueError(f"to_e4m3fnuz: scale must be {top}, got {int(lost.sum())} that are not")
    return doubled


def _check(name: str, codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> None:
    if codes.dtype != dtype:
        raise ValueError(f"{name}: codes must be {dtype}, got {codes.dtype}")
    if scale.dtype not in _SCALE_DTYPES:
        raise ValueError(f"{name}: scale must be float32 or float8_e8m0fnu, got {scale.dtype}")
