"""Rectangles of a logical shape; knows no layout, recipe or name.

Unit: elements. A region is one (start, stop) per dimension; the plain type lets other packages
pass regions without importing this one.
"""

import math
from collections.abc import Sequence as SequenceABC

import torch

Region = tuple[tuple[int, int], ...]


def full_region(shape: SequenceABC[int]) -> Region:
    """The region that is all of `shape`."""
    return tuple((0, size) for size in shape)


def region_shape(region: Region) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in region)


def region_numel(region: Region) -> int:
    return math.prod(stop - start for start, stop in region)


def common_region(one: Region, other: Region) -> Region:
    """What lies in both, of as many dimensions; with an empty range where nothing does."""
    starts = (max(a[0], b[0]) for a, b in zip(one, other, strict=True))
    stops = (min(a[1], b[1]) for a, b in zip(one, other, strict=True))
    return tuple((start, max(start, stop)) for start, stop in zip(starts, stops, strict=True))


def check_region(shape: SequenceABC[int], region: Region) -> None:
    """ValueError unless `region` has a range per dimension of `shape`; ranges may be empty."""
    if not isinstance(region, SequenceABC):
        raise ValueError(f"region must be a tuple of (start, stop), got {region!r}")
    if len(region) != len(shape):
        raise ValueError(
            f"region must have {len(shape)} ranges for shape {list(shape)}, got {len(region)}"
        )
    for dim, (bounds, size) in enumerate(zip(region, shape, strict=True)):
        if not isinstance(bounds, SequenceABC) or len(bounds) != 2:
            raise ValueError(f"region range {dim} must be (start, stop), got {bounds!r}")
        start, stop = bounds
        if not 0 <= start <= stop <= size:
            raise ValueError(
                f"region range {dim} must be 0 <= start <= stop <= {size}, got ({start}, {stop})"
            )


def region_view(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    """The part of `tensor` that `region` names, as a view."""
    return tensor[tuple(slice(start, stop) for start, stop in region)]
