"""Whose blocks are taken when the pool is full, and when such a sequence may come back.

The victim is the youngest of the lowest priority, so the oldest always gets on and two sequences
cannot take turns. It comes back in its old place in the line, and only when every running sequence
could take one more block as well: else it would be preempted again before it got anywhere.
"""

from collections.abc import Iterable

from syncline.scheduler_core.sequence import Sequence, order_of


def choose_victim(running: Iterable[Sequence]) -> Sequence | None:
    """The running sequence to preempt next, None if nothing runs."""
    return max(running, key=order_of, default=None)


def headroom_blocks(sequence: Sequence, num_running: int) -> int:
    """Free blocks that must remain after admitting this sequence."""
    return num_running if sequence.num_preemptions else 0
