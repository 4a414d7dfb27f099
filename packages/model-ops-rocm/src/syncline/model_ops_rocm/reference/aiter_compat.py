"""AITER's PyTorch quantisers, number for number, faults included: for tests alone.

Unit: one quantiser call. What these functions do wrong is on purpose: they wrap int8, make NaN
codes, divide zero by zero, and truncate where they ought to round. Nothing that stores or computes
a weight may use them; the recipes of this package are the right answers, and their tests say
where the two agree. No result depends on the platform or the PyTorch version: a cast that does is
written out as it behaved where the numbers were recorded (x86, PyTorch 2.13).
Source: ROCm/aiter e4048607a `aiter/ops/quant.py`, `aiter/utility/fp4_utils.py`,
`op_tests/test_moe_2stage.py`; ROCm/ATOM ffdf3bb5d `atom/model_ops/utils.py`,
`atom/quantization/quark/utils.py`.
"""

from collections.abc import Sequence as SequenceABC
from typing import Final

import torch

DTYPE_MAX: Final[dict[torch.dtype, float]] = {
    torch.float8_e4m3fn: 448.0,
    torch.float8_e4m3fnuz: 240.0,
    torch.int8: 127.0,
}
# By AITER's number of the type: 0 fp4 e2m1, 1 fp8 e4m3fn, 2 fp8 e4m3fnuz.
_MX_POWER: Final = (2, 8, 7)
_MX_MAX: Final = (6.0, 448.0, 240.0)
_MX_MANTISSA: Final = (1, 3, 3)
_F32_TINY: Final = 2.0**-126


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float32 -> codes: e4m3fn saturates, e4m3fnuz overflows to NaN, int8 truncates and wraps."""
    if dtype == torch.float8_e4m3fn:
        return x.clamp(-448.0, 448.0).to(dtype)
    if dtype == torch.float8_e4m3fnuz:
        # 248 is the tie between 240 and the 256 that the type lacks; ties go to even, so it is out.
        return torch.where(x.abs() >= 248.0, float("nan"), x).to(dtype)
    # x86 converts to int32 and keeps the low byte; what does not fit int32 becomes its minimum.
    fits = x.abs() < 2.0**31
    return (torch.where(fits, x, 0.0).long() & 0xFF).to(torch.uint8).view(torch.int8)


def pertoken_quant(
    x: torch.Tensor,
    dtype: torch.dtype,
    *,
    scale: torch.Tensor | None = None,
    smooth: torch.Tensor | None = None,
    dtype_max: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A scale per row, 1 where amax / max is 0; a given scale is taken as it is.

    `smooth`, one factor per column, multiplies x first.
    """
    x32 = x.float() if smooth is None else x.float() * smooth
    if scale is None:
        limit = DTYPE_MAX[dtype] if dtype_max is None else dtype_max
        scale = x32.abs().amax(dim=-1, keepdim=True) / _as_tensor(limit)
        scale = scale.masked_fill(scale == 0, 1.0)
    return cast(x32 / scale, dtype), scale


def per_tensor_quant(
    x: torch.Tensor,
    dtype: torch.dtype,
    *,
    scale: torch.Tensor | None = None,
    dtype_max: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One scale, without a guard: a tensor of zeros has scale 0 and NaN codes (0 for int8)."""
    x32 = x.float()
    if scale is None:
        limit = DTYPE_MAX[dtype] if dtype_max is None else dtype_max
        scale = x32.abs().amax() / _as_tensor(limit)
    return cast(x32 / scale, dtype), scale.view(1)


def per_1x128_quant(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """`pertoken_quant` of runs of 128; scales [M, K / 128]."""
    codes, scale = pertoken_quant(x.view(-1, 128), dtype)
    return codes.view(x.shape), scale.view(*x.shape[:-1], -1)


def weight_per_128x128_quant(
    weight: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """[E, N, K] in multiples of 128: `pertoken_quant` of each block's 16,384 elements."""
    experts, rows, columns = weight.shape
    blocks = weight.view(experts, rows // 128, 128, columns // 128, 128).transpose(2, 3)
    codes, scale = pertoken_quant(blocks.flatten(-2), dtype)
    codes = codes.view(torch.uint8).view(blocks.shape).transpose(2, 3).contiguous().view(dtype)
    return codes.view(weight.shape), scale.squeeze(-1)


def atom_per_128x128_quant(
    weight: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """[N, K] of any size, padded with zeros for the maximum; scales at least 2^-126; clamped."""
    rows, columns = weight.shape
    limit = DTYPE_MAX[dtype]
    padded = torch.nn.functional.pad(weight.float(), (0, -columns % 128, 0, -rows % 128))
    blocks = padded.view(padded.shape[0] // 128, 128, padded.shape[1] // 128, 128)
    amax = blocks.abs().amax(dim=(1, 3))
    scale = (amax / _as_tensor(limit)).clamp(min=_F32_TINY)
    codes = (blocks / scale[:, None, :, None]).clamp(-limit, limit).to(dtype)
    codes = codes.view(torch.uint8).view(padded.shape)[:rows, :columns].contiguous()
    return codes.view(dtype), scale


def f32_to_mx_e8m0_scale(amax: torch.Tensor, mode: int, kind: int) -> torch.Tensor:
    """float32 amax -> e8m0 bytes; mode 0 down, 1 up (default there), 2 even, 3 ceil."""
    bits = amax.view(torch.int32)
    if mode == 2:
        bits = (bits + (1 << (22 - _MX_MANTISSA[kind]))) & ~0x7F_FFFF
    divisor = _MX_MAX[kind] if mode == 1 else 2.0 ** _MX_POWER[kind]
    quotient = (bits.view(torch.float32) / _as_tensor(divisor)).view(torch.int32)
    exponent = (quotient >> 23) & 0xFF
    if mode in (1, 3):
        exponent = exponent + (((quotient & 0x7F_FFFF) != 0) & (exponent < 255))
    exponent = torch.where(amax.isfinite(), exponent, 255)
    return exponent.to(torch.uint8)


def e8m0_to_f32(scale: torch.Tensor) -> torch.Tensor:
    """e8m0 bytes -> float32; 255 becomes the signalling NaN 0x7F800001."""
    bits = scale.to(torch.int32) << 23
    bits = torch.where(scale == 0, 0x0040_0000, bits)
    bits = torch.where(scale == 255, 0x7F80_0001, bits)
    return bits.to(torch.int32).view(torch.float32)


def f32_to_floatx(x: torch.Tensor, exponent_bits: int, mantissa_bits: int) -> torch.Tensor:
    """float32 -> codes without infinities or NaNs, in uint8: nearest even, saturating.

    A NaN goes through the integer path of normal numbers, and its low byte is whatever comes out.
    """
    bias = (1 << (exponent_bits - 1)) - 1
    drop = 23 - mantissa_bits
    max_code = (1 << (exponent_bits + mantissa_bits)) - 1
    max_normal = 2.0 ** ((1 << exponent_bits) - 1 - bias) * (2 - 2.0**-mantissa_bits)
    sign_bit = 1 << (exponent_bits + mantissa_bits)
    bits = x.contiguous().view(torch.int32)
    sign = ((bits < 0).to(torch.int32) * sign_bit).to(torch.uint8)
    magnitude = (bits & 0x7FFF_FFFF).view(torch.float32)
    magic_bits = (127 - bias + drop + 1) << 23
    magic = torch.tensor(magic_bits, dtype=torch.int32).view(torch.float32)
    # Adding a power of two whose last mantissa bit is the smallest subnormal rounds to that unit.
    denormal = (magnitude + magic).view(torch.int32) - magic_bits
    normal = magnitude.view(torch.int32)
    odd = (normal >> drop) & 1
    normal = (normal + ((bias - 127) << 23) + ((1 << (drop - 1)) - 1) + odd) >> drop
    codes = torch.where(magnitude < 2.0 ** (1 - bias), denormal, normal) & 0xFF
    codes = torch.where(magnitude >= max_normal, max_code, codes)
    return codes.to(torch.uint8) | sign


def f32_to_mxfp4(x: torch.Tensor) -> torch.Tensor:
    """float32 [..., K] -> packed e2m1 [..., K / 2] in uint8, the even index in the low nibble."""
    codes = f32_to_floatx(x, 2, 1)
    return (codes[..., 1::2] << 4) | codes[..., 0::2]


def mxfp4_to_f32(packed: torch.Tensor) -> torch.Tensor:
    """Packed e2m1 [..., K / 2] -> float32 [..., K]."""
    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    table = torch.tensor([*magnitudes, *(-value for value in magnitudes)])
    codes = torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)
    return table[codes.long()]


def per_1x32_f4_quant(
    x: torch.Tensor, *, mode: int = 1, shuffle: bool = False, pack_dim: int = -1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed e2m1 and e8m0 bytes; leading dimensions of the scale are flattened."""
    if pack_dim == 0:
        codes, scale = per_1x32_f4_quant(x.T.contiguous(), mode=mode)
        return codes.T.contiguous(), scale.T.contiguous()
    groups = x.float().reshape(-1, 32)
    scale = f32_to_mx_e8m0_scale(groups.abs().amax(dim=-1), mode, 0)
    codes = f32_to_mxfp4(groups / e8m0_to_f32(scale)[:, None])
    scale = scale.view(-1, x.shape[-1] // 32)
    return codes.view(*x.shape[:-1], -1), shuffle_scale(scale) if shuffle else scale


def shuffle_scale(scale: torch.Tensor) -> torch.Tensor:
    """[R, C] padded to 256 rows and 8 columns; the padding, garbage in AITER, is 0 here."""
    rows, columns = scale.shape
    padded = torch.nn.functional.pad(scale, (0, -columns % 8, 0, -rows % 256))
    split = padded.view(padded.shape[0] // 32, 2, 16, padded.shape[1] // 8, 2, 4)
    return split.permute(0, 3, 5, 2, 4, 1).reshape(padded.shape)


def per_1x32_f8_quant(
    x: torch.Tensor, dtype: torch.dtype, *, e8m0: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """fp8 in runs of 32: e8m0 scales rounded up, or float32 ones of amax / 256, without a guard."""
    groups = x.float().reshape(-1, 32)
    amax = groups.abs().amax(dim=-1)
    if e8m0:
        stored = f32_to_mx_e8m0_scale(amax, 1, 1 if dtype == torch.float8_e4m3fn else 2)
        scale = e8m0_to_f32(stored)
    else:
        stored = scale = amax / _as_tensor(256.0)
    codes = cast(groups / scale[:, None], dtype)
    return codes.view(x.shape), stored.view(-1, x.shape[-1] // 32)


def per_1x32_i4_quant(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int4 range in int8, all in the dtype of `weight`; bfloat16 scales [..., K / 32, N]."""
    groups = weight.view(*weight.shape[:-1], -1, 32)
    scale = groups.abs().amax(dim=-1, keepdim=True).clamp(min=1e-6) / 7.0
    codes = (groups / scale).round().clamp(-7, 7).to(torch.int8)
    return codes.view(weight.shape), scale.squeeze(-1).transpose(-1, -2).contiguous().bfloat16()


def atom_normalize_e4m3fn_to_e4m3fnuz(
    codes: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """-0 becomes 0, the scale doubles (e8m0: + 1, but 0 and 255 stay, and 254); 0x7F is 240."""
    raw = codes.view(torch.uint8)
    moved = torch.where(raw == 0x80, 0, raw).to(torch.uint8).view(torch.float8_e4m3fnuz)
    if scale.dtype == torch.float32:
        return moved, scale * 2.0
    byte = scale.view(torch.uint8).int()
    kept = (byte == 0) | (byte == 255)
    return moved, torch.where(kept, byte, (byte + 1).clamp(max=254)).to(torch.uint8)


def atom_requantize_with_max_scale(
    codes: torch.Tensor, scale: torch.Tensor, widths: SequenceABC[int], *, normalize: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Parts of `widths` rows, a scale each, brought to the largest of the scales."""
    if normalize:
        codes, scale = atom_normalize_e4m3fn_to_e4m3fnuz(codes, scale)
    largest = scale.max()
    spread = scale.view(-1).repeat_interleave(torch.tensor(list(widths)))[:, None]
    return per_tensor_quant(codes.float() * spread, codes.dtype, scale=largest)


def atom_dequant_mxfp8(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """e4m3fn [..., K] and e8m0 bytes [..., K / 32] -> float32."""
    factors = e8m0_to_f32(scale).repeat_interleave(32, dim=-1)
    return codes.float() * factors


def _as_tensor(value: float) -> torch.Tensor:
    return torch.full((), value, dtype=torch.float32)
