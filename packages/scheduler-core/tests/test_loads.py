"""Parked while KV is loaded: every outcome, every disturbance, and nobody behind is held up."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from syncline.kv_cache import KVCacheManager
from syncline.scheduler_core import (
    FinishReason,
    IdleCause,
    PrefillChunk,
    Request,
    Scheduler,
    StepPlan,
    TransferError,
    TransferId,
    TransfersInFlightError,
    UnfinishedPolicy,
)
from syncline.scheduler_core.testing import (
    ScriptedTier,
    describe,
    make_config,
    make_request,
    make_result,
    step,
)

BLOCK_SIZE = 4


def make_loading(
    tier: ScriptedTier, *, num_blocks: int = 16, max_num_seqs: int = 4, caching: bool = True
) -> tuple[Scheduler, KVCacheManager]:
    kv = KVCacheManager(num_blocks, BLOCK_SIZE, enable_prefix_caching=caching)
    config = make_config(max_num_seqs=max_num_seqs, max_num_batched_tokens=32)
    return Scheduler(config, kv, offload=tier), kv


def plan_load(scheduler: Scheduler) -> StepPlan:
    """The next plan, which has one load and nothing to compute; its result is applied."""
    plan = scheduler.plan()
    assert plan is not None and len(plan.kv_loads) == 1
    assert not plan.decode_rows and not plan.prefill_chunks and not plan.joined
    scheduler.apply(make_result(plan))
    scheduler.check_integrity()
    return plan


def preempted_at_twelve(caching: bool = False) -> tuple[Scheduler, KVCacheManager, ScriptedTier]:
    """A prompt of 8 with four outputs has lost its blocks, and the tier claims all of it."""
    tier = ScriptedTier(0)
    scheduler, kv = make_loading(tier, caching=caching)
    scheduler.add(make_request("a", 8, 20))
    for _ in range(4):
        step(scheduler)
    assert scheduler.preempt_one() == 0
    tier.num_blocks = 99
    return scheduler, kv, tier


@pytest.mark.parametrize("num_tokens", range(13))
def test_what_a_load_leaves_missing_is_one_chunk_to_the_target(num_tokens: int) -> None:
    """#35 #36: prompt 8, total 12, not measured by the prompt; #48: one token at least; D66."""
    scheduler, kv, _ = preempted_at_twelve()
    (load,) = plan_load(scheduler).kv_loads
    assert (load.start, load.stop, len(load.block_ids), len(load.keys)) == (0, 12, 3, 3)
    assert kv.num_free_blocks == 13
    for _ in range(2):
        assert scheduler.plan() is None
        assert scheduler.idle_cause is IdleCause.WAITING_FOR_TRANSFER
    scheduler.finish_load(load.transfer_id, num_tokens)
    scheduler.check_integrity()
    plan = scheduler.plan()
    assert plan is not None and not plan.kv_loads
    start = min(num_tokens, 11)
    assert plan.prefill_chunks == (PrefillChunk(row=0, start=start, stop=12, is_final=True),)
    assert plan.joined[0].num_computed_tokens == start
    assert plan.joined[0].block_ids == load.block_ids
    assert scheduler.stats.num_loaded_tokens == start
    (sequence,) = scheduler.sequences
    assert (sequence.num_cached_tokens, sequence.num_recomputed_tokens) == (0, 11 - start)
    scheduler.apply(make_result(plan))
    while scheduler.has_unfinished:
        step(scheduler)
        scheduler.check_integrity()
    assert kv.num_free_blocks == kv.num_blocks


def test_loaded_blocks_are_published_when_the_load_has_ended_and_not_before() -> None:
    scheduler, kv, tier = preempted_at_twelve(caching=True)
    kv.clear_index()
    (load,) = plan_load(scheduler).kv_loads
    assert kv.num_cached_blocks == 0
    tier.num_blocks = 0
    scheduler.finish_load(load.transfer_id, 9)
    assert kv.num_cached_blocks == 2
    step(scheduler)
    assert kv.num_cached_blocks == 3


def test_only_what_is_not_cached_here_is_loaded() -> None:
    scheduler, kv, _ = preempted_at_twelve(caching=True)
    assert kv.num_cached_blocks == 2
    (load,) = plan_load(scheduler).kv_loads
    assert (load.start, load.stop, len(load.block_ids)) == (8, 12, 1)
    scheduler.finish_load(load.transfer_id, 4)
    plan = step(scheduler)
    assert (plan.prefill_chunks[0].start, plan.prefill_chunks[0].stop) == (11, 12)
    (sequence,) = scheduler.sequences
    assert sequence.num_cached_tokens == 8


def test_a_report_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    scheduler, kv, _ = preempted_at_twelve()
    (load,) = plan_load(scheduler).kv_loads
    before = (describe(scheduler), kv.stats, scheduler.num_transfers)
    for num_tokens in (-1, 13):
        with pytest.raises(ValueError, match="must be between 0 and 12"):
            scheduler.finish_load(load.transfer_id, num_tokens)
    for transfer_id in (-1, 7):
        with pytest.raises(TransferError, match="not under way"):
            scheduler.finish_load(TransferId(transfer_id), 0)
        with pytest.raises(TransferError, match="not under way"):
            scheduler.finish_store(TransferId(transfer_id), 0)
    with pytest.raises(TransferError, match="not under way"):
        scheduler.finish_store(load.transfer_id, 0)
    assert (describe(scheduler), kv.stats, scheduler.num_transfers) == before
    scheduler.finish_load(load.transfer_id, 12)
    with pytest.raises(TransferError, match="reported already"):
        scheduler.finish_load(load.transfer_id, 12)
    scheduler.check_integrity()


@pytest.mark.parametrize("num_tokens", [0, 5, 12])
def test_the_blocks_of_an_aborted_load_are_free_only_when_it_has_ended(num_tokens: int) -> None:
    """D16: neither leaked nor given away while they are written; one late report is accepted."""
    scheduler, kv, _ = preempted_at_twelve()
    (load,) = plan_load(scheduler).kv_loads
    assert scheduler.abort("a") == 1
    (sequence,) = scheduler.take_finished()
    assert (sequence.finish_reason, sequence.num_output_tokens) == (FinishReason.ABORT, 4)
    assert not scheduler.has_unfinished and scheduler.num_transfers == 1
    assert scheduler.abort("a") == 0
    scheduler.check_integrity()
    assert kv.num_free_blocks == 13
    scheduler.add(make_request("a", 8, 1))
    with pytest.raises(TransfersInFlightError, match="cannot resize the pool: 2 transfers"):
        plan_load(scheduler)
        scheduler.resize_pool(8)
    scheduler.finish_load(load.transfer_id, num_tokens)
    with pytest.raises(TransferError):
        scheduler.finish_load(load.transfer_id, num_tokens)
    assert (kv.num_free_blocks, scheduler.num_transfers) == (14, 1)
    scheduler.check_integrity()


@pytest.mark.parametrize("policy", ["recompute", "abort", "keep_kv", None])
def test_what_arrives_after_the_kv_epoch_rose_counts_as_failed(
    policy: UnfinishedPolicy | None,
) -> None:
    scheduler, kv, tier = preempted_at_twelve(caching=True)
    (load,) = plan_load(scheduler).kv_loads
    if policy is None:
        scheduler.bump_kv_epoch()
    else:
        scheduler.set_weight_version(1, policy=policy)
    scheduler.check_integrity()
    tier.num_blocks = 0
    assert scheduler.num_transfers == 1
    scheduler.finish_load(load.transfer_id, 4)
    scheduler.check_integrity()
    assert (kv.num_free_blocks, kv.num_cached_blocks) == (16, 0)
    if policy == "abort":
        assert not scheduler.has_unfinished
        return
    plan = step(scheduler)
    assert (plan.prefill_chunks[0].start, plan.prefill_chunks[0].stop) == (0, 12)
    assert tier.num_cleared == 1
    assert scheduler.stats.num_loaded_tokens == 0


@pytest.mark.parametrize("bumps", [False, True])
def test_a_sequence_that_has_loaded_and_waits_loses_its_blocks_like_any_other(bumps: bool) -> None:
    scheduler, kv, tier = preempted_at_twelve()
    (load,) = plan_load(scheduler).kv_loads
    scheduler.finish_load(load.transfer_id, 12)
    assert kv.num_free_blocks == 13
    if bumps:
        scheduler.bump_kv_epoch()
    else:
        assert scheduler.preempt_all() == 1
        assert kv.num_free_blocks == 16
    scheduler.check_integrity()
    tier.num_blocks = 0
    plan = step(scheduler)
    assert plan.prefill_chunks[0].start == 0
    scheduler.check_integrity()


def test_a_sequence_that_has_loaded_and_waits_may_end() -> None:
    scheduler, kv, _ = preempted_at_twelve()
    (load,) = plan_load(scheduler).kv_loads
    scheduler.finish_load(load.transfer_id, 12)
    scheduler.abort("a")
    scheduler.check_integrity()
    assert kv.num_free_blocks == 16 and scheduler.plan() is None


def test_a_load_that_brought_too_little_is_not_asked_for_again() -> None:
    """D66: the blocks it has are filled by computing, and a later preemption does not load."""
    for num_tokens in (0, 11):
        scheduler, _, _ = preempted_at_twelve()
        (load,) = plan_load(scheduler).kv_loads
        scheduler.finish_load(load.transfer_id, num_tokens)
        step(scheduler)
        scheduler.preempt_one()
        plan = step(scheduler)
        assert not plan.kv_loads and plan.prefill_chunks[0].start == 0


def test_a_request_that_needs_prompt_columns_or_shares_nothing_does_not_load() -> None:
    scheduler, _ = make_loading(ScriptedTier())
    scheduler.add(
        Request(
            request_id="columns",
            prompt_token_ids=tuple(range(9)),
            stop=make_request().stop,
            required_prompt_columns=frozenset({"x"}),
        )
    )
    scheduler.add(
        Request(
            request_id="alone",
            prompt_token_ids=tuple(range(9)),
            stop=make_request().stop,
            use_prefix_cache=False,
        )
    )
    plan = scheduler.plan()
    assert plan is not None and len(plan.prefill_chunks) == 2 and not plan.kv_loads


@pytest.mark.parametrize("max_num_seqs", [1, 2])
def test_whoever_is_behind_a_parked_request_is_not_held_up(max_num_seqs: int) -> None:
    """#35: parked for ever at the head; more of its kind than may load; the rest get done."""
    tier = ScriptedTier()
    scheduler, kv = make_loading(tier, num_blocks=40, max_num_seqs=max_num_seqs)
    for name in ("p", "q", "r"):
        scheduler.add(make_request(name, 8, 3))
    plan = scheduler.plan()
    assert plan is not None and len(plan.kv_loads) == max_num_seqs
    scheduler.apply(make_result(plan))
    assert scheduler.num_parked == 3
    for name in ("x", "y", "z"):
        scheduler.add(make_request(name, 3, 3))  # Less than a block: nothing to load.
    for _ in range(20):
        if scheduler.num_waiting > 3 or scheduler.num_running:
            step(scheduler)
            scheduler.check_integrity()
    assert sorted(s.request_id for s in scheduler.take_finished()) == ["x", "y", "z"]
    assert scheduler.plan() is None and scheduler.idle_cause is IdleCause.WAITING_FOR_TRANSFER
    loads = list(plan.kv_loads)
    while loads:
        scheduler.finish_load(loads.pop().transfer_id, 8)
        while (plan := scheduler.plan()) is not None:
            loads += plan.kv_loads
            scheduler.apply(make_result(plan))
            scheduler.check_integrity()
    assert not scheduler.has_unfinished and kv.num_free_blocks == kv.num_blocks


def test_a_running_sequence_that_lacks_the_blocks_of_a_load_waits_for_its_end() -> None:
    """The pool is full of a load: nobody spins, and both get done afterwards."""
    tier = ScriptedTier(0)
    scheduler, kv = make_loading(tier, num_blocks=5, caching=False)
    scheduler.add(make_request("old", 7, 9))
    step(scheduler)
    tier.num_blocks = 99
    scheduler.add(make_request("p", 12, 2))
    plan = scheduler.plan()
    assert plan is not None
    (load,) = plan.kv_loads
    assert kv.num_free_blocks == 0
    scheduler.apply(make_result(plan))
    for _ in range(3):
        assert scheduler.plan() is None
        assert scheduler.idle_cause is IdleCause.WAITING_FOR_TRANSFER
        scheduler.check_integrity()
    assert scheduler.stats.num_preemptions == 1
    tier.num_blocks = 0
    scheduler.finish_load(load.transfer_id, 12)
    while scheduler.has_unfinished:
        step(scheduler)
        scheduler.check_integrity()
    lengths = {s.request_id: s.num_output_tokens for s in scheduler.take_finished()}
    assert lengths == {"old": 9, "p": 2} and kv.num_free_blocks == 5


PAUSES: dict[str, Callable[[Scheduler], object]] = {
    "wait": lambda scheduler: scheduler.pause("wait"),
    "keep": lambda scheduler: scheduler.pause("keep"),
}


@pytest.mark.parametrize("mode", PAUSES)
def test_a_load_may_end_while_planning_is_paused(mode: str) -> None:
    """wait: a request that loads has begun, so it is run to its end."""
    scheduler, kv = make_loading(ScriptedTier())
    scheduler.add(make_request("a", 8, 2))
    (load,) = plan_load(scheduler).kv_loads
    PAUSES[mode](scheduler)
    assert scheduler.plan() is None
    scheduler.finish_load(load.transfer_id, 8)
    scheduler.check_integrity()
    if mode == "keep":
        assert scheduler.plan() is None and scheduler.idle_cause is IdleCause.PAUSED
        scheduler.resume()
    step(scheduler)
    step(scheduler)
    assert not scheduler.has_unfinished and kv.num_free_blocks == 16


def test_a_sequence_that_has_loaded_is_admitted_whatever_stands_in_front_of_it() -> None:
    """One that may not begin now, then one that lacks the very blocks that it owns."""
    tier = ScriptedTier(0)
    kv = KVCacheManager(5, BLOCK_SIZE, enable_prefix_caching=False)
    config = replace(make_config(), scheduling_policy="priority")
    scheduler = Scheduler(config, kv, offload=tier)
    scheduler.add(replace(make_request("old", 7, 9), priority=1))
    step(scheduler)
    tier.num_blocks = 99
    scheduler.add(replace(make_request("p", 12, 2), priority=2))
    (load,) = step(scheduler).kv_loads
    assert scheduler.plan() is None and scheduler.num_running == 0
    tier.num_blocks = 0
    scheduler.finish_load(load.transfer_id, 12)
    scheduler.pause("wait")
    scheduler.add(make_request("new", 3, 2))
    plan = step(scheduler)
    assert [join.request_id for join in plan.joined] == ["p"]
    while scheduler.num_waiting > 1 or scheduler.num_running:
        step(scheduler)
        scheduler.check_integrity()
    assert [s.request_id for s in scheduler.take_finished()] == ["p", "old"]
    assert scheduler.plan() is None and scheduler.idle_cause is IdleCause.PAUSED


def test_no_more_sequences_are_looked_at_than_may_load() -> None:
    """Thousands may want to: each is let in when it is its turn, and not asked before."""
    tier = ScriptedTier()
    scheduler, _ = make_loading(tier, num_blocks=200, max_num_seqs=2, caching=False)
    for i in range(40):
        scheduler.add(make_request(f"r{i}", 8, 1))
    loads = list(step(scheduler).kv_loads)
    assert (len(loads), scheduler.num_parked) == (2, 40)
    order: list[str] = []
    while loads:
        load = loads.pop(0)
        order.append(load.request_id)
        scheduler.finish_load(load.transfer_id, 8)
        num_asked = tier.num_asked
        loads += step(scheduler).kv_loads
        assert tier.num_asked - num_asked <= 2
        scheduler.check_integrity()
    while scheduler.has_unfinished:
        step(scheduler)
    assert order == [f"r{i}" for i in range(40)]
