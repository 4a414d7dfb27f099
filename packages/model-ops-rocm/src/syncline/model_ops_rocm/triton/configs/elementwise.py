"""Configurations of the ops that read and write each number once; imports no Triton.

Buckets are widths of a normalised row, of a row of the result, of a head, of a block. In each row a
thread loads 16 bytes at a time, which docs/kernels-static.md shows. Those of sm_90 for rms_norm,
rotary_embedding and silu_and_mul in 16 bits come from sweeps on an H200 at 1, 256 and 8,192 rows of
models' widths, made before launches overlapped; no other row came from a measurement. Programs of
one or two warps were bound there by how fast they start, the more so where launches overlap.
"""

from collections.abc import Callable, Iterator
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
Make = Callable[..., LaunchConfig]


def rows_of_table(
    op: str, arch: str, narrow: Buckets, wide: Buckets, *, kind: str = ""
) -> Iterator[Row]:
    """`narrow` for the 2-byte dtypes, `wide` for float32."""
    for dtype in (*HALF_DTYPES, torch.float32):
        for up_to, config in (wide if dtype is torch.float32 else narrow).items():
            yield ConfigKey(op, arch, dtype, up_to, kind), config


_GATHER: Final = ("gather_rows", "embedding")


def overlapping(arch: str, num_warps: int, **constants: int) -> LaunchConfig:
    """On sm_90 a launch starts while the one before it ends: 0.9 us a node instead of 1.4."""
    pdl = True if arch == "sm_90" else None
    return LaunchConfig(num_warps=num_warps, constants=constants, launch_pdl=pdl)


def _plain(arch: str, num_warps: int, **constants: int) -> LaunchConfig:
    return LaunchConfig(num_warps=num_warps, constants=constants)


def norm_rows(op: str, arch: str) -> Iterator[Row]:
    """Of an op that normalises whole rows: one sum, in one order, for all of them."""
    warps = {1_024: 4 if arch == "sm_90" else 2, 4_096: 8, MAX_NORM_WIDTH: 16}
    norm = {128: overlapping(arch, 1, BLOCK_ROWS=4)}
    norm |= {up_to: overlapping(arch, number, BLOCK_ROWS=1) for up_to, number in warps.items()}
    yield from rows_of_table(op, arch, norm, norm)


def heads_rows(
    op: str,
    arch: str,
    heads: tuple[int, int, int],
    make: Make = overlapping,
    *,
    num_warps: int = 1,
) -> Iterator[Row]:
    """Of an op on some heads of a token: of up to 64, of up to 256 dimensions, of float32."""
    small, large, wide = (make(arch, num_warps, BLOCK_HEADS=number) for number in heads)
    yield from rows_of_table(op, arch, {64: small, 256: large}, {256: wide})


def _pieces(op: str, arch: str, make: Make, loads: int = 1) -> Iterator[Row]:
    """Of an op that walks a row in pieces, 16 bytes for each lane of a warp at a time."""
    per_warp = 256 if arch == "sm_90" else 512
    narrow, wide = (
        {
            1_024: make(arch, 1, BLOCK_WIDTH=width),
            ANY_WIDTH: make(arch, 4, BLOCK_WIDTH=4 * width * loads),
        }
        for width in (per_warp, per_warp // 2)
    )
    yield from rows_of_table(op, arch, narrow, wide)


def table() -> Iterator[Row]:
    """Every row."""
    for arch in SUPPORTED_ARCHS:
        is_nvidia = arch == "sm_90"
        yield from norm_rows("rms_norm", arch)
        yield from _pieces("silu_and_mul", arch, overlapping, loads=2 if is_nvidia else 1)
        for op in ("kv_copy_blocks", *_GATHER):
            yield from _pieces(op, arch, _plain)
        if is_nvidia:
            yield from heads_rows("rotary_embedding", arch, (32, 16, 8), num_warps=2)
        else:
            yield from heads_rows("rotary_embedding", arch, (16, 8, 4))
        yield from heads_rows("kv_write", arch, (8, 4, 2) if is_nvidia else (16, 8, 4), _plain)
