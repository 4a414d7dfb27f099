"""What an update did, in numbers, for whoever decides what may be served next."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """A committed update: every stored byte of every slot was written from it.

    `seconds` has `check` (finite values, equal aliases), `wait` (for the guard), `encode` (into
    live storage or shadows), `swap` (shadows into live storage), `derive`, each only if it took
    place, and `total` from begin to commit.
    """

    version: int
    mode: str
    num_tensors: int  # distinct external names that came, aliases included, ignored ones not
    num_slots: int
    bytes_written: int
    bytes_total: int
    coverage: float
    max_buffered_bytes: int  # the most that waited at once for the rest of a scale's domain
    seconds: Mapping[str, float]
    aliases: tuple[str, ...]
    ignored: tuple[str, ...]
    derived: tuple[str, ...]
    checksum: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortReport:
    """An update that ended without a commit.

    With `live_bytes_written` False the weights are the old ones, whole and valid. With True they
    are a mixture, and nothing may be served before a complete update has been committed.
    """

    version: int
    reason: str
    live_bytes_written: bool
    num_tensors: int
    bytes_written: int  # into shadows, when the mode was staged
    bytes_total: int


class Stopwatch:
    """Seconds per phase, by a clock that the caller gives."""

    __slots__ = ("_clock", "_seconds", "_started")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._started = clock()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = self._clock()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + self._clock() - started

    def seconds(self) -> dict[str, float]:
        return {**self._seconds, "total": self._clock() - self._started}
