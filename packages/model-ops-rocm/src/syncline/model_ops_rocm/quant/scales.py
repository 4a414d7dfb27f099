"""From the maximum of a block to its scale; knows no block and no code but the largest one.

Unit: one scale per maximum. A maximum that is not finite gives the NaN of the scale's type; a
finite one never does, and never 0: the zero rule says what a block of zeros has.
"""

from typing import Final

import torch

from syncline.model_ops_rocm.quant.e8m0 import (
    E8M0_ONE,
    E8m0Mode,
    e8m0_from_amax,
    e8m0_to_float32,
)
from syncline.model_ops_rocm.quant.scheme import ZeroRule

_SMALLEST_FP32: Final = 2.0**-126


def fp32_scales(amax: torch.Tensor, *, clamp: float, zero: ZeroRule) -> torch.Tensor:
    """amax / clamp in float32, exactly rounded, subnormal results kept."""
    # Divide by a tensor: by a Python float, a GPU would multiply by the reciprocal.
    scale = amax / torch.full((), clamp, dtype=torch.float32, device=amax.device)
    if zero is ZeroRule.ONE:
        scale = scale.masked_fill(scale == 0, 1.0)
    else:
        scale = scale.clamp(min=_SMALLEST_FP32)
    # One NaN, whatever the payload: the bytes of a scale must not depend on the machine.
    return scale.masked_fill(~amax.isfinite(), float("nan"))


def e8m0_scales(
    amax: torch.Tensor, *, clamp: float, zero: ZeroRule, mode: E8m0Mode, mantissa_bits: int
) -> torch.Tensor:
    """Powers of two, as float8_e8m0fnu."""
    scale = e8m0_from_amax(amax, mode, max_value=clamp, mantissa_bits=mantissa_bits)
    if zero is ZeroRule.ONE:
        scale = scale.masked_fill(amax == 0, E8M0_ONE)
    return scale.view(torch.float8_e8m0fnu)


def scales_as_float32(scales: torch.Tensor) -> torch.Tensor:
    """What stored scales multiply by."""
    if scales.dtype == torch.float8_e8m0fnu:
        return e8m0_to_float32(scales.view(torch.uint8))
    return scales
