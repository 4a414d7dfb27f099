"""Two schedulers fed the same records make the same plans, whatever was refused in between."""

import dataclasses
import inspect
from collections.abc import Callable
from collections.abc import Sequence as SequenceABC

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.kv_cache import KVCacheManager, StableKey
from syncline.scheduler_core import (
    Record,
    RecordingScheduler,
    Scheduler,
    SchedulerConfig,
    StepPlan,
    StepResult,
    UnfinishedPolicy,
    replay,
)
from syncline.scheduler_core.errors import ResultError, StepOrderError, StepsInFlightError
from syncline.scheduler_core.oracle import HashModel, OracleKV, OracleRunner, Scenario, run
from syncline.scheduler_core.records import (
    AbortAll,
    AbortRequest,
    AddRequest,
    ApplyResult,
    BumpKVEpoch,
    FinishLoad,
    FinishStore,
    FlushPrefixCache,
    Pause,
    PlanStep,
    PreemptAll,
    PreemptOne,
    ResizePool,
    Resume,
    SetWeightVersion,
)
from syncline.scheduler_core.testing import describe, make_config, make_request, make_result

POLICIES: tuple[UnfinishedPolicy, ...] = ("recompute", "abort", "keep_kv")


class Recorded:
    """A recording scheduler on the oracle's device, with one method per input."""

    def __init__(self, config: SchedulerConfig, num_blocks: int) -> None:
        self.config = config
        self.num_blocks = num_blocks
        self.records: list[Record] = []
        self.digests: list[str] = []
        self.scheduler = RecordingScheduler(
            config, KVCacheManager(num_blocks, 4), on_record=self.records.append
        )
        self.runner = OracleRunner(
            OracleKV(num_blocks, 4), model=HashModel(vocab_size=20), keeps_kv=True
        )
        self.num_added = 0
        self.version = 0
        self.now_s = 0.0
        self.scheduler.plan(now_s=self.now_s)

    def add(self, a: int, b: int) -> None:
        request = make_request(f"r{self.num_added}", [i % 3 for i in range(1 + a)], 1 + b)
        self.num_added += 1
        request = dataclasses.replace(request, num_samples=1 + b % 3, arrival_s=self.now_s)
        self.scheduler.add(request)

    def plan(self, a: int, b: int) -> None:
        self.now_s += 1
        drafts = {s.seq_id: b % 3 for s in self.scheduler.sequences} if b % 2 else b % 3
        plan = self.scheduler.plan(window=1 + a % 3, num_draft_tokens=drafts, now_s=self.now_s)
        if plan is not None:
            self.digests.append(plan.digest())
            self.runner.launch(plan)

    def apply(self, a: int, b: int) -> None:
        if self.runner.num_in_flight:
            self.scheduler.apply(self.runner.collect(), now_s=self.now_s if a % 2 else None)

    def drain(self, a: int, b: int) -> None:
        while self.runner.num_in_flight:
            self.apply(a, b)

    def abort(self, a: int, b: int) -> None:
        self.scheduler.abort(f"r{a}")

    def abort_all(self, a: int, b: int) -> None:
        self.scheduler.abort_all()

    def pause(self, a: int, b: int) -> None:
        self.scheduler.pause("wait" if a % 2 else "keep")

    def resume(self, a: int, b: int) -> None:
        self.scheduler.resume()

    def preempt(self, a: int, b: int) -> None:
        if a % 4:
            self.scheduler.preempt_one()
        else:
            self.scheduler.preempt_all()

    def bump(self, a: int, b: int) -> None:
        self.drain(a, b)
        self.scheduler.bump_kv_epoch()

    def set_weight_version(self, a: int, b: int) -> None:
        self.drain(a, b)
        self.version += 1
        self.scheduler.set_weight_version(self.version, policy=POLICIES[a % 3])

    def resize(self, a: int, b: int) -> None:
        self.drain(a, b)
        self.scheduler.resize_pool(3 + a)
        self.runner.resize(3 + a)

    def flush(self, a: int, b: int) -> None:
        self.scheduler.flush_prefix_cache()

    def refused(self, a: int, b: int) -> None:
        """Inputs that raise: nothing changes and nothing is recorded."""
        before, num_records = describe(self.scheduler), len(self.records)
        scheduler = self.scheduler
        calls: list[Callable[[], object]] = [
            lambda: scheduler.add(make_request("x", 300)),
            lambda: scheduler.plan(window=0),
            lambda: scheduler.plan(num_draft_tokens=-1),
            lambda: scheduler.plan(now_s=-1.0),
            lambda: scheduler.apply(StepResult(step_id=10_000, token_ids=(), logprobs=())),
            lambda: scheduler.abort("r0", now_s=-1.0),
            lambda: scheduler.abort_all(now_s=-1.0),
            lambda: scheduler.pause("keep", now_s=-1.0),
            lambda: scheduler.resize_pool(0),
            lambda: scheduler.set_weight_version(99, policy="keep_kv", now_s=-1.0),
        ]
        if scheduler.steps_in_flight:
            calls.append(scheduler.bump_kv_epoch)
        for call in calls[a % len(calls) :]:
            with pytest.raises((ValueError, StepOrderError, StepsInFlightError)):
                call()
        assert describe(scheduler) == before and len(self.records) == num_records


Action = Callable[[Recorded, int, int], None]
ACTIONS: dict[str, Action] = {
    "add": Recorded.add,
    "plan": Recorded.plan,
    "apply": Recorded.apply,
    "abort": Recorded.abort,
    "abort_all": Recorded.abort_all,
    "pause": Recorded.pause,
    "resume": Recorded.resume,
    "preempt": Recorded.preempt,
    "bump": Recorded.bump,
    "set_weight_version": Recorded.set_weight_version,
    "resize": Recorded.resize,
    "flush": Recorded.flush,
    "refused": Recorded.refused,
}
OFTEN = ["add"] * 3 + ["plan"] * 12 + ["apply"] * 8 + ["resume"] * 2
STEPS = st.lists(
    st.tuples(st.sampled_from([*ACTIONS, *OFTEN]), st.integers(0, 9), st.integers(0, 9)),
    min_size=20,
    max_size=80,
)


@given(steps=STEPS, depth=st.integers(1, 3), num_blocks=st.integers(3, 12))
def test_a_replica_makes_the_same_plans_and_ends_the_same_sequences(
    steps: list[tuple[str, int, int]], depth: int, num_blocks: int
) -> None:
    config = make_config(max_num_seqs=3, max_num_batched_tokens=9, max_steps_in_flight=depth)
    recorded = Recorded(config, num_blocks)
    for name, a, b in steps:
        ACTIONS[name](recorded, a, b)
    replica = Scheduler(config, KVCacheManager(num_blocks, 4))
    plans = replay(replica, recorded.records)
    assert [plan.digest() for plan in plans] == recorded.digests
    assert describe(replica) == describe(recorded.scheduler)
    assert replica.metrics() == recorded.scheduler.metrics()
    ended = [s.take_finished() for s in (replica, recorded.scheduler)]
    summaries = [[(s.summary, s.output_token_ids, s.logprobs) for s in each] for each in ended]
    assert summaries[0] == summaries[1]


READERS = {"metrics", "take_finished", "take_handoffs", "check_integrity"}


def test_every_method_of_a_scheduler_is_a_recorded_input_or_reads_only() -> None:
    """One that is added later is not forgotten."""
    methods = {
        name
        for name, member in vars(Scheduler).items()
        if inspect.isfunction(member) and not name.startswith("_")
    }
    recorded = {name for name in vars(RecordingScheduler) if not name.startswith("_")}
    assert methods >= READERS and methods - READERS == recorded


def test_each_accepted_input_is_one_record_with_its_arguments() -> None:
    records: list[Record] = []
    scheduler = RecordingScheduler(
        make_config(), KVCacheManager(16, 4), weight_version=2, on_record=records.append
    )
    request = make_request()
    (seq_id,) = scheduler.add(request)
    plan = scheduler.plan(window=2, num_draft_tokens={seq_id: 1}, now_s=1.0)
    assert plan is not None and plan.weight_version == 2
    scheduler.apply(make_result(plan), now_s=2.0)
    scheduler.pause("keep", now_s=3.0)
    assert scheduler.plan() is None
    scheduler.resume()
    scheduler.preempt_one()
    scheduler.preempt_all()
    scheduler.bump_kv_epoch()
    scheduler.set_weight_version(3, policy="keep_kv", now_s=4.0)
    scheduler.resize_pool(8, now_s=5.0)
    scheduler.flush_prefix_cache()
    scheduler.abort("a", now_s=6.0)
    scheduler.abort_all(now_s=7.0)
    result = StepResult(step_id=0, token_ids=(7,), logprobs=(-0.5,))
    assert records == [
        AddRequest(request=request),
        PlanStep(window=2, num_draft_tokens=((seq_id, 1),), now_s=1.0),
        ApplyResult(result=result, now_s=2.0),
        Pause(mode="keep", now_s=3.0),
        PlanStep(window=1, num_draft_tokens=0, now_s=None),
        Resume(),
        PreemptOne(),
        PreemptAll(),
        BumpKVEpoch(),
        SetWeightVersion(version=3, policy="keep_kv", now_s=4.0),
        ResizePool(num_blocks=8, now_s=5.0),
        FlushPrefixCache(),
        AbortRequest(request_id="a", now_s=6.0),
        AbortAll(now_s=7.0),
    ]


def test_a_record_does_not_change_with_the_buffers_of_the_caller() -> None:
    records: list[Record] = []
    scheduler = RecordingScheduler(make_config(), KVCacheManager(16, 4), on_record=records.append)
    (seq_id,) = scheduler.add(make_request())
    drafts = {seq_id: 1}
    plan = scheduler.plan(num_draft_tokens=drafts)
    assert plan is not None
    token_ids, logprobs = [5], [-0.25]
    scheduler.apply(StepResult(step_id=0, token_ids=token_ids, logprobs=logprobs))
    token_ids[0], logprobs[0], drafts[seq_id] = 9, -9.0, 9
    planned, applied = records[1:]
    assert planned == PlanStep(window=1, num_draft_tokens=((seq_id, 1),), now_s=None)
    assert isinstance(applied, ApplyResult)
    assert (applied.result.token_ids, applied.result.logprobs) == ((5,), (-0.25,))


def test_a_refused_result_is_no_record() -> None:
    records: list[Record] = []
    scheduler = RecordingScheduler(make_config(), KVCacheManager(16, 4), on_record=records.append)
    scheduler.add(make_request())
    plan = scheduler.plan()
    assert plan is not None
    with pytest.raises(ResultError):
        scheduler.apply(make_result(plan, [1, 2]))
    with pytest.raises(ValueError, match="in use"):
        scheduler.add(make_request())
    assert len(records) == 2


def test_a_plan_that_had_nothing_to_launch_is_a_record() -> None:
    """It may have preempted: the sequence alone in the pool that could not grow."""
    plans: list[StepPlan] = []
    records: list[Record] = []

    def make(config: SchedulerConfig, kv: KVCacheManager) -> Scheduler:
        return RecordingScheduler(config, kv, on_record=records.append)

    config = make_config(max_steps_in_flight=2)
    requests = (make_request("a", 5, 23), make_request("b", 5, 23))
    outcome = run(Scenario(requests=requests, num_blocks=8, config=config), make_scheduler=make)
    num_planned = sum(isinstance(record, PlanStep) for record in records)
    assert outcome.stats.num_preemptions > 0
    plans = replay(Scheduler(config, KVCacheManager(8, 4)), records)
    assert len(plans) == outcome.stats.num_plans < num_planned


class KeysOnly:
    """A tier that says what it was told; each replica has one of its own."""

    def __init__(self) -> None:
        self.keys: set[StableKey] = set()

    def num_held_blocks(self, keys: SequenceABC[StableKey]) -> int:
        return next((i for i, key in enumerate(keys) if key not in self.keys), len(keys))

    def missing(self, keys: SequenceABC[StableKey]) -> SequenceABC[int]:
        return [i for i, key in enumerate(keys) if key not in self.keys]

    def stored(self, keys: SequenceABC[StableKey]) -> None:
        self.keys.update(keys)

    def clear(self) -> None:
        self.keys.clear()


def test_transfers_are_replayed_with_the_plans_that_carry_them() -> None:
    records: list[Record] = []
    config = make_config()
    scheduler = RecordingScheduler(
        config, KVCacheManager(9, 4), offload=KeysOnly(), on_record=records.append
    )
    for name in "abc":
        scheduler.add(make_request(name, 7, 20))
    digests: list[str] = []
    while scheduler.has_unfinished:
        plan = scheduler.plan()
        assert plan is not None
        digests.append(plan.digest())
        for store in plan.kv_stores:
            scheduler.finish_store(store.transfer_id, store.stop - store.start)
        for load in plan.kv_loads:
            scheduler.finish_load(load.transfer_id, load.num_tokens - 1)
        scheduler.apply(make_result(plan))
    kinds = {type(record) for record in records}
    assert FinishLoad in kinds and FinishStore in kinds
    replica = Scheduler(config, KVCacheManager(9, 4), offload=KeysOnly())
    assert [plan.digest() for plan in replay(replica, records)] == digests
    assert replica.metrics() == scheduler.metrics()
