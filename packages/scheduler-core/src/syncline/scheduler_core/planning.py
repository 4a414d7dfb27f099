"""One step: decodes first, then prefills that have begun, then admissions, within the budget.

A decode step in steady state costs no work per row here: the decode set's calendar names the rows
that need a block or reach a length limit. Preemption happens only while decode rows get their
blocks, so no plan admits what it also preempts.
"""

from syncline.kv_cache import BlockId, KVCacheManager, Reservation
from syncline.scheduler_core.admission import Admission, Admitted, KeySettled, Parking
from syncline.scheduler_core.chunking import next_chunk
from syncline.scheduler_core.config import SchedulerConfig
from syncline.scheduler_core.drafting import DraftPlanner
from syncline.scheduler_core.lifecycle import Lifecycle
from syncline.scheduler_core.pending import StepInFlight
from syncline.scheduler_core.plan import PrefillChunk, RowJoin, StepPlan
from syncline.scheduler_core.policies import PrefillPolicy
from syncline.scheduler_core.sequence import Sequence, order_of
from syncline.scheduler_core.speculation import DraftCounts
from syncline.scheduler_core.types import IdleCause, RowId, SequenceId


class _Draft:
    """The columns of the plan being made."""

    __slots__ = (
        "block_copies",
        "budget",
        "chunks",
        "has_preempted",
        "joined",
        "new_blocks",
        "num_partial",
    )

    def __init__(self) -> None:
        self.budget = 0
        self.has_preempted = False
        self.num_partial = 0  # Prefills begun that are not final in this plan.
        self.joined: list[RowJoin] = []
        self.new_blocks: list[tuple[RowId, int, tuple[BlockId, ...]]] = []
        self.block_copies: list[tuple[BlockId, BlockId]] = []
        self.chunks: list[tuple[Sequence, PrefillChunk]] = []


class Planner:
    """Makes plans. `waiting_cause`: why the last plan left sequences waiting, if it did."""

    __slots__ = ("_admission", "_config", "_drafts", "_kv", "_life", "_prefills", "waiting_cause")

    def __init__(self, config: SchedulerConfig, kv: KVCacheManager, life: Lifecycle) -> None:
        self._config = config
        self._kv = kv
        self._life = life
        self._admission = Admission(config.admission_policy, kv, life)
        self._drafts = DraftPlanner(life, config.max_steps_in_flight)
        self._prefills = PrefillPolicy(config)
        self.waiting_cause: IdleCause | None = None

    def plan(
        self,
        window: int,
        wanted_drafts: DraftCounts,
        *,
        weight_version: int,
        only_started: bool,
    ) -> StepPlan | None:
        """The next step, or None if nothing can be computed now; rows may be preempted in either
        case. only_started: admit no request of which nothing has been admitted yet.
        """
        life = self._life
        decoding = life.decoding
        draft = _Draft()
        if window > 1:
            window = min(window, self._config.max_model_len)  # Also while nobody decodes.
            window = decoding.window_within_lengths(window)
        self._reserve_decodes(window, draft)
        first_drafts = self._join_remotes(window, draft)
        if first_drafts:
            # A remote sends drafts for one step, and all steps of a window have as many.
            window = 1 if any(first_drafts.values()) else decoding.window_within_lengths(window)
            wanted_drafts = _with_first(wanted_drafts, decoding.batch.sequences, first_drafts)
        batch = decoding.batch
        draft.budget = self._config.max_num_batched_tokens - len(batch.rows)
        num_draft_tokens: tuple[int, ...] | None = None
        if wanted_drafts and batch.rows:
            num_draft_tokens = self._add_drafts(wanted_drafts, window, draft)
        for sequence in self._prefills.in_order(life.prefilling.values()):
            self._add_chunk(sequence, sequence.target_len, draft)
        self._wake(draft)
        self.waiting_cause = None
        if len(life.waiting):
            self.waiting_cause = self._admit_waiting(draft, only_started=only_started)
        if self.waiting_cause is None:
            self.waiting_cause = life.parked.first_cause
        kv_stores, kv_loads = life.transfers.take_stores(), life.transfers.take_loads()
        if not (batch.rows or draft.chunks or kv_stores or kv_loads):
            return None
        if not batch.rows:
            window = 1
        draft.block_copies += life.siblings.settle(is_scarce=draft.has_preempted)
        step = StepInFlight(
            life.pending.next_id,
            stamps=(self._kv.kv_epoch, weight_version),
            window=window,
            batch=batch,
            chunks=draft.chunks,
            num_draft_tokens=num_draft_tokens,
        )
        life.pending.push(step)
        self._move_on(step)
        life.counters.num_plans += 1
        num_decode_tokens = len(batch.rows) + sum(num_draft_tokens or ())
        life.counters.num_decode_tokens += num_decode_tokens * window
        return StepPlan(
            step_id=step.step_id,
            kv_epoch=step.kv_epoch,
            weight_version=weight_version,
            window=window,
            decode_rows=batch.rows,
            num_draft_tokens=num_draft_tokens,
            left=life.rows.drain_left(),
            joined=tuple(draft.joined),
            new_blocks=tuple(draft.new_blocks),
            block_copies=tuple(draft.block_copies),
            prefill_chunks=tuple([chunk for _, chunk in draft.chunks]),
            kv_stores=kv_stores,
            kv_loads=kv_loads,
        )

    def _reserve_decodes(self, window: int, draft: _Draft) -> None:
        """Every member of the decode set gets its next `window` positions, or is preempted."""
        decoding = self._life.decoding
        if window == 1 and self._extend_each(draft):
            return
        short = decoding.take_short_of_blocks(window)
        reserve = self._kv.reserve
        # Oldest first: a victim is never older, so it has not been given blocks in this plan.
        short.sort(key=order_of)
        for sequence in short:
            row = sequence.row
            if row is None:
                continue  # Preempted for an older one in this very loop.
            table = sequence.table
            first_new = len(table.block_ids)
            target_len = sequence.target_len
            while (reservation := reserve(table, target_len - 1 + window)) is None:
                if self._life.siblings.give_up_blocks():
                    continue
                if self._preempt_victim(draft) is sequence:
                    break
            if reservation is None:
                continue
            if reservation.new_block_ids:
                draft.new_blocks.append((row, first_new, reservation.new_block_ids))
            decoding.file_blocks(sequence, target_len)

    def _join_remotes(self, window: int, draft: _Draft) -> dict[SequenceId, int]:
        """Whoever came with its first token and has loaded its prompt decodes at once.

        Returns the drafts that its first step has from the remote. Where blocks for the window are
        lacking, the one missing position is planned as a chunk instead.
        """
        life = self._life
        first_drafts: dict[SequenceId, int] = {}  # In nearly every plan it stays empty.
        for sequence in life.transfers.first_decodes():
            remote = sequence.request.remote_prefill
            assert remote is not None
            if not life.rows.num_free or not self._kv.is_current(sequence.table):
                continue
            if self._kv.reserve(sequence.table, sequence.target_len - 1 + window) is None:
                continue
            life.waiting.remove(sequence)
            row = life.rows.take()
            life.admit(sequence, row)
            life.decode_at_once(sequence, row)
            draft.joined.append(_join(sequence, row))
            first_drafts[sequence.seq_id] = remote.num_draft_tokens
        return first_drafts

    def _extend_each(self, draft: _Draft) -> bool:
        """One block more for each row that lacks its next position; False if there are too few."""
        decoding = self._life.decoding
        short = decoding.short_of_blocks
        if not short:
            return True
        block_ids = self._kv.extend_each([sequence.table for sequence in short])
        if block_ids is None:
            return False
        new_blocks = draft.new_blocks
        for sequence, block_id in zip(short, block_ids, strict=True):
            assert sequence.row is not None
            index = len(sequence.table.block_ids) - 1
            new_blocks.append((sequence.row, index, (block_id,)))
        decoding.postpone_short(self._kv.block_size)
        return True

    def _add_drafts(
        self, wanted: DraftCounts, window: int, draft: _Draft
    ) -> tuple[int, ...] | None:
        """Drafts per decode row, out of the budget that the rows' own tokens leave."""
        budget = self._drafts.max_draft_tokens(draft.budget)
        num_draft_tokens, new_blocks = self._drafts.grant(wanted, window, budget)
        draft.new_blocks += new_blocks
        draft.budget -= sum(num_draft_tokens or ())
        return num_draft_tokens

    def _preempt_victim(self, draft: _Draft) -> Sequence:
        victim = self._life.victim()
        assert victim is not None  # Whoever needs a block is running.
        self._life.preempt(victim)
        draft.has_preempted = True
        return victim

    def _add_chunk(self, sequence: Sequence, target_len: int, draft: _Draft) -> None:
        """The next positions of a sequence whose blocks are reserved, as the budget allows."""
        if draft.budget <= 0:
            draft.num_partial += 1
            return
        assert sequence.row is not None
        budget = self._prefills.max_chunk(draft.budget)
        chunk = next_chunk(sequence.row, sequence.num_issued_tokens, target_len, budget)
        draft.num_partial += not chunk.is_final
        sequence.issue(chunk.stop)
        draft.chunks.append((sequence, chunk))
        num_tokens = chunk.stop - chunk.start
        draft.budget -= num_tokens
        num_again = max(0, min(chunk.stop, sequence.max_computed_tokens) - chunk.start)
        sequence.num_recomputed_tokens += num_again
        self._life.counters.num_recomputed_tokens += num_again
        self._life.counters.num_prefill_tokens += num_tokens

    def _wake(self, draft: _Draft) -> None:
        """Whoever is parked on something that has come may be admitted."""
        life = self._life
        # After the decodes: one that was preempted for blocks no longer computes anything.
        for key in self._kv.take_settled():
            life.wake(KeySettled(key))
        for turn in self._prefills.take_turns(draft.num_partial, life.parked):
            life.wake(turn)
        for event in life.transfers.take_allowed(life.parked):
            life.wake(event)

    def _admit_waiting(self, draft: _Draft, *, only_started: bool) -> IdleCause | None:
        """Admit in order; returns why the first one that was not admitted has to wait."""
        life = self._life
        if draft.has_preempted:
            self._admit_loaded(draft)
            return IdleCause.WAITING_FOR_BLOCKS
        passed_over: list[Sequence] = []
        first_cause: IdleCause | None = None
        cause: IdleCause | None = None
        while (sequence := life.waiting.pop_first()) is not None:
            cause = self._admit(sequence, draft, only_started=only_started)
            if cause is None:
                continue
            first_cause = first_cause or cause
            if sequence in life.parked:
                continue
            passed_over.append(sequence)
            if cause is not IdleCause.PAUSED:
                break
        life.waiting.put_back(passed_over)
        if cause is IdleCause.WAITING_FOR_BLOCKS:
            self._admit_loaded(draft)
        return first_cause

    def _admit_loaded(self, draft: _Draft) -> None:
        """Whoever owns its blocks already need not wait behind others for theirs."""
        life = self._life
        for sequence in life.transfers.loaded():
            if sequence in life.parked:
                continue
            life.waiting.remove(sequence)
            if self._admit(sequence, draft, only_started=False) and sequence not in life.parked:
                life.waiting.put(sequence)

    def _admit(self, sequence: Sequence, draft: _Draft, *, only_started: bool) -> IdleCause | None:
        """Give the sequence a row, blocks and its first chunk, or park it; or say why not."""
        life = self._life
        if only_started and not life.groups[sequence.request_id].has_started:
            return IdleCause.PAUSED
        if draft.budget <= 0:
            return IdleCause.MAX_NUM_BATCHED_TOKENS
        if not life.rows.num_free:
            return IdleCause.MAX_NUM_SEQS
        max_num_new: int | None = None
        if not self._prefills.may_begin_partial(draft.num_partial):
            max_num_new = self._prefills.max_chunk(draft.budget)
        verdict = self._admission.consider(sequence, max_num_new)
        if isinstance(verdict, Parking):
            life.park(sequence, verdict.cause, verdict.event)
            if verdict.cause is IdleCause.MAX_NUM_PARTIAL_PREFILLS:
                self._prefills.queue(sequence)
            return verdict.cause
        if not isinstance(verdict, Admitted):
            return verdict
        sequence.hold(verdict.num_computed_tokens)
        self._start(sequence, verdict.reservation, draft)
        return None

    def _start(self, sequence: Sequence, reservation: Reservation, draft: _Draft) -> None:
        """Give a row and its first chunk to a sequence that has its blocks."""
        life = self._life
        # All of it is computed from here on, chunk by chunk: whoever needs it waits for its end.
        target_len = sequence.target_len
        self._kv.expect(sequence.table, sequence.token_ids, target_len)
        row = life.rows.take()
        life.admit(sequence, row)
        draft.block_copies.extend(reservation.copies)
        draft.joined.append(_join(sequence, row))
        self._add_chunk(sequence, target_len, draft)

    def _move_on(self, step: StepInFlight) -> None:
        """What the plan just made changes for the next one."""
        life = self._life
        if step.batch.rows:
            if step.num_draft_tokens is not None:
                num_more = [-step.window * num_drafts for num_drafts in step.num_draft_tokens]
                life.decoding.get_tokens_back(step.batch.sequences, num_more)
            for sequence in life.decoding.advance(step.window):
                life.drain(sequence)
                step.capped.append(sequence)
        for sequence, chunk in step.chunks:
            if chunk.is_final and life.begin_decoding(sequence, chunk.row, step.step_id):
                step.capped.append(sequence)


def _join(sequence: Sequence, row: RowId) -> RowJoin:
    return RowJoin(
        row=row,
        seq_id=sequence.seq_id,
        request_id=sequence.request_id,
        sample_index=sequence.sample_index,
        token_ids=sequence.token_ids,
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_computed_tokens=sequence.num_computed_tokens,
        block_ids=tuple(sequence.table.block_ids),
    )


def _with_first(
    wanted: DraftCounts, sequences: list[Sequence], first_drafts: dict[SequenceId, int]
) -> DraftCounts:
    """The caller's wish, but for those that have the remote's drafts and no others yet."""
    if isinstance(wanted, int):
        wanted = {sequence.seq_id: wanted for sequence in sequences}
    return {**wanted, **first_drafts}
