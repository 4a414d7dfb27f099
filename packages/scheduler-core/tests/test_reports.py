"""Faults that were reported in public against engines of this kind, each as a toy run.

The number after B is the row of docs/faults.md, which names the report.
"""

import itertools

import pytest

from syncline.kv_cache import KVCacheManager
from syncline.scheduler_core import FinishReason, ResultError, Scheduler, StepPlan, StopRules
from syncline.scheduler_core.oracle import (
    HashModel,
    OracleRunner,
    Scenario,
    hash_drafter,
    reference_output,
    run,
)
from syncline.scheduler_core.testing import (
    make_config,
    make_counted_result,
    make_request,
    make_result,
    make_scheduler,
    step,
)


def planned(scheduler: Scheduler, num_draft_tokens: int = 0) -> StepPlan:
    plan = scheduler.plan(num_draft_tokens=num_draft_tokens)
    assert plan is not None
    return plan


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("num_drafts", [0, 1, 2, 3])
def test_b01_a_preempted_sequence_holds_its_real_tokens_and_nothing_else(
    depth: int, num_drafts: int
) -> None:
    """Pool 4 of 4; "a" and "b" of 6 + 6 tokens each: "b" is preempted, whatever is in flight."""
    requests = (make_request("a", 6, 6), make_request("b", 6, 6))
    expected = {
        request.request_id: reference_output(HashModel(), request, 0, max_model_len=128)
        for request in requests
    }
    num_seen_preempted = 0

    def observe(scheduler: Scheduler) -> None:
        nonlocal num_seen_preempted
        scheduler.check_integrity()
        for sequence in scheduler.sequences:
            num_outputs = sequence.num_output_tokens
            assert sequence.num_tokens == len(sequence.token_ids) == 6 + num_outputs
            truth = expected[sequence.request_id]
            assert tuple(sequence.output_token_ids) == truth.token_ids[:num_outputs]
            assert tuple(sequence.logprobs) == truth.logprobs[:num_outputs]
            num_seen_preempted += bool(sequence.num_preemptions and sequence.row is None)

    for rate in (0.0, 0.5, 1.0):
        scenario = Scenario(
            requests=requests,
            num_blocks=4,
            config=make_config(max_steps_in_flight=depth),
            num_draft_tokens=num_drafts,
            drafter=hash_drafter(rate),
        )
        outcome = run(scenario, observe=observe)
        for request_id, truth in expected.items():
            sequence = outcome.sequences[request_id, 0]
            assert tuple(sequence.output_token_ids) == truth.token_ids
            assert tuple(sequence.logprobs) == truth.logprobs
    assert num_seen_preempted


def test_b07_a_fully_cached_prompt_computes_one_token_every_time() -> None:
    kv = KVCacheManager(4, 4)
    scheduler = Scheduler(make_config(), kv)
    for name, num_cached in (("a", 0), ("b", 7), ("c", 7)):
        scheduler.add(make_request(name, list(range(8)), 2))
        plan = step(scheduler)
        assert sum(c.stop - c.start for c in plan.prefill_chunks) == 8 - num_cached
        step(scheduler)
        (ended,) = scheduler.take_finished()
        assert (ended.num_cached_tokens, ended.num_output_tokens) == (num_cached, 2)
        assert kv.num_free_blocks == 4


def test_b09_what_can_never_fit_blocks_nobody_behind_it() -> None:
    """Pool 16 tokens: "a" has 20, "b" fits, "c" outgrows the pool alone."""
    scheduler = make_scheduler(num_blocks=4, config=make_config(max_model_len=64))
    scheduler.add(make_request("a", 20, 1))
    scheduler.add(make_request("b", 4, 2))
    for _ in range(2):
        step(scheduler)
    a, b = scheduler.take_finished()
    assert (a.finish_reason, a.num_output_tokens, a.num_preemptions) == (FinishReason.ERROR, 0, 0)
    assert "20 tokens need 5 blocks of 4" in a.finish_detail
    assert b.num_output_tokens == 2
    scheduler.add(make_request("c", 15, 10))
    for _ in range(2):
        step(scheduler)
    (c,) = scheduler.take_finished()
    assert (c.finish_reason, c.num_output_tokens) == (FinishReason.LENGTH, 2)
    assert c.num_preemptions == 0
    assert not scheduler.has_unfinished


@pytest.mark.parametrize("how", ["abort", "preempt"])
def test_b12_no_counter_of_drafts_ever_falls(how: str) -> None:
    """Rows "a" and "b" verify 3 drafts each; "b" is lost before the result, which accepts 2."""
    scheduler = make_scheduler()
    for name in "ab":
        scheduler.add(make_request(name, 4, 20))
    step(scheduler)
    plan = planned(scheduler, 3)
    assert plan.num_draft_tokens == (3, 3)
    a, b = scheduler.sequences
    if how == "abort":
        scheduler.abort("b")
        scheduler.apply(make_counted_result(plan, [[1, 2, 3]], []))
        num_verified, num_kept = 1, 3
        assert b.output_token_ids == [7]
    else:
        assert scheduler.preempt_one() == b.seq_id
        scheduler.apply(make_counted_result(plan, [[1, 2, 3]], [[4, 5, 6]]))
        num_verified, num_kept = 2, 6
        assert b.output_token_ids == [7, 4, 5, 6]
    assert a.output_token_ids == [7, 1, 2, 3]
    stats = scheduler.stats
    assert stats.num_accepted_tokens == 2 + num_kept  # With the first token of each.
    assert stats.num_draft_tokens == 3 * num_verified
    assert stats.num_accepted_draft_tokens == 2 * num_verified
    assert stats.num_rejected_draft_tokens == stats.num_recovered_tokens == num_verified
    assert (stats.num_bonus_tokens, stats.num_surplus_tokens) == (0, 0)


@pytest.mark.parametrize(
    ("row", "kept", "reason"),
    [
        ([2, 7, 5], [1, 2, 7], "stop"),
        ([2, 3, 4], [1, 2, 3, 4], "length"),
        ([2, 3, 7], [1, 2, 3, 7], "stop"),
    ],
)
def test_b13_a_stop_within_the_cap_wins_and_a_row_cannot_reach_beyond_it(
    row: list[int], kept: list[int], reason: str
) -> None:
    """max_tokens 4, one token there: drafts are cut to 2, so that the row ends at the cap."""
    kv = KVCacheManager(8, 4)
    scheduler = Scheduler(make_config(), kv)
    rules = StopRules(max_tokens=4, stop_token_ids=frozenset({7}))
    scheduler.add(make_request("a", 4, stop=rules))
    step(scheduler, 1)
    plan = planned(scheduler, 3)
    assert plan.num_draft_tokens == (2,)
    with pytest.raises(ResultError, match="between 1 and 3 tokens, got 4"):
        scheduler.apply(make_counted_result(plan, [[*row, 6]]))
    scheduler.apply(make_counted_result(plan, [row]))
    (ended,) = scheduler.take_finished()
    assert ended.output_token_ids == kept
    assert ended.finish_reason == reason
    assert len(ended.logprobs) == len(kept) == scheduler.stats.num_accepted_tokens
    assert kv.num_free_blocks == 8


@pytest.mark.parametrize("in_flight", [0, 1, 2])
@pytest.mark.parametrize("flush", ["preempt", "bump", "recompute"])
def test_b15_paused_and_flushed_the_next_token_is_the_next_token(
    in_flight: int, flush: str
) -> None:
    request = make_request("a", 6, 10)
    expected = reference_output(HashModel(), request, 0, max_model_len=128)
    nums_in_flight: set[int] = set()

    def pause(scheduler: Scheduler, runner: OracleRunner) -> None:
        nums_in_flight.add(scheduler.steps_in_flight)
        scheduler.pause("keep")

    def empty(scheduler: Scheduler, runner: OracleRunner) -> None:
        if flush == "preempt":
            scheduler.preempt_all()
        elif flush == "bump":
            scheduler.bump_kv_epoch()
        else:
            scheduler.set_weight_version(0, policy="recompute")
        scheduler.resume()

    for tick in range(2, 9):
        scenario = Scenario(
            requests=(request,),
            num_blocks=16,
            config=make_config(max_steps_in_flight=in_flight + 1),
            controls={tick: pause, tick + 4: empty},
        )
        outcome = run(scenario)
        assert tuple(outcome.sequences["a", 0].output_token_ids) == expected.token_ids
        assert len(expected.token_ids) == 10
        assert outcome.stats.num_surplus_tokens == 0
    assert in_flight in nums_in_flight


def test_b35_an_early_end_of_sequence_inside_a_verified_row_does_not_count() -> None:
    """min_tokens 3, end of sequence 2: of the row (2, 5, 2, 5) the third token ends it."""
    for ignored, kept in ((False, [2, 5, 2]), (True, [2, 5, 2, 5, 2, 5, 2, 5])):
        scheduler = make_scheduler()
        eos = frozenset({2})
        rules = StopRules(max_tokens=8, min_tokens=3, eos_token_ids=eos, ignore_eos=ignored)
        scheduler.add(make_request("a", 4, stop=rules))
        step(scheduler, 2)
        scheduler.apply(make_counted_result(planned(scheduler, 2), [[5, 2, 5]]))
        while scheduler.has_unfinished:
            scheduler.apply(make_counted_result(planned(scheduler, 1), [[2, 5]]))
        (ended,) = scheduler.take_finished()
        assert ended.output_token_ids == kept
        assert ended.finish_reason is (FinishReason.LENGTH if ignored else FinishReason.STOP)


def test_b37_every_sample_of_a_request_draws_its_own_tokens_again_and_again() -> None:
    def outputs(config_seqs: int) -> list[list[int]]:
        scenario = Scenario(
            requests=(make_request("a", 6, 8, num_samples=4),),
            num_blocks=32,
            config=make_config(max_num_seqs=config_seqs),
        )
        sequences = run(scenario).sequences
        return [sequences["a", i].output_token_ids.to_list() for i in range(4)]

    first = outputs(4)
    assert all(one != other for one, other in itertools.combinations(first, 2))
    assert outputs(4) == outputs(2) == outputs(1) == first


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("num_samples", [1, 2])
def test_b39_what_the_client_gave_up_holds_nothing_from_that_moment_on(
    depth: int, num_samples: int
) -> None:
    for num_steps in range(8):
        kv = KVCacheManager(8, 4, enable_prefix_caching=False)
        config = make_config(max_num_seqs=2, max_steps_in_flight=depth)
        scheduler = Scheduler(config, kv)
        scheduler.add(make_request("a", 4, 20, num_samples=num_samples))
        plans: list[StepPlan] = []
        for _ in range(num_steps):
            if (plan := scheduler.plan()) is None:
                scheduler.apply(make_result(plans.pop(0)))
                plan = planned(scheduler)
            plans.append(plan)
        num_outputs = [sequence.num_output_tokens for sequence in scheduler.sequences]
        assert scheduler.abort("a") == num_samples
        assert (kv.num_free_blocks, scheduler.num_running, scheduler.num_waiting) == (8, 0, 0)
        for plan in plans:
            scheduler.apply(make_result(plan))
        ended = scheduler.take_finished()
        assert [sequence.num_output_tokens for sequence in ended] == num_outputs
        assert scheduler.plan() is None
        scheduler.check_integrity()
        assert scheduler.abort("a") == 0
        scheduler.add(make_request("a", 4, 1))
