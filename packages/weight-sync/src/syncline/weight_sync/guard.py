"""The right to write live weights, as its owner grants it.

This package asks; the engine answers, because only it knows what may be reading. Nothing here
waits for a device, stops a scheduler or knows what a KV cache is.
"""

from typing import Protocol


class WriteGuard(Protocol):
    """Exclusive: it is held by one update at most, from before its first live byte to its end."""

    def acquire(self, reason: str) -> None:
        """Grant once all work that may read the weights has finished, or raise.

        After a raise nothing is held and nothing was written; the update may ask again.
        """
        ...

    def first_write(self) -> None:
        """Called once, after `acquire` and before the first live byte: what was computed from the
        old weights, such as cached KV, loses its meaning now. A raise gives the guard back."""
        ...

    def release(self) -> None:
        """The update ended. What the weights are worth now, its report says."""
        ...


class LiveGate:
    """The one way to live storage: the guard, then its hook, then the mark, then bytes."""

    __slots__ = ("_bytes_written", "_guard", "_held")

    def __init__(self, guard: WriteGuard) -> None:
        self._guard = guard
        self._held = False
        self._bytes_written = False

    @property
    def held(self) -> bool:
        return self._held

    @property
    def bytes_written(self) -> bool:
        """May a live byte differ from what it was? Stays true after the release."""
        return self._bytes_written

    def open(self, reason: str) -> None:
        """Live storage may be written from here to `release`; asks the guard the first time."""
        if self._held:
            return
        self._guard.acquire(reason)
        self._held = True
        try:
            self._guard.first_write()
        except BaseException:
            self.release()
            raise
        self._bytes_written = True

    def release(self) -> None:
        """Give the guard back if it is held; if the guard raises it still counts as held."""
        if self._held:
            self._guard.release()
            self._held = False
