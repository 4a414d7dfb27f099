"""Control at every tick of small runs, at every depth: nothing is dropped, doubled or leaked."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import pytest

from syncline.kv_cache import KVCacheManager
from syncline.scheduler_core import (
    FinishReason,
    PauseMode,
    Scheduler,
    Sequence,
    StepPlan,
    StopRules,
    UnfinishedPolicy,
)
from syncline.scheduler_core.oracle import HashModel, OracleKV, OracleRunner, VersionLedger
from syncline.scheduler_core.testing import make_config, make_request

NUM_BLOCKS = 9
LAST_TICK = 26
LAST_ABORT = 56
RULES = StopRules(max_tokens=9, stop_token_ids=frozenset(range(8)))
REQUESTS = (
    make_request("a", 6, 7),
    make_request("group", [1, 2, 3, 4, 5, 6, 7, 8], stop=RULES, num_samples=3),
    make_request("c", [1, 2, 3, 4, 5, 6, 7, 8, 9], 8),
)


@dataclass(slots=True, kw_only=True)
class World:
    """A scheduler on the oracle's device; results come as late as `depth` allows."""

    depth: int
    scheduler: Scheduler = field(init=False)
    runner: OracleRunner = field(init=False)
    ledger: VersionLedger = field(init=False)
    plans: deque[StepPlan] = field(init=False)
    ended: list[Sequence] = field(init=False)

    def __post_init__(self) -> None:
        config = make_config(
            max_num_seqs=4, max_num_batched_tokens=8, max_steps_in_flight=self.depth
        )
        self.scheduler = Scheduler(config, KVCacheManager(NUM_BLOCKS, 4))
        self.runner = OracleRunner(OracleKV(NUM_BLOCKS, 4), keeps_kv=True)
        self.ledger = VersionLedger()
        self.plans = deque()
        self.ended = []
        for request in REQUESTS:
            self.scheduler.add(request)

    def apply(self) -> None:
        result = self.runner.collect()
        self.ledger.note(self.plans.popleft(), result)
        self.scheduler.apply(result)

    def drain(self, num_left: int = 0) -> None:
        while self.runner.num_in_flight > num_left:
            self.apply()

    def tick(self) -> None:
        plan = self.scheduler.plan()
        if plan is not None:
            self.runner.launch(plan)
            self.plans.append(plan)
        elif self.runner.num_in_flight:
            self.apply()
        self.ended += self.scheduler.take_finished()

    def run(self, at: int, act: Callable[["World"], None]) -> None:
        """To the end, with `act` before one tick."""
        for tick in range(500):
            if tick == at:
                act(self)
                self.scheduler.check_integrity()
            self.tick()
            if tick > at and not self.scheduler.has_unfinished and not self.runner.num_in_flight:
                break
        self.scheduler.check_integrity()
        kv = self.scheduler.metrics().kv
        assert kv.num_free_blocks == kv.num_blocks and not self.scheduler.has_unfinished
        assert len({sequence.seq_id for sequence in self.ended}) == len(self.ended)
        for sequence in self.ended:
            tokens = zip(sequence.output_token_ids, sequence.logprobs, strict=True)
            assert list(tokens) == self.ledger.expected(HashModel(), sequence)

    def outputs(self) -> dict[tuple[str, int], list[int]]:
        return {(s.request_id, s.sample_index): list(s.output_token_ids) for s in self.ended}


def nothing(world: World) -> None:
    """Not disturbed."""


def calm(depth: int = 1) -> World:
    world = World(depth=depth)
    world.run(0, nothing)
    return world


CALM = calm().outputs()


def test_the_runs_below_have_something_to_disturb() -> None:
    """The group's samples end at different lengths, and the last tick is near the end of all."""
    lengths = {len(CALM["group", i]) for i in range(3)}
    assert len(lengths) > 1 and len(CALM) == 5
    for depth in (1, 2, 3):
        world = calm(depth)
        assert world.outputs() == CALM
        assert world.scheduler.stats.num_preemptions > 0


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("request_id", ["a", "group", "c"])
def test_an_abort_at_every_tick_is_whole_idempotent_and_frees_the_id_at_once(
    request_id: str, depth: int
) -> None:
    request = next(request for request in REQUESTS if request.request_id == request_id)
    num_aborted: set[int] = set()

    def abort(world: World) -> None:
        scheduler = world.scheduler
        left = [s for s in scheduler.sequences if s.request_id == request_id]
        assert scheduler.abort(request_id) == len(left)
        assert scheduler.abort(request_id) == 0
        assert all(sequence.finish_reason is FinishReason.ABORT for sequence in left)
        num_aborted.add(len(left))
        scheduler.add(request)

    for at in range(LAST_ABORT):
        world = World(depth=depth)
        world.run(at, abort)
        aborted = [s for s in world.ended if s.finish_reason is FinishReason.ABORT]
        for sequence in aborted:
            whole = CALM[sequence.request_id, sequence.sample_index]
            assert list(sequence.output_token_ids) == whole[: sequence.num_output_tokens]
        world.ended = [s for s in world.ended if s not in aborted]
        assert world.outputs() == CALM  # The others, and the one that took the id.
    assert {0, request.num_samples} <= num_aborted
    if request.num_samples > 1:
        assert num_aborted & {1, 2}  # Half of a group.


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("mode", ["keep", "wait"])
@pytest.mark.parametrize("sleeps", [False, True])
def test_pause_and_resume_at_every_tick_drop_and_double_nothing(
    mode: PauseMode, depth: int, sleeps: bool
) -> None:
    """With every number of results in flight; asleep, what the KV held is gone."""

    def pause(world: World, num_left: int) -> None:
        world.drain(num_left)
        world.scheduler.pause(mode)
        for _ in range(3):
            if mode == "keep":
                assert world.scheduler.plan() is None
        if sleeps:
            world.drain()
            world.scheduler.bump_kv_epoch()
            world.runner.kv = OracleKV(NUM_BLOCKS, 4)
        if mode == "wait":
            started = {s.request_id for s in world.scheduler.sequences if s.num_output_tokens}
            for _ in range(60):
                world.tick()
            assert not started & {s.request_id for s in world.scheduler.sequences}
        world.scheduler.resume()

    for at in range(0, LAST_TICK, 1 if mode == "keep" else 3):
        for num_left in range(depth + 1):
            world = World(depth=depth)
            world.run(at, partial(pause, num_left=num_left))
            assert world.outputs() == CALM


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_pause_abort_at_every_tick_ends_everything_with_the_tokens_it_has(depth: int) -> None:
    def pause(world: World) -> None:
        world.scheduler.pause("abort")
        assert not world.scheduler.has_unfinished
        world.scheduler.add(make_request("late", 6, 7))
        assert world.scheduler.plan() is None
        world.drain()
        world.scheduler.resume()

    for at in range(LAST_TICK):
        world = World(depth=depth)
        world.run(at, pause)
        late = world.outputs().pop(("late", 0))
        assert len(late) == 7
        for sequence in world.ended[:-1]:
            whole = CALM[sequence.request_id, sequence.sample_index]
            assert list(sequence.output_token_ids) == whole[: sequence.num_output_tokens]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("policy", ["recompute", "keep_kv", "abort"])
@pytest.mark.parametrize("bumps", [False, True])
def test_new_weights_at_every_tick_under_every_policy(
    policy: UnfinishedPolicy, depth: int, bumps: bool
) -> None:
    """Each token is that of the weights which computed its context; no prompt seen before hits
    what older weights computed.
    """

    def update(world: World) -> None:
        world.drain()
        if bumps:
            world.scheduler.bump_kv_epoch()
        world.scheduler.set_weight_version(1, policy=policy)
        if policy != "keep_kv":
            world.runner.kv = OracleKV(NUM_BLOCKS, 4)
        assert policy != "abort" or not world.scheduler.has_unfinished
        world.scheduler.add(make_request("again", REQUESTS[2].prompt_token_ids, 3))

    fresh = World(depth=1)
    fresh.run(0, update)
    expected = fresh.outputs()["again", 0]
    has_mixed = False
    for at in range(0, LAST_TICK, 2):
        world = World(depth=depth)
        world.run(at, update)
        assert world.outputs()["again", 0] == expected
        runs = [sequence.version_runs for sequence in world.ended]
        has_mixed = has_mixed or any(len(run) == 2 for run in runs)
        assert all(version in (0, 1) for run in runs for version, _ in run)
    assert has_mixed is (policy != "abort")


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_blocks", [3, 5, 30])
def test_a_resize_at_every_tick_changes_no_token(num_blocks: int, depth: int) -> None:
    """A pool that holds one of them at most, two, and all."""

    def resize(world: World) -> None:
        world.drain()
        world.scheduler.resize_pool(num_blocks)
        world.runner.resize(num_blocks)

    for at in range(0, LAST_TICK, 2):
        world = World(depth=depth)
        world.run(at, resize)
        for sequence in world.ended:
            whole = CALM[sequence.request_id, sequence.sample_index]
            assert list(sequence.output_token_ids) == whole[: sequence.num_output_tokens]
            if sequence.num_output_tokens < len(whole):
                assert sequence.finish_detail.startswith("kv capacity")
                assert sequence.num_tokens > num_blocks * 4
            else:
                assert sequence.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
