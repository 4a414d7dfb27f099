"""Rectangles of a tensor's index space: volume, intersection, difference.

A region holds one (start, stop) pair per dimension; the region of a 0-d tensor is `()` and holds
one element. Knows no tensors' contents, no slots and no names. Unit: elements.
"""

import math
from collections.abc import Iterable
from collections.abc import Sequence as SequenceABC

Region = tuple[tuple[int, int], ...]


def whole_region(shape: SequenceABC[int]) -> Region:
    """All of a tensor of this shape."""
    return tuple((0, size) for size in shape)


def extents(region: Region) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in region)


def volume(region: Region) -> int:
    return math.prod(stop - start for start, stop in region)


def intersection(first: Region, second: Region) -> Region | None:
    """What both hold; None if that is no element at all."""
    common = []
    for (start, stop), (other_start, other_stop) in zip(first, second, strict=True):
        # Plain comparisons: most pairs of a long list are apart, and this loop finds that out.
        low = start if start > other_start else other_start
        high = stop if stop < other_stop else other_stop
        if low >= high:
            return None
        common.append((low, high))
    return tuple(common)


def difference(region: Region, taken: Region) -> list[Region]:
    """Disjoint regions that together hold `region` without `taken`.

    Every bound of the result is a bound of one of the two, so what is cut along a grid stays so.
    """
    common = intersection(region, taken)
    if common is None:
        return [region] if volume(region) else []
    left = []
    rest = list(region)
    for dim, (start, stop) in enumerate(common):
        whole_start, whole_stop = rest[dim]
        for piece in ((whole_start, start), (stop, whole_stop)):
            if piece[0] < piece[1]:
                left.append((*rest[:dim], piece, *rest[dim + 1 :]))
        rest[dim] = (start, stop)
    return left


def difference_all(region: Region, taken: Iterable[Region]) -> list[Region]:
    """Disjoint regions that together hold `region` without any of `taken`."""
    left = [region] if volume(region) else []
    for other in taken:
        left = [piece for part in left for piece in difference(part, other)]
    return left


def relative(region: Region, origin: Region) -> Region:
    """The same elements, counted from the start of `origin`."""
    return tuple(
        (start - base, stop - base) for (start, stop), (base, _) in zip(region, origin, strict=True)
    )


def slices(region: Region) -> tuple[slice, ...]:
    """An index for a tensor, a view of exactly these elements."""
    return tuple(slice(start, stop) for start, stop in region)


def describe(region: Region) -> str:
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in region) + "]"


def require_within(region: Region, shape: SequenceABC[int], field: str) -> None:
    """Raise ValueError unless `region` is a rectangle inside a tensor of this shape."""
    if len(region) != len(shape):
        raise ValueError(
            f"{field} must have {len(shape)} dimensions for the shape {tuple(shape)}, got {region}"
        )
    for dim, ((start, stop), size) in enumerate(zip(region, shape, strict=True)):
        if not 0 <= start <= stop <= size:
            raise ValueError(
                f"{field} must lie within [0, {size}) in dimension {dim}, got [{start}, {stop})"
            )
