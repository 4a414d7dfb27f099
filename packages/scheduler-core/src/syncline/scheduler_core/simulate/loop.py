"""Run a workload through a scheduler, step by step, and watch.

Results come as late as the depth allows, as from a device that is always busy. With checks, the
oracle's runner executes every plan and each sample is compared with its reference; the books of
the scheduler are compared with each other as often as asked.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from syncline.kv_cache import KVCacheError, KVCacheManager
from syncline.scheduler_core.config import SchedulerConfig
from syncline.scheduler_core.errors import SchedulerError
from syncline.scheduler_core.oracle import OracleError, OracleKV, OracleRunner, reference_output
from syncline.scheduler_core.oracle.drafters import Drafter, accept_all
from syncline.scheduler_core.plan import RowJoin, StepPlan, StepResult
from syncline.scheduler_core.request import Request
from syncline.scheduler_core.scheduler import Scheduler
from syncline.scheduler_core.sequence import Sequence
from syncline.scheduler_core.simulate.device import CountingRunner
from syncline.scheduler_core.simulate.history import History, Visit
from syncline.scheduler_core.simulate.workload import EndingModel, Load
from syncline.scheduler_core.types import RowId, SchedulerStats, SequenceId

MakeScheduler: TypeAlias = Callable[[SchedulerConfig, KVCacheManager], Scheduler]


class BrokenInvariantError(SchedulerError):
    """The scheduler under simulation did what it must never do. `step`: when; `detail`: what."""

    def __init__(self, step: int, detail: str) -> None:
        super().__init__(f"step {step}: {detail}")
        self.step = step
        self.detail = detail


class Runner(Protocol):
    """Executes plans. OracleRunner and CountingRunner are such."""

    @property
    def num_in_flight(self) -> int: ...

    def launch(self, plan: StepPlan) -> None: ...

    def collect(self) -> StepResult: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What the load runs on.

    num_draft_tokens   drafts wanted for each decode row and step
    drafter            how many of them are right
    check_interval     steps between two looks at the books, 0 for none
    model              the load's own, for the oracle; None: what is computed is not checked
    """

    config: SchedulerConfig
    num_blocks: int
    block_size: int = 16
    enable_prefix_caching: bool = True
    window: int = 1
    num_draft_tokens: int = 0
    drafter: Drafter = accept_all
    check_interval: int = 1
    model: EndingModel | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came of a run.

    num_ended               samples by finish reason
    num_cut_by_pool         samples that the whole pool could not hold to their end
    num_preempted_samples   samples that were preempted at least once
    """

    setup: Setup
    history: History
    stats: SchedulerStats
    num_ended: dict[str, int]
    num_cut_by_pool: int
    num_preempted_samples: int


def simulate(load: Load, setup: Setup, make_scheduler: MakeScheduler = Scheduler) -> Result:
    """Run to the end. Raises BrokenInvariantError at the first thing that must not be."""
    simulation = _Simulation(load, setup, make_scheduler)
    try:
        return simulation.run()
    except OracleError as error:
        raise BrokenInvariantError(error.step_id, error.detail) from error
    except (SchedulerError, KVCacheError, AssertionError) as error:
        if isinstance(error, BrokenInvariantError):
            raise
        text = str(error) or type(error).__name__
        raise BrokenInvariantError(simulation.step, text) from error


class _Stay:
    """A row and who holds it, from the step in which the sequence joined."""

    __slots__ = ("first_step", "num_cached", "num_known", "num_preemptions", "sequence")

    def __init__(self, sequence: Sequence, first_step: int, join: RowJoin) -> None:
        self.sequence = sequence
        self.first_step = first_step
        self.num_cached = join.num_computed_tokens
        self.num_known = len(join.token_ids)
        self.num_preemptions = sequence.num_preemptions


class _Simulation:
    """One run. `step` counts calls of `plan`, the ones that gave nothing included."""

    def __init__(self, load: Load, setup: Setup, make_scheduler: MakeScheduler) -> None:
        self._setup = setup
        self._load = load
        self._kv = KVCacheManager(
            setup.num_blocks,
            setup.block_size,
            enable_prefix_caching=setup.enable_prefix_caching,
        )
        self._scheduler = make_scheduler(setup.config, self._kv)
        self._runner: Runner = (
            CountingRunner(load.output_lens, setup.drafter)
            if setup.model is None
            else OracleRunner(
                OracleKV(setup.num_blocks, setup.block_size),
                model=setup.model,
                drafter=setup.drafter,
            )
        )
        self._requests = {request.request_id: request for request in load.requests}
        self._sequences: dict[SequenceId, Sequence] = {}
        self._stays: dict[RowId, _Stay] = {}
        self._history = History()
        self._num_ended: dict[str, int] = {}
        self._num_cut_by_pool = 0
        self._num_preempted_samples = 0
        self._num_preemptions_seen = 0
        self.step = 0

    def run(self) -> Result:
        scheduler, runner = self._scheduler, self._runner
        due = list(zip(self._load.arrival_steps, self._load.requests, strict=True))[::-1]
        depth = self._setup.config.max_steps_in_flight
        while due or scheduler.has_unfinished or scheduler.steps_in_flight:
            while due and due[-1][0] <= self.step:
                self._add(due.pop()[1])
            plan = scheduler.plan(
                window=self._setup.window, num_draft_tokens=self._setup.num_draft_tokens
            )
            if plan is not None:
                runner.launch(plan)
                self._note_moves(plan)
            elif not runner.num_in_flight and scheduler.has_unfinished:
                raise BrokenInvariantError(
                    self.step,
                    f"{len(scheduler.sequences)} sequences are left, nothing is planned and "
                    f"nothing is in flight: {scheduler.idle_cause}",
                )
            self._note_step(plan)
            if runner.num_in_flight and (plan is None or runner.num_in_flight == depth):
                scheduler.apply(runner.collect())
            interval = self._setup.check_interval
            if interval and self.step % interval == 0:
                scheduler.check_integrity()
            for sequence in scheduler.take_finished():
                self._end(sequence)
            self.step += 1
        for row in list(self._stays):
            self._note_leaving(row)
        return Result(
            setup=self._setup,
            history=self._history,
            stats=scheduler.stats,
            num_ended=self._num_ended,
            num_cut_by_pool=self._num_cut_by_pool,
            num_preempted_samples=self._num_preempted_samples,
        )

    def _add(self, request: Request) -> None:
        ids = self._scheduler.add(request)
        for sequence in self._scheduler.sequences[-len(ids) :]:
            self._sequences[sequence.seq_id] = sequence

    def _note_moves(self, plan: StepPlan) -> None:
        for row in plan.left:
            self._note_leaving(row)
        for join in plan.joined:
            sequence = self._sequences[join.seq_id]
            self._stays[join.row] = _Stay(sequence, self.step, join)

    def _note_leaving(self, row: RowId) -> None:
        stay = self._stays.pop(row)
        sequence = stay.sequence
        self._history.visits.append(
            Visit(
                seq_id=sequence.seq_id,
                name=f"{sequence.request_id}[{sequence.sample_index}]",
                first_step=stay.first_step,
                last_step=self.step,
                num_cached=stay.num_cached,
                num_known=stay.num_known,
                is_preempted=sequence.num_preemptions > stay.num_preemptions,
            )
        )

    def _note_step(self, plan: StepPlan | None) -> None:
        scheduler, kv, history = self._scheduler, self._kv, self._history
        history.running.append(scheduler.num_running)
        history.waiting.append(scheduler.num_waiting)
        history.held.append(kv.num_blocks - kv.num_free_blocks)
        history.cached.append(kv.num_evictable_blocks)
        num_preemptions = scheduler.stats.num_preemptions
        history.preempted.append(num_preemptions - self._num_preemptions_seen)
        self._num_preemptions_seen = num_preemptions
        if plan is None:
            assert scheduler.idle_cause is not None
            history.idle_causes[scheduler.idle_cause] += 1
            history.prefill.append(0)
            history.decode.append(0)
            return
        if scheduler.waiting_cause is not None:
            history.waiting_causes[scheduler.waiting_cause] += 1
        history.prefill.append(sum(chunk.stop - chunk.start for chunk in plan.prefill_chunks))
        num_positions = len(plan.decode_rows) + sum(plan.num_draft_tokens or ())
        history.decode.append(num_positions * plan.window)

    def _end(self, sequence: Sequence) -> None:
        reason = str(sequence.finish_reason)
        self._num_ended[reason] = self._num_ended.get(reason, 0) + 1
        # What the pool can never hold ends early, and says so.
        is_cut = "kv capacity" in sequence.finish_detail
        self._num_cut_by_pool += is_cut
        self._num_preempted_samples += sequence.num_preemptions > 0
        if self._setup.model is not None:
            self._compare(sequence, self._setup.model, is_cut=is_cut)

    def _compare(self, sequence: Sequence, model: EndingModel, *, is_cut: bool) -> None:
        """With the reference, token by token; a sample that the pool cut short with its start."""
        request = self._requests[sequence.request_id]
        expected = reference_output(
            model,
            request,
            sequence.sample_index,
            max_model_len=self._setup.config.max_model_len,
        )
        got = sequence.output_token_ids
        name = f"request {sequence.request_id!r}[{sequence.sample_index}]"
        if not is_cut and len(got) != len(expected.token_ids):
            raise BrokenInvariantError(
                self.step,
                f"{name} ends with {len(got)} tokens ({sequence.finish_detail}), "
                f"the reference with {len(expected.token_ids)}",
            )
        for i, (token_id, logprob) in enumerate(zip(got, sequence.logprobs, strict=True)):
            wanted = (expected.token_ids[i], expected.logprobs[i])
            if (token_id, logprob) != wanted:
                raise BrokenInvariantError(
                    self.step,
                    f"{name}: output token {i} is {token_id} with logprob {logprob}, "
                    f"the reference has {wanted[0]} with {wanted[1]}",
                )
