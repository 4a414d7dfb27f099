"""Prefix sharing: computed once, hit only when computed, never counted or held twice."""

import dataclasses

import pytest

from syncline.kv_cache import KVCacheManager
from syncline.scheduler_core import IdleCause, Request, Scheduler
from syncline.scheduler_core.oracle import Scenario, run
from syncline.scheduler_core.testing import (
    make_config,
    make_request,
    make_result,
    make_scheduler,
    step,
)


def run_alone(scheduler: Scheduler, request: Request) -> list[int]:
    """Run one request to its end; returns the number of prompt tokens scheduled per step."""
    scheduler.add(request)
    scheduled: list[int] = []
    while scheduler.has_unfinished:
        plan = step(scheduler)
        scheduled += [chunk.stop - chunk.start for chunk in plan.prefill_chunks]
    return scheduled


def test_a_fully_cached_prompt_copies_its_last_block_and_computes_one_token() -> None:
    """B07: blocks of 4, a prompt of 8, three times in a row."""
    kv = KVCacheManager(16, 4)
    scheduler = Scheduler(make_config(), kv)
    assert run_alone(scheduler, make_request("a", list(range(8)), 2)) == [8]
    for name in "bc":
        scheduler.add(make_request(name, list(range(8)), 2))
        plan = step(scheduler)
        (join,) = plan.joined
        assert join.num_computed_tokens == 7
        ((source, destination),) = plan.block_copies
        assert destination == join.block_ids[1] != source
        assert [(c.start, c.stop) for c in plan.prefill_chunks] == [(7, 8)]
        step(scheduler)
    cached = [s.num_cached_tokens for s in scheduler.take_finished()]
    assert cached == [0, 7, 7]
    assert kv.num_free_blocks == 16


@pytest.mark.parametrize("depth", [1, 2])
def test_equal_prompts_in_one_tick_are_computed_once(depth: int) -> None:
    scheduler = make_scheduler(config=make_config(max_steps_in_flight=depth))
    prompt = list(range(10))
    for name in "abc":
        scheduler.add(make_request(name, prompt, 4))
    scheduler.add(make_request("other", 9, 4))
    first = scheduler.plan()
    assert first is not None
    # The others wait for the first, and hold up nobody who is behind them.
    assert [join.request_id for join in first.joined] == ["a", "other"]
    assert scheduler.waiting_cause is IdleCause.WAITING_FOR_PREFIX
    scheduler.apply(make_result(first))
    second = scheduler.plan()
    assert second is not None
    assert [join.request_id for join in second.joined] == ["b", "c"]
    assert [(c.start, c.stop) for c in second.prefill_chunks] == [(8, 10), (8, 10)]
    assert second.joined[0].block_ids[:2] == first.joined[0].block_ids[:2]
    assert scheduler.stats.num_prefill_tokens == 10 + 9 + 2 + 2


def test_samples_of_one_prompt_compute_it_once_and_each_has_its_own_row() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", list(range(8)), 4, num_samples=3))
    assert [c.stop for c in step(scheduler).prefill_chunks] == [8]
    plan = step(scheduler)
    assert [join.sample_index for join in plan.joined] == [1, 2]
    assert len({destination for _, destination in plan.block_copies}) == 2
    assert scheduler.stats.num_prefill_tokens == 8 + 1 + 1
    assert len({sequence.row for sequence in scheduler.sequences}) == 3


def test_a_waiter_goes_on_alone_when_the_one_it_waits_for_is_gone() -> None:
    for disturb in ("abort", "preempt"):
        config = make_config(max_num_batched_tokens=8)
        scheduler = make_scheduler(config=config)
        prompt = list(range(20))
        scheduler.add(make_request("a", prompt, 3))
        plan = scheduler.plan()
        assert plan is not None
        scheduler.add(make_request("b", prompt, 3))
        if disturb == "abort":
            scheduler.abort("a")
        else:
            scheduler.preempt_one()
        scheduler.apply(make_result(plan))
        again = step(scheduler)
        expected = "b" if disturb == "abort" else "a"
        assert [join.request_id for join in again.joined] == [expected]
        while scheduler.has_unfinished:
            step(scheduler)
        scheduler.check_integrity()


def test_blocks_of_a_step_in_flight_are_not_hit() -> None:
    """A block enters the index when its step has been applied, not when it was planned."""
    kv = KVCacheManager(16, 4)
    scheduler = Scheduler(make_config(max_steps_in_flight=2), kv)
    scheduler.add(make_request("a", list(range(9)), 4))
    plan = scheduler.plan()
    assert plan is not None and kv.num_cached_blocks == 0
    scheduler.add(make_request("b", list(range(9)), 4))
    decode = scheduler.plan()
    assert decode is not None and decode.joined == ()
    scheduler.apply(make_result(plan))
    assert kv.num_cached_blocks == 2


def test_what_a_lost_row_was_still_computing_is_not_published() -> None:
    """The result may yet say that the step failed."""
    for disturb in ("abort", "preempt"):
        kv = KVCacheManager(16, 4)
        scheduler = Scheduler(make_config(max_num_batched_tokens=8), kv)
        scheduler.add(make_request("a", list(range(20)), 3))
        step(scheduler)
        plan = scheduler.plan()
        assert plan is not None
        if disturb == "abort":
            scheduler.abort("a")
        else:
            scheduler.preempt_one()
        assert kv.num_cached_blocks == 2
        scheduler.apply(make_result(plan))
        assert kv.num_cached_blocks == 2


def test_output_blocks_are_shared_when_a_conversation_goes_on() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1, 2, 3, 4, 5, 6], 7))
    while scheduler.has_unfinished:
        step(scheduler, 50)
    scheduler.add(make_request("b", [1, 2, 3, 4, 5, 6] + [50] * 7 + [9], 2))
    # 13 tokens, of which the last has no KV: three full blocks.
    assert step(scheduler).joined[0].num_computed_tokens == 12


def test_hits_that_nobody_holds_are_not_free_blocks_as_well() -> None:
    """B06: pool 4 of 4, two blocks cached, one held; two hits and two more must wait."""
    kv = KVCacheManager(4, 4)
    scheduler = Scheduler(make_config(), kv)
    run_alone(scheduler, make_request("r1", list(range(8)), 1))
    scheduler.add(make_request("x", [40, 41, 42], 2))
    step(scheduler)
    assert kv.num_free_blocks == 3
    scheduler.add(make_request("r2", [*range(8), *range(20, 28)], 1))
    (_, r2) = scheduler.sequences
    plan = step(scheduler)
    assert plan.joined == () and scheduler.waiting_cause is IdleCause.WAITING_FOR_BLOCKS
    assert (r2.num_computed_tokens, r2.num_cached_tokens, r2.row) == (0, 0, None)
    plan = step(scheduler)
    assert plan.joined[0].num_computed_tokens == 8
    assert not scheduler.has_unfinished
    assert kv.num_free_blocks == 4
    scheduler.check_integrity()


@pytest.mark.parametrize("opted_out", [False, True])
def test_chunks_advance_without_a_prefix_cache(opted_out: bool) -> None:
    """B10: pool 8 of 4, budget 4, prompt 12, chunk by chunk, whether the cache is off or unused."""
    kv = KVCacheManager(8, 4, enable_prefix_caching=opted_out)
    scheduler = Scheduler(make_config(max_num_seqs=4, max_num_batched_tokens=4), kv)
    request = make_request("a", list(range(12)), 2)
    scheduler.add(dataclasses.replace(request, use_prefix_cache=not opted_out))
    (sequence,) = scheduler.sequences
    progress: list[tuple[int, int]] = []
    for _ in range(3):
        plan = step(scheduler)
        progress.append((plan.prefill_chunks[0].start, sequence.num_computed_tokens))
    assert progress == [(0, 4), (4, 8), (8, 12)]
    assert sequence.num_output_tokens == 1
    step(scheduler)
    assert kv.num_free_blocks == 8 and kv.num_cached_blocks == 0


def test_a_request_that_opts_out_neither_hits_nor_fills_nor_waits() -> None:
    scheduler = make_scheduler()
    prompt = list(range(8))
    private = dataclasses.replace(make_request("p", prompt, 2), use_prefix_cache=False)
    scheduler.add(private)
    scheduler.add(make_request("a", prompt, 2))
    plan = step(scheduler)
    assert [join.num_computed_tokens for join in plan.joined] == [0, 0]
    step(scheduler)
    scheduler.add(private)
    assert step(scheduler).joined[0].num_computed_tokens == 0


@pytest.mark.parametrize(("salt", "adapter"), [("x", ""), ("", "x")])
def test_kv_is_not_shared_across_salts_or_adapters(salt: str, adapter: str) -> None:
    scheduler = make_scheduler()
    prompt = list(range(8))
    other = dataclasses.replace(make_request("b", prompt, 1), cache_salt=salt, adapter_id=adapter)
    run_alone(scheduler, make_request("a", prompt, 1))
    assert run_alone(scheduler, other) == [8]
    assert run_alone(scheduler, dataclasses.replace(other, request_id="c")) == [1]


def test_old_entries_do_not_outlive_their_blocks() -> None:
    """B05: pool 2 of 4, 100 rounds of fresh prompts: the old prefix is gone, the index small."""
    kv = KVCacheManager(2, 4)
    scheduler = Scheduler(make_config(), kv)
    assert run_alone(scheduler, make_request("r1", [1, 2, 3, 4, 5], 1)) == [5]
    assert run_alone(scheduler, make_request("r2", [9, 9, 9, 9, 8, 8, 8, 8], 1)) == [8]
    assert run_alone(scheduler, make_request("r3", [1, 2, 3, 4, 5], 1)) == [5]
    assert scheduler.stats.num_cached_tokens == 0
    for i in range(100):
        run_alone(scheduler, make_request("x", [i, i, i, i, i], 1))
        assert kv.num_cached_blocks <= 2
        scheduler.check_integrity()


def test_copies_in_a_full_pool_keep_their_content() -> None:
    """Every source may itself be taken for something else in the same plan."""
    prompt = list(range(8))
    for num_blocks in (3, 4, 5, 6):
        requests = tuple(make_request(name, prompt, 5) for name in "abcd")
        outcome = run(Scenario(requests=requests, num_blocks=num_blocks, config=make_config()))
        outputs = {tuple(s.output_token_ids) for s in outcome.sequences.values()}
        assert len(outputs) == 1
