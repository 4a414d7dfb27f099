"""n samples of one prompt: one computes it, the others wait, then each starts behind it.

The one that computes is the group's *leader*. When its prompt is through, the group holds the
prompt's blocks; every sample that begins after that shares them and computes one token. The hold
ends with the last sample that has not begun, and before anybody is preempted for want of blocks.

    group   leader  hold   samples that have not begun
            -       -      in line; the next one admitted leads, unless the cache has it all
            set     -      parked, as soon as a plan comes to them
            -       set    in line; admitted from the hold

Source: our own; vLLM v1 computes a prompt n times unless its full blocks are cached.
"""

from collections.abc import Callable
from dataclasses import dataclass

from syncline.kv_cache import BlockId, KVCacheManager, PromptHold, Reservation
from syncline.scheduler_core.parking import Event
from syncline.scheduler_core.sequence import Sequence
from syncline.scheduler_core.types import SequenceId


@dataclass(frozen=True, slots=True)
class PromptSettled:
    """An event: nobody computes this request's prompt any more, it is held or was given up."""

    request_id: str


class RequestGroup:
    """The unfinished sequences of one request, and how far their common prompt is.

    has_started   one of them was admitted once
    unbegun       those that have never been admitted
    leader        the one that computes the prompt for the others, or stands in line to do so
    hold, source  the computed prompt and the sequence that computed it
    """

    __slots__ = (
        "has_started",
        "hold",
        "leader",
        "request_id",
        "sequences",
        "source",
        "unbegun",
    )

    def __init__(self, request_id: str, sequences: list[Sequence]) -> None:
        self.request_id = request_id
        self.sequences = {sequence.seq_id: sequence for sequence in sequences}
        self.unbegun: dict[SequenceId, Sequence] = dict(self.sequences)
        self.has_started = False
        self.leader: Sequence | None = None
        self.hold: PromptHold | None = None
        self.source: Sequence | None = None


class Siblings:
    """Who leads which group, and the holds of all groups. `wake` is told when waiting is over."""

    __slots__ = ("_held", "_kv", "_unsettled", "_wake")

    def __init__(self, kv: KVCacheManager, wake: Callable[[Event], None]) -> None:
        self._kv = kv
        self._wake = wake
        self._held: dict[str, RequestGroup] = {}
        self._unsettled: list[RequestGroup] = []  # Held since the last plan.

    def must_wait(self, sequence: Sequence, group: RequestGroup) -> bool:
        """Whether another one computes the prompt that this sequence has yet to begin."""
        leader = group.leader
        return leader is not None and leader is not sequence and sequence.seq_id in group.unbegun

    def lead(self, sequence: Sequence, group: RequestGroup) -> None:
        """The others wait for this one, from now on until it has lost its row or its turn."""
        if len(group.unbegun) > 1 and group.leader is None and group.hold is None:
            group.leader = sequence

    def note_admission(self, sequence: Sequence, group: RequestGroup) -> None:
        """It leads unless each sample finds as much in the cache: all but the last token."""
        group.has_started = True
        group.unbegun.pop(sequence.seq_id, None)
        if not group.unbegun:
            group.leader = None
            self._drop(group)
            return
        has_columns_already = (
            sequence.has_computed_prompt and sequence.request.required_prompt_columns
        )
        is_cached = sequence.num_cached_tokens >= sequence.num_prompt_tokens - 1
        if is_cached or has_columns_already:
            self.note_loss(sequence, group)
        elif group.leader is None and group.hold is None:
            group.leader = sequence

    def note_prompt(self, sequence: Sequence, group: RequestGroup, kv_epoch: int) -> None:
        """Its prompt is through, computed by steps with this stamp: hold it for the others."""
        if group.leader is not sequence:
            return
        num_tokens = sequence.num_prompt_tokens
        group.hold = self._kv.prompt_holds.take(sequence.table, num_tokens, kv_epoch)
        if group.hold is not None:
            group.source = sequence
            self._held[group.request_id] = group
            self._unsettled.append(group)
        self.note_loss(sequence, group)

    def note_loss(self, sequence: Sequence, group: RequestGroup) -> None:
        """It does not lead, or no longer: the others need not wait for it."""
        if group.leader is sequence:
            group.leader = None
            self._wake(PromptSettled(group.request_id))

    def note_end(self, sequence: Sequence, group: RequestGroup, *, has_failed: bool) -> None:
        self.note_loss(sequence, group)
        group.unbegun.pop(sequence.seq_id, None)
        # KV of a row that failed is not to be trusted.
        if not group.unbegun or (has_failed and group.source is sequence):
            self._drop(group)

    def reserve(self, sequence: Sequence, group: RequestGroup) -> Reservation | None:
        """Fill its table from the hold, and take over the columns of the prompt that it needs."""
        assert group.hold is not None and group.source is not None
        is_last = len(group.unbegun) == 1 and sequence.seq_id in group.unbegun
        reservation = self._kv.prompt_holds.reserve(
            sequence.table, sequence.target_len, group.hold, is_last=is_last
        )
        if reservation is not None and sequence.request.required_prompt_columns:
            sequence.take_prompt_columns(group.source)
        return reservation

    def settle(self, *, is_scarce: bool) -> list[tuple[BlockId, BlockId]]:
        """Before a step writes: the copies that part new holds from the sequences that go on.

        is_scarce: take no block for it; a hold that would need one gives its tail up.
        """
        copies: list[tuple[BlockId, BlockId]] = []
        holds = self._kv.prompt_holds
        for group in self._unsettled:
            if group.hold is None:
                continue
            if is_scarce and group.hold.is_tail_borrowed:
                holds.drop_tail(group.hold)
            copies += holds.settle(group.hold)
        self._unsettled.clear()
        return copies

    def give_up_blocks(self) -> bool:
        """Drop the youngest hold that has a block to itself; False if no such hold is left."""
        for group in self._youngest_first():
            if group.hold is not None and self._kv.prompt_holds.num_freed_by(group.hold):
                self._drop(group)
                return True
        return False

    def make_way(self, group: RequestGroup) -> bool:
        """Give up what may keep a sample of this group from ever starting, piece by piece.

        First another group's hold, then this one's tail, then the rest; False if nothing is left.
        """
        for other in self._youngest_first():
            if other is not group:
                self._drop(other)
                return True
        if group.hold is None:
            return False
        if group.hold.tail is not None:
            self._kv.prompt_holds.drop_tail(group.hold)
        else:
            self._drop(group)
        return True

    def drop_all(self) -> None:
        """KV has lost its meaning, or all blocks are needed."""
        for group in list(self._held.values()):
            self._drop(group)

    def check(self, group: RequestGroup) -> str | None:
        """What is wrong with the books about this group, if anything."""
        if group.hold is not None and (group.leader is not None or not group.unbegun):
            return "its prompt is held, but is being computed, or nobody needs it"
        if (group.hold is None) != (group.request_id not in self._held):
            return "its prompt is held, but not listed, or listed, but not held"
        if group.hold is not None and group.hold.is_tail_borrowed and group not in self._unsettled:
            return "its prompt's last block is borrowed for good"
        if not group.unbegun.keys() <= group.sequences.keys():
            return "a sequence has not begun, but has ended"
        if any(s.row is not None or s.num_preemptions for s in group.unbegun.values()):
            return "a sequence has begun, but is listed as one that has not"
        return None

    def _youngest_first(self) -> list[RequestGroup]:
        return sorted(self._held.values(), key=_place_in_line, reverse=True)

    def _drop(self, group: RequestGroup) -> None:
        if group.hold is not None:
            self._kv.prompt_holds.drop(group.hold)
            group.hold = None
            group.source = None
            del self._held[group.request_id]


def _place_in_line(group: RequestGroup) -> tuple[int, int]:
    """That of the first sample that has not begun."""
    return min(sequence.order_key for sequence in group.unbegun.values())
