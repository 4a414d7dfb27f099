"""What a weight layout can do, and the checks all layouts share; knows no particular order."""

from collections.abc import Sequence as SequenceABC
from typing import Protocol

import torch

from syncline.model_ops_rocm.errors import LayoutError
from syncline.model_ops_rocm.regions import Region, check_region, region_shape

# Permuting moves bits, so it runs on integers: no NaN payload can change on the way, and types
# without a copy kernel (packed fp4) work too.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class WeightLayout(Protocol):
    """A permutation of the elements of [..., N, K], given by shape and element size alone."""

    def describe(self) -> str:
        """A short name for errors and reports."""
        ...

    def check(self, shape: SequenceABC[int], dtype: torch.dtype) -> None:
        """LayoutError naming the precondition, unless a tensor like this can be in the layout."""
        ...

    def tile(self, dtype: torch.dtype) -> tuple[int, int]:
        """(rows, columns) of the last two dimensions that are stored as one contiguous run."""
        ...

    def apply(self, logical: torch.Tensor) -> torch.Tensor:
        """A new contiguous tensor of the same shape and dtype, in stored order."""
        ...

    def inverse(self, stored: torch.Tensor) -> torch.Tensor:
        """A new contiguous tensor in logical order; the exact inverse of `apply`."""
        ...

    def apply_into(self, out: torch.Tensor, source: torch.Tensor, region: Region) -> None:
        """Write `source`, the logical elements of `region`, where `out` stores them.

        `out` is the whole stored tensor, contiguous, and no byte outside the region changes.
        LayoutError, with nothing written, if the region cuts a tile, or shapes or dtypes disagree.
        """
        ...


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same storage and shape, as integers of the same size."""
    return tensor.view(_BITS[tensor.itemsize])


def check_write(
    layout: WeightLayout, out: torch.Tensor, source: torch.Tensor, region: Region
) -> None:
    """The preconditions of `apply_into`; ValueError for a region outside `out`."""
    check_region(out.shape, region)
    name = layout.describe()
    if out.is_meta or source.is_meta:
        # A copy to or from a meta tensor does nothing and raises nothing.
        raise LayoutError(layout=name, precondition="tensors with storage", got="a meta tensor")
    if not out.is_contiguous():
        raise LayoutError(
            layout=name, precondition="contiguous storage", got=f"strides {out.stride()}"
        )
    if source.dtype != out.dtype:
        raise LayoutError(
            layout=name, precondition=f"a source of {out.dtype}", got=str(source.dtype)
        )
    if tuple(source.shape) != region_shape(region):
        raise LayoutError(
            layout=name,
            precondition=f"a source of shape {list(region_shape(region))}",
            got=str(list(source.shape)),
        )
    layout.check(out.shape, out.dtype)
    if not region_is_whole_tiles(layout, out.dtype, region):
        rows, columns = layout.tile(out.dtype)
        raise LayoutError(
            layout=name,
            precondition=f"a region of whole tiles of {rows} rows x {columns} columns",
            got=str(region),
        )


def region_is_whole_tiles(layout: WeightLayout, dtype: torch.dtype, region: Region) -> bool:
    """Whether a region of a fitting shape cuts no tile; an empty region cuts none."""
    if any(start == stop for start, stop in region):
        return True
    # From the last dimension backwards: a vector has columns only.
    tile = reversed(layout.tile(dtype))
    return all(
        start % size == 0 and stop % size == 0
        for (start, stop), size in zip(reversed(region), tile, strict=False)
    )
