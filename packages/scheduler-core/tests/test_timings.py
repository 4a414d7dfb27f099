"""The caller's clock, the summary of a sequence, and a detail for every way to end."""

import dataclasses
import itertools
import math
from collections.abc import Callable

import pytest

from syncline.scheduler_core import (
    FinishReason,
    Request,
    RequestTimings,
    RowError,
    Scheduler,
    Sequence,
    StepPlan,
    StopRules,
)
from syncline.scheduler_core.testing import (
    EndOnId,
    describe,
    make_config,
    make_request,
    make_result,
    make_scheduler,
    step,
)


def timed_request(request_id: str, arrival_s: float | None, max_tokens: int = 2) -> Request:
    return dataclasses.replace(make_request(request_id, 6, max_tokens), arrival_s=arrival_s)


def test_each_time_is_that_of_the_call_in_which_it_happened() -> None:
    scheduler = make_scheduler(config=make_config(max_num_batched_tokens=8, max_steps_in_flight=2))
    scheduler.add(timed_request("a", 1.0, 3))
    scheduler.add(timed_request("b", 0.5, 3))
    a, b = scheduler.sequences
    assert a.timings == RequestTimings(arrival_s=1.0)
    first = scheduler.plan(now_s=2.0)
    second = scheduler.plan(now_s=2.5)  # "b": a chunk of two tokens went into the first already.
    assert first is not None and second is not None
    scheduler.apply(make_result(first), now_s=3.0)
    assert (a.timings.first_token_s, b.timings.first_token_s) == (3.0, None)
    scheduler.apply(make_result(second), now_s=4.0)
    while (plan := scheduler.plan(now_s=None)) is not None:
        scheduler.apply(make_result(plan), now_s=6.0)
    assert a.timings == RequestTimings(
        arrival_s=1.0, first_scheduled_s=2.0, first_token_s=3.0, finished_s=6.0
    )
    assert b.timings.first_token_s == 4.0 and b.timings.finished_s == 6.0
    assert (a.timings.queue_s, a.timings.time_to_first_token_s, a.timings.total_s) == (1, 2, 5)
    assert a.summary.timings == a.timings


@pytest.mark.parametrize("given", list(itertools.product([False, True], repeat=4)))
def test_a_time_that_was_not_given_is_none_and_the_others_are_there(
    given: tuple[bool, bool, bool, bool],
) -> None:
    times = [float(i) if is_given else None for i, is_given in enumerate(given)]
    scheduler = make_scheduler()
    scheduler.add(timed_request("a", times[0]))
    (a,) = scheduler.sequences
    plan = scheduler.plan(now_s=times[1])
    assert plan is not None
    scheduler.apply(make_result(plan), now_s=times[2])
    scheduler.abort("a", now_s=times[3])
    timings = a.timings
    assert [
        timings.arrival_s,
        timings.first_scheduled_s,
        timings.first_token_s,
        timings.finished_s,
    ] == times
    assert (timings.queue_s is None) == (None in times[:2])
    assert (timings.time_to_first_token_s is None) == (None in (times[0], times[2]))
    assert (timings.total_s is None) == (None in (times[0], times[3]))


@pytest.mark.parametrize("preempt_before", [0, 1, 2])
def test_a_preemption_moves_no_time_that_is_set(preempt_before: int) -> None:
    """Not even to None: a later admission without a clock is not the first one."""
    scheduler = make_scheduler(config=make_config(max_steps_in_flight=2))
    scheduler.add(timed_request("a", 0.0, 4))
    (a,) = scheduler.sequences
    plans = [scheduler.plan(now_s=1.0)]
    for moment in range(3):
        if moment == preempt_before:
            scheduler.preempt_one()
        plans.append(scheduler.plan())
        plan = plans.pop(0)
        if plan is not None:
            scheduler.apply(make_result(plan), now_s=2.0 + moment)
    assert a.num_preemptions == 1
    assert (a.timings.first_scheduled_s, a.timings.first_token_s) == (1.0, 2.0)


def test_the_first_token_may_be_the_last() -> None:
    scheduler = make_scheduler()
    scheduler.add(timed_request("a", 0.0, 1))
    (a,) = scheduler.sequences
    plan = scheduler.plan(now_s=1.0)
    assert plan is not None
    scheduler.apply(make_result(plan), now_s=2.0)
    assert (a.timings.first_token_s, a.timings.finished_s) == (2.0, 2.0)


def test_a_request_that_can_never_fit_has_ended_when_it_came() -> None:
    scheduler = make_scheduler(num_blocks=1)
    scheduler.add(timed_request("a", 7.0))
    (a,) = scheduler.take_finished()
    assert a.timings == RequestTimings(arrival_s=7.0, finished_s=7.0)


Call = Callable[[Scheduler, StepPlan, float], object]
CALLS: dict[str, Call] = {
    "plan": lambda scheduler, plan, now_s: scheduler.plan(now_s=now_s),
    "apply": lambda scheduler, plan, now_s: scheduler.apply(make_result(plan), now_s=now_s),
    "abort": lambda scheduler, plan, now_s: scheduler.abort("a", now_s=now_s),
    "abort_all": lambda scheduler, plan, now_s: scheduler.abort_all(now_s=now_s),
    "pause": lambda scheduler, plan, now_s: scheduler.pause("abort", now_s=now_s),
    "set_weight_version": lambda scheduler, plan, now_s: scheduler.set_weight_version(
        1, policy="abort", now_s=now_s
    ),
    "resize_pool": lambda scheduler, plan, now_s: scheduler.resize_pool(3, now_s=now_s),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("now_s", [4.9, math.nan, math.inf, -math.inf])
def test_a_clock_that_runs_backwards_is_refused_and_nothing_changes(
    name: str, now_s: float
) -> None:
    scheduler = make_scheduler()
    scheduler.add(timed_request("a", 4.0))
    scheduler.add(timed_request("b", 3.0))  # Arrivals may come in any order.
    plan = scheduler.plan(now_s=5.0)
    assert plan is not None
    if name not in ("plan", "apply"):
        scheduler.apply(make_result(plan))
    before = describe(scheduler)
    with pytest.raises(ValueError, match=rf"not before 5\.0, a time already given, got {now_s}"):
        CALLS[name](scheduler, plan, now_s)
    assert describe(scheduler) == before and not scheduler.is_paused
    CALLS[name](scheduler, plan, 5.0)  # The same time again is fine.
    for sequence in scheduler.take_finished():
        assert sequence.timings.finished_s == 5.0


def test_an_arrival_moves_the_clock_as_well() -> None:
    scheduler = make_scheduler()
    scheduler.add(timed_request("a", 4.0))
    with pytest.raises(ValueError, match=r"now_s must be finite and not before 4\.0"):
        scheduler.plan(now_s=3.0)
    with pytest.raises(ValueError, match="arrival_s of request 'b' must be finite, got nan"):
        timed_request("b", math.nan)


def test_a_refused_result_moves_no_clock() -> None:
    scheduler = make_scheduler()
    scheduler.add(timed_request("a", 0.0))
    plan = scheduler.plan(now_s=1.0)
    assert plan is not None
    with pytest.raises(Exception, match="must have 1 entries"):
        scheduler.apply(make_result(plan, [1, 2]), now_s=9.0)
    scheduler.apply(make_result(plan), now_s=2.0)


def test_the_summary_tells_the_hits_of_the_first_admission() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", list(range(8)), 1))
    step(scheduler)
    scheduler.add(make_request("b", list(range(10)), 4))
    (b,) = scheduler.sequences
    for _ in range(3):
        step(scheduler)
    scheduler.preempt_one()
    step(scheduler)
    assert b.num_cached_tokens == 12  # Its own, of the second admission.
    summary = b.summary
    assert summary.num_cached_tokens == 8 and summary.num_preemptions == 1
    assert (summary.num_prompt_tokens, summary.num_output_tokens) == (10, 4)
    assert summary.version_runs == ((0, 4),)
    assert summary.finish_reason is FinishReason.LENGTH
    assert summary.finish_detail == b.finish_detail == "max_tokens 4"


def ended(scheduler: Scheduler, request: Request, token_id: int = 7) -> Sequence:
    """Run one request with the same token over and over."""
    scheduler.add(request)
    while scheduler.has_unfinished:
        step(scheduler, token_id)
    (sequence,) = scheduler.take_finished()
    return sequence


def by_abort(act: Callable[[Scheduler], object]) -> Callable[[], Sequence]:
    def end() -> Sequence:
        scheduler = make_scheduler()
        scheduler.add(make_request())
        step(scheduler)
        act(scheduler)
        (sequence,) = scheduler.take_finished()
        return sequence

    return end


def by_row_error(scheduler: Scheduler) -> None:
    plan = scheduler.plan()
    assert plan is not None
    error = RowError(row=0, message="the logits are not numbers")
    scheduler.apply(dataclasses.replace(make_result(plan), errors=(error,)))


WAYS_TO_END: dict[tuple[str, str], Callable[[], Sequence]] = {
    ("stop", "stop token 7"): lambda: ended(
        make_scheduler(), make_request(stop=StopRules(max_tokens=9, stop_token_ids=frozenset({7})))
    ),
    ("stop", "end of sequence token 7"): lambda: ended(
        make_scheduler(), make_request(stop=StopRules(max_tokens=9, eos_token_ids=frozenset({7})))
    ),
    ("stop", "stop sequence (7, 7)"): lambda: ended(
        make_scheduler(), make_request(stop=StopRules(max_tokens=9, stop_sequences=((7, 7),)))
    ),
    ("stop", "stop string 'END'"): lambda: ended(
        make_scheduler(), make_request(make_stop_matcher=lambda: EndOnId(7, "END"))
    ),
    ("length", "max_tokens 6"): lambda: ended(make_scheduler(), make_request()),
    ("length", "max_model_len 8"): lambda: ended(
        make_scheduler(config=make_config(max_model_len=8)), make_request()
    ),
    ("length", "kv capacity: 9 tokens need 3 blocks of 4, the pool has 2"): lambda: ended(
        make_scheduler(num_blocks=2), make_request()
    ),
    (
        "error",
        "the prompt can never fit; kv capacity: 6 tokens need 2 blocks of 4, the pool has 1",
    ): lambda: ended(make_scheduler(num_blocks=1), make_request()),
    ("error", "column 'x' has no value at 5 prompt positions, first at 1"): lambda: ended(
        make_scheduler(),
        dataclasses.replace(make_request(), required_prompt_columns=frozenset({"x"})),
    ),
    ("error", "the logits are not numbers"): by_abort(by_row_error),
    ("length", "kv capacity: 7 tokens need 2 blocks of 4, the pool has 1"): by_abort(
        lambda scheduler: scheduler.resize_pool(1)
    ),
    ("abort", "aborted"): by_abort(lambda scheduler: scheduler.abort("a")),
    ("abort", "aborted with all others"): by_abort(Scheduler.abort_all),
    ("abort", "aborted by pause"): by_abort(lambda scheduler: scheduler.pause("abort")),
    ("abort", "weights changed to version 3"): by_abort(
        lambda scheduler: scheduler.set_weight_version(3, policy="abort")
    ),
}


@pytest.mark.parametrize(("reason", "detail"), WAYS_TO_END)
def test_every_way_to_end_says_what_it_was(reason: str, detail: str) -> None:
    summary = WAYS_TO_END[reason, detail]().summary
    assert (summary.finish_reason, summary.finish_detail) == (reason, detail)


def test_an_error_without_a_message_is_refused() -> None:
    with pytest.raises(ValueError, match="message of row 3 must say what failed"):
        RowError(row=3, message="")
