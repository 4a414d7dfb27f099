"""Configurations of the products of few rows that warps of their own feed: sm_90 alone.

Keyed by the number of rows of x. Where programs are few, each reads as fast as its multiprocessor
can, and the other multiprocessors are free for the next kernel's; so many of them were measured, on
an H200, as were AHEAD and RELEASE: what a kernel asks for while the one ahead of it still reads,
and when the next may begin. Of 64 rows, where K is long or tiles are many, two programs of a
cluster share each tile; of fewer, where tiles are about 96, two have THIRDS, three tiles together.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

import torch

from syncline.model_ops_rocm.triton.configs.base import HALF_DTYPES, Buckets, ConfigKey, Row
from syncline.model_ops_rocm.triton.configs.linear import DEEP, LONE, Sizes
from syncline.model_ops_rocm.triton.targets import LaunchConfig

SPECIALISED: Final = "specialised"
THIRDS: Final = "thirds"
# Buckets of rows. Rows past the edge of a tile of 64 cost more than to read them would: of those
# all, or none.
ROWS: Final = (16, 32, 64)
_SOME_ROWS: Final = 32
_ARCH: Final = "sm_90"
_CODES: Final = torch.float8_e4m3fn
_TILE_COLUMNS: Final = 64
_FEW_TILES: Final = range(60, 65)
_LONE_TILES: Final = range(96, 129)
_THIRDS_TILES: Final = range(91, 100)  # up to 66 programs, half of the multiprocessors
_LEAST_BYTES: Final = 8_192  # of a row of the weight
_DEEP_K: Final = 8_192


def kind_for_specialised(arch: str, dtype: torch.dtype, sizes: Sizes) -> str | None:
    """The kind of the rows for a product that warps of their own feed, if this is one.

    `dtype` is the weight's: of codes, of which not every op's are alike.
    """
    if arch != _ARCH or dtype not in (*HALF_DTYPES, _CODES):
        return None
    is_measured = sizes.num_rows <= _SOME_ROWS or sizes.num_rows == ROWS[-1]
    if not is_measured or sizes.depth * dtype.itemsize < _LEAST_BYTES:
        return None
    tiles, is_of_codes = -(-sizes.num_columns // _TILE_COLUMNS), dtype == _CODES
    if tiles in _FEW_TILES:
        is_deep = sizes.depth >= _DEEP_K and not is_of_codes
        return f"{SPECIALISED}-{DEEP}" if is_deep else SPECIALISED
    if is_of_codes:
        return None
    if sizes.num_rows <= _SOME_ROWS and tiles in _THIRDS_TILES:
        return f"{SPECIALISED}-{THIRDS}"
    return f"{SPECIALISED}-{LONE}" if tiles in _LONE_TILES else None


def _specialised(
    block: tuple[int, int, int],
    stages: tuple[int, int],
    *,
    ahead: int,
    release: int,
    swap: int = 1,
) -> LaunchConfig:
    """For rows of x that one tile holds; `block` is rows of x, rows of the weight, and K.

    `stages` are tiles under way, of the weight and of x.
    """
    block_m, block_n, block_k = block
    return LaunchConfig(
        num_warps=4,
        fuses_multiply_add=True,
        maxnreg=128,
        launch_pdl=True,
        constants={
            "BLOCK_M": block_m,
            "BLOCK_N": block_n,
            "BLOCK_K": block_k,
            "STAGES": stages[0],
            "X_STAGES": stages[1],
            "AHEAD": ahead,
            "RELEASE": release,
            "SWAP": swap,
        },
    )


def _cluster(
    block: tuple[int, int, int], stages: tuple[int, int], *, ahead: int, release: int
) -> LaunchConfig:
    """Likewise where two programs of a cluster share tiles."""
    alone = _specialised(block, stages, ahead=ahead, release=release)
    constants = {name: value for name, value in alone.constants.items() if name != "SWAP"}
    return replace(alone, num_ctas=2, constants=constants)


_SOME_OF_FEW: Final = _specialised((32, 64, 256), (5, 4), ahead=2, release=2)
_HALF: Final[Mapping[str, Buckets]] = MappingProxyType(
    {
        SPECIALISED: {
            16: _specialised((16, 64, 256), (6, 4), ahead=2, release=2),
            32: _SOME_OF_FEW,
            64: _specialised((64, 32, 256), (5, 4), ahead=3, release=5, swap=0),
        },
        f"{SPECIALISED}-{DEEP}": {
            16: _specialised((16, 64, 256), (6, 4), ahead=3, release=3),
            32: _SOME_OF_FEW,
            64: _cluster((64, 64, 128), (7, 6), ahead=4, release=4),
        },
        f"{SPECIALISED}-{THIRDS}": {
            16: _cluster((16, 64, 256), (5, 5), ahead=3, release=3),
            32: _cluster((32, 64, 256), (5, 3), ahead=2, release=2),
        },
        f"{SPECIALISED}-{LONE}": {
            16: _specialised((16, 64, 128), (10, 10), ahead=3, release=6),
            32: _specialised((32, 64, 128), (8, 8), ahead=4, release=6),
            64: _cluster((64, 64, 64), (6, 4), ahead=3, release=2),
        },
    }
)
# BLOCK_K is four sums of 128, which the kernel multiplies side by side.
_OF_CODES: Final[Mapping[str, Buckets]] = MappingProxyType(
    {
        SPECIALISED: {
            16: _specialised((16, 64, 512), (5, 5), ahead=2, release=3),
            32: _specialised((32, 64, 512), (5, 4), ahead=2, release=3),
            64: _specialised((64, 32, 512), (4, 4), ahead=2, release=5, swap=0),
        },
    }
)


def table() -> Iterator[Row]:
    """Every row."""
    for dtype in HALF_DTYPES:
        yield from _rows("linear", dtype, _HALF)
    yield from _rows("linear_quantised", _CODES, _OF_CODES)


def _rows(op: str, dtype: torch.dtype, kinds: Mapping[str, Buckets]) -> Iterator[Row]:
    for kind, buckets in kinds.items():
        for up_to, config in buckets.items():
            yield ConfigKey(op, _ARCH, dtype, up_to, kind), config
