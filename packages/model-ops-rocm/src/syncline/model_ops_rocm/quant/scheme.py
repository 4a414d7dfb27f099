"""The choices a quantiser has, as values; computes nothing.

Unit: names. Their strings appear in descriptions of formats.
"""

from enum import StrEnum
from typing import Final

import torch

from syncline.model_ops_rocm.quant.minifloat import E2M1, E4M3FN, E4M3FNUZ, MiniFloat


class Granularity(StrEnum):
    """Which elements of a matrix [N, K] share a scale; leading dimensions are other matrices."""

    TENSOR = "tensor"
    TOKEN = "token"
    BLOCK_1X128 = "1x128"
    BLOCK_128X128 = "128x128"
    BLOCK_1X32 = "1x32"


class CodeType(StrEnum):
    """What an element becomes; e2m1 is packed, two to a byte along K, the even in the low half."""

    E4M3FN = "e4m3fn"
    E4M3FNUZ = "e4m3fnuz"
    INT8 = "int8"
    E2M1 = "e2m1"


class ScaleType(StrEnum):
    """What a scale is stored as: float32, or a power of two in a byte."""

    FP32 = "fp32"
    E8M0 = "e8m0"


class ZeroRule(StrEnum):
    """The scale of elements that are all zero.

    ONE: 1 where amax, or in float32 amax / clamp, is 0. SMALLEST: the smallest scale there is,
    2^-126 for float32, which then is the least of any block, and 2^-127 for e8m0.
    """

    ONE = "one"
    SMALLEST = "smallest"


CODE_DTYPES: Final[dict[CodeType, torch.dtype]] = {
    CodeType.E4M3FN: torch.float8_e4m3fn,
    CodeType.E4M3FNUZ: torch.float8_e4m3fnuz,
    CodeType.INT8: torch.int8,
    CodeType.E2M1: torch.float4_e2m1fn_x2,
}
SCALE_DTYPES: Final[dict[ScaleType, torch.dtype]] = {
    ScaleType.FP32: torch.float32,
    ScaleType.E8M0: torch.float8_e8m0fnu,
}
MINI_FLOATS: Final[dict[CodeType, MiniFloat]] = {
    CodeType.E4M3FN: E4M3FN,
    CodeType.E4M3FNUZ: E4M3FNUZ,
    CodeType.E2M1: E2M1,
}
INT8_MAX: Final = 127.0


def max_of(code: CodeType) -> float:
    """The largest magnitude that a code means; int8 leaves out -128, so both signs are alike."""
    return INT8_MAX if code is CodeType.INT8 else MINI_FLOATS[code].max_value
