"""e8m0 scales: a power of two in a byte; knows no block and no code but the largest one.

Unit: byte b is 2^(b - 127); 255 is NaN. Rounding of amax to a scale has four modes, because the
entry points of the AITER library differ in it; none is a default here.
Source: ROCm/aiter e4048607a `aiter/utility/fp4_utils.py` f32_to_mx_e8m0_scale. Differs: a finite
amax never gives the NaN scale (there EVEN rounds the largest ones to infinity first).
"""

import math
from enum import IntEnum
from typing import Final

import torch

E8M0_NAN: Final = 255
E8M0_ONE: Final = 127
_MANTISSA = 0x7F_FFFF
_EXPONENT_SHIFT = 23


class E8m0Mode(IntEnum):
    """How amax becomes a power of two; the numbers are AITER's MxScaleRoundMode.

    With M the code's largest value and P the largest power of two in it: ROUND_UP is the smallest
    power >= amax / M (no code saturates); ROUND_DOWN the largest <= amax / P; CEIL the smallest
    >= amax / P; EVEN rounds amax to the code's mantissa first, then takes the largest <= it / P.
    A quotient below 2^-126 has no exponent of its own: ROUND_UP and CEIL give 2^-126, the others
    2^-127.
    """

    ROUND_DOWN = 0
    ROUND_UP = 1
    EVEN = 2
    CEIL = 3


def e8m0_from_amax(
    amax: torch.Tensor, mode: E8m0Mode, *, max_value: float, mantissa_bits: int
) -> torch.Tensor:
    """float32 amax (>= 0) -> uint8 scales; what is not finite becomes 255."""
    finite = amax.isfinite()
    safe = torch.where(finite, amax, 0.0)
    power = math.floor(math.log2(max_value))
    if mode is E8m0Mode.EVEN:
        # In integers: adding may carry past the largest exponent, which as a float is infinity.
        bits = safe.view(torch.int32).long() + (1 << (_EXPONENT_SHIFT - 1 - mantissa_bits))
        exponent = (bits >> _EXPONENT_SHIFT) - power
    else:
        divisor = max_value if mode is E8m0Mode.ROUND_UP else 2.0**power
        # By a tensor: by a Python float, a GPU would multiply by the reciprocal.
        quotient = safe / torch.full((), divisor, dtype=torch.float32, device=amax.device)
        bits = quotient.view(torch.int32).long()
        exponent = bits >> _EXPONENT_SHIFT
        if mode is not E8m0Mode.ROUND_DOWN:
            exponent = exponent + ((bits & _MANTISSA) != 0)
    exponent = exponent.clamp(min=0, max=E8M0_NAN - 1)
    return torch.where(finite, exponent, E8M0_NAN).to(torch.uint8)


def e8m0_to_float32(scales: torch.Tensor) -> torch.Tensor:
    """uint8 scales -> float32, exact; 0 is the subnormal 2^-127, 255 is NaN."""
    bits = scales.to(torch.int32) << _EXPONENT_SHIFT
    bits = torch.where(scales == 0, 1 << (_EXPONENT_SHIFT - 1), bits)
    bits = torch.where(scales == E8M0_NAN, 0x7FC0_0000, bits)
    return bits.to(torch.int32).view(torch.float32)
