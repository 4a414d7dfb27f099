"""One class for every permuted layout: digits of rows and columns, preconditions and padding.

Unit: elements, but for column digits given in bytes. A value of `PermutedLayout` is all there is to
a layout; `shuffle` and `scales` list the known ones. Knows no recipe and no kernel. Leading
dimensions are independent matrices, so an expert's slice of a stored tensor is that expert's
stored matrix.
"""

import math
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch

from syncline.model_ops_rocm.layouts.base import (
    as_bits,
    check_apart,
    check_storage,
    check_target,
    check_write,
    empty_storage,
    refuse,
)
from syncline.model_ops_rocm.layouts.digits import DigitOrder
from syncline.model_ops_rocm.regions import Region, region_numel

_ITEM_SIZES = (1, 2, 4)


@lru_cache(maxsize=256)
def _digit_order(
    rows: tuple[int, ...], columns: tuple[int, ...], order: tuple[int, ...]
) -> DigitOrder:
    """Checked once: a region write asks for it several times."""
    return DigitOrder((rows, columns), order)


@dataclass(frozen=True, slots=True, kw_only=True)
class PermutedLayout:
    """[..., N, K] padded to multiples, its digits in another order; compared by value.

    The digits of a row come first in `order`. With `column_unit` "bytes" the last column digit
    counts bytes, so that the order depends on the element size.
    """

    name: str
    row_digits: tuple[int, ...]
    column_digits: tuple[int, ...]
    order: tuple[int, ...]
    column_unit: Literal["elements", "bytes"] = "elements"
    column_multiple: int = 1  # of the padded K, in elements, beyond what the digits ask
    pad_rows_to: int = 1
    pad_columns_to: int = 1
    fill: int = 0  # the bits of a padding element
    merged_rows: int = 1  # stored as [..., N / merged_rows, K * merged_rows]
    item_sizes: tuple[int, ...] = _ITEM_SIZES

    def __post_init__(self) -> None:
        for field, value in (
            ("column_multiple", self.column_multiple),
            ("pad_rows_to", self.pad_rows_to),
            ("pad_columns_to", self.pad_columns_to),
            ("merged_rows", self.merged_rows),
        ):
            if value < 1:
                raise ValueError(f"PermutedLayout: {field} must be positive, got {value}")
        if not self.item_sizes or not set(self.item_sizes) <= set(_ITEM_SIZES):
            raise ValueError(
                f"PermutedLayout: item_sizes must be of {_ITEM_SIZES}, got {self.item_sizes}"
            )
        for size in self.item_sizes:
            self.digits(size)

    @property
    def pads(self) -> bool:
        return self.pad_rows_to > 1 or self.pad_columns_to > 1

    def describe(self) -> str:
        return self.name

    def tile(self, dtype: torch.dtype) -> tuple[int, int]:
        rows, columns = self.digits(dtype.itemsize).tile
        return (rows, columns)

    def check(self, shape: SequenceABC[int], dtype: torch.dtype) -> None:
        if dtype.itemsize not in self.item_sizes:
            sizes = " or ".join(", ".join(map(str, self.item_sizes)).rsplit(", ", 1))
            raise refuse(self, f"elements of {sizes} byte{'' if sizes == '1' else 's'}", dtype)
        rows, columns = self._multiples(dtype)
        fits = len(shape) >= 2
        if fits:
            *_, num_rows, num_columns = self.padded_shape(shape)
            fits = num_rows % rows == 0 and num_columns % columns == 0
        if not fits:
            padded = f" padded to {list(self.padded_shape(shape))}" if len(shape) >= 2 else ""
            raise refuse(
                self,
                f"[..., N, K] with N % {rows} == 0 and K % {columns} == 0",
                f"shape {list(shape)}{padded if self.pads else ''}",
            )

    def padded_shape(self, shape: SequenceABC[int]) -> tuple[int, ...]:
        """The logical shape with its padding, which lies behind the last rows and columns."""
        *lead, rows, columns = shape
        return (
            *lead,
            -(-rows // self.pad_rows_to) * self.pad_rows_to,
            -(-columns // self.pad_columns_to) * self.pad_columns_to,
        )

    def stored_shape(self, shape: SequenceABC[int], dtype: torch.dtype) -> tuple[int, ...]:
        self.check(shape, dtype)
        *lead, rows, columns = self.padded_shape(shape)
        return (*lead, rows // self.merged_rows, columns * self.merged_rows)

    def logical_shape(self, stored_shape: SequenceABC[int]) -> tuple[int, ...]:
        """Refuses columns that no shape with merged rows has."""
        if self.merged_rows == 1 or len(stored_shape) < 2:
            return tuple(stored_shape)
        *lead, rows, columns = stored_shape
        if columns % self.merged_rows != 0:
            raise refuse(
                self, f"stored columns % {self.merged_rows} == 0", f"shape {list(stored_shape)}"
            )
        return (*lead, rows * self.merged_rows, columns // self.merged_rows)

    def address(self, shape: SequenceABC[int], dtype: torch.dtype, index: SequenceABC[int]) -> int:
        """Where a logical element is stored, in elements from the start of the storage."""
        self.check(shape, dtype)
        return self.digits(dtype.itemsize).address(self.padded_shape(shape), index)

    def index(
        self, shape: SequenceABC[int], dtype: torch.dtype, address: int
    ) -> tuple[int, ...] | None:
        """The logical index of a stored element; None for padding."""
        self.check(shape, dtype)
        index = self.digits(dtype.itemsize).index(self.padded_shape(shape), address)
        inside = all(coordinate < size for coordinate, size in zip(index, shape, strict=True))
        return index if inside else None

    def source_index(self, shape: SequenceABC[int], dtype: torch.dtype) -> torch.Tensor:
        """The flat logical position of each stored element, -1 for padding; int64."""
        stored_shape = self.stored_shape(shape, dtype)
        positions = torch.arange(math.prod(shape)).view(tuple(shape))
        padded = positions.new_full(self.padded_shape(shape), -1)
        padded[tuple(slice(size) for size in shape)] = positions
        return self.digits(dtype.itemsize).in_stored_order(padded).reshape(stored_shape)

    def apply(self, logical: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        check_storage(self, logical)
        stored_shape = self.stored_shape(logical.shape, logical.dtype)
        if out is None:
            out = empty_storage(stored_shape, logical.dtype, logical.device)
        check_target(self, out, stored_shape, logical.dtype)
        check_apart(self, out, logical)
        digits = self.digits(logical.itemsize)
        ordered = digits.in_stored_order(self._pad(as_bits(logical), logical.shape))
        as_bits(out).view(ordered.shape).copy_(ordered)
        return out

    def inverse(
        self,
        stored: torch.Tensor,
        *,
        shape: SequenceABC[int] | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        check_storage(self, stored)
        logical_shape = self._logical_shape(stored, shape)
        wanted = self.stored_shape(logical_shape, stored.dtype)
        if tuple(stored.shape) != wanted:
            raise refuse(self, f"a stored tensor of shape {list(wanted)}", list(stored.shape))
        if out is None:
            out = empty_storage(logical_shape, stored.dtype, stored.device)
        check_target(self, out, logical_shape, stored.dtype)
        check_apart(self, out, stored)
        padded_shape = self.padded_shape(logical_shape)
        digits = self.digits(stored.itemsize)
        places = digits.in_logical_order(as_bits(stored).contiguous(), padded_shape)
        if padded_shape == logical_shape:
            as_bits(out).view(places.shape).copy_(places)
        else:
            rows, columns = logical_shape[-2:]
            as_bits(out).copy_(places.reshape(padded_shape)[..., :rows, :columns])
        return out

    def apply_into(
        self,
        out: torch.Tensor,
        source: torch.Tensor,
        region: Region,
        *,
        shape: SequenceABC[int] | None = None,
    ) -> None:
        logical_shape = self._logical_shape(out, shape)
        check_write(self, out, source, region, logical_shape)
        if region_numel(region) == 0:
            return
        padded_shape = self.padded_shape(logical_shape)
        bits = as_bits(source)
        whole: Region = tuple(
            (start, padded if stop == size else stop)
            for (start, stop), size, padded in zip(region, logical_shape, padded_shape, strict=True)
        )
        if whole != region:
            (top, bottom), (left, right) = whole[-2:]
            bits = self._filled(bits, (*source.shape[:-2], bottom - top, right - left))
        self.digits(out.itemsize).write(as_bits(out), bits, padded_shape, whole)

    def apply_in_place(self, tensor: torch.Tensor) -> None:
        """Permute a contiguous tensor in its own storage, one matrix at a time.

        LayoutError, with nothing written, for a layout that pads: the storage has no room.
        """
        self._check_in_place(tensor)
        for matrix in as_bits(tensor).view(-1, *tensor.shape[-2:]):
            digits = self.digits(tensor.itemsize)
            ordered = digits.in_stored_order(matrix.clone())
            matrix.view(ordered.shape).copy_(ordered)

    def inverse_in_place(self, tensor: torch.Tensor) -> None:
        """Undo `apply_in_place`: `tensor` keeps its logical shape all the while."""
        self._check_in_place(tensor)
        for matrix in as_bits(tensor).view(-1, *tensor.shape[-2:]):
            digits = self.digits(tensor.itemsize)
            places = digits.in_logical_order(matrix.clone(), matrix.shape)
            matrix.view(places.shape).copy_(places)

    def digits(self, itemsize: int) -> DigitOrder:
        """The permutation of elements of this size."""
        columns = self.column_digits
        if self.column_unit == "bytes":
            columns = (*columns[:-1], columns[-1] // itemsize)
        return _digit_order(self.row_digits, columns, self.order)

    def _multiples(self, dtype: torch.dtype) -> tuple[int, int]:
        rows, columns = self.digits(dtype.itemsize).multiples
        return rows, math.lcm(columns, self.column_multiple)

    def _logical_shape(
        self, stored: torch.Tensor, shape: SequenceABC[int] | None
    ) -> tuple[int, ...]:
        if shape is not None:
            return tuple(shape)
        if self.pads:
            raise refuse(self, "shape, the logical one, since it pads", None)
        return self.logical_shape(stored.shape)

    def _pad(self, bits: torch.Tensor, shape: SequenceABC[int]) -> torch.Tensor:
        padded_shape = self.padded_shape(shape)
        return bits if padded_shape == tuple(shape) else self._filled(bits, padded_shape)

    def _filled(self, bits: torch.Tensor, shape: SequenceABC[int]) -> torch.Tensor:
        padded = bits.new_full(tuple(shape), self.fill)
        padded[..., : bits.shape[-2], : bits.shape[-1]] = bits
        return padded

    def _check_in_place(self, tensor: torch.Tensor) -> None:
        self.check(tensor.shape, tensor.dtype)
        if self.padded_shape(tensor.shape) != tuple(tensor.shape):
            padded = self.padded_shape(tensor.shape)
            raise refuse(self, f"storage for shape {list(padded)}", list(tensor.shape))
        check_target(self, tensor, tensor.shape, tensor.dtype)
