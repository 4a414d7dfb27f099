"""Quantisers: from floating point to codes and scales, and back; knows no layout.

One module per concern: narrow types, e8m0 scales, blocks that share a scale, one scale per row,
fp8 of one kind to the other. Each divides exactly, clamps before it casts, and has an answer for
zeros, so that a code is never NaN unless its input was not finite.
"""

from syncline.model_ops_rocm.quant.e8m0 import (
    E8M0_NAN,
    E8M0_ONE,
    E8m0Mode,
    e8m0_from_amax,
    e8m0_to_float32,
)
from syncline.model_ops_rocm.quant.fnuz import E4m3fnuzWeight, E4m3fnWeight, to_e4m3fnuz
from syncline.model_ops_rocm.quant.minifloat import (
    E2M1,
    E4M3FN,
    E4M3FNUZ,
    MiniFloat,
    decode_minifloat,
    encode_minifloat,
    pack_nibbles,
    unpack_nibbles,
)
from syncline.model_ops_rocm.quant.per_token import (
    FP8_MAX,
    per_token_fp8_decode,
    per_token_fp8_encode,
)
from syncline.model_ops_rocm.quant.scheme import CodeType, Granularity, ScaleType, ZeroRule

__all__ = [
    "E2M1",
    "E4M3FN",
    "E4M3FNUZ",
    "E8M0_NAN",
    "E8M0_ONE",
    "FP8_MAX",
    "CodeType",
    "E4m3fnWeight",
    "E4m3fnuzWeight",
    "E8m0Mode",
    "Granularity",
    "MiniFloat",
    "ScaleType",
    "ZeroRule",
    "decode_minifloat",
    "e8m0_from_amax",
    "e8m0_to_float32",
    "encode_minifloat",
    "pack_nibbles",
    "per_token_fp8_decode",
    "per_token_fp8_encode",
    "to_e4m3fnuz",
    "unpack_nibbles",
]
