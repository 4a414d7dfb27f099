"""State rows: who may have one, and which were given up since the last plan."""

from heapq import heappop, heappush

from syncline.scheduler_core.types import RowId


class RowPool:
    """Rows 0 to num_rows - 1; the lowest free one is taken first."""

    __slots__ = ("_free", "_left")

    def __init__(self, num_rows: int) -> None:
        self._free = list(range(num_rows))
        self._left: list[RowId] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def free_rows(self) -> frozenset[RowId]:
        return frozenset(self._free)

    def take(self) -> RowId:
        """Raises IndexError if `num_free` is 0."""
        return heappop(self._free)

    def give_up(self, row: RowId) -> None:
        """The row may be taken again at once; the next plan reports it as left."""
        heappush(self._free, row)
        self._left.append(row)

    def drain_left(self) -> tuple[RowId, ...]:
        """The rows given up since the last call."""
        if not self._left:
            return ()
        left = tuple(self._left)
        self._left.clear()
        return left
