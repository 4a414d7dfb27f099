"""Orders in which a kernel wants the elements of a weight, as values; knows no dtype conversion.

A layout is compared by value and permutes elements only: same dtype, same bytes in another order,
and padding where it says so. Whether a weight is in a layout is written in its storage format,
never on a tensor.
"""

from syncline.model_ops_rocm.layouts.base import WeightLayout
from syncline.model_ops_rocm.layouts.digits import REST, DigitOrder
from syncline.model_ops_rocm.layouts.int4 import (
    INT4_EVENS_FIRST,
    INT4_HALVES,
    INT4_SEQUENTIAL,
    Int4Packing,
)
from syncline.model_ops_rocm.layouts.permuted import PermutedLayout
from syncline.model_ops_rocm.layouts.row_major import RowMajor
from syncline.model_ops_rocm.layouts.scales import (
    batched_scale_tiles,
    e8m0_gate_up_shuffle,
    e8m0_shuffle,
    int4_scale_pairs,
    n32k4_gate_up,
    scale_tiles,
)
from syncline.model_ops_rocm.layouts.shuffle import (
    Shuffle16x16,
    Shuffle32x16,
    byte_tile_shuffle,
    gate_up_rows,
    gate_up_rows_shuffle,
    gate_up_shuffle,
    gfx1250_tiles,
    shuffle_nk,
)

__all__ = [
    "INT4_EVENS_FIRST",
    "INT4_HALVES",
    "INT4_SEQUENTIAL",
    "REST",
    "DigitOrder",
    "Int4Packing",
    "PermutedLayout",
    "RowMajor",
    "Shuffle16x16",
    "Shuffle32x16",
    "WeightLayout",
    "batched_scale_tiles",
    "byte_tile_shuffle",
    "e8m0_gate_up_shuffle",
    "e8m0_shuffle",
    "gate_up_rows",
    "gate_up_rows_shuffle",
    "gate_up_shuffle",
    "gfx1250_tiles",
    "int4_scale_pairs",
    "n32k4_gate_up",
    "scale_tiles",
    "shuffle_nk",
]
