"""Values of the wrong kind are refused where they come in, by name, and change nothing."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from syncline.scheduler_core import (
    ColumnSpan,
    RemotePrefill,
    ResultError,
    Scheduler,
    StepResult,
    StopRules,
)
from syncline.scheduler_core.digest import encode
from syncline.scheduler_core.testing import (
    describe,
    make_config,
    make_request,
    make_result,
    make_scheduler,
    step,
)


class FixedWidth(int):
    """As an unsigned byte of an array library: its sums wrap around."""

    def __radd__(self, other: int) -> "FixedWidth":
        return FixedWidth(int.__add__(self, other) % 256)

    __add__ = __radd__


class Index:
    """An integer that is no int."""

    def __index__(self) -> int:
        return 7


@pytest.mark.parametrize("value", [1.5, "x", [1], float("nan")])
@pytest.mark.parametrize(
    ("base", "name"),
    [
        *((make_config(), name) for name in ("max_num_seqs", "max_num_batched_tokens")),
        *((make_config(), name) for name in ("max_model_len", "max_steps_in_flight")),
        (make_config(), "long_prefill_token_threshold"),
        (make_config(), "max_num_partial_prefills"),
        *((StopRules(max_tokens=4), name) for name in ("max_tokens", "min_tokens")),
        *((StopRules(max_tokens=4), name) for name in ("stop_token_ids", "eos_token_ids")),
        *((make_request(), name) for name in ("num_samples", "priority")),
        (make_request(), "required_prompt_columns"),
        (RemotePrefill(first_token_id=1, first_logprob=-1.0), "first_token_id"),
        (RemotePrefill(first_token_id=1, first_logprob=-1.0), "num_draft_tokens"),
    ],
)
def test_every_number_and_set_of_a_value_is_one(base: Any, name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"^{name}.* must be a"):
        replace(base, **{name: value})


@pytest.mark.parametrize("name", ["request_id", "cache_salt", "adapter_id"])
@pytest.mark.parametrize("value", [None, 5, [1]])
def test_every_name_of_a_request_is_a_str(name: str, value: object) -> None:
    """A salt of None would fail where its first block is named, in the middle of a result."""
    wrong: dict[str, Any] = {name: value}
    with pytest.raises(ValueError, match=f"^{name}.* must be a str, got"):
        replace(make_request(), **wrong)


def test_a_plain_set_of_stop_ids_is_refused_before_it_stops_a_plan_halfway() -> None:
    ids: Any = {3}
    with pytest.raises(ValueError, match="stop_token_ids must be a frozenset"):
        StopRules(max_tokens=4, stop_token_ids=ids)


_WRONG: Any = 1.5
CALLS: list[Callable[[Scheduler], object]] = [
    lambda scheduler: scheduler.plan(window=_WRONG),
    lambda scheduler: scheduler.plan(num_draft_tokens=_WRONG),
    lambda scheduler: scheduler.plan(num_draft_tokens={_WRONG: 1}),
    lambda scheduler: scheduler.plan(num_draft_tokens={scheduler.sequences[0].seq_id: _WRONG}),
    lambda scheduler: scheduler.resize_pool(_WRONG),
    lambda scheduler: scheduler.set_weight_version(_WRONG, policy="recompute"),
]


@pytest.mark.parametrize("call", CALLS)
def test_a_call_with_a_number_of_the_wrong_kind_changes_nothing(
    call: Callable[[Scheduler], object],
) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 5, 9))
    step(scheduler)
    before = describe(scheduler)
    with pytest.raises(ValueError, match=r"must be an int.*, got 1\.5"):
        call(scheduler)
    assert describe(scheduler) == before
    scheduler.check_integrity()


def make_column(**wrong: Any) -> dict[str, object]:
    span: dict[str, Any] = {"row": 0, "name": "x", "start": 0, "values": (1,), **wrong}
    return {"columns": (ColumnSpan(**span),)}


@pytest.mark.parametrize(
    "wrong",
    [
        {"counts": (1.0, 1.0)},
        {"counts": ("a", "b")},
        {"counts": 5},
        {"window_counts": (1.0, 1.0)},
        {"token_ids": None},
        {"token_ids": 5},
        {"logprobs": None},
        {"columns": None},
        {"columns": (1,)},
        {"errors": None},
        {"errors": 5},
        {"errors": (1,)},
        make_column(values=None),
        make_column(values=5),
        make_column(start=0.5),
        make_column(start="a"),
        make_column(name=[1]),
    ],
)
def test_a_result_of_the_wrong_kind_changes_nothing(wrong: dict[str, Any]) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 5, 9))
    scheduler.add(make_request("b", 5, 9))
    step(scheduler)
    plan = scheduler.plan()
    assert plan is not None
    before = describe(scheduler)
    result = make_result(plan)
    with pytest.raises(ResultError):
        scheduler.apply(replace(result, **wrong))
    assert describe(scheduler) == before
    scheduler.apply(result)
    scheduler.check_integrity()


def test_counts_of_a_fixed_width_are_summed_as_integers() -> None:
    scheduler = make_scheduler(num_blocks=400, config=make_config(max_model_len=512))
    for name in "ab":
        scheduler.add(make_request(name, 4, 300))
    step(scheduler)
    plan = scheduler.plan(window=200)
    assert plan is not None and plan.window == 200
    counts = (FixedWidth(200), FixedWidth(200))
    result = StepResult(
        step_id=plan.step_id, token_ids=[9] * 400, logprobs=[-1.0] * 400, counts=counts
    )
    scheduler.apply(result)
    assert [sequence.num_output_tokens for sequence in scheduler.sequences] == [201, 201]
    assert type(scheduler.stats.num_accepted_tokens) is int


@pytest.mark.parametrize("is_empty", [True, False])
def test_a_window_beyond_every_length_costs_nothing(is_empty: bool) -> None:
    scheduler = make_scheduler()
    if not is_empty:
        scheduler.add(make_request("a", 5, 9))
    plan = scheduler.plan(window=10**12)
    assert (plan is None) is is_empty


def test_an_integer_of_another_library_has_the_fingerprint_of_its_value() -> None:
    assert encode((Index(), 7)) == encode((7, 7))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"prompt_token_ids": ("a", "b")}, "must be ints, got 'a'"),
        ({"prompt_token_ids": [1.5, 2]}, "must be ints, got 1.5"),
        ({"prompt_token_ids": [3, None]}, "must be ints, got None"),
        ({"prompt_token_ids": "abc"}, "must be a tuple of ints, got 'abc'"),
        ({"prompt_token_ids": {1: 2}}, r"must be a tuple of ints, got \{1: 2\}"),
        ({"prompt_token_ids": 5}, "must be a tuple of ints, got 5"),
        ({"prompt_token_ids": None}, "must be a tuple of ints, got None"),
        ({"stop": None}, "stop of request 'a' must be a StopRules, got None"),
        ({"use_prefix_cache": "no"}, "use_prefix_cache of request 'a' must be a bool, got 'no'"),
        ({"hands_off_kv": 1}, "hands_off_kv of request 'a' must be a bool, got 1"),
        ({"arrival_s": "a"}, "arrival_s of request 'a' must be a number or None, got 'a'"),
        ({"remote_prefill": 5}, "remote_prefill of request 'a' must be a RemotePrefill, got 5"),
    ],
)
def test_a_request_of_the_wrong_kind_is_refused_by_field(
    wrong: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        replace(make_request("a", 5, 9), **wrong)


def test_a_time_of_the_wrong_kind_is_refused_with_nothing_changed() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 5, 9))
    before = describe(scheduler)
    with pytest.raises(ValueError, match="now_s must be a number or None, got 'a'"):
        scheduler.plan(now_s="a")  # type: ignore[arg-type]  # as it says
    assert describe(scheduler) == before
