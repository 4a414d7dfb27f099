"""Flushing the prefix cache: whether it happened, and that nothing from before it is ever hit."""

import dataclasses

import pytest

from syncline.kv_cache import KVCacheManager
from syncline.scheduler_core import FlushReport, Scheduler
from syncline.scheduler_core.oracle import (
    HashModel,
    OracleRunner,
    Scenario,
    apply_at_once,
    reference_output,
    run,
)
from syncline.scheduler_core.testing import (
    describe,
    make_config,
    make_request,
    make_result,
    make_scheduler,
    step,
)

PROMPT = list(range(10))


def test_a_flush_with_a_step_in_flight_does_not_happen_and_says_so() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", PROMPT))
    step(scheduler)
    plan = scheduler.plan()
    assert plan is not None
    before, metrics = describe(scheduler), scheduler.metrics()
    report = scheduler.flush_prefix_cache()
    assert report == FlushReport(is_flushed=False, num_unlisted_blocks=0)
    assert describe(scheduler) == before and scheduler.metrics() == metrics
    scheduler.apply(make_result(plan))
    assert scheduler.flush_prefix_cache() == FlushReport(is_flushed=True, num_unlisted_blocks=2)
    assert scheduler.flush_prefix_cache() == FlushReport(is_flushed=True, num_unlisted_blocks=0)
    assert scheduler.metrics().kv.num_cached_blocks == 0


def test_what_a_running_sequence_holds_stays_its_own_after_a_flush() -> None:
    """It goes on without recomputing, and no block of it is listed, ended or preempted."""
    kv = KVCacheManager(32, 4)
    scheduler = Scheduler(make_config(), kv)
    scheduler.add(make_request("a", PROMPT, 20))
    (a,) = scheduler.sequences
    step(scheduler)
    scheduler.flush_prefix_cache()
    scheduler.check_integrity()
    scheduler.add(make_request("b", PROMPT, 1))
    plan = step(scheduler)
    assert plan.joined[0].num_computed_tokens == 0 and plan.decode_rows == (0,)
    assert kv.num_cached_blocks == 2  # Those of "b".
    for _ in range(9):
        step(scheduler)
    assert a.num_preemptions == 0 and a.num_recomputed_tokens == 0
    scheduler.preempt_one()
    assert kv.num_cached_blocks == 2 and a.num_output_tokens == 11
    assert step(scheduler).joined[0].num_computed_tokens == 8  # Again from "b".
    assert kv.num_cached_blocks > 2  # Computed after the flush: it may be shared.


def test_whoever_waits_for_the_prefix_of_a_flushed_one_computes_it_itself() -> None:
    config = make_config(max_num_batched_tokens=8)
    config = dataclasses.replace(config, long_prefill_token_threshold=6)
    scheduler = make_scheduler(config=config)
    scheduler.add(make_request("a", list(range(30))))
    scheduler.add(make_request("b", list(range(30))))
    step(scheduler)
    assert scheduler.num_parked == 1
    scheduler.flush_prefix_cache()
    while scheduler.has_unfinished:
        step(scheduler)
        scheduler.check_integrity()
    assert [s.num_cached_tokens for s in scheduler.take_finished()] == [0, 0]


@pytest.mark.parametrize("num_blocks", [8, 40])
def test_a_flush_at_every_tick_changes_no_answer(num_blocks: int) -> None:
    requests = (
        make_request("a", PROMPT, 9, num_samples=2),
        make_request("b", [*PROMPT, 1, 2, 3], 6),
        make_request("c", PROMPT[:8], 4),
    )
    config = make_config(max_num_seqs=3, max_num_batched_tokens=6)
    reports: list[FlushReport] = []

    def flush(scheduler: Scheduler, runner: OracleRunner) -> None:
        reports.append(scheduler.flush_prefix_cache())
        assert scheduler.metrics().kv.num_cached_blocks == 0

    calm = Scenario(requests=requests, num_blocks=num_blocks, config=config)
    for tick in range(run(calm).num_ticks):
        outcome = run(
            Scenario(
                requests=requests,
                num_blocks=num_blocks,
                config=config,
                controls={tick: flush},
                lateness=apply_at_once,
            )
        )
        for (request_id, index), sequence in outcome.sequences.items():
            request = next(r for r in requests if r.request_id == request_id)
            expected = reference_output(HashModel(), request, index, max_model_len=128)
            assert tuple(sequence.output_token_ids) == expected.token_ids
    assert all(report.is_flushed for report in reports)
    assert max(report.num_unlisted_blocks for report in reports) > 2


@pytest.mark.parametrize("num_plans", [1, 2, 3, 4])
@pytest.mark.parametrize("num_prompt_tokens", [3, 4, 7])
def test_no_sample_that_has_yet_to_begin_shares_a_prompt_computed_before(
    num_prompt_tokens: int, num_plans: int
) -> None:
    """Neither one that is held for it, nor one that is computed in part."""
    kv = KVCacheManager(32, 4)
    config = make_config(max_num_seqs=1, max_num_batched_tokens=2)
    scheduler = Scheduler(config, kv)
    scheduler.add(make_request("a", num_prompt_tokens, 6, num_samples=2))
    for _ in range(num_plans):
        step(scheduler)
    assert scheduler.flush_prefix_cache().is_flushed
    plan = step(scheduler)
    while not plan.joined:
        assert kv.num_cached_blocks == 0
        plan = step(scheduler)
    (join,) = plan.joined
    assert (join.sample_index, join.num_computed_tokens) == (1, 0)
