"""The scheduler: requests in, frozen plans out, results in, finished sequences out.

Composes the rooms of this package and holds no policy of its own. Deterministic: plans follow from
the order of calls alone.
"""

from syncline.kv_cache import KVCacheManager
from syncline.scheduler_core.applying import Applier
from syncline.scheduler_core.checking import require_int
from syncline.scheduler_core.config import SchedulerConfig
from syncline.scheduler_core.connectors.protocols import OffloadConnector
from syncline.scheduler_core.connectors.values import Handoff, RemotePrefill, TransferId
from syncline.scheduler_core.control import Control
from syncline.scheduler_core.integrity import check_integrity
from syncline.scheduler_core.lifecycle import Lifecycle
from syncline.scheduler_core.metrics import SchedulerMetrics
from syncline.scheduler_core.plan import StepPlan, StepResult
from syncline.scheduler_core.planning import Planner
from syncline.scheduler_core.policies import require_priority_allowed
from syncline.scheduler_core.request import Request
from syncline.scheduler_core.sequence import Sequence
from syncline.scheduler_core.speculation import DraftCounts, check_draft_counts
from syncline.scheduler_core.stopping import stop_candidates
from syncline.scheduler_core.types import (
    FinishReason,
    FlushReport,
    IdleCause,
    PauseMode,
    SchedulerStats,
    SequenceId,
    UnfinishedPolicy,
)


class Scheduler:
    """Continuous batching over one KV pool, which nobody else may reserve from.

    A loop around it: `plan()` and launch while it gives plans, `apply()` the oldest result, and
    `take_finished()`. Up to `config.max_steps_in_flight` plans may be out at once.
    """

    __slots__ = (
        "_applier",
        "_config",
        "_control",
        "_idle_cause",
        "_kv",
        "_life",
        "_next_seq_id",
        "_planner",
    )

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        *,
        weight_version: int = 0,
        offload: OffloadConnector | None = None,
    ) -> None:
        self._config = config
        self._kv = kv
        self._life = Lifecycle(kv, config.max_num_seqs, offload)
        self._planner = Planner(config, kv, self._life)
        self._applier = Applier(self._life)
        self._control = Control(config, kv, self._life, weight_version)
        self._idle_cause: IdleCause | None = None
        self._next_seq_id = 0

    @property
    def config(self) -> SchedulerConfig:
        return self._config

    @property
    def weight_version(self) -> int:
        return self._control.weight_version

    @property
    def steps_in_flight(self) -> int:
        return len(self._life.pending)

    @property
    def num_running(self) -> int:
        """Sequences that hold a state row."""
        return len(self._life.running)

    @property
    def num_waiting(self) -> int:
        """Unfinished sequences without a state row, parked ones included."""
        return self._life.num_waiting

    @property
    def num_parked(self) -> int:
        """Of those waiting, the ones that no plan considers before an event has come."""
        return len(self._life.parked)

    @property
    def num_transfers(self) -> int:
        """Transfers that own blocks until they are reported, of ended sequences too."""
        return self._life.transfers.num_in_flight

    @property
    def has_unfinished(self) -> bool:
        return bool(self._life.sequences)

    @property
    def is_paused(self) -> bool:
        return self._control.is_paused

    @property
    def idle_cause(self) -> IdleCause | None:
        """Why the latest `plan` returned None; None if it returned a plan."""
        return self._idle_cause

    @property
    def waiting_cause(self) -> IdleCause | None:
        """Why the latest plan left sequences waiting; None if it left none."""
        return self._planner.waiting_cause

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        """All unfinished sequences, in order of arrival."""
        return tuple(self._life.sequences.values())

    @property
    def stats(self) -> SchedulerStats:
        return self._life.counters.snapshot()

    def metrics(self) -> SchedulerMetrics:
        """Counters and gauges as they stand now."""
        return SchedulerMetrics(
            stats=self.stats,
            kv=self._kv.stats,
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            num_parked=self.num_parked,
            num_transfers=self.num_transfers,
            num_steps_in_flight=self.steps_in_flight,
            kv_epoch=self._kv.kv_epoch,
            weight_version=self.weight_version,
            is_paused=self.is_paused,
            idle_cause=self._idle_cause,
            waiting_cause=self.waiting_cause,
        )

    def add(self, request: Request) -> tuple[SequenceId, ...]:
        """Queue every sample of the request; returns their ids in order of sample index.

        Raises ValueError if an unfinished request has this id, if it has a priority that the
        policy would ignore, or if the prompt leaves no room under max_model_len. A prompt that the
        whole pool cannot hold ends at once, with reason error; so does, with its own reason, a
        request whose `remote_prefill` brings the last token already.
        """
        if request.request_id in self._life.groups:
            raise ValueError(
                f"request_id {request.request_id!r} is in use by an unfinished request"
            )
        require_priority_allowed(self._config, request)
        num_prompt_tokens = len(request.prompt_token_ids)
        if num_prompt_tokens >= self._config.max_model_len:
            raise ValueError(
                f"prompt_token_ids of request {request.request_id!r} must be fewer than "
                f"max_model_len ({self._config.max_model_len}), got {num_prompt_tokens}"
            )
        candidates = stop_candidates(request)
        sequences: list[Sequence] = []
        for sample_index in range(request.num_samples):
            sequence = Sequence(
                SequenceId(self._next_seq_id + sample_index),
                request,
                sample_index,
                pending=self._life.pending,
                table=self._kv.new_table(
                    cache_salt=request.cache_salt,
                    adapter_id=request.adapter_id,
                    cacheable=request.use_prefix_cache,
                ),
                stop_candidates=candidates,
            )
            sequence.start_version(self._control.weight_version)
            self._control.set_limit(sequence)
            sequences.append(sequence)
        self._next_seq_id += request.num_samples
        self._life.clock.arrive(request.arrival_s)
        self._life.add(request.request_id, sequences)
        for sequence in sequences:
            self._control.end_if_unfit(sequence)
            if request.remote_prefill is not None and not sequence.is_finished:
                self._begin_with_remote(sequence, request.remote_prefill)
        return tuple(sequence.seq_id for sequence in sequences)

    def plan(
        self, *, window: int = 1, num_draft_tokens: DraftCounts = 0, now_s: float | None = None
    ) -> StepPlan | None:
        """The next step to launch, or None: `idle_cause` then says why.

        Up to `window` decode steps are planned at once. Plans are to be executed in the order in
        which they were made. `now_s`: see `RequestTimings`.

        num_draft_tokens: drafts wanted in each of those steps, for every decode row or by sequence
        (absent: none; an entry of a sequence that does not decode now is not used).
        `StepPlan.num_draft_tokens` says how many each row gets: fewer where its length limit, the
        token budget (at most half of what the decode rows leave, while somebody is prefilling or
        waiting) or the blocks say so. Drafts never cause a preemption.

        Raises ValueError for a window below 1, a negative number of drafts, or a sequence id that
        was never given out.
        """
        require_int("window", window)
        if window < 1:
            raise ValueError(f"window must be at least 1, got {window}")
        if num_draft_tokens:
            check_draft_counts(num_draft_tokens, self._next_seq_id)
        life = self._life
        life.clock.check(now_s)
        life.clock.enter(now_s)
        if len(life.pending) >= self._config.max_steps_in_flight:
            self._idle_cause = IdleCause.WAITING_FOR_RESULTS
            return None
        if self._control.is_frozen:
            self._idle_cause = IdleCause.PAUSED
            return None
        self._control.settle_kv()
        plan = self._planner.plan(
            window,
            num_draft_tokens,
            weight_version=self._control.weight_version,
            only_started=self._control.is_paused,
        )
        self._idle_cause = None if plan is not None else self._why_idle()
        return plan

    def apply(self, result: StepResult, *, now_s: float | None = None) -> None:
        """Take the result of the oldest step in flight.

        Raises StepOrderError for any other step and ResultError for a result that does not fit
        its plan; either leaves everything unchanged.
        """
        self._life.clock.check(now_s)
        self._applier.apply(result, now_s)

    def finish_load(self, transfer_id: TransferId, num_tokens: int) -> None:
        """A load of `StepPlan.kv_loads` has ended: its first `num_tokens` tokens are there.

        0 if it failed. Whatever is missing is computed into the blocks that the sequence holds,
        one token at least, and it asks for no second load. To be reported also, once, for a
        sequence that has ended: its blocks were kept for this.

        Raises TransferError if no such load is under way, and ValueError for more tokens than were
        asked for or fewer than 0; either leaves everything unchanged.
        """
        self._life.wake(self._life.transfers.finish_load(transfer_id, num_tokens))

    def finish_store(self, transfer_id: TransferId, num_tokens: int) -> None:
        """A store of `StepPlan.kv_stores` has ended; its first `num_tokens` tokens are in the tier.

        Raises as `finish_load` does.
        """
        self._life.transfers.finish_store(transfer_id, num_tokens)

    def take_handoffs(self) -> list[Handoff]:
        """Prompts of requests with `hands_off_kv` that have ended since the last call.

        Their blocks are kept until `finish_send`, which each needs once, even if nobody reads them.
        """
        return self._life.transfers.handoffs.take()

    def finish_send(self, transfer_id: TransferId) -> None:
        """The blocks of a handoff have been read, or never will be.

        Raises TransferError, with nothing changed, if no such handoff is under way.
        """
        self._life.transfers.handoffs.finish(transfer_id)

    def take_finished(self) -> list[Sequence]:
        """Every sequence that has ended since the last call, in order of ending."""
        finished = self._life.finished
        self._life.finished = []
        return finished

    def abort(self, request_id: str, *, now_s: float | None = None) -> int:
        """End every unfinished sample of the request, keeping its tokens; returns how many.

        0 for an id that is unknown or has ended: aborting twice is no error.
        """
        self._life.clock.check(now_s)
        self._life.clock.enter(now_s)
        group = self._life.groups.get(request_id)
        if group is None:
            return 0
        sequences = list(group.sequences.values())
        for sequence in sequences:
            self._life.end(sequence, FinishReason.ABORT, "aborted")
        return len(sequences)

    def abort_all(self, *, now_s: float | None = None) -> int:
        """As `abort`, for every unfinished request."""
        self._life.clock.check(now_s)
        self._life.clock.enter(now_s)
        return self._control.abort_all("aborted with all others")

    def pause(self, mode: PauseMode, *, now_s: float | None = None) -> None:
        """Stop planning: after ending everything (abort), after finishing every request that has
        begun (wait), or at once with all KV kept (keep). Requests may still be added.
        """
        self._life.clock.check(now_s)
        self._control.pause(mode, now_s)

    def resume(self) -> None:
        self._control.resume()

    def preempt_one(self) -> SequenceId | None:
        """Preempt the sequence that scarcity would hit next; None if none is running."""
        victim = self._life.victim()
        if victim is None:
            return None
        self._life.preempt(victim)
        return victim.seq_id

    def preempt_all(self) -> int:
        """Take every block from every sequence, to be computed again; returns how many had some."""
        return self._life.preempt_all()

    def bump_kv_epoch(self) -> int:
        """KV content has lost its meaning. Raises StepsInFlightError while a step is in flight.

        Sequences that hold KV recompute it, unless `set_weight_version` says `keep_kv` before the
        next plan.
        """
        return self._control.bump_kv_epoch()

    def set_weight_version(
        self, version: int, *, policy: UnfinishedPolicy, now_s: float | None = None
    ) -> None:
        """Tokens from here on carry this version; older KV is never shared again.

        policy: what unfinished sequences do that hold KV of the old weights. Raises
        StepsInFlightError while a step is in flight.
        """
        self._life.clock.check(now_s)
        self._control.set_weight_version(version, policy, now_s)

    def resize_pool(self, num_blocks: int, *, now_s: float | None = None) -> None:
        """Change the number of blocks; every sequence recomputes, or ends if it cannot fit.

        Raises StepsInFlightError while a step is in flight.
        """
        self._life.clock.check(now_s)
        self._control.resize_pool(num_blocks, now_s)

    def flush_prefix_cache(self) -> FlushReport:
        """Unlist every cached block. While a step or a load is in flight it does not, and says so.

        Sequences keep the KV they hold, none of which is shared from now on, until they give it up.
        """
        return self._control.flush_prefix_cache()

    def check_integrity(self) -> None:
        """Raise StateError or kv_cache's IntegrityError if the books contradict each other."""
        check_integrity(self._life, self._config.max_num_seqs)

    def _begin_with_remote(self, sequence: Sequence, remote: RemotePrefill) -> None:
        self._applier.begin_with_remote(sequence, remote, self.weight_version)
        if remote.weight_version == self.weight_version and not sequence.is_finished:
            self._life.transfers.expect_remote(sequence)

    def _why_idle(self) -> IdleCause:
        life = self._life
        if not life.sequences:
            return IdleCause.NO_REQUESTS
        if len(life.pending):
            return IdleCause.WAITING_FOR_RESULTS
        waiting_cause = self._planner.waiting_cause
        assert waiting_cause is not None  # No step in flight, nothing planned: all are waiting.
        if waiting_cause is not IdleCause.PAUSED and life.transfers.num_in_flight:
            return IdleCause.WAITING_FOR_TRANSFER  # Nothing else can change what is lacking.
        return waiting_cause
