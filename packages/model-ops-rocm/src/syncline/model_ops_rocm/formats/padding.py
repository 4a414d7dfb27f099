"""Rows and columns of zeros behind a matrix, written down so that nobody has to guess them.

Unit: logical elements of the last two dimensions. Padding belongs to one shape, which is its record
of where the numbers end. The padding counts as zeros everywhere: it is stored as the codes of zero,
and whoever stores the last row or column of the matrix stores it. Knows no recipe and no layout.
"""

from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass

import torch
import torch.nn.functional as nn_functional

from syncline.model_ops_rocm.regions import Region


@dataclass(frozen=True, slots=True, kw_only=True)
class Padding:
    """[..., rows, columns], brought to multiples of `row_multiple` and `column_multiple`."""

    rows: int
    columns: int
    row_multiple: int = 1
    column_multiple: int = 1

    def __post_init__(self) -> None:
        values = (self.rows, self.columns, self.row_multiple, self.column_multiple)
        names = ("rows", "columns", "row_multiple", "column_multiple")
        for name, value in zip(names, values, strict=True):
            if value < 1:
                raise ValueError(f"Padding: {name} must be at least 1, got {value}")

    @property
    def padded(self) -> tuple[int, int]:
        """Rows and columns as they are stored."""
        return (
            self.rows + -self.rows % self.row_multiple,
            self.columns + -self.columns % self.column_multiple,
        )

    def describe(self) -> str:
        rows, columns = self.padded
        return f"padded_{self.rows}x{self.columns}_to_{rows}x{columns}"

    def padded_shape(self, logical_shape: SequenceABC[int]) -> tuple[int, ...]:
        """ValueError unless the logical shape ends in these rows and columns."""
        if tuple(logical_shape[-2:]) != (self.rows, self.columns):
            raise ValueError(
                f"{self.describe()}: logical_shape must end in"
                f" {[self.rows, self.columns]}, got {list(logical_shape)}"
            )
        return (*logical_shape[:-2], *self.padded)

    def padded_region(self, region: Region) -> Region:
        """With the padding behind every range that reaches the last row or column."""
        stored = tuple(
            (start, padded if stop == size and start < stop else stop)
            for (start, stop), size, padded in zip(
                region[-2:], (self.rows, self.columns), self.padded, strict=True
            )
        )
        return (*region[:-2], *stored)

    def pad(self, source: torch.Tensor, region: Region) -> torch.Tensor:
        """`source`, the elements of `region`, with the zeros of its padded region."""
        (_, bottom), (_, right) = self.padded_region(region)[-2:]
        below, beside = bottom - region[-2][1], right - region[-1][1]
        if not below and not beside:
            return source
        return nn_functional.pad(source, (0, beside, 0, below))

    def crop(self, padded: torch.Tensor) -> torch.Tensor:
        """The logical elements of a whole padded tensor."""
        return padded[..., : self.rows, : self.columns].contiguous()
