"""Narrow floating types with integer operations alone; knows no scale and no block.

Unit: one code per element, in a uint8. Encoding rounds to nearest even and saturates: what lies
beyond the largest value, infinity included, becomes the largest value. It uses shifts, additions
and comparisons of int32, so any backend without a native cast can do the same and get the same
bits. A NaN becomes the type's NaN; e2m1 has none, so there a NaN saturates like an infinity.
Subnormals of both sides count. -0.0 keeps its sign, except in e4m3fnuz, where that byte is the NaN.
"""

from dataclasses import dataclass
from typing import Final

import torch

_F32_MANTISSA = 23
_F32_BIAS = 127
_F32_INF = 0x7F80_0000
_MAGNITUDE = 0x7FFF_FFFF
# A shift that makes 0 of every 24-bit significand, even rounded.
_ALL_GONE = _F32_MANTISSA + 2


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniFloat:
    """A type of up to 8 bits: sign, exponent, mantissa; `max_code` is its largest finite code."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max_code: int
    nan_code: int | None
    signed_zero: bool = True

    @property
    def max_value(self) -> float:
        return self.value_of(self.max_code)

    @property
    def sign_bit(self) -> int:
        return 1 << (self.exponent_bits + self.mantissa_bits)

    def value_of(self, code: int) -> float:
        """The number that a finite code means, by the definition of the type."""
        sign = -1.0 if code & self.sign_bit else 1.0
        exponent = (code & (self.sign_bit - 1)) >> self.mantissa_bits
        fraction = (code & ((1 << self.mantissa_bits) - 1)) / (1 << self.mantissa_bits)
        if exponent == 0:
            return sign * fraction * 2.0 ** (1 - self.bias)
        return sign * (1 + fraction) * 2.0 ** (exponent - self.bias)

    def holds(self, value: float) -> bool:
        """Whether a positive number is a value of the type."""
        return any(self.value_of(code) == value for code in range(1, self.max_code + 1))


E4M3FN: Final = MiniFloat(
    name="e4m3fn", exponent_bits=4, mantissa_bits=3, bias=7, max_code=0x7E, nan_code=0x7F
)
E4M3FNUZ: Final = MiniFloat(
    name="e4m3fnuz",
    exponent_bits=4,
    mantissa_bits=3,
    bias=8,
    max_code=0x7F,
    nan_code=0x80,
    signed_zero=False,
)
E2M1: Final = MiniFloat(
    name="e2m1", exponent_bits=2, mantissa_bits=1, bias=1, max_code=0x7, nan_code=None
)


def encode_minifloat(x: torch.Tensor, kind: MiniFloat) -> torch.Tensor:
    """float32 of any shape -> uint8 codes, by integer operations on the bits of `x`."""
    if x.dtype != torch.float32:
        raise ValueError(f"encode_minifloat: x must be float32, got {x.dtype}")
    bits = x.contiguous().view(torch.int32)
    magnitude = bits & _MAGNITUDE
    is_nan = magnitude > _F32_INF
    top = torch.tensor(kind.max_value, dtype=torch.float32).view(torch.int32).item()
    magnitude = magnitude.clamp(max=int(top))
    codes = _round_magnitude(magnitude, kind)
    sign = (bits < 0).to(torch.int32) * kind.sign_bit
    codes = codes | sign if kind.signed_zero else torch.where(codes == 0, codes, codes | sign)
    if kind.nan_code is not None:
        # The sign of a NaN is kept where the type has NaNs of both signs.
        nan = sign | kind.nan_code
        codes = torch.where(is_nan, nan, codes)
    return codes.to(torch.uint8)


def _round_magnitude(magnitude: torch.Tensor, kind: MiniFloat) -> torch.Tensor:
    """Codes without sign of magnitudes that are at most the largest value."""
    drop = _F32_MANTISSA - kind.mantissa_bits
    rebias = (_F32_BIAS - kind.bias) << _F32_MANTISSA
    # A carry out of the mantissa moves into the exponent, which is the right answer.
    normal = (magnitude - rebias + ((1 << (drop - 1)) - 1) + ((magnitude >> drop) & 1)) >> drop
    exponent = magnitude >> _F32_MANTISSA
    significand = (magnitude & ((1 << _F32_MANTISSA) - 1)) | (1 << _F32_MANTISSA)
    # The smaller the exponent, the more bits fall off: the unit is the type's smallest subnormal.
    smallest_normal = _F32_BIAS + 1 - kind.bias
    shift = (drop + smallest_normal - exponent).clamp(min=1, max=_ALL_GONE)
    half = (torch.ones_like(shift) << (shift - 1)) - 1
    subnormal = (significand + half + ((significand >> shift) & 1)) >> shift
    return torch.where(exponent < smallest_normal, subnormal, normal)


def decode_minifloat(codes: torch.Tensor, kind: MiniFloat) -> torch.Tensor:
    """uint8 codes -> float32, exact; codes outside the type are a ValueError of the table."""
    top = 2 * kind.sign_bit
    finite = range(kind.max_code + 1)
    values = [float("nan")] * top
    for code in finite:
        values[code] = kind.value_of(code)
        if code or kind.signed_zero:
            values[code | kind.sign_bit] = kind.value_of(code | kind.sign_bit)
    table = torch.tensor(values, dtype=torch.float32, device=codes.device)
    return table[codes.long()]


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """uint8 codes of 4 bits [..., K] -> uint8 [..., K / 2]: an even index in the low nibble."""
    if not codes.shape or codes.shape[-1] % 2:
        raise ValueError(f"pack_nibbles: the last dimension must be even, got {list(codes.shape)}")
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [..., K / 2] -> uint8 codes of 4 bits [..., K]; the inverse of `pack_nibbles`."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)
