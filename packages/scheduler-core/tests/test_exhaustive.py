"""Small runs, disturbed at every tick: one by one, and two by two."""

import itertools

import pytest

from syncline.scheduler_core import Request, StopRules
from syncline.scheduler_core.oracle import HashModel, Outcome, Scenario, reference_output, run
from syncline.scheduler_core.testing import (
    assert_reference,
    check_every,
    make_config,
    make_request,
)

RULES = StopRules(max_tokens=9, stop_token_ids=frozenset({11, 12}))
REQUESTS = (
    make_request("a", 6, 7),
    make_request("b", [1, 2, 3, 4, 5, 6, 7, 8], stop=RULES),
    make_request("c", [1, 2, 3, 4, 5, 6, 7, 8, 9], 5),
)
EXPECTED = {
    request.request_id: reference_output(HashModel(), request, 0, max_model_len=64)
    for request in REQUESTS
}


def make_scenario(
    depth: int, num_blocks: int, caching: bool, requests: tuple[Request, ...] = REQUESTS
) -> Scenario:
    config = make_config(
        max_num_seqs=3,
        max_num_batched_tokens=6,
        max_model_len=64,
        max_steps_in_flight=depth,
    )
    return Scenario(
        requests=requests,
        num_blocks=num_blocks,
        config=config,
        enable_prefix_caching=caching,
    )


def assert_true(outcome: Outcome, *, aborted: str = "") -> None:
    for (request_id, _), sequence in outcome.sequences.items():
        assert_reference(sequence, EXPECTED[request_id], may_abort=request_id == aborted)


def with_preempts(scenario: Scenario, *ticks: int) -> Scenario:
    return Scenario(
        requests=scenario.requests,
        num_blocks=scenario.num_blocks,
        config=scenario.config,
        enable_prefix_caching=scenario.enable_prefix_caching,
        preempts=frozenset(ticks),
    )


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("num_blocks", [40, 7])
def test_a_preemption_at_every_tick_changes_nothing(
    depth: int, caching: bool, num_blocks: int
) -> None:
    scenario = make_scenario(depth, num_blocks, caching)
    num_ticks = run(scenario).num_ticks
    for tick in range(num_ticks):
        assert_true(run(with_preempts(scenario, tick)))


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_two_preemptions_at_every_pair_of_ticks_change_nothing(depth: int) -> None:
    scenario = make_scenario(depth, 40, True, REQUESTS[:2])
    num_ticks = run(scenario).num_ticks
    for ticks in itertools.combinations(range(num_ticks), 2):
        assert_true(run(with_preempts(scenario, *ticks), observe=check_every(5)))


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_many_preemptions_cost_steps_and_no_token(depth: int) -> None:
    for every in (2, 3, 4):
        scenario = make_scenario(depth, 40, True)
        outcome = run(with_preempts(scenario, *range(0, 60, every)), observe=check_every(5))
        assert_true(outcome)
        assert outcome.stats.num_preemptions >= 5
        assert outcome.stats.num_surplus_tokens <= 2 * len(REQUESTS)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_an_abort_at_every_tick_of_every_request(depth: int) -> None:
    scenario = make_scenario(depth, 7, True)
    num_ticks = run(scenario).num_ticks
    for tick, request in itertools.product(range(num_ticks), REQUESTS):
        aborts = {tick: (request.request_id,)}
        outcome = run(
            Scenario(requests=REQUESTS, num_blocks=7, config=scenario.config, aborts=aborts)
        )
        assert_true(outcome, aborted=request.request_id)
