"""Results are taken in step order and only in the shape their plan asked for."""

import dataclasses
import math
from typing import Any

import pytest

from syncline.scheduler_core import (
    ColumnSpan,
    FinishReason,
    ResultError,
    RowError,
    Scheduler,
    StepOrderError,
    StepPlan,
    StepResult,
)
from syncline.scheduler_core.testing import (
    describe,
    make_config,
    make_request,
    make_result,
    make_scheduler,
    step,
)


def two_rows(depth: int = 1) -> tuple[Scheduler, StepPlan]:
    """Two sequences in decode, and the plan of their next step."""
    scheduler = make_scheduler(config=make_config(max_steps_in_flight=depth))
    scheduler.add(make_request("a", 4, 9))
    scheduler.add(make_request("b", 4, 9))
    step(scheduler)
    plan = scheduler.plan()
    assert plan is not None
    return scheduler, plan


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_every_order_but_the_planned_one_is_refused_and_changes_nothing(depth: int) -> None:
    scheduler, first = two_rows(depth)
    plans = [first]
    while (plan := scheduler.plan()) is not None:
        plans.append(plan)
    assert len(plans) == depth
    for due, plan in enumerate(plans):
        before = describe(scheduler)
        wrong = [other.step_id for other in plans if other is not plan] + [0, 99, -1]
        for step_id in wrong:
            result = dataclasses.replace(make_result(plan), step_id=step_id)
            with pytest.raises(StepOrderError) as caught:
                scheduler.apply(result)
            assert (caught.value.expected, caught.value.got) == (plan.step_id, step_id)
            assert describe(scheduler) == before
        scheduler.apply(make_result(plan, 20 + due))
    with pytest.raises(StepOrderError) as caught:
        scheduler.apply(make_result(plans[-1]))
    assert caught.value.expected is None
    assert [s.output_token_ids for s in scheduler.sequences] == [[7, *range(20, 20 + depth)]] * 2


NAN = math.nan
# Any: keyword arguments of one dataclass, whose fields have different types.
MISSHAPEN: list[tuple[str, dict[str, Any]]] = [
    ("token_ids must have 2 entries", {"token_ids": [7]}),
    ("token_ids must have 2 entries", {"token_ids": [7, 7, 7], "logprobs": [-1.0] * 3}),
    ("logprobs must have 2 entries", {"logprobs": [-1.0]}),
    ("logprobs must have 2 entries", {"logprobs": [-1.0] * 3}),
    ("token id -1 is negative", {"token_ids": [7, -1]}),
    ("logprob nan of request 'b' is not finite", {"logprobs": [-1.0, NAN]}),
    ("logprob -inf of request 'a' is not finite", {"logprobs": [-math.inf, -1.0]}),
    ("counts must have 2 entries, got 3", {"counts": (1, 1, 0)}),
    ("must have between 1 and 1 tokens, got 2", {"counts": (2, 0)}),
    ("must have between 1 and 1 tokens, got 0", {"counts": (0, 2)}),
    ("row 5 is not part of the step", {"errors": (RowError(row=5, message="x"),)}),
    (
        "row 5 is not part of the step",
        {"columns": (ColumnSpan(row=5, name="x", start=0, values=(1,)),)},
    ),
    ("starts at -1", {"columns": (ColumnSpan(row=1, name="x", start=-1, values=(1,)),)}),
]


@pytest.mark.parametrize(("message", "change"), MISSHAPEN)
def test_a_misshapen_result_is_refused_whole_and_the_right_one_still_works(
    message: str,
    change: dict[str, Any],  # Any: see MISSHAPEN.
) -> None:
    scheduler, plan = two_rows()
    before = describe(scheduler)
    result = dataclasses.replace(make_result(plan, [7, 8]), **change)
    with pytest.raises(ResultError, match=message):
        scheduler.apply(result)
    assert describe(scheduler) == before
    scheduler.check_integrity()
    scheduler.apply(make_result(plan, [7, 8]))
    assert [s.output_token_ids for s in scheduler.sequences] == [[7, 7], [7, 8]]


def test_a_failed_row_ends_with_its_message_and_the_others_go_on() -> None:
    scheduler, plan = two_rows()
    scheduler.apply(
        StepResult(
            step_id=plan.step_id,
            token_ids=[9],
            logprobs=[-0.5],
            counts=(0, 1),
            errors=(RowError(row=0, message="logits are not numbers"),),
        )
    )
    scheduler.check_integrity()
    (failed,) = scheduler.take_finished()
    assert (failed.request_id, failed.finish_reason) == ("a", FinishReason.ERROR)
    assert failed.finish_detail == "logits are not numbers"
    assert failed.output_token_ids == [7]
    (other,) = scheduler.sequences
    assert other.output_token_ids == [7, 9]


def test_a_failed_row_may_bring_a_token_that_is_no_number_and_it_is_dropped() -> None:
    scheduler, plan = two_rows()
    scheduler.apply(
        StepResult(
            step_id=plan.step_id,
            token_ids=[3, 9],
            logprobs=[NAN, -0.5],
            errors=(RowError(row=0, message="bad"),),
        )
    )
    (failed,) = scheduler.take_finished()
    assert failed.output_token_ids == [7] and failed.logprobs == [-0.5]


def test_kv_of_a_failed_row_is_not_shared() -> None:
    scheduler = make_scheduler(config=make_config(max_num_batched_tokens=8))
    scheduler.add(make_request("a", list(range(12)), 2))
    step(scheduler)  # The first eight positions are computed and shared.
    plan = scheduler.plan()
    assert plan is not None
    scheduler.apply(
        dataclasses.replace(make_result(plan), errors=(RowError(row=0, message="bad"),))
    )
    scheduler.add(make_request("b", list(range(12)), 2))
    assert step(scheduler).joined[0].num_computed_tokens == 8


def test_output_of_a_row_that_failed_later_is_not_shared() -> None:
    scheduler = make_scheduler()
    prompt = list(range(10, 16))
    scheduler.add(make_request("a", prompt, 20))
    for _ in range(8):
        step(scheduler)  # 14 tokens, KV of 13: the prompt and two more blocks.
    plan = scheduler.plan()
    assert plan is not None
    scheduler.apply(
        dataclasses.replace(make_result(plan), errors=(RowError(row=0, message="bad"),))
    )
    (failed,) = scheduler.take_finished()
    scheduler.add(make_request("b", failed.token_ids))
    assert step(scheduler).joined[0].num_computed_tokens == 4


def test_an_error_of_a_chunk_that_is_not_final_ends_its_sequence() -> None:
    scheduler = make_scheduler(config=make_config(max_num_batched_tokens=8))
    scheduler.add(make_request("a", 12))
    plan = scheduler.plan()
    assert plan is not None
    scheduler.apply(
        StepResult(
            step_id=plan.step_id,
            token_ids=[],
            logprobs=[],
            errors=(RowError(row=0, message="bad"),),
        )
    )
    (failed,) = scheduler.take_finished()
    assert failed.finish_reason is FinishReason.ERROR and failed.output_token_ids == []
    scheduler.check_integrity()
