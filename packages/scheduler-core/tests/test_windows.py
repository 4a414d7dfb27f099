"""Windows: several decode steps in one plan, rows that yield fewer tokens than they might."""

import itertools
import random

import pytest

from syncline.scheduler_core import Request, Sequence, StepResult, StopRules
from syncline.scheduler_core.oracle import (
    HashModel,
    Scenario,
    apply_at_once,
    apply_when_full,
    reference_output,
    run,
)
from syncline.scheduler_core.testing import make_config, make_request, make_scheduler, step


def assert_as_expected(requests: tuple[Request, ...], sequences: dict[str, Sequence]) -> None:
    for request in requests:
        expected = reference_output(HashModel(), request, 0, max_model_len=64)
        sequence = sequences[request.request_id]
        assert tuple(sequence.output_token_ids) == expected.token_ids
        assert tuple(sequence.logprobs) == expected.logprobs
        assert sequence.finish_reason is expected.finish_reason


@pytest.mark.parametrize("window", [2, 3, 5])
def test_windows_change_the_number_of_steps_and_nothing_else(window: int) -> None:
    rules = StopRules(max_tokens=17, stop_token_ids=frozenset({3, 4}))
    requests = tuple(make_request(name, 3 + i, stop=rules) for i, name in enumerate("abcd"))
    for depth, num_blocks in itertools.product((1, 2, 3), (64, 12, 7)):
        config = make_config(max_num_batched_tokens=8, max_model_len=64, max_steps_in_flight=depth)
        scenario = Scenario(requests=requests, num_blocks=num_blocks, config=config, window=window)
        outcome = run(scenario)
        assert_as_expected(requests, {k[0]: s for k, s in outcome.sequences.items()})


@pytest.mark.parametrize("seed", range(6))
def test_rows_may_yield_fewer_tokens_than_the_window(seed: int) -> None:
    """The upper end of what is in flight is then too high, and is put right when results come."""
    rng = random.Random(seed)
    rules = StopRules(max_tokens=19, stop_token_ids=frozenset({3}))
    requests = tuple(make_request(name, 3 + i, stop=rules) for i, name in enumerate("abc"))
    config = make_config(max_num_batched_tokens=8, max_model_len=64, max_steps_in_flight=3)
    for num_blocks in (64, 9):
        outcome = run(
            Scenario(
                requests=requests,
                num_blocks=num_blocks,
                config=config,
                window=4,
                counts=lambda step_id, row, maximum: rng.randint(1, maximum),
                lateness=rng.choice([apply_at_once, apply_when_full]),
                preempts=frozenset(rng.sample(range(30), 4)),
            )
        )
        assert_as_expected(requests, {k[0]: s for k, s in outcome.sequences.items()})


def test_a_window_ends_at_the_nearest_length_limit() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 4, 4))
    scheduler.add(make_request("b", 4, 9))
    step(scheduler)
    plan = scheduler.plan(window=8)
    assert plan is not None and plan.window == 3
    scheduler.apply(
        StepResult(step_id=plan.step_id, token_ids=[7] * 6, logprobs=[-1.0] * 6, counts=(3, 3))
    )
    assert [s.request_id for s in scheduler.take_finished()] == ["a"]
    assert scheduler.stats.num_decode_tokens == 6


def test_a_row_that_yields_less_than_its_last_window_decodes_on() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 4, 5))
    step(scheduler)
    plan = scheduler.plan(window=4)
    assert plan is not None and plan.window == 4
    assert scheduler.plan() is None  # All it may have is in flight.
    scheduler.apply(
        StepResult(step_id=plan.step_id, token_ids=[7] * 2, logprobs=[-1.0] * 2, counts=(2,))
    )
    scheduler.check_integrity()
    again = scheduler.plan(window=4)
    assert again is not None and again.window == 2 and again.decode_rows == (0,)


def test_every_position_of_a_window_is_reserved() -> None:
    scheduler = make_scheduler(block_size=4)
    scheduler.add(make_request("a", 4, 40))
    (sequence,) = scheduler.sequences
    step(scheduler)
    plan = scheduler.plan(window=7)
    assert plan is not None
    # Positions 4 to 10: the row's second and third block.
    assert sequence.table.num_tokens_capacity == 12
    ((row, first, block_ids),) = plan.new_blocks
    assert (row, first, len(block_ids)) == (0, 1, 2)


def test_tokens_of_a_window_after_the_end_are_surplus() -> None:
    scheduler = make_scheduler()
    rules = StopRules(max_tokens=30, stop_token_ids=frozenset({9}))
    scheduler.add(make_request("a", 4, stop=rules))
    step(scheduler)
    plan = scheduler.plan(window=4)
    assert plan is not None
    scheduler.apply(
        StepResult(
            step_id=plan.step_id,
            token_ids=[1, 9, 2, 3],
            logprobs=[-1.0, -2.0, -3.0, -4.0],
            counts=(4,),
        )
    )
    (ended,) = scheduler.take_finished()
    assert ended.output_token_ids == [7, 1, 9] and ended.logprobs == [-0.5, -1.0, -2.0]
    assert ended.num_computed_tokens == 0 and ended.row is None
    stats = scheduler.stats
    assert (stats.num_accepted_tokens, stats.num_surplus_tokens) == (3, 2)


def test_counters_of_a_row_that_is_aborted_or_preempted_in_flight_stay_true() -> None:
    """Rows of 4 at most; "a" is gone when its result comes, "b" yields 3."""
    for disturb in ("abort", "preempt"):
        scheduler = make_scheduler()
        scheduler.add(make_request("b", 4, 30))
        scheduler.add(make_request("a", 4, 30))
        step(scheduler)
        plan = scheduler.plan(window=4)
        assert plan is not None
        if disturb == "abort":
            scheduler.abort("a")
        else:
            scheduler.preempt_one()
        count = 0 if disturb == "abort" else 2
        scheduler.apply(
            StepResult(
                step_id=plan.step_id,
                token_ids=[1, 2, 3, *[4, 5][:count]],
                logprobs=[-1.0] * (3 + count),
                counts=(3, count),
            )
        )
        scheduler.check_integrity()
        stats = scheduler.stats
        assert (stats.num_accepted_tokens, stats.num_surplus_tokens) == (5 + count, 0)
        assert scheduler.sequences[0].output_token_ids == [7, 1, 2, 3]
