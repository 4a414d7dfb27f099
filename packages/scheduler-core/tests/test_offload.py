"""KV that comes back from a slower tier: whatever arrives, whenever, the answer is the same."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest

from syncline.kv_cache import KVCacheManager
from syncline.scheduler_core import (
    IdleCause,
    PauseMode,
    Request,
    Scheduler,
    StepPlan,
    TransferError,
)
from syncline.scheduler_core.oracle import (
    HashModel,
    OracleTier,
    Outcome,
    Scenario,
    Transfer,
    apply_at_once,
    apply_when_full,
    prefill_remotely,
    reference_output,
    run,
)
from syncline.scheduler_core.oracle.drive import Control
from syncline.scheduler_core.speculation import DraftCounts
from syncline.scheduler_core.testing import (
    ScriptedTier,
    assert_reference,
    check_every,
    make_config,
    make_request,
    make_result,
    step,
)

MAX_MODEL_LEN = 48
SHARED = [3, 1, 4, 1, 5, 9, 2, 6]
REQUESTS = (
    make_request("a", 7, 14),
    make_request("b", [*SHARED, 7], 12),
    make_request("c", SHARED, 13, num_samples=2),
    make_request("d", 3, 17),
)


def make_scenario(
    num_blocks: int,
    depth: int = 1,
    *,
    tier: OracleTier | None,
    caching: bool = True,
    ends: Callable[[int, Transfer], tuple[int, int]] | None = None,
    requests: tuple[Request, ...] = REQUESTS,
) -> Scenario:
    scenario = Scenario(
        requests=requests,
        num_blocks=num_blocks,
        config=make_config(
            max_num_seqs=4,
            max_num_batched_tokens=16,
            max_model_len=MAX_MODEL_LEN,
            max_steps_in_flight=depth,
        ),
        enable_prefix_caching=caching,
        lateness=apply_at_once if depth == 1 else apply_when_full,
        tier=tier,
    )
    return scenario if ends is None else replace(scenario, transfer_ends=ends)


def assert_true(outcome: Outcome, requests: tuple[Request, ...] = REQUESTS) -> None:
    for request in requests:
        for sample_index in range(request.num_samples):
            sequence = outcome.sequences[request.request_id, sample_index]
            expected = reference_output(
                HashModel(), request, sample_index, max_model_len=MAX_MODEL_LEN
            )
            assert_reference(sequence, expected, may_abort=True)


def after(num_ticks: int) -> Callable[[int, Transfer], tuple[int, int]]:
    """Every transfer ends whole, so many ticks after its plan."""
    return lambda tick, transfer: (num_ticks, transfer.stop - transfer.start)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("caching", [True, False])
def test_a_tier_changes_no_answer_and_saves_recomputation(caching: bool, depth: int) -> None:
    """Many preemptions in tiny pools (#16, #35, B03): every resume is a load, and none at fault."""
    for num_ticks in (0, 3):
        num_without = num_with = 0
        for num_blocks in (6, 7, 9):
            scenario = make_scenario(num_blocks, depth, tier=None, caching=caching)
            num_without += run(scenario, observe=check_every(3)).stats.num_recomputed_tokens
            scenario = replace(scenario, tier=OracleTier(), transfer_ends=after(num_ticks))
            outcome = run(scenario, observe=check_every(3))
            assert_true(outcome)
            assert outcome.stats.num_preemptions >= 3
            num_with += outcome.stats.num_recomputed_tokens
        assert num_with < num_without * (0.8 if caching else 0.4)


@pytest.mark.parametrize("depth", [1, 2])
def test_loads_and_stores_of_any_length_and_lateness(depth: int) -> None:
    """Every number of tokens that a load may bring, in turn, and tiers that forget."""
    for turn, max_blocks in product(range(7), (None, 2)):

        def ends(tick: int, transfer: Transfer, turn: int = turn) -> tuple[int, int]:
            num_tokens = transfer.stop - transfer.start
            return (turn + transfer.transfer_id) % 4, (turn * 3 + tick) % (num_tokens + 1)

        scenario = make_scenario(7, depth, tier=OracleTier(max_blocks), ends=ends)
        assert_true(run(scenario, observe=check_every(3)))


def pause_for_two_ticks(mode: PauseMode) -> dict[int, Control]:
    return {0: lambda s, r: s.pause(mode), 2: lambda s, r: s.resume()}


DISTURBANCES: dict[str, dict[int, Control]] = {
    "abort a": {0: lambda s, r: void(s.abort("a"))},
    "abort b": {0: lambda s, r: void(s.abort("b"))},
    "abort all": {0: lambda s, r: void(s.abort_all())},
    "preempt one": {0: lambda s, r: void(s.preempt_one())},
    "preempt all": {0: lambda s, r: void(s.preempt_all())},
    "bump": {0: lambda s, r: void(s.bump_kv_epoch())},
    "two bumps": dict.fromkeys((0, 1), lambda s, r: void(s.bump_kv_epoch())),
    "pause and wait": pause_for_two_ticks("wait"),
    "pause and keep": pause_for_two_ticks("keep"),
    "pause and abort": pause_for_two_ticks("abort"),
}


def void(_: object) -> None:
    """Nobody looks at what the call answers."""


@pytest.mark.parametrize("name", DISTURBANCES)
def test_a_disturbance_at_every_tick_changes_no_answer_and_leaks_nothing(name: str) -> None:
    """D9 D16 D22: whatever is parked, loaded, stored or running at that moment."""
    remote = make_request("b", 6, 5)
    requests = (
        make_request("a", 5, 7),
        replace(remote, remote_prefill=prefill_remotely(HashModel(), remote, num_draft_tokens=2)),
        make_request("c", [3, 1, 4, 1, 5], 6),
    )
    scenario = make_scenario(5, tier=OracleTier(), ends=after(2), requests=requests)
    seen: list[Scheduler] = []

    def observe(scheduler: Scheduler) -> None:
        scheduler.check_integrity()
        seen[:] = [scheduler]

    for tick in range(run(scenario).num_ticks):
        controls = {tick + delay: control for delay, control in DISTURBANCES[name].items()}
        disturbed = replace(scenario, tier=OracleTier(), controls=controls)
        assert_true(run(disturbed, observe=observe), requests)
        metrics = seen[0].metrics()
        assert (metrics.num_held_blocks, metrics.num_transfers) == (0, 0)


def make_storing() -> tuple[Scheduler, ScriptedTier]:
    """A tier that wants every block and has none."""
    tier = ScriptedTier(0)
    tier.wanted = range(99)
    kv = KVCacheManager(16, 4, enable_prefix_caching=False)
    return Scheduler(make_config(), kv, offload=tier), tier


def test_blocks_are_stored_when_their_sequence_gives_up_its_row_and_each_only_once() -> None:
    scheduler, tier = make_storing()
    scheduler.add(make_request("a", 8, 8))
    step(scheduler)
    block_ids = tuple(scheduler.sequences[0].table.block_ids)
    scheduler.preempt_one()
    plan = step(scheduler)
    (store,) = plan.kv_stores
    assert (store.start, store.stop, store.block_ids) == (0, 8, block_ids[:2])
    assert len(store.keys) == 2 and not tier.stored_keys
    # The same blocks again, and one more: the first two are under way.
    for _ in range(3):
        step(scheduler)
    scheduler.preempt_one()
    (second,) = step(scheduler).kv_stores
    assert (second.start, second.stop) == (8, 12)
    for transfer_id, num_tokens, num_stored in (
        (store.transfer_id, 7, 1),
        (second.transfer_id, 4, 2),
    ):
        with pytest.raises(ValueError, match="must be between"):
            scheduler.finish_store(transfer_id, 9)
        scheduler.finish_store(transfer_id, num_tokens)
        assert len(tier.stored_keys) == num_stored
        with pytest.raises(TransferError):
            scheduler.finish_store(transfer_id, num_tokens)
    assert tier.stored_keys == [store.keys[0], second.keys[0]]
    # The end of the last one leaves a plan of stores alone: what the tier says it wants now.
    tier.wanted = {0, 2}
    while scheduler.has_unfinished:
        step(scheduler)
    last = scheduler.plan()
    assert last is not None and not last.decode_rows and not last.prefill_chunks
    assert [(s.start, s.stop) for s in last.kv_stores] == [(0, 4), (8, 12)]
    scheduler.apply(make_result(last))
    assert scheduler.plan() is None


def test_a_store_of_an_older_epoch_is_neither_planned_nor_offered() -> None:
    scheduler, tier = make_storing()
    for is_planned, policy in product((True, False), ("recompute", None)):
        scheduler.add(make_request("a", 8, 3))
        step(scheduler)
        scheduler.abort("a")
        stores = step(scheduler).kv_stores if is_planned else ()
        if policy is None:
            scheduler.bump_kv_epoch()
        else:
            scheduler.set_weight_version(1, policy="recompute")
        for store in stores:
            scheduler.finish_store(store.transfer_id, 8)
        assert scheduler.plan() is None
        assert tier.stored_keys == []
    # Content that was computed in the new epoch is stored under the very same keys.
    scheduler.add(make_request("a", 8, 3))
    step(scheduler)
    scheduler.abort("a")
    (store,) = step(scheduler).kv_stores
    scheduler.finish_store(store.transfer_id, 8)
    assert tuple(tier.stored_keys) == store.keys


def test_a_resize_forgets_what_no_plan_has_stored_yet() -> None:
    scheduler, _ = make_storing()
    scheduler.add(make_request("a", 8, 3))
    step(scheduler)
    scheduler.resize_pool(8)
    assert not step(scheduler).kv_stores
    scheduler.preempt_one()
    assert len(step(scheduler).kv_stores[0].keys) == 2


@pytest.mark.parametrize("depth", [1, 2])
def test_a_load_may_overwrite_what_a_copy_of_its_plan_has_read(depth: int) -> None:
    """In a full pool the source of a cached prompt's copy is given to whoever loads behind it."""
    prompts = {"c": [9] * 8, "d": [7] * 8, "a": SHARED, "b": SHARED, "e": [9] * 8}
    requests = {name: make_request(name, prompt, 1) for name, prompt in prompts.items()}
    tier = OracleTier()
    scenario = replace(
        make_scenario(4, depth, tier=tier, requests=()),
        arrivals={
            0: (requests["c"],),
            5: (requests["d"],),
            10: (requests["a"],),
            15: (requests["b"], requests["e"]),
        },
    )
    plans: list[StepPlan] = []

    class Spy(Scheduler):
        def plan(
            self, *, window: int = 1, num_draft_tokens: DraftCounts = 0, now_s: float | None = None
        ) -> StepPlan | None:
            plan = super().plan(window=window, num_draft_tokens=num_draft_tokens, now_s=now_s)
            plans.extend([] if plan is None else [plan])
            return plan

    outcome = run(scenario, make_scheduler=lambda config, kv: Spy(config, kv, offload=tier))
    assert_true(outcome, tuple(requests.values()))
    sources = {source for plan in plans for source, _ in plan.block_copies if plan.kv_loads}
    loaded = {b for plan in plans for load in plan.kv_loads for b in load.block_ids}
    assert sources and sources <= loaded


def test_what_is_idle_behind_a_load_waits_for_the_transfer_whatever_it_was_parked_on() -> None:
    """The sibling has been parked longest, on the prompt that its leader has come to load."""
    tier = ScriptedTier(0)
    config = replace(make_config(), long_prefill_token_threshold=4, max_num_partial_prefills=1)
    scheduler = Scheduler(config, KVCacheManager(16, 4), offload=tier)
    scheduler.add(make_request("long", list(range(20)), 4))
    scheduler.add(make_request("a", [7] * 20, 4, num_samples=2))
    step(scheduler)
    assert scheduler.num_parked == 2
    scheduler.abort("long")
    tier.num_blocks = 2
    plan = step(scheduler)
    (load,) = plan.kv_loads
    assert scheduler.plan() is None
    assert scheduler.waiting_cause is IdleCause.WAITING_FOR_PREFIX
    assert scheduler.idle_cause is IdleCause.WAITING_FOR_TRANSFER
    scheduler.finish_load(load.transfer_id, 8)
    assert step(scheduler).joined
