"""Deferred output: plans made before tokens are known, tokens that come after the end."""

import pytest

from syncline.scheduler_core import FinishReason, IdleCause, Scheduler, StepPlan, StopRules
from syncline.scheduler_core.oracle import HashModel, Scenario, run
from syncline.scheduler_core.testing import (
    make_config,
    make_request,
    make_result,
    make_scheduler,
    step,
)


def fill(scheduler: Scheduler) -> list[StepPlan]:
    """Plan until depth or need says no."""
    plans: list[StepPlan] = []
    while (plan := scheduler.plan()) is not None:
        plans.append(plan)
    return plans


@pytest.mark.parametrize("depth", [1, 2, 3, 5])
def test_at_most_depth_steps_are_in_flight(depth: int) -> None:
    scheduler = make_scheduler(config=make_config(max_steps_in_flight=depth))
    scheduler.add(make_request("a", 4, 20))
    plans = fill(scheduler)
    assert len(plans) == scheduler.steps_in_flight == depth
    assert scheduler.idle_cause is IdleCause.WAITING_FOR_RESULTS
    assert [plan.step_id for plan in plans] == list(range(depth))
    # The first plan is the prompt; the others decode tokens that nobody knows yet.
    assert [plan.decode_rows for plan in plans[1:]] == [(0,)] * (depth - 1)


def test_no_token_list_ever_holds_a_token_that_is_not_sampled() -> None:
    scheduler = make_scheduler(config=make_config(max_steps_in_flight=3))
    scheduler.add(make_request("a", [5, 6, 7], 9))
    (sequence,) = scheduler.sequences
    fill(scheduler)
    assert list(sequence.token_ids) == [5, 6, 7] and sequence.logprobs == []
    assert sequence.target_len == 6  # Three tokens may come; none is in any list.
    scheduler.preempt_one()
    assert list(sequence.token_ids) == [5, 6, 7] and sequence.target_len == 6


@pytest.mark.parametrize("depth", [2, 3])
def test_tokens_after_a_stop_are_surplus_and_never_delivered(depth: int) -> None:
    scheduler = make_scheduler(config=make_config(max_steps_in_flight=depth))
    scheduler.add(
        make_request("a", 4, stop=StopRules(max_tokens=20, stop_token_ids=frozenset({9})))
    )
    scheduler.add(make_request("b", 4, 20))
    plans = fill(scheduler)
    scheduler.apply(make_result(plans[0], [9, 1]))
    (ended,) = scheduler.take_finished()
    assert ended.output_token_ids == [9] and ended.finish_reason is FinishReason.STOP
    for plan in plans[1:]:
        scheduler.apply(make_result(plan, [8, 2]))
        scheduler.check_integrity()
    assert ended.output_token_ids == [9] and ended.logprobs == [-0.5]
    assert scheduler.stats.num_surplus_tokens == depth - 1
    (other,) = scheduler.sequences
    assert other.output_token_ids == [1] + [2] * (depth - 1)
    assert step(scheduler).left == (0,)


def test_the_first_token_of_a_prompt_that_was_aborted_in_flight_is_surplus() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 4))
    scheduler.add(make_request("b", 4))
    plan = scheduler.plan()
    assert plan is not None
    scheduler.abort("a")
    (ended,) = scheduler.take_finished()
    scheduler.apply(make_result(plan, [8, 9]))
    assert ended.output_token_ids == []
    assert ended.logprobs == []
    assert scheduler.sequences[0].output_token_ids == [9]
    assert scheduler.stats.num_surplus_tokens == scheduler.stats.num_accepted_tokens == 1


def test_lengths_known_in_advance_produce_no_surplus() -> None:
    for depth in (1, 2, 3):
        scheduler = make_scheduler(config=make_config(max_steps_in_flight=depth, max_model_len=12))
        scheduler.add(make_request("a", 4, 5))
        scheduler.add(make_request("b", 8, 50))
        while scheduler.has_unfinished:
            plans = fill(scheduler)
            for plan in plans:
                scheduler.apply(make_result(plan))
        outputs = {s.request_id: s.num_output_tokens for s in scheduler.take_finished()}
        assert outputs == {"a": 5, "b": 4}
        assert scheduler.stats.num_surplus_tokens == 0


def test_a_row_of_an_ended_sequence_is_reused_while_its_surplus_is_in_flight() -> None:
    config = make_config(max_num_seqs=1, max_steps_in_flight=2)
    scheduler = make_scheduler(config=config)
    rules = StopRules(max_tokens=20, stop_token_ids=frozenset({9}))
    scheduler.add(make_request("a", 4, stop=rules))
    scheduler.add(make_request("b", 4, stop=rules))
    first, second = fill(scheduler)
    scheduler.apply(make_result(first, 9))
    third = scheduler.plan()
    assert third is not None
    assert third.left == (0,) and third.joined[0].row == 0 and third.joined[0].request_id == "b"
    scheduler.apply(make_result(second, 5))  # Of "a", which has ended.
    (b,) = scheduler.sequences
    assert b.output_token_ids == []
    scheduler.apply(make_result(third, 6))
    assert b.output_token_ids == [6]


@pytest.mark.parametrize("depth", [2, 3])
def test_tokens_in_flight_at_a_preemption_are_delivered_once_and_awaited(depth: int) -> None:
    scheduler = make_scheduler(config=make_config(max_steps_in_flight=depth))
    scheduler.add(make_request("a", [5, 6, 7], 9))
    (sequence,) = scheduler.sequences
    plans = fill(scheduler)
    assert scheduler.preempt_one() == sequence.seq_id
    assert (sequence.row, sequence.num_computed_tokens) == (None, 0)
    for due, plan in enumerate(plans):
        # Depth has room again from the second result on, but the tokens are still awaited.
        assert scheduler.plan() is None
        assert scheduler.idle_cause is IdleCause.WAITING_FOR_RESULTS
        scheduler.apply(make_result(plan, 20 + due))
        scheduler.check_integrity()
    assert sequence.output_token_ids == list(range(20, 20 + depth))
    again = scheduler.plan()
    assert again is not None
    (join,) = again.joined
    assert join.token_ids == (5, 6, 7, *range(20, 20 + depth))
    assert again.prefill_chunks[0].stop == 3 + depth and again.prefill_chunks[0].is_final


def test_a_token_in_flight_at_a_preemption_may_end_the_sequence() -> None:
    scheduler = make_scheduler(config=make_config(max_steps_in_flight=2))
    rules = StopRules(max_tokens=20, stop_token_ids=frozenset({9}))
    scheduler.add(make_request("a", 4, stop=rules))
    first, second = fill(scheduler)
    scheduler.preempt_one()
    scheduler.apply(make_result(first, 9))
    (ended,) = scheduler.take_finished()
    assert ended.output_token_ids == [9]
    assert scheduler.num_waiting == 0 and not scheduler.has_unfinished
    scheduler.apply(make_result(second, 8))
    assert scheduler.stats.num_surplus_tokens == 1


def test_another_ones_end_costs_a_preempted_sequence_no_token_in_flight() -> None:
    scheduler = make_scheduler(config=make_config(max_steps_in_flight=3))
    rules = StopRules(max_tokens=20, stop_token_ids=frozenset({9}))
    scheduler.add(make_request("a", 4, stop=rules))
    scheduler.add(make_request("b", 4, stop=rules))
    first, second, third = fill(scheduler)
    (_, b) = scheduler.sequences
    assert scheduler.preempt_one() == b.seq_id
    scheduler.apply(make_result(first, [9, 1]))
    scheduler.apply(make_result(second, [5, 2]))
    scheduler.apply(make_result(third, [6, 3]))
    assert b.output_token_ids == [1, 2, 3]
    assert scheduler.stats.num_surplus_tokens == 2


def test_the_cap_may_be_reached_by_tokens_in_flight_at_a_preemption() -> None:
    scheduler = make_scheduler(config=make_config(max_steps_in_flight=3))
    scheduler.add(make_request("a", 4, 3))
    plans = fill(scheduler)
    assert len(plans) == 3
    scheduler.preempt_one()
    for plan in plans:
        scheduler.apply(make_result(plan))
    (ended,) = scheduler.take_finished()
    assert ended.num_output_tokens == 3 and ended.finish_reason is FinishReason.LENGTH


def test_a_chunk_of_an_earlier_admission_does_not_count_for_the_next() -> None:
    """Preempted while a chunk that is not final is in flight."""
    config = make_config(max_num_batched_tokens=8, max_steps_in_flight=2)
    scheduler = make_scheduler(config=config, enable_prefix_caching=False)
    scheduler.add(make_request("a", 20))
    (sequence,) = scheduler.sequences
    first, second = fill(scheduler)
    scheduler.preempt_one()
    scheduler.apply(make_result(first))
    assert sequence.num_computed_tokens == 0
    scheduler.apply(make_result(second))
    assert sequence.num_computed_tokens == 0
    again = scheduler.plan()
    assert again is not None and again.prefill_chunks[0].start == 0


def test_steps_without_a_sequence_do_not_change_what_is_pending_for_it() -> None:
    """A final chunk, then a step of others only, then a preemption: one token, no more."""
    config = make_config(max_num_seqs=2, max_num_batched_tokens=8, max_steps_in_flight=3)
    scheduler = make_scheduler(config=config)
    scheduler.add(make_request("a", 4, 1))
    scheduler.add(make_request("b", 20, 4))
    plans = fill(scheduler)
    a, b = scheduler.sequences
    assert a.target_len == 5 and b.target_len == 21
    assert [chunk.row for plan in plans for chunk in plan.prefill_chunks] == [0, 1, 1, 1]
    scheduler.preempt_one()
    scheduler.preempt_one()
    assert (a.target_len, b.target_len) == (5, 21)
    for plan in plans:
        scheduler.apply(make_result(plan))
    assert (a.num_output_tokens, b.num_output_tokens) == (1, 1)


@pytest.mark.parametrize("lateness", [0, 1])
def test_two_sequences_in_a_pool_for_one_and_a_half(lateness: int) -> None:
    """Pool 4 blocks of 4, two prompts of 6 with 6 tokens each; the younger is preempted."""
    requests = (make_request("a", 6, 6), make_request("b", 6, 6))
    outputs: list[dict[tuple[str, int], list[int]]] = []
    for num_blocks in (100, 4):
        scenario = Scenario(
            requests=requests,
            num_blocks=num_blocks,
            config=make_config(max_steps_in_flight=2),
            lateness=lambda tick, num: num * lateness,
        )
        outcome = run(scenario)
        outputs.append({key: s.output_token_ids[:] for key, s in outcome.sequences.items()})
        preempted = [s.num_preemptions for s in outcome.sequences.values()]
        assert preempted == ([0, 0] if num_blocks == 100 else [0, 1])
    assert outputs[0] == outputs[1]
    assert all(len(output) == 6 for output in outputs[0].values())


def test_an_almost_fully_cached_prompt_in_one_chunk() -> None:
    """Prefix on, deferred: the first token of such a request goes to output index 0."""
    prompt = list(range(12))
    outputs: list[list[int]] = []
    for caching in (True, False):
        scenario = Scenario(
            requests=(make_request("p", prompt, 1),),
            arrivals={4: (make_request("c", [*prompt, 50, 51], 3),)},
            num_blocks=16,
            config=make_config(max_num_batched_tokens=16, max_steps_in_flight=2),
            enable_prefix_caching=caching,
            model=HashModel(),
        )
        outcome = run(scenario)
        c = outcome.sequences["c", 0]
        assert c.num_cached_tokens == (12 if caching else 0)
        assert outcome.stats.num_prefill_tokens == 12 + (2 if caching else 14)
        assert c.prompt_token_ids == (*prompt, 50, 51) and c.num_output_tokens == 3
        outputs.append(c.output_token_ids[:])
    assert outputs[0] == outputs[1]
