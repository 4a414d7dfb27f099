"""Results of rows with drafts: only the shape that the plan asked for, counters that stay true."""

import dataclasses
import itertools
import math
from typing import Any

import pytest

from syncline.scheduler_core import (
    ColumnSpan,
    FinishReason,
    ResultError,
    RowError,
    Scheduler,
    SchedulerStats,
    SequenceId,
    StepPlan,
    StopRules,
)
from syncline.scheduler_core.testing import (
    describe,
    make_config,
    make_counted_result,
    make_request,
    make_result,
    make_scheduler,
    step,
)


def verifying(
    *num_drafts: int, window: int = 1, depth: int = 1, stop_id: int = 99
) -> tuple[Scheduler, StepPlan]:
    """A sequence per number, each with one token (7), and a plan with so many drafts for each."""
    scheduler = make_scheduler(config=make_config(max_steps_in_flight=depth))
    rules = StopRules(max_tokens=50, stop_token_ids=frozenset({stop_id}))
    for i in range(len(num_drafts)):
        scheduler.add(make_request("abcdef"[i], 4, stop=rules))
    step(scheduler)
    wanted = {SequenceId(i): k for i, k in enumerate(num_drafts)}
    plan = scheduler.plan(window=window, num_draft_tokens=wanted)
    assert plan is not None and plan.num_draft_tokens == num_drafts
    return scheduler, plan


def draft_counters(stats: SchedulerStats) -> tuple[int, int, int, int, int]:
    """Drafts, accepted, rejected, recovered, bonus; what always holds of them."""
    counters = (
        stats.num_draft_tokens,
        stats.num_accepted_draft_tokens,
        stats.num_rejected_draft_tokens,
        stats.num_recovered_tokens,
        stats.num_bonus_tokens,
    )
    assert min(counters) >= 0
    assert counters[0] == counters[1] + counters[2]
    return counters


NAN = math.nan
# Any: keyword arguments of one dataclass, whose fields have different types.
MISSHAPEN: list[tuple[str, dict[str, Any]]] = [
    ("row 0 .* must have between 1 and 6 tokens, got 7", {"counts": (7, 2)}),
    ("row 0 .* must have between 1 and 6 tokens, got 0", {"counts": (0, 9)}),
    ("row 1 .* must have between 1 and 8 tokens, got 9", {"counts": (0, 9), "errors": (0,)}),
    (
        "row 1 .* must have between 1 and 8 tokens, got 0",
        {"counts": (6, 0), "token_ids": [1] * 6, "logprobs": [-1.0] * 6},
    ),
    ("row 0 .* must have between 0 and 6 tokens, got -1", {"counts": (-1, 10), "errors": (0,)}),
    ("counts must have 2 entries, got 3", {"counts": (4, 4, 1)}),
    ("window_counts must be given for 2 steps with drafts", {"window_counts": None}),
    ("window_counts must have 4 entries, got 5", {"window_counts": (2, 3, 4, 0, 0)}),
    ("window_counts must have 4 entries, got 2", {"window_counts": (5, 4)}),
    (r"decode row 0: the sum of \(2, 2\) must be .* 5", {"window_counts": (2, 2, 1, 4)}),
    (r"decode row 1: the sum of \(1, 4\) must be .* 4", {"window_counts": (2, 3, 1, 4)}),
    ("decode row 0: .* between 0 and 3 tokens, got 4", {"window_counts": (4, 1, 1, 3)}),
    ("decode row 0: .* between 0 and 3 tokens, got -1", {"window_counts": (-1, 6, 1, 3)}),
    ("decode row 1: .* between 0 and 4 tokens, got 5", {"window_counts": (2, 3, 5, -1)}),
    (r"decode row 1: .* after one that did not: \(0, 4\)", {"window_counts": (2, 3, 0, 4)}),
    ("logprob nan of request 'a' is not finite", {"logprobs": [-1.0] * 4 + [NAN] + [-1.0] * 4}),
    ("logprob nan of request 'b' is not finite", {"logprobs": [-1.0] * 5 + [NAN] + [-1.0] * 3}),
    ("token id -3 is negative", {"token_ids": [1] * 8 + [-3]}),
    ("token_ids must have 9 entries", {"token_ids": [1] * 8}),
    ("logprobs must have 9 entries", {"logprobs": [-1.0] * 10}),
    ("row 5 is not part of the step", {"errors": (5,)}),
]


@pytest.mark.parametrize(("message", "change"), MISSHAPEN)
def test_a_misshapen_result_is_refused_whole_and_the_right_one_still_works(
    message: str,
    change: dict[str, Any],  # Any: see MISSHAPEN.
) -> None:
    """Two steps at once, two and three drafts: rows of at most six and eight tokens."""
    scheduler, plan = verifying(2, 3, window=2)
    right = make_counted_result(plan, [[1, 2], [3, 4, 5]], [[1, 2, 3, 4]])
    before = describe(scheduler)
    errors = tuple(RowError(row=row, message="x") for row in change.get("errors", ()))
    with pytest.raises(ResultError, match=message):
        scheduler.apply(dataclasses.replace(right, **{**change, "errors": errors}))
    assert describe(scheduler) == before
    scheduler.check_integrity()
    scheduler.apply(right)
    scheduler.check_integrity()
    outputs = [s.output_token_ids for s in scheduler.sequences]
    assert outputs == [[7, 1, 2, 3, 4, 5], [7, 1, 2, 3, 4]]
    # a: 1 of 2, then 2 of 2 accepted; b: 3 of 3, its second step was not run.
    assert draft_counters(scheduler.stats) == (7, 6, 1, 1, 2)


def test_every_number_of_accepted_drafts_is_taken_and_counted() -> None:
    for num_drafts in range(1, 5):
        for num_accepted in range(num_drafts + 1):
            scheduler, plan = verifying(num_drafts)
            row = list(range(20, 21 + num_accepted))
            scheduler.apply(make_counted_result(plan, [row]))
            scheduler.check_integrity()
            (sequence,) = scheduler.sequences
            assert sequence.output_token_ids == [7, *row]
            assert len(sequence.logprobs) == 2 + num_accepted
            num_rejected = num_drafts - num_accepted
            is_bonus = num_accepted == num_drafts
            expected = (num_drafts, num_accepted, num_rejected, int(not is_bonus), int(is_bonus))
            assert draft_counters(scheduler.stats) == expected
            assert scheduler.stats.num_accepted_tokens == 2 + num_accepted


def test_rows_without_drafts_count_none_and_neither_does_a_final_chunk() -> None:
    scheduler, plan = verifying(2, 0)
    scheduler.apply(make_counted_result(plan, [[1]], [[2]]))
    assert draft_counters(scheduler.stats) == (2, 0, 2, 1, 0)
    scheduler.add(make_request("p", 5, 3))
    mixed = scheduler.plan(num_draft_tokens=1)
    assert mixed is not None and mixed.num_draft_tokens == (1, 1)
    scheduler.apply(make_counted_result(mixed, [[3, 4]], [[5]], [[6]]))
    assert [s.output_token_ids for s in scheduler.sequences] == [[7, 1, 3, 4], [7, 2, 5], [6]]
    assert draft_counters(scheduler.stats) == (4, 1, 3, 2, 1)


def test_a_result_without_counts_has_one_token_per_row_and_no_accepted_draft() -> None:
    """The rows have yielded less than they might: what was in flight is put right."""
    scheduler, plan = verifying(2, 1)
    scheduler.apply(make_result(plan, [3, 4]))
    scheduler.check_integrity()
    assert [s.output_token_ids for s in scheduler.sequences] == [[7, 3], [7, 4]]
    assert draft_counters(scheduler.stats) == (3, 0, 3, 2, 0)
    window = scheduler.plan(window=3)
    assert window is not None and window.window == 3
    scheduler.apply(make_result(window, [5, 6]))
    scheduler.check_integrity()
    assert [s.output_token_ids for s in scheduler.sequences] == [[7, 3, 5], [7, 4, 6]]


@pytest.mark.parametrize("disturb", ["abort", "preempt"])
def test_a_row_disturbed_before_its_result_comes_is_counted_truly(disturb: str) -> None:
    """B12: three drafts for A and B; A is gone when the result comes, B yields three tokens."""
    for num_tokens in range(5):
        scheduler, plan = verifying(3, 3)
        b, a = scheduler.sequences  # The younger is preempted.
        if disturb == "abort":
            scheduler.abort(a.request_id)
        else:
            scheduler.preempt_one()
            if not num_tokens:
                continue  # Preempted, not ended: its row has run.
        scheduler.apply(make_counted_result(plan, [[1, 2, 3]], [[4, 5, 6, 8][:num_tokens]]))
        scheduler.check_integrity()
        assert b.output_token_ids == [7, 1, 2, 3]
        stats = scheduler.stats
        if disturb == "abort":
            assert a.output_token_ids == [7]
            assert draft_counters(stats) == (3, 2, 1, 1, 0)
            assert (stats.num_accepted_tokens, stats.num_surplus_tokens) == (5, num_tokens)
        else:
            assert a.output_token_ids == [7, 4, 5, 6, 8][: 1 + num_tokens]
            num_accepted = 2 + num_tokens - 1
            num_bonus = int(num_tokens == 4)
            expected = (6, num_accepted, 6 - num_accepted, 2 - num_bonus, num_bonus)
            assert draft_counters(stats) == expected
            assert (stats.num_accepted_tokens, stats.num_surplus_tokens) == (5 + num_tokens, 0)


def test_a_failed_row_counts_no_drafts_and_its_tokens_are_dropped() -> None:
    for num_tokens in range(4):
        scheduler, plan = verifying(2, 2)
        result = make_counted_result(plan, [[1, 2, 3][:num_tokens]], [[4, 5]])
        scheduler.apply(dataclasses.replace(result, errors=(RowError(row=0, message="bad"),)))
        scheduler.check_integrity()
        (failed,) = scheduler.take_finished()
        assert failed.finish_reason is FinishReason.ERROR and failed.output_token_ids == [7]
        (other,) = scheduler.sequences
        assert other.output_token_ids == [7, 4, 5]
        assert draft_counters(scheduler.stats) == (2, 1, 1, 1, 0)
        assert scheduler.stats.num_surplus_tokens == num_tokens


def test_tokens_of_a_row_in_flight_after_the_end_are_surplus_and_count_no_drafts() -> None:
    """Depth 3: the stop comes first, two verify steps of the ended sequence after it."""
    scheduler, first = verifying(2, depth=3, stop_id=9)
    others = [scheduler.plan(num_draft_tokens=2), scheduler.plan(num_draft_tokens=2)]
    scheduler.apply(make_counted_result(first, [[9, 1]]))
    (ended,) = scheduler.take_finished()
    assert ended.output_token_ids == [7, 9]
    before = draft_counters(scheduler.stats)
    assert before == (2, 1, 1, 1, 0)
    for num_tokens, plan in zip((3, 0), others, strict=True):
        assert plan is not None and plan.num_draft_tokens == (2,)
        scheduler.apply(make_counted_result(plan, [[1, 2, 3][:num_tokens]]))
        assert draft_counters(scheduler.stats) == before
    assert ended.output_token_ids == [7, 9] and ended.logprobs == [-0.5, -9.5]
    assert (scheduler.stats.num_accepted_tokens, scheduler.stats.num_surplus_tokens) == (2, 4)


def test_steps_of_a_window_that_began_after_the_end_count_no_drafts() -> None:
    """A window of three steps with two drafts, the stop at every index of nine tokens."""
    for index in range(9):
        scheduler, plan = verifying(2, window=3, stop_id=9)
        row = [9 if i == index else 20 + i for i in range(9)]
        scheduler.apply(make_counted_result(plan, [row[:3], row[3:6], row[6:]]))
        (ended,) = scheduler.take_finished()
        assert ended.output_token_ids == [7, *row[: index + 1]]
        num_steps = index // 3 + 1
        expected = (2 * num_steps, 2 * num_steps, 0, 0, num_steps)
        assert draft_counters(scheduler.stats) == expected
        assert scheduler.stats.num_surplus_tokens == 8 - index


def test_every_cut_of_a_window_by_the_runner_is_taken() -> None:
    """A runner may stop a window between steps, never inside one."""
    for splits in itertools.product((1, 2, 3), repeat=3):
        for num_steps in (1, 2, 3):
            scheduler, plan = verifying(2, 2, window=3)
            rows = [[20 + i] * split for i, split in enumerate(splits[:num_steps])]
            scheduler.apply(make_counted_result(plan, rows, [[5], [6], [8]]))
            scheduler.check_integrity()
            num_new = sum(splits[:num_steps])
            a, b = scheduler.sequences
            assert a.num_output_tokens == 1 + num_new
            assert b.output_token_ids == [7, 5, 6, 8]
            num_accepted = num_new - num_steps
            assert draft_counters(scheduler.stats)[:2] == (2 * num_steps + 6, num_accepted)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_pending_tokens_shrink_to_what_came(depth: int) -> None:
    """#28 #68: no width is stored, so none is wrong: the steps in flight are asked."""
    for counts in itertools.product((1, 2, 3), repeat=depth):
        scheduler, first = verifying(2, depth=depth)
        (sequence,) = scheduler.sequences
        plans = [first]
        while (plan := scheduler.plan(num_draft_tokens=2)) is not None:
            plans.append(plan)
        assert len(plans) == depth and sequence.target_len == 5 + 3 * depth
        num_tokens = 5
        for i, (plan, count) in enumerate(zip(plans, counts, strict=True)):
            scheduler.apply(make_counted_result(plan, [[7] * count]))
            scheduler.check_integrity()
            num_tokens += count
            assert sequence.num_tokens == num_tokens == sequence.num_computed_tokens + 1
            assert sequence.target_len == num_tokens + 3 * (depth - 1 - i)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_preemption_with_drafts_in_flight_strips_nothing(depth: int) -> None:
    """#28 #29 #68 #75 #82 #90: every token that comes is kept with its logprob, none is made up."""
    for counts in itertools.product((1, 3), repeat=depth):
        scheduler, first = verifying(2, depth=depth)
        (sequence,) = scheduler.sequences
        plans = [first]
        while (plan := scheduler.plan(num_draft_tokens=2)) is not None:
            plans.append(plan)
        scheduler.preempt_one()
        assert sequence.num_tokens == 5 and sequence.logprobs == [-0.5]
        ids = iter(range(20, 40))
        for plan, count in zip(plans, counts, strict=True):
            assert scheduler.plan(num_draft_tokens=2) is None  # Its tokens are awaited.
            scheduler.apply(make_counted_result(plan, [[next(ids) for _ in range(count)]]))
            scheduler.check_integrity()
        expected = list(range(20, 20 + sum(counts)))
        assert sequence.output_token_ids == [7, *expected]
        assert sequence.logprobs == [-0.5, *(-0.5 - i for i in expected)]
        again = scheduler.plan(num_draft_tokens=2)
        assert again is not None and again.num_draft_tokens is None
        assert again.joined[0].token_ids == sequence.token_ids
        num_drafts, num_accepted, *_ = draft_counters(scheduler.stats)
        assert (num_drafts, num_accepted) == (2 * depth, sum(counts) - depth)


def test_columns_and_versions_of_a_row_are_cut_where_its_tokens_are() -> None:
    """D7, D21: at every index of a row of four, beside the token itself and its logprob."""
    for index in range(4):
        scheduler, plan = verifying(3, stop_id=9)
        row = [9 if i == index else 20 + i for i in range(4)]
        result = make_counted_result(plan, [row])
        span = ColumnSpan(row=0, name="x", start=4, values=("p4", "p5", "p6", "p7"))
        scheduler.apply(dataclasses.replace(result, columns=(span,)))
        (ended,) = scheduler.take_finished()
        num_outputs = index + 2
        assert ended.output_token_ids == [7, *row][:num_outputs]
        assert ended.logprobs == [-0.5, *(-0.5 - i for i in row)][:num_outputs]
        assert ended.version_runs == [(0, num_outputs)]
        # Positions 4 to 7 were computed; the sequence has 4 + num_outputs of them.
        kept = range(4, min(8, 4 + num_outputs))
        assert ended.columns == {"x": {p: f"p{p}" for p in kept}}
