"""Requests, stop rules and limits are refused by field, value and limit."""

import dataclasses
from typing import Any

import pytest

from syncline.scheduler_core import Request, Scheduler, SchedulerConfig, StopRules
from syncline.scheduler_core.testing import make_config, make_request, make_scheduler


def test_stop_rules_name_the_field_that_is_wrong() -> None:
    with pytest.raises(ValueError, match=r"max_tokens must be at least 1, got 0"):
        StopRules(max_tokens=0)
    with pytest.raises(ValueError, match=r"min_tokens must be between 0 and max_tokens \(4\)"):
        StopRules(max_tokens=4, min_tokens=5)
    with pytest.raises(ValueError, match="stop_sequences must not contain an empty sequence"):
        StopRules(max_tokens=4, stop_sequences=((1,), ()))


def test_a_request_needs_a_prompt_of_ids_and_a_sample() -> None:
    rules = StopRules(max_tokens=1)
    with pytest.raises(ValueError, match="prompt_token_ids of request 'x' must not be empty"):
        Request(request_id="x", prompt_token_ids=(), stop=rules)
    with pytest.raises(ValueError, match="must be at least 0, got -1"):
        Request(request_id="x", prompt_token_ids=(3, -1), stop=rules)
    with pytest.raises(ValueError, match=r"must be below 2\*\*32, got 4294967296"):
        Request(request_id="x", prompt_token_ids=(3, 2**32), stop=rules)
    with pytest.raises(ValueError, match="num_samples of request 'x' must be at least 1, got 0"):
        Request(request_id="x", prompt_token_ids=(3,), stop=rules, num_samples=0)


@pytest.mark.parametrize(
    "name", ["max_num_seqs", "max_num_batched_tokens", "max_model_len", "max_steps_in_flight"]
)
def test_every_limit_is_at_least_one(name: str) -> None:
    smallest = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=1, max_model_len=1)
    too_small: dict[str, Any] = {name: 0}  # Any: the fields differ in type
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        dataclasses.replace(smallest, **too_small)


def test_the_budget_holds_a_token_of_every_running_sequence() -> None:
    with pytest.raises(
        ValueError, match=r"max_num_batched_tokens must be at least max_num_seqs \(8\), got 7"
    ):
        make_config(max_num_seqs=8, max_num_batched_tokens=7)


def test_a_prompt_that_leaves_no_room_for_a_token_is_refused() -> None:
    scheduler = make_scheduler(config=make_config(max_model_len=10))
    with pytest.raises(ValueError, match=r"fewer than max_model_len \(10\), got 10"):
        scheduler.add(make_request(prompt=10))
    assert not scheduler.has_unfinished
    scheduler.add(make_request(prompt=9))


def test_an_id_is_in_use_until_its_last_sample_has_ended() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", num_samples=2))
    with pytest.raises(ValueError, match="request_id 'a' is in use"):
        scheduler.add(make_request("a"))
    assert scheduler.num_waiting == 2
    scheduler.abort("a")
    scheduler.add(make_request("a"))
    assert scheduler.num_waiting == 1


def test_the_first_sequence_id_is_zero_and_no_id_comes_back() -> None:
    scheduler = make_scheduler()
    assert scheduler.add(make_request("a", num_samples=2)) == (0, 1)
    scheduler.abort("a")
    assert scheduler.add(make_request("a")) == (2,)
    assert [sequence.seq_id for sequence in scheduler.take_finished()] == [0, 1]
    assert [sequence.seq_id for sequence in scheduler.sequences] == [2]


def test_a_window_has_at_least_one_step() -> None:
    scheduler: Scheduler = make_scheduler()
    with pytest.raises(ValueError, match="window must be at least 1, got 0"):
        scheduler.plan(window=0)
