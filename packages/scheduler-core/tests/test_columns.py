"""Per-position columns: the first value of each position, all of the prompt, none beyond."""

import dataclasses

import pytest

from syncline.scheduler_core import (
    ColumnSpan,
    FinishReason,
    StepPlan,
    StepResult,
    StopRules,
    UnfinishedPolicy,
)
from syncline.scheduler_core.oracle import HashModel, Scenario, run
from syncline.scheduler_core.testing import (
    make_config,
    make_request,
    make_result,
    make_scheduler,
    step,
)


def with_columns(plan: StepPlan, *spans: tuple[int, int, list[object]]) -> StepResult:
    columns = tuple(
        ColumnSpan(row=row, name="x", start=start, values=values) for row, start, values in spans
    )
    return dataclasses.replace(make_result(plan), columns=columns)


def test_a_request_that_needs_prompt_columns_bypasses_hits_and_still_fills_the_cache() -> None:
    scheduler = make_scheduler()
    prompt = list(range(8))
    scheduler.add(make_request("a", prompt, 1))
    step(scheduler)
    needy = dataclasses.replace(
        make_request("b", prompt, 2), required_prompt_columns=frozenset({"x"})
    )
    scheduler.add(needy)
    plan = scheduler.plan()
    assert plan is not None and plan.joined[0].num_computed_tokens == 0
    scheduler.apply(with_columns(plan, (0, 0, [None, *range(1, 8)])))
    (b,) = scheduler.sequences
    assert b.columns["x"] == {0: None, **{i: i for i in range(1, 8)}}
    # Its prompt is through: after a preemption hits serve it like anyone.
    scheduler.preempt_one()
    again = scheduler.plan()
    assert again is not None and again.joined[0].num_computed_tokens == 8


def test_a_prompt_whose_columns_did_not_come_fails_by_name() -> None:
    scheduler = make_scheduler()
    scheduler.add(
        dataclasses.replace(make_request("a", 5, 4), required_prompt_columns=frozenset({"x"}))
    )
    plan = scheduler.plan()
    assert plan is not None
    scheduler.apply(with_columns(plan, (0, 1, [1, 2])))
    (failed,) = scheduler.take_finished()
    assert failed.finish_reason is FinishReason.ERROR
    assert failed.finish_detail == "column 'x' has no value at 2 prompt positions, first at 3"


@pytest.mark.parametrize("policy", ["recompute", "keep_kv"])
def test_prompt_columns_are_of_one_weight_version(policy: UnfinishedPolicy) -> None:
    scheduler = make_scheduler(config=make_config(max_num_batched_tokens=4, max_num_seqs=4))
    scheduler.add(
        dataclasses.replace(make_request("a", 10, 2), required_prompt_columns=frozenset({"x"}))
    )

    def advance(label: str) -> None:
        plan = scheduler.plan()
        assert plan is not None
        (chunk,) = plan.prefill_chunks
        values: list[object] = [label] * (chunk.stop - chunk.start)
        scheduler.apply(with_columns(plan, (chunk.row, chunk.start, values)))

    advance("old")
    scheduler.set_weight_version(1, policy=policy)
    for _ in range(3):
        advance("new")
    (a,) = scheduler.sequences
    assert a.columns["x"] == dict.fromkeys(range(10), "new")
    # Once through, the prompt's columns stay: they are of the version that computed them.
    scheduler.set_weight_version(2, policy=policy)
    assert a.columns["x"] == dict.fromkeys(range(10), "new")


def test_keep_kv_keeps_a_half_prompt_that_needs_no_columns() -> None:
    scheduler = make_scheduler(config=make_config(max_num_batched_tokens=4, max_num_seqs=4))
    scheduler.add(make_request("a", 10, 2))
    step(scheduler)
    scheduler.set_weight_version(1, policy="keep_kv")
    (a,) = scheduler.sequences
    assert (a.num_computed_tokens, a.num_preemptions) == (4, 0)


def test_values_beyond_the_end_or_of_ended_sequences_are_dropped() -> None:
    config = make_config(max_steps_in_flight=2)
    scheduler = make_scheduler(config=config)
    rules = StopRules(max_tokens=9, stop_token_ids=frozenset({7}))
    scheduler.add(make_request("a", 3, stop=rules))
    first, second = scheduler.plan(), scheduler.plan()
    assert first is not None and second is not None
    scheduler.apply(with_columns(first, (0, 0, ["p0", "p1", "p2", "token", "beyond"])))
    (ended,) = scheduler.take_finished()
    assert ended.columns["x"] == {0: "p0", 1: "p1", 2: "p2", 3: "token"}
    scheduler.apply(with_columns(second, (0, 3, ["late", "later"])))
    assert ended.columns["x"] == {0: "p0", 1: "p1", 2: "p2", 3: "token"}


def test_recomputed_positions_keep_their_first_value_and_none_is_lost() -> None:
    """Preempted at every tick: the column is the one of an undisturbed run."""
    request = dataclasses.replace(
        make_request("a", 11, 8), required_prompt_columns=frozenset({"x"})
    )
    other = make_request("b", 6, 8)
    config = make_config(max_num_batched_tokens=8, max_steps_in_flight=2)
    context = 0
    expected: dict[int, int] = {}
    reference = run(
        Scenario(requests=(request,), num_blocks=64, config=config, columns=("x",))
    ).sequences["a", 0]
    for position, token_id in enumerate(reference.token_ids[:-1]):
        context = HashModel().extend(context, token_id, 0)
        expected[position] = context
    for tick in range(12):
        outcome = run(
            Scenario(
                requests=(other, request),
                num_blocks=64,
                config=config,
                columns=("x",),
                preempts=frozenset({tick}),
            )
        )
        sequence = outcome.sequences["a", 0]
        assert sequence.output_token_ids == reference.output_token_ids
        assert sequence.columns["x"] == expected
