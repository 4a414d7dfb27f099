"""Where every sequence stands, and the only moves between those places.

    waiting -> prefilling -> decoding <-> draining          running: the last three, with a row
       ^            |            |            |
       '------------'------------'------------'  preempt
    waiting <-> parked                              until an event comes; no plan looks at it.
                                                    A sequence whose KV is being loaded holds blocks
    any -> finished

draining: the steps in flight may take it to a length limit, so no plan contains it until they are
applied. A move keeps rows, blocks, decode set and line in step; nobody else changes them.
"""

from syncline.kv_cache import KVCacheManager
from syncline.scheduler_core.columns import TokenLog
from syncline.scheduler_core.connectors.protocols import OffloadConnector
from syncline.scheduler_core.decoding import DecodeSet
from syncline.scheduler_core.parking import Event, ParkingLot
from syncline.scheduler_core.pending import PendingSteps
from syncline.scheduler_core.preemption import choose_victim
from syncline.scheduler_core.rows import RowPool
from syncline.scheduler_core.sequence import Sequence
from syncline.scheduler_core.siblings import RequestGroup, Siblings
from syncline.scheduler_core.survival import OutputLengths
from syncline.scheduler_core.timings import Clock
from syncline.scheduler_core.transfers import Transfers
from syncline.scheduler_core.types import Counters, FinishReason, IdleCause, RowId, SequenceId
from syncline.scheduler_core.waiting import WaitingLine


class Lifecycle:
    """All unfinished sequences by place, and those that ended and have not been taken yet."""

    __slots__ = (
        "clock",
        "counters",
        "decoding",
        "draining",
        "finished",
        "groups",
        "kv",
        "log",
        "output_lengths",
        "parked",
        "pending",
        "prefilling",
        "rows",
        "running",
        "sequences",
        "siblings",
        "transfers",
        "waiting",
    )

    def __init__(
        self, kv: KVCacheManager, num_rows: int, offload: OffloadConnector | None = None
    ) -> None:
        self.kv = kv
        self.clock = Clock()
        self.counters = Counters()
        self.log = TokenLog()
        self.pending = PendingSteps()
        self.transfers = Transfers(kv, self.counters, offload=offload, max_loading=num_rows)
        self.rows = RowPool(num_rows)
        self.sequences: dict[SequenceId, Sequence] = {}
        self.groups: dict[str, RequestGroup] = {}
        self.waiting = WaitingLine()
        self.parked = ParkingLot()
        self.siblings = Siblings(kv, self.wake)
        self.running: dict[SequenceId, Sequence] = {}
        self.prefilling: dict[SequenceId, Sequence] = {}
        self.decoding = DecodeSet()
        self.draining: dict[SequenceId, Sequence] = {}
        self.finished: list[Sequence] = []
        self.output_lengths = OutputLengths()

    def add(self, request_id: str, sequences: list[Sequence]) -> None:
        self.groups[request_id] = RequestGroup(request_id, sequences)
        for sequence in sequences:
            self.sequences[sequence.seq_id] = sequence
            self.waiting.put(sequence)

    @property
    def num_waiting(self) -> int:
        """Sequences without a row, parked or in line."""
        return len(self.waiting) + len(self.parked)

    def park(self, sequence: Sequence, cause: IdleCause, event: Event) -> None:
        """waiting -> parked. The caller has taken it out of the line, and the event will come."""
        self.parked.park(sequence, cause, event)

    def wake(self, event: Event) -> None:
        """parked -> waiting, in their old places, for all that wait for this event."""
        # The last one first: all of them are mostly older than the line, so each goes in front.
        for sequence in reversed(self.parked.wake(event)):
            self.waiting.put(sequence)

    def admit(self, sequence: Sequence, row: RowId) -> None:
        """waiting -> prefilling. The caller has taken it out of the line and filled its table, and
        the sequence holds the KV that is in it.
        """
        num_cached_tokens = sequence.num_computed_tokens - self.transfers.take_loaded(sequence)
        if not sequence.num_preemptions:
            sequence.note_first_admission(num_cached_tokens, self.clock.now_s)
        sequence.begin_prefill(row, num_cached_tokens)
        self.running[sequence.seq_id] = sequence
        self.prefilling[sequence.seq_id] = sequence
        group = self.groups[sequence.request_id]
        self.siblings.note_admission(sequence, group)
        self.counters.num_admissions += 1
        self.counters.num_cached_tokens += num_cached_tokens

    def decode_at_once(self, sequence: Sequence, row: RowId) -> None:
        """prefilling -> decoding, of one that lacks no KV but that of its last token."""
        del self.prefilling[sequence.seq_id]
        sequence.decode_at_once(self.pending.next_id)
        self.decoding.add(sequence, row)

    def begin_decoding(self, sequence: Sequence, row: RowId, final_step: int) -> bool:
        """prefilling -> decoding, or draining (True) if the one token in flight is the last."""
        del self.prefilling[sequence.seq_id]
        sequence.begin_decoding(final_step)
        if sequence.target_len >= sequence.max_total_tokens:
            self.drain(sequence)
            return True
        self.decoding.add(sequence, row)
        return False

    def drain(self, sequence: Sequence) -> None:
        """-> draining: what is in flight may end it by length."""
        self.decoding.discard(sequence)
        self.draining[sequence.seq_id] = sequence
        sequence.pause_decoding(self.pending.last_id)

    def resume_if_short(self, sequence: Sequence) -> None:
        """draining -> decoding, if fewer tokens came than might have."""
        if sequence.seq_id not in self.draining or sequence.row is None:
            return
        if sequence.target_len < sequence.max_total_tokens:
            del self.draining[sequence.seq_id]
            sequence.resume_decoding(self.pending.next_id)
            self.decoding.add(sequence, sequence.row)

    def victim(self) -> Sequence | None:
        return choose_victim(self.running.values())

    def preempt(self, sequence: Sequence) -> None:
        """running -> waiting. Its blocks are free; tokens in flight will still be delivered."""
        self._give_up_row(sequence, publish=True)
        self.siblings.note_loss(sequence, self.groups[sequence.request_id])
        sequence.num_preemptions += 1
        self.counters.num_preemptions += 1
        self.waiting.put(sequence)

    def preempt_all(self) -> int:
        """running -> waiting, all of them. Whoever waits with blocks loses them too, unless a load
        writes them still.
        """
        self.siblings.drop_all()
        victims = list(self.running.values())
        for sequence in victims:
            self.preempt(sequence)
        return len(victims) + self.transfers.drop_loaded()

    def end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        detail: str,
        *,
        stop_reason: int | str | None = None,
    ) -> None:
        """any -> finished. Results still in flight for it become surplus."""
        self.transfers.handoffs.offer(sequence, reason)
        if sequence in self.parked:
            self.parked.remove(sequence)
        elif sequence.row is None:
            self.waiting.remove(sequence)
        else:
            # KV of a row that failed is not to be trusted.
            self._give_up_row(sequence, publish=reason is not FinishReason.ERROR)
        sequence.outputs.close()
        self.transfers.forget(sequence)
        sequence.finish_reason = reason
        sequence.finish_detail = detail
        sequence.stop_reason = stop_reason
        sequence.finished_s = self.clock.now_s
        del self.sequences[sequence.seq_id]
        group = self.groups[sequence.request_id]
        del group.sequences[sequence.seq_id]
        self.siblings.note_end(sequence, group, has_failed=reason is FinishReason.ERROR)
        if not group.sequences:
            del self.groups[sequence.request_id]
        self.output_lengths.note(sequence.num_output_tokens, is_whole=reason is FinishReason.STOP)
        self.pending.note_end(sequence)
        self.finished.append(sequence)

    def _give_up_row(self, sequence: Sequence, *, publish: bool) -> None:
        assert sequence.row is not None
        if publish:
            # The table's own epoch tells whether its content still has the current meaning.
            self.kv.publish(
                sequence.table,
                sequence.token_ids,
                sequence.num_computed_tokens,
                self.kv.kv_epoch,
            )
            self.transfers.collect(sequence)
        self.kv.release(sequence.table)
        self.decoding.discard(sequence)
        self.draining.pop(sequence.seq_id, None)
        self.prefilling.pop(sequence.seq_id, None)
        del self.running[sequence.seq_id]
        self.rows.give_up(sequence.row)
        sequence.leave_row(self.pending.last_id)
