"""Sequences that wait for one event each, out of the waiting line: no plan looks at them.

A sequence is parked on an event and stays until that event comes or the sequence ends. Knows
nothing of what an event means: whoever parks a sequence sees to it that the event will come.
"""

from collections.abc import Hashable, Iterator
from typing import TypeAlias

from syncline.scheduler_core.sequence import Sequence, order_of
from syncline.scheduler_core.types import IdleCause, SequenceId

Event: TypeAlias = Hashable
"""What is waited for. Events of two kinds must never be equal: each kind is a class of its own."""


class ParkingLot:
    """Parked sequences by event; constant time to park, to remove and for each one woken."""

    __slots__ = ("_by_event", "_spots")

    def __init__(self) -> None:
        self._by_event: dict[Event, dict[SequenceId, Sequence]] = {}
        self._spots: dict[SequenceId, tuple[IdleCause, Event]] = {}

    def __len__(self) -> int:
        return len(self._spots)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.seq_id in self._spots

    def __iter__(self) -> Iterator[tuple[Sequence, IdleCause, Event]]:
        """Every parked sequence with its cause and its event."""
        for parked in self._by_event.values():
            for sequence in parked.values():
                yield sequence, *self._spots[sequence.seq_id]

    @property
    def first_cause(self) -> IdleCause | None:
        """What the one that has been parked longest waits for; None if nobody is parked."""
        for cause, _ in self._spots.values():
            return cause
        return None

    def park(self, sequence: Sequence, cause: IdleCause, event: Event) -> None:
        """The sequence must not be parked already."""
        assert sequence.seq_id not in self._spots
        self._spots[sequence.seq_id] = (cause, event)
        self._by_event.setdefault(event, {})[sequence.seq_id] = sequence

    def wake(self, event: Event) -> list[Sequence]:
        """The event has come: exactly those parked on it leave, in order of admission."""
        parked = self._by_event.pop(event, None)
        if parked is None:
            return []
        for seq_id in parked:
            del self._spots[seq_id]
        return sorted(parked.values(), key=order_of)

    def remove(self, sequence: Sequence) -> None:
        """The sequence has ended. Raises KeyError if it is not parked."""
        _, event = self._spots.pop(sequence.seq_id)
        parked = self._by_event[event]
        del parked[sequence.seq_id]
        if not parked:
            del self._by_event[event]
