"""Configurations of products of many rows in codes that a warp of its own feeds; imports no Triton.

Unit: one product of fp8 codes with fp8 codes of a row-major weight, not batch-invariant. Kinds are
MANY and how codes are multiplied, as in `configs.linear`. There is one program for each
multiprocessor, at most, which takes one tile of the result after another. Measured on an H200.
"""

from collections.abc import Iterator, Mapping
from typing import Final

import torch

from syncline.model_ops_rocm.triton.configs.base import ANY_WIDTH, Buckets, ConfigKey, Row
from syncline.model_ops_rocm.triton.configs.linear import (
    CODES,
    CODES_OF_BLOCKS,
    HALVES,
    QUARTERS,
    Sizes,
)
from syncline.model_ops_rocm.triton.targets import LaunchConfig

MANY: Final = "many"
# So many columns that tiles of one piece are more than programs, and wider ones are not.
WIDE: Final = "wide"
# Multiprocessors of an H200: a program fills one.
PROGRAMS: Final = 132
TILE_ROWS: Final = 128
# Rows at which another kind may begin: what is prepared for more has those for as many, too.
BOUNDS: Final = (TILE_ROWS, 2 * TILE_ROWS)
_ARCH: Final = "sm_90"
_FEW_ROWS: Final = 64
_TILE_COLUMNS: Final = 128
_WIDE_COLUMNS: Final = 192
# Fewer tiles leave most multiprocessors idle, which other kernels' smaller ones do not.
_FEWEST_ITEMS: Final = 64
_LEAST_K: Final = 1_024  # every part has its stages full before the first is free again
_SPLIT_K: Final = 4_096


def kind_for_many(arch: str, kind: str, sizes: Sizes) -> str | None:
    """The kind of the rows for codes multiplied by `kind`, if a warp of its own feeds them.

    Where so few tiles share them, the parts of K are as many as programs can take at once.
    """
    num_rows, num_columns, depth = sizes
    if arch != _ARCH or num_rows <= _FEW_ROWS or depth < _LEAST_K:
        return None
    is_one_tile = num_rows <= TILE_ROWS
    widest = -(-num_columns // PROGRAMS)  # the columns of a program, if each has one tile
    if kind == CODES and is_one_tile and _TILE_COLUMNS < widest <= _WIDE_COLUMNS:
        return f"{MANY}-{kind}-{WIDE}"
    items, part = -(-num_rows // TILE_ROWS) * -(-num_columns // _TILE_COLUMNS), ""
    if depth >= _SPLIT_K and is_one_tile and 4 * items <= PROGRAMS:
        items, part = 4 * items, f"-{QUARTERS}"
    elif depth >= _SPLIT_K and num_rows <= 2 * TILE_ROWS and 2 * items <= PROGRAMS:
        items, part = 2 * items, f"-{HALVES}"
    return f"{MANY}-{kind}{part}" if items >= _FEWEST_ITEMS else None


def _fed(
    columns: int, block_n: int, block_k: int, num_stages: int, *, splits: int = 1
) -> LaunchConfig:
    """Tiles of `columns` pieces; `num_stages` of `block_k` columns of K are under way."""
    return LaunchConfig(
        num_warps=4,
        fuses_multiply_add=True,
        maxnreg=168,
        launch_pdl=True,
        constants={
            "COLUMNS": columns,
            "BLOCK_N": block_n,
            "BLOCK_K": block_k,
            "STAGES": num_stages,
            "SPLITS": splits,
            "GROUP_M": 8,
        },
    )


_MANY: Final[Mapping[str, Buckets]] = {
    "": {ANY_WIDTH: _fed(1, 128, 256, 3)},
    f"-{QUARTERS}": {TILE_ROWS: _fed(1, 128, 256, 3, splits=4)},
    f"-{HALVES}": {2 * TILE_ROWS: _fed(1, 128, 256, 3, splits=2)},
}
_KINDS: Final[Mapping[str, Mapping[str, Buckets]]] = {
    CODES: {**_MANY, f"-{WIDE}": {TILE_ROWS: _fed(3, 64, 128, 5)}},
    CODES_OF_BLOCKS: _MANY,
}


def table() -> Iterator[Row]:
    """Every row."""
    for kind, by_size in _KINDS.items():
        for size, buckets in by_size.items():
            for up_to, config in buckets.items():
                key = ConfigKey(
                    "linear_quantised", _ARCH, torch.float8_e4m3fn, up_to, f"{MANY}-{kind}{size}"
                )
                yield key, config
