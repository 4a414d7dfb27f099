"""Where a layout stores the elements of one matrix, as two sums; knows no dtype and no kernel.

Unit: elements. A layout permutes the digits of rows and columns, so a place is a number that
depends on the row alone plus one that depends on the column alone. That is all that a writer of
single elements needs, in whatever order it comes to them.
"""

import math
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass
from functools import lru_cache

import torch

from syncline.model_ops_rocm.layouts.base import WeightLayout, as_bits
from syncline.model_ops_rocm.layouts.digits import REST, DigitOrder
from syncline.model_ops_rocm.layouts.permuted import PermutedLayout
from syncline.model_ops_rocm.layouts.row_major import RowMajor
from syncline.model_ops_rocm.regions import Region, region_shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One dimension: digits with their strides, and what is left of the index with its own.

    `inner` is (size, stride) from the least significant digit on. The rest of the index counts by
    `stride` within `part_size`, and its quotient by `part_stride`; part_size 0 has no parts.
    """

    inner: tuple[tuple[int, int], ...] = ()
    stride: int
    part_size: int = 0
    part_stride: int = 0

    def at(self, index: torch.Tensor) -> torch.Tensor:
        """int64 indices -> what they add to a place."""
        places = torch.zeros_like(index)
        rest = index
        for size, stride in self.inner:
            places += rest % size * stride
            rest = rest // size
        if self.part_size:
            places += rest // self.part_size * self.part_stride
            rest = rest % self.part_size
        return places + rest * self.stride


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Element (row, column) of a matrix is stored at `rows.at(row) + columns.at(column)`.

    `shape` is that of the matrix with its padding, which has places too, and holds `fill`.
    """

    shape: tuple[int, int]
    rows: Axis
    columns: Axis
    fill: int = 0

    @property
    def numel(self) -> int:
        """Elements of a stored matrix: what lies between two matrices of one tensor."""
        return math.prod(self.shape)


def places_of(layout: WeightLayout, shape: tuple[int, ...], dtype: torch.dtype) -> Places | None:
    """Of the last two dimensions of a logical shape, or of a vector as one row.

    LayoutError if the layout cannot store it; None for a layout that is no order of digits.
    """
    return _places(layout, shape, dtype) if isinstance(layout, RowMajor | PermutedLayout) else None


@lru_cache(maxsize=1_024)
def _places(
    layout: RowMajor | PermutedLayout, shape: tuple[int, ...], dtype: torch.dtype
) -> Places:
    if isinstance(layout, RowMajor):
        rows, columns = (1, *shape)[-2:]
        return Places(shape=(rows, columns), rows=Axis(stride=columns), columns=Axis(stride=1))
    layout.check(shape, dtype)
    rows, columns = layout.padded_shape(shape)[-2:]
    digits = layout.digits(dtype.itemsize)
    strides = _strides(digits, (rows, columns))
    num_row_digits = len(digits.digits[0])
    return Places(
        shape=(rows, columns),
        rows=_axis(digits.digits[0], rows, strides[:num_row_digits]),
        columns=_axis(digits.digits[1], columns, strides[num_row_digits:]),
        fill=layout.fill,
    )


def _strides(digits: DigitOrder, shape: tuple[int, int]) -> list[int]:
    """Of each digit, in the order of the digits: the size of all that storage counts faster."""
    sizes = digits.sizes(shape)
    strides = [0] * len(sizes)
    stride = 1
    for digit in reversed(digits.order):
        strides[digit] = stride
        stride *= sizes[digit]
    return strides


def _axis(split: tuple[int, ...], size: int, strides: SequenceABC[int]) -> Axis:
    at = split.index(REST)
    inner = tuple(zip(reversed(split[at + 1 :]), reversed(strides[at + 1 :]), strict=True))
    rest = size // math.prod(digit for digit in split if digit != REST)
    return Axis(
        inner=tuple((digit, stride) for digit, stride in inner if digit > 1),
        stride=strides[at],
        part_size=rest if at else 0,
        part_stride=strides[0] if at else 0,
    )


def write_padded(places: Places, out: torch.Tensor, source: torch.Tensor, region: Region) -> None:
    """Store `source` at the start of `region`, any rectangle, and padding in the rest of it.

    `out` is contiguous storage of all matrices, of the same dtype; elements go one by one.
    """
    bits = as_bits(source).to(out.device)
    padded = bits.new_full(region_shape(region), places.fill)
    padded[tuple(slice(size) for size in source.shape)] = bits
    rows, columns = region[-2:]
    row_at = places.rows.at(torch.arange(*rows, device=out.device))
    column_at = places.columns.at(torch.arange(*columns, device=out.device))
    at = (row_at[:, None] + column_at).flatten()
    lead = region[:-2]
    matrices = as_bits(out).view(*out.shape[: len(lead)], places.numel)
    part = matrices[tuple(slice(start, stop) for start, stop in lead)]
    part[..., at] = padded.reshape(*part.shape[:-1], at.numel())
