"""Configurations of the ops that quantise activations or fuse several; imports no Triton.

Buckets are widths of a row, of a head. Kinds: "rows", where the elements of one share a scale and
are one tile, and "groups" of a row, several to a tile. The norm has the rows of `rms_norm`, so that
its sums are the same.
"""

from collections.abc import Iterator
from typing import Final

from syncline.model_ops_rocm.triton.configs.base import ANY_WIDTH, Row
from syncline.model_ops_rocm.triton.configs.elementwise import (
    MAX_NORM_WIDTH,
    heads_rows,
    norm_rows,
    rows_of_table,
)
from syncline.model_ops_rocm.triton.targets import SUPPORTED_ARCHS, LaunchConfig


def _elements(num_warps: int, block_elements: int) -> LaunchConfig:
    return LaunchConfig(num_warps=num_warps, constants={"BLOCK_ELEMENTS": block_elements})


_ROWS: Final = {2_048: _elements(4, 1_024), MAX_NORM_WIDTH: _elements(16, 1_024)}


def table() -> Iterator[Row]:
    """Every row."""
    for arch in SUPPORTED_ARCHS:
        for op in ("quantise_activation", "silu_and_mul_quant"):
            yield from rows_of_table(op, arch, _ROWS, _ROWS, kind="rows")
            narrow, wide = {ANY_WIDTH: _elements(4, 2_048)}, {ANY_WIDTH: _elements(4, 1_024)}
            yield from rows_of_table(op, arch, narrow, wide, kind="groups")
        yield from norm_rows("rms_norm_quant", arch)
        yield from heads_rows("qk_norm_rope_kv_write", arch)
