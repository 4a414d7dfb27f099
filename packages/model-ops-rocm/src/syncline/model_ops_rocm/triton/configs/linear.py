"""Configurations of the products with a stored weight; imports no Triton.

Buckets are rows of x. Rows of `linear` have x's dtype; those of `linear_quantised` the weight's
codes as dtype, and as kind how they are multiplied. SWAP: the weight is the left operand, so that
few rows are the narrow side of a matrix instruction. A batch-invariant call takes the widest bucket
for every number of rows: one instruction, one BLOCK_K, no splits.
"""

from collections.abc import Iterator, Mapping
from typing import Final

import torch

from syncline.model_ops_rocm.triton.configs.base import ANY_WIDTH, HALF_DTYPES, ConfigKey, Row
from syncline.model_ops_rocm.triton.targets import LaunchConfig

# How codes are multiplied: with codes of x, whose scales multiply the whole sum or one of each 128
# of K; decoded, with x in 16 bits or in float32; with MX codes of x.
CODES: Final = "codes"
CODES_OF_BLOCKS: Final = "codes-of-blocks"
DECODED: Final = "decoded"
DECODED_FP32: Final = "decoded-fp32"
MX: Final = "mx"
_AMD: Final = ("gfx942", "gfx950")


def _tile(
    block: tuple[int, int, int],
    num_warps: int,
    num_stages: int,
    *,
    splits: int = 1,
    prefetch: int | None = None,
) -> LaunchConfig:
    """`block` is rows of x, rows of the weight, and K.

    With `prefetch`, for CUDA alone, a launch overlaps the end of the kernel before it, and asks for
    so much of K of each row of the weight meanwhile.
    """
    swap = block[0] <= 64
    return LaunchConfig(
        num_warps=num_warps,
        num_stages=num_stages,
        fuses_multiply_add=True,
        launch_pdl=None if prefetch is None else True,
        constants={
            "BLOCK_M": block[0],
            "BLOCK_N": block[1],
            "BLOCK_K": block[2],
            "SWAP": int(swap),
            "SPLITS": splits,
            "PREFETCH": prefetch or 0,
            "GROUP_M": 1 if swap else 8,
        },
    )


_Buckets = Mapping[int, LaunchConfig]
_LINEAR_AMD: Final[_Buckets] = {
    16: _tile((16, 64, 128), 4, 2),
    64: _tile((64, 64, 64), 4, 2),
    ANY_WIDTH: _tile((128, 128, 64), 8, 2),
}
_LINEAR_NVIDIA: Final[_Buckets] = {
    16: _tile((16, 64, 128), 4, 4),
    64: _tile((64, 64, 128), 4, 3),
    ANY_WIDTH: _tile((128, 128, 64), 8, 3),
}
_FP32_AMD: Final[_Buckets] = {
    64: _tile((16, 64, 32), 4, 2),
    ANY_WIDTH: _tile((128, 64, 32), 8, 2),
}
_FP32_NVIDIA: Final[_Buckets] = {
    64: _tile((16, 64, 32), 4, 3),
    ANY_WIDTH: _tile((128, 64, 16), 8, 3),
}


def table() -> Iterator[Row]:
    """Every row."""
    for arch in (*_AMD, "sm_90"):
        is_amd = arch in _AMD
        half, full = (_LINEAR_AMD, _FP32_AMD) if is_amd else (_LINEAR_NVIDIA, _FP32_NVIDIA)
        for dtype in HALF_DTYPES:
            yield from _rows("linear", arch, dtype, half)
        yield from _rows("linear", arch, torch.float32, full)
        yield from _quantised(arch, 2 if is_amd else 4)


def _quantised(arch: str, stages: int) -> Iterator[Row]:
    fn, fnuz, e2m1 = torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float4_e2m1fn_x2
    op, native = "linear_quantised", fnuz if arch == "gfx942" else fn
    codes = {
        16: _tile((16, 64, 128), 4, stages),
        64: _tile((64, 64, 128), 4, stages),
        ANY_WIDTH: _tile((128, 128, 128), 8, min(stages, 3)),
    }
    for kind in (CODES, CODES_OF_BLOCKS):
        yield from _rows(op, arch, native, codes, kind)
    few, many = _tile((16, 64, 128), 4, stages), _tile((128, 128, 64), 8, min(stages, 3))
    for dtype in (fn, fnuz, e2m1):
        decoded = {16: few, ANY_WIDTH: many} if dtype in (native, e2m1) else {ANY_WIDTH: many}
        yield from _rows(op, arch, dtype, decoded, DECODED)
        yield from _rows(op, arch, dtype, {ANY_WIDTH: _tile((16, 64, 32), 4, 2)}, DECODED_FP32)
    if arch == "gfx950":
        mx = {16: _tile((16, 64, 256), 4, 2), ANY_WIDTH: _tile((128, 128, 128), 8, 2)}
        for dtype in (fn, e2m1):
            yield from _rows(op, arch, dtype, mx, MX)


def _rows(
    op: str, arch: str, dtype: torch.dtype, buckets: _Buckets, kind: str = ""
) -> Iterator[Row]:
    for up_to, config in buckets.items():
        yield ConfigKey(op, arch, dtype, up_to, kind), config
