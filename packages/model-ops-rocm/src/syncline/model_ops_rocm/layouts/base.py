"""What a weight layout can do, and the checks all layouts share; knows no particular order."""

from collections.abc import Sequence as SequenceABC
from typing import Protocol

import torch

from syncline.model_ops_rocm.errors import LayoutError
from syncline.model_ops_rocm.memory import share_bytes
from syncline.model_ops_rocm.regions import Region, check_region, region_shape

# Permuting moves bits, so it runs on integers: no NaN payload can change on the way, and types
# without a copy kernel (packed fp4) work too.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


class WeightLayout(Protocol):
    """A permutation of the elements of [..., N, K], given by shape and element size alone.

    A layout that pads stores a larger tensor, whose shape does not say where the padding begins.
    The methods that take `shape`, the logical one, need it then; otherwise it may be left out.
    """

    def describe(self) -> str:
        """A short name for errors and reports."""
        ...

    def check(self, shape: SequenceABC[int], dtype: torch.dtype) -> None:
        """LayoutError naming the precondition, unless a tensor like this can be in the layout."""
        ...

    def tile(self, dtype: torch.dtype) -> tuple[int, int]:
        """(rows, columns) of the last two dimensions that a region must hold whole."""
        ...

    def stored_shape(self, shape: SequenceABC[int], dtype: torch.dtype) -> tuple[int, ...]:
        """The shape to allocate for a logical shape; the same one, for most layouts."""
        ...

    def logical_shape(self, stored_shape: SequenceABC[int]) -> tuple[int, ...]:
        """The shape that is stored in this one, if nothing of it is padding."""
        ...

    def apply(self, logical: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """The tensor in stored order: new contiguous storage, or every byte of `out`."""
        ...

    def inverse(
        self,
        stored: torch.Tensor,
        *,
        shape: SequenceABC[int] | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The tensor in logical order, without padding; the exact inverse of `apply`."""
        ...

    def apply_into(
        self,
        out: torch.Tensor,
        source: torch.Tensor,
        region: Region,
        *,
        shape: SequenceABC[int] | None = None,
    ) -> None:
        """Write `source`, the logical elements of `region`, where `out` stores them.

        `out` is the whole stored tensor, contiguous. No byte outside the region changes, but for
        the padding that continues a region which ends where the tensor does: it is filled.
        LayoutError, with nothing written, if the region cuts a tile, or shapes or dtypes disagree.
        """
        ...


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same storage and shape, as integers of the same size."""
    return tensor.view(_BITS[tensor.itemsize])


def empty_storage(
    shape: SequenceABC[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """New contiguous storage that holds anything.

    It is asked for as integers: where `torch.use_deterministic_algorithms` is on, PyTorch fills
    what it hands out, and cannot fill packed fp4.
    """
    return torch.empty(tuple(shape), dtype=_BITS[dtype.itemsize], device=device).view(dtype)


def refuse(layout: WeightLayout, precondition: str, got: object) -> LayoutError:
    """The error to raise."""
    return LayoutError(layout=layout.describe(), precondition=precondition, got=str(got))


def check_storage(layout: WeightLayout, *tensors: torch.Tensor) -> None:
    # A copy to or from a meta tensor does nothing and raises nothing.
    if any(tensor.is_meta for tensor in tensors):
        raise refuse(layout, "tensors with storage", "a meta tensor")


def check_apart(layout: WeightLayout, out: torch.Tensor, source: torch.Tensor) -> None:
    """A permutation reads what it would have overwritten, if they share bytes."""
    if share_bytes(out, source):
        raise refuse(layout, "a source apart from out", "tensors that share bytes")


def check_target(
    layout: WeightLayout, out: torch.Tensor, shape: SequenceABC[int], dtype: torch.dtype
) -> None:
    """The preconditions of a tensor that is written as a whole."""
    check_storage(layout, out)
    if tuple(out.shape) != tuple(shape):
        raise refuse(layout, f"out of shape {list(shape)}", list(out.shape))
    if out.dtype != dtype:
        raise refuse(layout, f"out of {dtype}", out.dtype)
    if not out.is_contiguous():
        raise refuse(layout, "contiguous storage", f"strides {out.stride()}")


def check_write(
    layout: WeightLayout,
    out: torch.Tensor,
    source: torch.Tensor,
    region: Region,
    shape: SequenceABC[int],
) -> None:
    """The preconditions of `apply_into`; ValueError for a region outside the logical shape."""
    check_region(shape, region)
    check_storage(layout, out, source)
    if not out.is_contiguous():
        raise refuse(layout, "contiguous storage", f"strides {out.stride()}")
    if source.dtype != out.dtype:
        raise refuse(layout, f"a source of {out.dtype}", source.dtype)
    if tuple(source.shape) != region_shape(region):
        raise refuse(layout, f"a source of shape {list(region_shape(region))}", list(source.shape))
    layout.check(shape, out.dtype)
    stored_shape = layout.stored_shape(shape, out.dtype)
    if tuple(out.shape) != stored_shape:
        raise refuse(
            layout, f"out of shape {list(stored_shape)} for {list(shape)}", list(out.shape)
        )
    if not region_is_whole_tiles(layout, out.dtype, region, shape):
        rows, columns = layout.tile(out.dtype)
        raise refuse(layout, f"a region of whole tiles of {rows} rows x {columns} columns", region)
    check_apart(layout, out, source)


def region_is_whole_tiles(
    layout: WeightLayout,
    dtype: torch.dtype,
    region: Region,
    shape: SequenceABC[int] | None = None,
) -> bool:
    """Whether a region of a fitting shape cuts no tile; an empty region cuts none.

    With the logical shape, a region that ends where the tensor does holds the padding, too.
    """
    if any(start == stop for start, stop in region):
        return True
    ends = [stop for _, stop in region] if shape is None else shape
    # From the last dimension backwards: a vector has columns only.
    tile = reversed(layout.tile(dtype))
    return all(
        start % size == 0 and (stop % size == 0 or (shape is not None and stop == end))
        for (start, stop), size, end in zip(reversed(region), tile, reversed(ends), strict=False)
    )
