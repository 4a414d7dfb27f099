"""May this waiting sequence start now, and with which blocks: all of its known tokens, or not.

Blocks for every known token are reserved at once, so a prefill that has begun never needs another.
"""

from dataclasses import dataclass

from syncline.kv_cache import BlockKey, KVCacheManager, PrefixMatch, Reservation
from syncline.scheduler_core.forecast import Forecast
from syncline.scheduler_core.lifecycle import Lifecycle
from syncline.scheduler_core.parking import Event
from syncline.scheduler_core.policies import PartialTurn
from syncline.scheduler_core.preemption import headroom_blocks
from syncline.scheduler_core.sequence import Sequence
from syncline.scheduler_core.siblings import PromptSettled, RequestGroup
from syncline.scheduler_core.transfers import Source
from syncline.scheduler_core.types import AdmissionPolicy, IdleCause, SequenceId

_NO_MATCH = PrefixMatch()


@dataclass(frozen=True, slots=True)
class KeySettled:
    """An event: nobody computes this block any more, it has been published or given up."""

    key: BlockKey


def is_awaited(life: Lifecycle, event: Event) -> bool:
    """Whether an event that sequences are parked on is still to come."""
    if isinstance(event, KeySettled):
        return life.kv.is_awaited(event.key)
    if isinstance(event, PromptSettled):
        group = life.groups.get(event.request_id)
        return group is not None and group.leader is not None
    return life.transfers.is_awaited(event)


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """The table is filled; KV of the first `num_computed_tokens` exists after the copies."""

    num_computed_tokens: int
    reservation: Reservation


@dataclass(frozen=True, slots=True, kw_only=True)
class Parking:
    """It waits for `event`, and holds up nobody."""

    cause: IdleCause
    event: Event


class Admission:
    """Asked once per plan and waiting sequence, in order, until it refuses one."""

    __slots__ = ("_forecast", "_kv", "_life", "_refused")

    def __init__(self, policy: AdmissionPolicy, kv: KVCacheManager, life: Lifecycle) -> None:
        self._forecast = Forecast(kv, life) if policy == "forecast" else None
        self._kv = kv
        self._life = life
        # The last one refused for want of blocks, and the (free, cached) blocks there were.
        self._refused: tuple[SequenceId, int, int] | None = None

    def consider(
        self, sequence: Sequence, max_num_new: int | None
    ) -> Admitted | Parking | IdleCause:
        """Fill its table, or say what it waits for and change nothing.

        max_num_new: it may begin only with at most so many positions left to compute; None: with
        any number. A Parking concerns it alone; after a refusal by an IdleCause nobody younger may
        start. One that is parked until its KV has been loaded has its table filled, and is admitted
        with it later.
        """
        if sequence.resume_after > self._life.pending.last_applied_id:
            return IdleCause.WAITING_FOR_RESULTS
        if sequence.table.block_ids:
            loaded = self._consider_loaded(sequence, max_num_new)
            if loaded is not None:
                return loaded
        siblings = self._life.siblings
        group = self._life.groups[sequence.request_id]
        if siblings.must_wait(sequence, group):
            event = PromptSettled(sequence.request_id)
            return Parking(cause=IdleCause.WAITING_FOR_PREFIX, event=event)
        if self._is_refused_again(sequence):
            return IdleCause.WAITING_FOR_BLOCKS
        verdict = self._place(sequence, group, max_num_new)
        # Nobody runs who would free a block: only holds can be in the way.
        while verdict is IdleCause.WAITING_FOR_BLOCKS and not self._life.running:
            if not siblings.make_way(group):
                break
            verdict = self._place(sequence, group, max_num_new)
        return verdict

    def _place(
        self, sequence: Sequence, group: RequestGroup, max_num_new: int | None
    ) -> Admitted | Parking | IdleCause:
        match = _NO_MATCH
        target_len = sequence.target_len  # Derived from all that is in flight: asked once.
        if group.hold is None or sequence.num_output_tokens:
            match = self._match(sequence, target_len)
        if group.hold is not None and group.hold.num_tokens >= match.num_tokens:
            return self._place_from_hold(sequence, group, group.hold.num_tokens, max_num_new)
        source = self._life.transfers.source(sequence, match.num_tokens)
        parking = self._wait_for(sequence, match, source is not None, max_num_new)
        if parking is not None:
            return parking
        num_new_blocks = self._kv.num_blocks_taken(target_len, match)
        if not self._has_room(sequence, num_new_blocks):
            return self._refuse(sequence)
        reservation = self._kv.reserve(sequence.table, target_len, match)
        if reservation is None:
            return self._refuse(sequence)
        self._refused = None
        if source is not None:
            return self._begin_load(sequence, match.num_tokens, source)
        return Admitted(num_computed_tokens=match.num_tokens, reservation=reservation)

    def _place_from_hold(
        self, sequence: Sequence, group: RequestGroup, num_held: int, max_num_new: int | None
    ) -> Admitted | Parking | IdleCause:
        if _is_too_long(sequence, num_held, max_num_new):
            return self._until_turn(sequence)
        size = self._kv.block_size
        num_new_blocks = -(-sequence.target_len // size) - num_held // size
        if not self._has_room(sequence, num_new_blocks):
            return self._refuse(sequence)
        reservation = self._life.siblings.reserve(sequence, group)
        if reservation is None:
            return self._refuse(sequence)
        self._refused = None
        return Admitted(num_computed_tokens=num_held, reservation=reservation)

    def _wait_for(
        self, sequence: Sequence, match: PrefixMatch, would_load: bool, max_num_new: int | None
    ) -> Parking | None:
        """What it should wait for although there might be blocks for it."""
        if match.awaited_key is not None:
            self._kv.watch(match.awaited_key)
            return Parking(cause=IdleCause.WAITING_FOR_PREFIX, event=KeySettled(match.awaited_key))
        if would_load:
            if self._life.transfers.may_load:
                return None
            event = self._life.transfers.queue(sequence)
            return Parking(cause=IdleCause.WAITING_FOR_TRANSFER, event=event)
        if _is_too_long(sequence, match.num_tokens, max_num_new):
            return self._until_turn(sequence)
        return None

    def _consider_loaded(
        self, sequence: Sequence, max_num_new: int | None
    ) -> Admitted | Parking | None:
        """It has its blocks already; None if what is in them has lost its meaning since."""
        if not self._kv.is_current(sequence.table):
            self._life.transfers.drop(sequence)
            return None
        if _is_too_long(sequence, sequence.num_computed_tokens, max_num_new):
            return self._until_turn(sequence)
        return Admitted(num_computed_tokens=sequence.num_computed_tokens, reservation=Reservation())

    def _begin_load(self, sequence: Sequence, num_local_tokens: int, source: Source) -> Parking:
        group = self._life.groups[sequence.request_id]
        # It has begun, and so is run to its end while new requests are held back.
        group.has_started = True
        self._life.siblings.lead(sequence, group)
        event = self._life.transfers.begin_load(sequence, num_local_tokens, source)
        return Parking(cause=IdleCause.WAITING_FOR_TRANSFER, event=event)

    def _until_turn(self, sequence: Sequence) -> Parking:
        # Whoever has the same prompt would have to wait for a turn as well.
        self._life.siblings.lead(sequence, self._life.groups[sequence.request_id])
        event = PartialTurn(sequence.seq_id)
        return Parking(cause=IdleCause.MAX_NUM_PARTIAL_PREFILLS, event=event)

    def _match(self, sequence: Sequence, target_len: int) -> PrefixMatch:
        # Columns of every prompt position exist only once each has been computed here.
        if sequence.request.required_prompt_columns and not sequence.has_computed_prompt:
            return _NO_MATCH
        return self._kv.match(sequence.table, sequence.token_ids, target_len - 1)

    def _has_room(self, sequence: Sequence, num_new_blocks: int) -> bool:
        """Whether those who run can grow as well, in the policy's eyes."""
        life = self._life
        if self._forecast is not None:
            return self._forecast.has_room(sequence, num_new_blocks)
        headroom = headroom_blocks(sequence, len(life.running) + life.transfers.num_holding)
        return not headroom or num_new_blocks + headroom <= self._kv.num_free_blocks

    def _refuse(self, sequence: Sequence) -> IdleCause:
        self._refused = (sequence.seq_id, self._kv.num_free_blocks, self._kv.num_cached_blocks)
        return IdleCause.WAITING_FOR_BLOCKS

    def _is_refused_again(self, sequence: Sequence) -> bool:
        """Nothing has changed for the better since its last refusal, and others still run."""
        if self._refused is None or not self._life.running:
            return False
        seq_id, num_free, num_cached = self._refused
        if seq_id != sequence.seq_id or self._kv.num_free_blocks > num_free:
            return False
        if self._forecast is not None:
            return not self._forecast.may_say_otherwise()
        return self._kv.num_cached_blocks == num_cached


def _is_too_long(sequence: Sequence, num_computed_tokens: int, max_num_new: int | None) -> bool:
    return max_num_new is not None and sequence.target_len - num_computed_tokens > max_num_new
