"""Quantisers: from floating point to codes and scales, and back; knows no layout and no region.

One module per scheme. Each divides exactly, clamps before it casts, and has an answer for zeros,
so that a code is never NaN unless its input was not finite.
"""

from syncline.model_ops_rocm.quant.per_token import (
    FP8_MAX,
    per_token_fp8_decode,
    per_token_fp8_encode,
)

__all__ = ["FP8_MAX", "per_token_fp8_decode", "per_token_fp8_encode"]
