"""The layouts of block scales that AITER's kernels read, as values; knows no quantiser.

Unit: one scale; for e8m0 scales a byte, [..., N, K / 32]. Fill 0x7F is the scale 1.0. float32
scales stay row-major, as AITER passes them through. Where experts' scales are flattened to
[E * n, k], the stored bytes are those of [E, n, k].
Source: ROCm/aiter e4048607a `aiter/ops/shuffle.py` and `aiter/ops/triton/utils/shuffle.py`, each by
its name there. Differs: padding that AITER leaves uninitialised is zero.
"""

from syncline.model_ops_rocm.layouts.digits import REST
from syncline.model_ops_rocm.layouts.permuted import PermutedLayout

_ONE = 0x7F


def e8m0_shuffle(*, padded: bool = True, merged: bool = False) -> PermutedLayout:
    """shuffle_scale(is_guinterleave=False), fp4_utils.e8m0_shuffle: padded to 256 rows, 8 columns.

    Blocks of 32 rows x 8 columns; inside, a scale at row r, column c is at (c % 4) * 64 + (r % 16)
    * 4 + (c // 4) * 2 + r // 16. Not padded and merged ([..., N / 32, 32 K]) it is the Triton
    kernels' shuffle_scale_gemm for gfx950 and, per expert, shuffle_scale_moe's CDNA4_SCALE.
    """
    return PermutedLayout(
        name=f"e8m0_shuffle{'' if padded else '_unpadded'}{'_merged' if merged else ''}",
        row_digits=(REST, 2, 16),
        column_digits=(REST, 2, 4),
        order=(0, 3, 5, 2, 4, 1),
        pad_rows_to=256 if padded else 1,
        pad_columns_to=8 if padded else 1,
        merged_rows=32 if merged else 1,
        item_sizes=(1,),
    )


def e8m0_gate_up_shuffle(*, gate_up: bool) -> PermutedLayout:
    """shuffle_scale(is_guinterleave=True, gate_up=), shuffle_scale_a16w4: [E, n, k].

    `gate_up`: blocks of 16 gate rows alternate with blocks of 16 up rows. Columns are padded to 8
    with 1.0, rows are not padded.
    """
    return PermutedLayout(
        name=f"e8m0_shuffle_{'gate_up' if gate_up else 'down'}",
        row_digits=(2, REST, 16) if gate_up else (REST, 2, 16),
        column_digits=(REST, 2, 4),
        order=(1, 3, 5, 2, 4, 0) if gate_up else (0, 3, 5, 2, 4, 1),
        pad_columns_to=8,
        fill=_ONE,
        item_sizes=(1,),
    )


def scale_tiles(
    *, rows: int = 32, columns: int = 4, merged: bool = False, pad_rows: bool = False
) -> PermutedLayout:
    """Tiles of rows x columns scales, row-major inside and out, for gfx1250.

    32 x 4: shuffle_scale_f4 for MXFP4, and padded, with 1.0, shuffle_mxfp8fp4_scale; 32 x 8:
    shuffle_scale_f4 for NVFP4; merged ([..., N / rows, rows * K]): shuffle_scale_n32k4, and the
    Triton kernels' shuffle_scale_gemm and shuffle_scale_moe with their own rows and columns.
    """
    for field, value in (("rows", rows), ("columns", columns)):
        if value < 1:
            raise ValueError(f"scale_tiles: {field} must be positive, got {value}")
    name = f"scale_tiles_{rows}x{columns}"
    return PermutedLayout(
        name=f"{name}{'_padded' if pad_rows else ''}{'_merged' if merged else ''}",
        row_digits=(REST, rows),
        column_digits=(REST, columns),
        order=(0, 2, 1, 3),
        pad_rows_to=rows if pad_rows else 1,
        fill=_ONE if pad_rows else 0,
        merged_rows=rows if merged else 1,
        item_sizes=(1,),
    )


def n32k4_gate_up() -> PermutedLayout:
    """shuffle_scale_n32k4 with both flags: gate and up rows alternate, then tiles of 32 x 4."""
    return PermutedLayout(
        name="n32k4_gate_up",
        row_digits=(2, REST, 16),
        column_digits=(REST, 4),
        order=(1, 3, 2, 0, 4),
        merged_rows=32,
        item_sizes=(1,),
    )


def batched_scale_tiles(*, columns: int) -> PermutedLayout:
    """shuffle_scale_batched: [..., N / 128, 128 K]; rows 32 apart are neighbours."""
    if columns < 1:
        raise ValueError(f"batched_scale_tiles: columns must be positive, got {columns}")
    return PermutedLayout(
        name=f"batched_scale_tiles_{columns}",
        row_digits=(REST, 4, 32),
        column_digits=(REST, columns),
        order=(0, 3, 2, 1, 4),
        merged_rows=128,
        item_sizes=(1,),
    )


def int4_scale_pairs() -> PermutedLayout:
    """shuffle_scale_for_int4: bfloat16 scales [E, G, N] of groups of 32, two groups side by side.

    AITER shapes the same bytes [E, G / 2, N, 2]; here they are [E, G / 2, 2 N].
    """
    return PermutedLayout(
        name="int4_scale_pairs",
        row_digits=(REST, 2),
        column_digits=(REST,),
        order=(0, 2, 1),
        merged_rows=2,
        item_sizes=(2,),
    )
