"""Prefix caching as it went wrong elsewhere: each test is a report, in the smallest pool."""

import dataclasses
import itertools

import pytest

from syncline.kv_cache import KVCacheManager, PrefixIndex
from syncline.kv_cache.testing import colliding_key
from syncline.scheduler_core import IdleCause, PrefillChunk, Scheduler, SchedulerConfig, StepPlan
from syncline.scheduler_core.oracle import HashModel, Scenario, reference_output, run
from syncline.scheduler_core.testing import (
    make_config,
    make_request,
    make_result,
    make_scheduler,
    step,
)


def scheduled(plan: StepPlan) -> list[tuple[int, int]]:
    return [(chunk.start, chunk.stop) for chunk in plan.prefill_chunks]


def finish(scheduler: Scheduler) -> None:
    while scheduler.has_unfinished:
        step(scheduler)
        scheduler.check_integrity()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_prompt_that_is_almost_cached_yields_its_first_token_in_one_step(depth: int) -> None:
    """B02: 12 cached tokens and 2 new ones, results deferred."""
    config = make_config(max_num_batched_tokens=16, max_steps_in_flight=depth)
    prompt = list(range(12))
    first, second = make_request("a", prompt, 1), make_request("c", [*prompt, 50, 51], 3)
    outcome = run(
        Scenario(requests=(first,), arrivals={4: (second,)}, num_blocks=16, config=config)
    )
    sequence = outcome.sequences["c", 0]
    assert sequence.num_cached_tokens == 12
    assert outcome.stats.num_prefill_tokens == 12 + 2
    expected = reference_output(HashModel(), second, 0, max_model_len=128)
    assert sequence.output_token_ids == list(expected.token_ids)
    assert sequence.prompt_token_ids == second.prompt_token_ids


@pytest.mark.parametrize("budget", [4, 16])
def test_what_is_scheduled_at_a_resume_follows_from_what_is_cached(budget: int) -> None:
    """B03: prompt of 8 and one output; 8 are cached, so one is computed, in one step."""
    config = make_config(max_num_seqs=2, max_num_batched_tokens=budget)
    scheduler = make_scheduler(config=config)
    scheduler.add(make_request("b", 8, 4))
    (sequence,) = scheduler.sequences
    while not sequence.num_output_tokens:
        step(scheduler)
    scheduler.preempt_one()
    plan = step(scheduler)
    assert plan.prefill_chunks == (PrefillChunk(row=0, start=8, stop=9, is_final=True),)
    assert (plan.joined[0].num_computed_tokens, len(plan.joined[0].block_ids)) == (8, 3)


def test_hits_of_a_refused_attempt_are_forgotten() -> None:
    """B03, variant: refused once, its cached blocks evicted, then admitted: nothing is cached."""
    kv = KVCacheManager(5, 4)
    scheduler = Scheduler(make_config(), kv)
    scheduler.add(make_request("x", 7, 12))
    scheduler.add(make_request("b", 8, 3))
    step(scheduler)
    scheduler.preempt_one()
    refused = step(scheduler)
    assert refused.joined == () and scheduler.waiting_cause is IdleCause.WAITING_FOR_BLOCKS
    (b,) = [s for s in scheduler.sequences if s.request_id == "b"]
    assert (b.num_computed_tokens, b.num_cached_tokens, b.table.block_ids) == (0, 0, [])
    joins: list[int] = []
    while scheduler.has_unfinished:
        plan = step(scheduler)
        joins += [join.num_computed_tokens for join in plan.joined]
        if plan.joined:
            assert scheduled(plan) == [(0, 9)]
    assert joins == [0] and kv.num_free_blocks == 5


def test_a_refused_admission_leaves_no_trace() -> None:
    """B06: refused at every plan, while the only running sequence grows into its own block."""
    kv = KVCacheManager(4, 4)
    scheduler = Scheduler(make_config(), kv)
    scheduler.add(make_request("r1", list(range(8)), 1))
    step(scheduler)
    scheduler.add(make_request("x", 1, 4))
    step(scheduler)
    scheduler.add(make_request("r2", [*range(8), *range(20, 28)], 1))
    (_, r2) = scheduler.sequences
    for _ in range(2):
        plan = step(scheduler)
        assert plan.joined == () and kv.num_free_blocks == 3 and kv.num_cached_blocks == 2
        assert (r2.num_computed_tokens, r2.num_cached_tokens, r2.table.block_ids) == (0, 0, [])
        scheduler.check_integrity()
    step(scheduler)
    assert step(scheduler).joined[0].num_computed_tokens == 8
    assert kv.num_free_blocks == 4


def test_hits_are_used_by_the_allocation_that_was_admitted_for_them() -> None:
    """D61: a prompt of four blocks, two of them cached, in a pool with two others."""
    kv = KVCacheManager(4, 4)
    scheduler = Scheduler(make_config(), kv)
    prompt = list(range(16))
    scheduler.add(make_request("a", prompt[:8], 1))
    hits = step(scheduler).joined[0].block_ids
    scheduler.add(make_request("b", prompt, 1))
    plan = scheduler.plan()
    assert plan is not None and kv.num_free_blocks == 0
    assert plan.joined[0].block_ids[:2] == hits and scheduled(plan) == [(8, 16)]
    scheduler.apply(make_result(plan))
    assert kv.num_free_blocks == 4


def test_a_content_that_is_computed_twice_keeps_its_first_block() -> None:
    """D15: the second copy is neither listed nor kept as cached, and takes no hit away."""
    kv = KVCacheManager(8, 4)
    scheduler = Scheduler(make_config(), kv)
    prompt = list(range(8))
    scheduler.add(make_request("a", prompt, 9))
    first = step(scheduler).joined[0].block_ids[:2]
    # It needs a column at every position, and so computes what is cached.
    again = dataclasses.replace(
        make_request("b", prompt, 1), required_prompt_columns=frozenset({"x"})
    )
    scheduler.add(again)
    second = step(scheduler).joined[0].block_ids[:2]
    assert not set(first) & set(second) and kv.num_cached_blocks == 2
    scheduler.add(make_request("c", [*prompt, 40], 1))
    assert step(scheduler).joined[0].block_ids[:2] == first
    finish(scheduler)
    # The copy is plainly free: the whole of it is taken before anything cached is evicted.
    scheduler.add(make_request("d", [60 + i for i in range(20)], 1))
    step(scheduler)
    scheduler.add(make_request("e", [*prompt, 41], 1))
    assert step(scheduler).joined[0].num_computed_tokens == 8


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_with_two_keys_for_all_contents_every_answer_is_right(depth: int) -> None:
    """Hits, waits, fully cached prompts, held prompts and resumes: none trusts a key."""

    def with_collisions(config: SchedulerConfig, kv: KVCacheManager) -> Scheduler:
        index = PrefixIndex(colliding_key)
        return Scheduler(config, KVCacheManager(kv.num_blocks, kv.block_size, index=index))

    requests = tuple(
        make_request(name, prompt, 5, num_samples=num_samples)
        for name, prompt, num_samples in (
            ("a", [1, 2, 3, 4, 5, 6, 7, 8], 3),
            ("b", [1, 2, 3, 4, 5, 6, 7, 8, 9], 2),
            ("c", [3, 2, 1, 4, 5, 6, 7, 8], 2),
            ("d", [1, 2, 3, 6, 5, 4, 7, 8, 9, 9, 9, 9], 1),
        )
    )
    config = make_config(max_num_seqs=4, max_num_batched_tokens=12, max_steps_in_flight=depth)
    for num_blocks, tick in itertools.product((5, 9, 30), (1, 4, 7)):
        scenario = Scenario(
            requests=requests[:3],
            arrivals={tick: requests[3:]},
            preempts=frozenset({tick, tick + 2}),
            num_blocks=num_blocks,
            config=config,
        )
        outcome = run(scenario, make_scheduler=with_collisions)
        for request in requests:
            for i in range(request.num_samples):
                expected = reference_output(HashModel(), request, i, max_model_len=128)
                sequence = outcome.sequences[request.request_id, i]
                assert sequence.output_token_ids == list(expected.token_ids)


def test_a_wait_pause_finishes_the_samples_that_have_not_begun() -> None:
    """Their request has begun: they are parked, woken and run, and nobody else is."""
    scheduler = make_scheduler(enable_prefix_caching=False)
    scheduler.add(make_request("a", 6, 3, num_samples=3))
    scheduler.add(make_request("b", 6, 3, num_samples=2))
    plan = scheduler.plan()
    assert plan is not None
    scheduler.add(make_request("c", 6, 3, num_samples=2))
    scheduler.pause("wait")
    scheduler.apply(make_result(plan))
    while (plan := scheduler.plan()) is not None:
        scheduler.apply(make_result(plan))
        scheduler.check_integrity()
    assert scheduler.idle_cause is IdleCause.PAUSED
    assert sorted(s.request_id for s in scheduler.take_finished()) == [*"aaabb"]
    assert [s.request_id for s in scheduler.sequences] == [*"cc"]


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("how", ["preempt_all", "abort", "bump", "weights", "resize"])
def test_holds_are_gone_with_everything_that_gives_up_all_blocks(how: str, caching: bool) -> None:
    """Three samples wait for a row while the prompt is held for them."""
    kv = KVCacheManager(9, 4, enable_prefix_caching=caching)
    scheduler = Scheduler(make_config(max_num_seqs=1), kv)
    scheduler.add(make_request("a", 6, 1, num_samples=4))
    step(scheduler)
    assert scheduler.num_running == 0 and kv.num_free_blocks == 7
    if how == "preempt_all":
        assert scheduler.preempt_all() == 0
    elif how == "abort":
        assert scheduler.abort("a") == 3
    elif how == "bump":
        scheduler.bump_kv_epoch()
    elif how == "weights":
        scheduler.set_weight_version(1, policy="keep_kv")
    else:
        scheduler.resize_pool(5)
    assert kv.num_free_blocks == kv.num_blocks
    scheduler.check_integrity()
    finish(scheduler)
    # Where the KV has lost its meaning, it is computed once more, and only once.
    again = {"abort": 0, "preempt_all": 6 if not caching else 2}.get(how, 6)
    assert scheduler.stats.num_prefill_tokens == 6 + (again + 2 if again else 0)
    assert kv.num_free_blocks == kv.num_blocks
