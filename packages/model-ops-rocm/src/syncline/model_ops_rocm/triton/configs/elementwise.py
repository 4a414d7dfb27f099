"""Configurations of the ops that read and write each number once; imports no Triton.

Buckets are widths of a normalised row, of a row of the result, of a head, of a block. No row of
these tables came from a measurement yet: each was chosen so that a thread loads 16 bytes at a time,
which docs/kernels-static.md shows.
"""

from collections.abc import Iterator
from typing import Final

import torch

from syncline.model_ops_rocm.triton.configs.base import (
    ANY_WIDTH,
    HALF_DTYPES,
    Buckets,
    ConfigKey,
    Row,
)
from syncline.model_ops_rocm.triton.targets import SUPPORTED_ARCHS, LaunchConfig

MAX_NORM_WIDTH: Final = 32_768


def rows_of_table(
    op: str, arch: str, narrow: Buckets, wide: Buckets, *, kind: str = ""
) -> Iterator[Row]:
    """`narrow` for the 2-byte dtypes, `wide` for float32."""
    for dtype in (*HALF_DTYPES, torch.float32):
        for up_to, config in (wide if dtype is torch.float32 else narrow).items():
            yield ConfigKey(op, arch, dtype, up_to, kind), config


def _norm(num_warps: int, block_rows: int) -> LaunchConfig:
    return LaunchConfig(num_warps=num_warps, constants={"BLOCK_ROWS": block_rows})


def _flat(num_warps: int, block_width: int) -> LaunchConfig:
    return LaunchConfig(num_warps=num_warps, constants={"BLOCK_WIDTH": block_width})


def _heads(num_warps: int, block_heads: int) -> LaunchConfig:
    return LaunchConfig(num_warps=num_warps, constants={"BLOCK_HEADS": block_heads})


# A wavefront of AMD has 64 lanes and a warp of NVIDIA 32: with 8 elements of 2 bytes, or 4 of 4, in
# each lane, one warp loads 512 or 256 elements at once.
_NORM_AMD: Final = {128: _norm(1, 4), 1_024: _norm(2, 1), 4_096: _norm(8, 1)}
_NORM_NVIDIA: Final = {128: _norm(1, 4), 1_024: _norm(4, 1), 4_096: _norm(8, 1)}
_NORM_WIDEST: Final = {MAX_NORM_WIDTH: _norm(16, 1)}
_GATHER: Final = ("gather_rows", "embedding")


def norm_rows(op: str, arch: str) -> Iterator[Row]:
    """Of an op that normalises whole rows: one sum, in one order, for all of them."""
    norm = (_NORM_NVIDIA if arch == "sm_90" else _NORM_AMD) | _NORM_WIDEST
    yield from rows_of_table(op, arch, norm, norm)


def heads_rows(op: str, arch: str) -> Iterator[Row]:
    """Of an op on some heads of a token."""
    if arch == "sm_90":
        narrow, wide = {64: _heads(1, 8), 256: _heads(1, 4)}, {256: _heads(1, 2)}
    else:
        narrow, wide = {64: _heads(1, 16), 256: _heads(1, 8)}, {256: _heads(1, 4)}
    yield from rows_of_table(op, arch, narrow, wide)


def table() -> Iterator[Row]:
    """Every row."""
    for arch in SUPPORTED_ARCHS:
        yield from norm_rows("rms_norm", arch)
        per_warp = 256 if arch == "sm_90" else 512
        for op in ("silu_and_mul", "kv_copy_blocks", *_GATHER):
            narrow = {1_024: _flat(1, per_warp), ANY_WIDTH: _flat(4, 4 * per_warp)}
            wide = {1_024: _flat(1, per_warp // 2), ANY_WIDTH: _flat(4, 2 * per_warp)}
            yield from rows_of_table(op, arch, narrow, wide)
        for op in ("rotary_embedding", "kv_write"):
            yield from heads_rows(op, arch)
