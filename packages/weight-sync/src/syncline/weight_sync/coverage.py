"""Which elements of one tensor have come, as disjoint rectangles.

Counts elements, exactly: every element is covered once or not at all. Does not know where they
came from nor what they hold. Neighbours are merged, found by the face they share, so parts that
arrive in order, whatever their number, are a handful of rectangles; a query costs one pass.
"""

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as SequenceABC

from syncline.weight_sync.regions import (
    Region,
    difference_all,
    intersection,
    volume,
    whole_region,
)

Face = tuple[int, Region, int]  # dimension, bounds in the others, position


class Coverage:
    """A set of elements of a tensor; it only grows."""

    __slots__ = ("_by_start", "_by_stop", "_num_cells", "_num_covered", "_regions", "_whole")

    def __init__(self, shape: SequenceABC[int]) -> None:
        self._whole = whole_region(shape)
        self._num_cells = volume(self._whole)
        self._num_covered = 0
        self._regions: dict[Region, None] = {}  # a set that keeps its order
        self._by_start: dict[Face, Region] = {}
        self._by_stop: dict[Face, Region] = {}

    @property
    def num_covered(self) -> int:
        return self._num_covered

    @property
    def is_complete(self) -> bool:
        """True from the start for a tensor without elements."""
        return self._num_covered == self._num_cells

    def copy(self) -> "Coverage":
        twin = Coverage([stop for _, stop in self._whole])
        twin._num_covered = self._num_covered
        twin._regions = dict(self._regions)
        twin._by_start = dict(self._by_start)
        twin._by_stop = dict(self._by_stop)
        return twin

    def overlaps(self, region: Region) -> list[Region]:
        """The covered elements of `region`, as disjoint regions."""
        common = (intersection(region, covered) for covered in self._regions)
        return [piece for piece in common if piece is not None]

    def covers(self, region: Region, extra: Iterable[Region] = ()) -> bool:
        """Are all elements of `region` covered, once `extra`, disjoint from all here, is added?"""
        found = sum(volume(piece) for piece in self.overlaps(region))
        for other in extra:
            common = intersection(region, other)
            found += 0 if common is None else volume(common)
        return found == volume(region)

    def missing(self, region: Region | None = None) -> list[Region]:
        """The elements of `region` (None: of the tensor) that are not covered, disjoint."""
        return difference_all(self._whole if region is None else region, self._regions)

    def add(self, region: Region) -> None:
        """Cover elements that are not covered yet; the caller asked `overlaps` before."""
        if volume(region) == 0:
            return
        self._num_covered += volume(region)
        assert self._num_covered <= self._num_cells, f"{region} was covered already"
        merged = region
        while (neighbour := self._neighbour(merged)) is not None:
            self._forget(neighbour)
            merged = tuple(
                (min(a[0], b[0]), max(a[1], b[1])) for a, b in zip(merged, neighbour, strict=True)
            )
        self._regions[merged] = None
        for start_face, stop_face in _faces(merged):
            self._by_start[start_face] = merged
            self._by_stop[stop_face] = merged

    def _neighbour(self, region: Region) -> Region | None:
        """A covered region that makes one rectangle with `region`."""
        for start_face, stop_face in _faces(region):
            found = self._by_stop.get(start_face) or self._by_start.get(stop_face)
            if found is not None:
                return found
        return None

    def _forget(self, region: Region) -> None:
        del self._regions[region]
        for start_face, stop_face in _faces(region):
            del self._by_start[start_face], self._by_stop[stop_face]


def _faces(region: Region) -> Iterator[tuple[Face, Face]]:
    """Both ends in each dimension; two disjoint regions cannot start, or stop, at the same one."""
    for dim, (start, stop) in enumerate(region):
        others = region[:dim] + region[dim + 1 :]
        yield (dim, others, start), (dim, others, stop)
