"""The order of admission: by priority, then by arrival, for newcomers and preempted ones alike."""

from bisect import insort
from collections import deque
from collections.abc import Iterable, Iterator

from syncline.scheduler_core.sequence import Sequence, order_of


class WaitingLine:
    """Waiting sequences in admission order. Cheap at both ends, where nearly all changes happen."""

    __slots__ = ("_line",)

    def __init__(self) -> None:
        self._line: deque[Sequence] = deque()

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._line)

    def put(self, sequence: Sequence) -> None:
        """Take the place that arrival gives, in front of anyone younger."""
        if not self._line or self._line[-1].order_key < sequence.order_key:
            self._line.append(sequence)
        elif sequence.order_key < self._line[0].order_key:
            self._line.appendleft(sequence)
        else:
            insort(self._line, sequence, key=order_of)

    def pop_first(self) -> Sequence | None:
        return self._line.popleft() if self._line else None

    def put_back(self, passed_over: Iterable[Sequence]) -> None:
        """Return sequences taken by `pop_first`, given in the order they were taken."""
        self._line.extendleft(reversed(list(passed_over)))

    def remove(self, sequence: Sequence) -> None:
        self._line.remove(sequence)
