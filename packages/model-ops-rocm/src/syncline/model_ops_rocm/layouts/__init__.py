"""Orders in which a kernel wants the elements of a weight, as values; knows no dtype conversion.

A layout is compared by value and permutes elements only: same shape, same dtype, same bytes in
another order. Whether a weight is in a layout is written in its storage format, never on a tensor.
"""

from syncline.model_ops_rocm.layouts.base import WeightLayout
from syncline.model_ops_rocm.layouts.row_major import RowMajor
from syncline.model_ops_rocm.layouts.shuffle import Shuffle16x16

__all__ = ["RowMajor", "Shuffle16x16", "WeightLayout"]
