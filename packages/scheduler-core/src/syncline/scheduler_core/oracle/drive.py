"""Drive a scheduler with the oracle's model through a scenario: pool, budgets, depth, disturbances.

Results are held back as long as the scenario says. Every tick the books are checked; a scheduler
that neither plans nor waits for a result is stuck, and that is an error.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from syncline.kv_cache import KVCacheManager
from syncline.scheduler_core.config import SchedulerConfig
from syncline.scheduler_core.errors import SchedulerError
from syncline.scheduler_core.oracle.drafters import Drafter, accept_all
from syncline.scheduler_core.oracle.kv_array import OracleKV
from syncline.scheduler_core.oracle.model import HashModel
from syncline.scheduler_core.oracle.runner import OracleRunner
from syncline.scheduler_core.oracle.transport import (
    OracleTier,
    OracleTransport,
    Transfer,
    end_at_once,
)
from syncline.scheduler_core.plan import StepPlan
from syncline.scheduler_core.request import Request
from syncline.scheduler_core.scheduler import Scheduler
from syncline.scheduler_core.sequence import Sequence
from syncline.scheduler_core.speculation import DraftCounts
from syncline.scheduler_core.types import RowId, SchedulerStats, SequenceId

Control: TypeAlias = Callable[[Scheduler, OracleRunner], None]


class StuckError(SchedulerError):
    """Requests are unfinished, nothing is in flight and nothing is planned, or it never ends."""


def apply_at_once(tick: int, num_in_flight: int) -> int:
    """The least lateness: every result is applied before the next plan, if depth allows."""
    return num_in_flight


def apply_when_full(tick: int, num_in_flight: int) -> int:
    """The greatest lateness: a result is applied only when no further plan may be made."""
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One run. A tick is one call of `plan`.

    arrivals    tick -> requests added before it; `requests` come before tick 0
    aborts      tick -> ids of requests aborted before it
    preempts    ticks before which the normal victim is preempted
    controls    tick -> anything else done to the scheduler before it
    lateness    (tick, results in flight) -> how many of them to apply after this plan
    windows     tick -> the window asked for; otherwise `window`
    num_draft_tokens   drafts asked for in every decode row
    drafts      (tick, sequence id) -> drafts asked for; otherwise `num_draft_tokens`
    counts, drafter    see OracleRunner
    tier, transfer_ends   a slower tier to offload to, and when its transfers end
    """

    requests: tuple[Request, ...]
    num_blocks: int
    config: SchedulerConfig
    block_size: int = 4
    enable_prefix_caching: bool = True
    window: int = 1
    windows: Callable[[int], int] | None = None
    num_draft_tokens: int = 0
    drafts: Callable[[int, SequenceId], int] | None = None
    drafter: Drafter = accept_all
    arrivals: Mapping[int, tuple[Request, ...]] = field(
        default_factory=dict[int, tuple[Request, ...]]
    )
    aborts: Mapping[int, tuple[str, ...]] = field(default_factory=dict[int, tuple[str, ...]])
    preempts: frozenset[int] = frozenset()
    controls: Mapping[int, Control] = field(default_factory=dict[int, Control])
    lateness: Callable[[int, int], int] = apply_when_full
    counts: Callable[[int, RowId, int], int] | None = None
    columns: tuple[str, ...] = ()
    model: HashModel = field(default_factory=HashModel)
    tier: OracleTier | None = None
    transfer_ends: Callable[[int, Transfer], tuple[int, int]] = end_at_once
    is_strict: bool = True
    keeps_kv: bool = False
    max_ticks: int = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a scenario. sequences: (request_id, sample_index) -> the finished sequence."""

    sequences: Mapping[tuple[str, int], Sequence]
    num_ticks: int
    num_steps: int
    stats: SchedulerStats


def run(
    scenario: Scenario,
    *,
    make_scheduler: Callable[[SchedulerConfig, KVCacheManager], Scheduler] | None = None,
    observe: Callable[[Scheduler], None] = Scheduler.check_integrity,
) -> Outcome:
    """Run to the end. Raises OracleError, StuckError, or what `observe` raises on a change."""
    kv = KVCacheManager(
        scenario.num_blocks,
        scenario.block_size,
        enable_prefix_caching=scenario.enable_prefix_caching,
    )
    tier = scenario.tier
    if make_scheduler is None:
        scheduler = Scheduler(scenario.config, kv, offload=tier)
    else:
        scheduler = make_scheduler(scenario.config, kv)
    transport = OracleTransport(OracleTier() if tier is None else tier, scenario.transfer_ends)
    runner = OracleRunner(
        OracleKV(scenario.num_blocks, scenario.block_size),
        model=scenario.model,
        columns=scenario.columns,
        counts=scenario.counts,
        drafter=scenario.drafter,
        is_strict=scenario.is_strict,
        keeps_kv=scenario.keeps_kv,
    )
    expected: dict[SequenceId, tuple[str, int]] = {}
    for request in scenario.requests:
        _add(scheduler, request, expected)
    finished: list[Sequence] = []
    last_event = max([*scenario.arrivals, *scenario.controls, *scenario.aborts], default=-1)
    tick = 0
    while (
        scheduler.has_unfinished
        or scheduler.steps_in_flight
        or transport.num_under_way
        or tick <= last_event
    ):
        if tick >= scenario.max_ticks:
            raise StuckError(f"{_leftovers(scheduler)} after {tick} ticks")
        transport.finish_due(scheduler, runner.kv, tick)
        _disturb(scenario, scheduler, runner, tick, expected)
        observe(scheduler)
        plan = _plan(scenario, scheduler, tick)
        observe(scheduler)
        if plan is not None:
            transport.launch(plan, runner.kv, tick)
            runner.launch(plan)
        num_due = scenario.lateness(tick, runner.num_in_flight)
        if plan is None:
            num_due = max(num_due, 1)
            is_waiting = runner.num_in_flight or transport.num_under_way or tick <= last_event
            if scheduler.has_unfinished and not is_waiting:
                raise StuckError(f"{_leftovers(scheduler)}, idle: {scheduler.idle_cause}")
        for _ in range(min(num_due, runner.num_in_flight)):
            scheduler.apply(runner.collect())
            observe(scheduler)
        finished += scheduler.take_finished()
        tick += 1
    return Outcome(
        sequences=_by_sample(finished, expected),
        num_ticks=tick,
        num_steps=scheduler.stats.num_plans,
        stats=scheduler.stats,
    )


def _plan(scenario: Scenario, scheduler: Scheduler, tick: int) -> StepPlan | None:
    drafts = scenario.drafts
    wanted: DraftCounts = scenario.num_draft_tokens
    if drafts is not None:
        wanted = {s.seq_id: drafts(tick, s.seq_id) for s in scheduler.sequences}
    windows = scenario.windows
    window = scenario.window if windows is None else windows(tick)
    return scheduler.plan(window=window, num_draft_tokens=wanted)


def _disturb(
    scenario: Scenario,
    scheduler: Scheduler,
    runner: OracleRunner,
    tick: int,
    expected: dict[SequenceId, tuple[str, int]],
) -> None:
    """Whatever the scenario has planned before this tick."""
    for request in scenario.arrivals.get(tick, ()):
        _add(scheduler, request, expected)
    for request_id in scenario.aborts.get(tick, ()):
        scheduler.abort(request_id)
    if tick in scenario.controls:
        scenario.controls[tick](scheduler, runner)
    if tick in scenario.preempts:
        scheduler.preempt_one()


def _add(
    scheduler: Scheduler, request: Request, expected: dict[SequenceId, tuple[str, int]]
) -> None:
    for sample_index, seq_id in enumerate(scheduler.add(request)):
        expected[seq_id] = (request.request_id, sample_index)


def _leftovers(scheduler: Scheduler) -> str:
    num_parked = scheduler.num_parked
    return f"{len(scheduler.sequences)} sequences left, {num_parked} of them parked"


def _by_sample(
    finished: list[Sequence], expected: dict[SequenceId, tuple[str, int]]
) -> dict[tuple[str, int], Sequence]:
    """Exactly one finished sequence per sample, or an error that names what is wrong."""
    ended = [sequence.seq_id for sequence in finished]
    if sorted(ended) != sorted(expected):
        raise StuckError(f"added {sorted(expected)}, ended {sorted(ended)}")
    return {expected[sequence.seq_id]: sequence for sequence in finished}
