"""What a plan says: order of rows, chunks within the budget, rows and blocks as they change."""

import dataclasses

import pytest

from syncline.scheduler_core import IdleCause, PrefillChunk, StepPlan
from syncline.scheduler_core.testing import (
    make_config,
    make_request,
    make_result,
    make_scheduler,
    num_yielding_rows,
    step,
)


def num_planned_tokens(plan: StepPlan) -> int:
    chunks = sum(chunk.stop - chunk.start for chunk in plan.prefill_chunks)
    return len(plan.decode_rows) * plan.window + chunks


def test_a_plan_cannot_be_changed() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request())
    plan = scheduler.plan()
    assert plan is not None
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.step_id = 3  # type: ignore[misc]  # That it fails is the test.


def test_a_joining_row_brings_its_tokens_and_its_whole_table() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [5, 6, 7, 8, 9], num_samples=1))
    plan = step(scheduler)
    (join,) = plan.joined
    (sequence,) = scheduler.sequences
    assert (join.row, join.seq_id, join.request_id, join.sample_index) == (0, 0, "a", 0)
    assert join.token_ids == (5, 6, 7, 8, 9) and join.num_prompt_tokens == 5
    assert join.num_computed_tokens == 0
    assert join.block_ids == tuple(sequence.table.block_ids) and len(join.block_ids) == 2
    assert plan.prefill_chunks == (PrefillChunk(row=0, start=0, stop=5, is_final=True),)
    assert plan.decode_rows == () and plan.left == () and plan.new_blocks == ()


def test_decodes_come_first_then_running_prefills_then_admissions_within_the_budget() -> None:
    scheduler = make_scheduler(config=make_config(max_num_batched_tokens=10))
    scheduler.add(make_request("a", 4))
    step(scheduler)
    scheduler.add(make_request("b", 12))
    scheduler.add(make_request("c", 6))
    first = step(scheduler)
    assert first.decode_rows == (0,)
    assert first.prefill_chunks == (PrefillChunk(row=1, start=0, stop=9, is_final=False),)
    assert scheduler.waiting_cause is IdleCause.MAX_NUM_BATCHED_TOKENS
    second = step(scheduler)
    assert second.decode_rows == (0,)
    assert second.prefill_chunks == (
        PrefillChunk(row=1, start=9, stop=12, is_final=True),
        PrefillChunk(row=2, start=0, stop=6, is_final=True),
    )
    assert num_planned_tokens(first) == num_planned_tokens(second) == 10
    third = step(scheduler)
    assert third.decode_rows == (0, 1, 2)


def test_a_decoding_row_is_never_planned_as_a_prefill() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 4, 8))
    assert step(scheduler).prefill_chunks
    for _ in range(7):
        plan = step(scheduler)
        assert plan.decode_rows == (0,) and plan.prefill_chunks == ()


def test_the_rows_are_the_same_tuple_while_membership_is_unchanged() -> None:
    scheduler = make_scheduler(config=make_config(max_steps_in_flight=2))
    scheduler.add(make_request("a", 4, 20))
    scheduler.add(make_request("b", 4, 20))
    step(scheduler)
    plans = [step(scheduler) for _ in range(8)]
    assert all(plan.decode_rows is plans[0].decode_rows for plan in plans)
    scheduler.add(make_request("c", 4, 20))
    step(scheduler)
    joined = step(scheduler)
    assert joined.decode_rows == (0, 1, 2)
    scheduler.abort("b")
    assert step(scheduler).decode_rows == (0, 2)


def test_at_most_max_num_seqs_hold_a_row() -> None:
    scheduler = make_scheduler(config=make_config(max_num_seqs=2))
    for name in "abc":
        scheduler.add(make_request(name, 4, 3))
    plan = step(scheduler)
    assert [join.request_id for join in plan.joined] == ["a", "b"]
    assert scheduler.waiting_cause is IdleCause.MAX_NUM_SEQS
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)
    step(scheduler)
    step(scheduler)
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 1)
    assert [join.request_id for join in step(scheduler).joined] == ["c"]


def test_a_row_given_up_is_reported_once_and_may_be_joined_at_once() -> None:
    scheduler = make_scheduler(config=make_config(max_num_seqs=2))
    scheduler.add(make_request("a", 4, 1))
    scheduler.add(make_request("b", 4, 5))
    scheduler.add(make_request("c", 4, 5))
    assert step(scheduler).left == ()
    plan = step(scheduler)
    assert plan.left == (0,)
    assert [(join.row, join.request_id) for join in plan.joined] == [(0, "c")]
    assert step(scheduler).left == ()


def test_new_blocks_continue_the_rows_table_and_come_one_position_early_never_late() -> None:
    scheduler = make_scheduler(block_size=4)
    scheduler.add(make_request("a", 3, 12))
    (sequence,) = scheduler.sequences
    tables = list(step(scheduler).joined[0].block_ids)
    for written in range(3, 13):
        plan = scheduler.plan()
        assert plan is not None
        for row, first, block_ids in plan.new_blocks:
            assert row == 0 and first == len(tables)
            tables += block_ids
        assert tables == list(sequence.table.block_ids)
        assert len(tables) == written // 4 + 1  # The position `written` is covered, just so.
        scheduler.apply(make_result(plan))


def test_a_block_comes_in_time_when_every_step_crosses_a_boundary() -> None:
    """Growth of a whole block per step, from a length that is a multiple of the block size."""
    scheduler = make_scheduler(block_size=4)
    scheduler.add(make_request("a", 8, 24))
    (sequence,) = scheduler.sequences
    step(scheduler)
    while not sequence.is_finished:
        plan = scheduler.plan(window=4)
        assert plan is not None
        scheduler.check_integrity()
        assert sequence.table.num_tokens_capacity >= sequence.num_issued_tokens
        scheduler.apply(
            dataclasses.replace(make_result(plan, [7] * plan.window), counts=(plan.window,))
        )


@pytest.mark.parametrize("counts", [None, (1, 1)])
def test_rows_that_yield_are_decode_rows_then_final_chunks_in_order(
    counts: tuple[int, ...] | None,
) -> None:
    scheduler = make_scheduler(config=make_config(max_num_batched_tokens=20))
    scheduler.add(make_request("a", 4))
    step(scheduler, 1)
    scheduler.add(make_request("b", 5))
    scheduler.add(make_request("c", 30))
    plan = scheduler.plan()
    assert plan is not None and num_yielding_rows(plan) == 2
    scheduler.apply(dataclasses.replace(make_result(plan, [11, 12]), counts=counts))
    outputs = [sequence.output_token_ids for sequence in scheduler.sequences]
    assert outputs == [[1, 11], [12], []]


def test_priority_goes_before_arrival() -> None:
    config = dataclasses.replace(make_config(max_num_seqs=1), scheduling_policy="priority")
    scheduler = make_scheduler(config=config)
    for name, priority in (("late", 1), ("first", 0), ("second", 0), ("urgent", -1)):
        scheduler.add(dataclasses.replace(make_request(name, 3, 1), priority=priority))
    order = [step(scheduler).joined[0].request_id for _ in range(4)]
    assert order == ["urgent", "first", "second", "late"]


def test_an_idle_scheduler_says_why() -> None:
    scheduler = make_scheduler(config=make_config(max_steps_in_flight=2))

    def plan() -> tuple[StepPlan | None, IdleCause | None]:
        return scheduler.plan(), scheduler.idle_cause

    assert plan() == (None, IdleCause.NO_REQUESTS)
    scheduler.add(make_request("a", 3, 1))
    first, cause = plan()
    assert first is not None and cause is None
    # Its only token is in flight: there is nothing to plan although depth would allow it.
    assert plan() == (None, IdleCause.WAITING_FOR_RESULTS)
    scheduler.apply(make_result(first))
    assert plan() == (None, IdleCause.NO_REQUESTS)


def test_stats_count_what_was_planned_and_what_was_kept() -> None:
    scheduler = make_scheduler(config=make_config(max_steps_in_flight=2))
    scheduler.add(make_request("a", 5, 3))
    while scheduler.has_unfinished:
        step(scheduler)
    stats = scheduler.stats
    assert (stats.num_prefill_tokens, stats.num_decode_tokens) == (5, 2)
    assert (stats.num_accepted_tokens, stats.num_surplus_tokens) == (3, 0)
    assert (stats.num_plans, stats.num_admissions, stats.num_preemptions) == (3, 1, 0)
