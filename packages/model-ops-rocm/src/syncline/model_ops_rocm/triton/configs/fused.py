"""Configurations of the ops that quantise activations or fuse several; imports no Triton.

Buckets are widths of a row, of a head. Kinds: "rows", where the elements of one share a scale and
are one tile, and "groups" of a row, several to a tile. The norm has the rows of `rms_norm`, so that
its sums are the same.
"""

from collections.abc import Iterator

from syncline.model_ops_rocm.triton.configs.base import ANY_WIDTH, Row
from syncline.model_ops_rocm.triton.configs.elementwise import (
    MAX_NORM_WIDTH,
    heads_rows,
    norm_rows,
    overlapping,
    rows_of_table,
)
from syncline.model_ops_rocm.triton.targets import SUPPORTED_ARCHS


def table() -> Iterator[Row]:
    """Every row."""
    for arch in SUPPORTED_ARCHS:
        is_nvidia = arch == "sm_90"
        rows = {
            1_024: overlapping(arch, 4 if is_nvidia else 2, BLOCK_ELEMENTS=1_024),
            4_096: overlapping(arch, 8, BLOCK_ELEMENTS=1_024),
            MAX_NORM_WIDTH: overlapping(arch, 16, BLOCK_ELEMENTS=1_024),
        }
        half_rows = rows
        if is_nvidia:
            # Measured on an H200: with 64 elements in a thread wide rows come at 81 to 87 % of the
            # rate of a copy where many do, with 32 at 62 to 66 %; 256 rows take up to 1.4 us more.
            half_rows = rows | {
                8_192: overlapping(arch, 4, BLOCK_ELEMENTS=1_024),
                16_384: overlapping(arch, 8, BLOCK_ELEMENTS=1_024),
            }
        narrow = {ANY_WIDTH: overlapping(arch, 4, BLOCK_ELEMENTS=2_048)}
        wide = {ANY_WIDTH: overlapping(arch, 4, BLOCK_ELEMENTS=1_024)}
        for op in ("quantise_activation", "silu_and_mul_quant"):
            yield from rows_of_table(op, arch, half_rows, rows, kind="rows")
            yield from rows_of_table(op, arch, narrow, wide, kind="groups")
        yield from norm_rows("rms_norm_quant", arch)
        heads = (16, 8, 4)
        num_warps = 2 if is_nvidia else 1
        yield from heads_rows("qk_norm_rope_kv_write", arch, heads, num_warps=num_warps)
