"""KV that comes back from a slower tier: whatever arrives, whenever, the answer is the same."""

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest

from syncline.scheduler_core import (
    FinishReason,
    Request,
    Scheduler,
)
from syncline.scheduler_core.oracle import (
    HashModel,
    OracleTier,
    Outcome,
    Scenario,
    Transfer,
    apply_at_once,
    apply_when_full,
    reference_output,
    run,
)
from syncline.scheduler_core.testing import make_config, make_request

MAX_MODEL_LEN = 48
SHARED = [3, 1, 4, 1, 5, 9, 2, 6]
REQUESTS = (
    make_request("a", 7, 14),
    make_request("b", [*SHARED, 7], 12),
    make_request("c", SHARED, 13, num_samples=2),
    make_request("d", 3, 17),
)


def make_scenario(
    num_blocks: int,
    depth: int = 1,
    *,
    tier: OracleTier | None,
    caching: bool = True,
    ends: Callable[[int, Transfer], tuple[int, int]] | None = None,
    requests: tuple[Request, ...] = REQUESTS,
) -> Scenario:
    scenario = Scenario(
        requests=requests,
        num_blocks=num_blocks,
        config=make_config(
            max_num_seqs=4,
            max_num_batched_tokens=16,
            max_model_len=MAX_MODEL_LEN,
            max_steps_in_flight=depth,
        ),
        enable_prefix_caching=caching,
        lateness=apply_at_once if depth == 1 else apply_when_full,
        tier=tier,
    )
    return scenario if ends is None else replace(scenario, transfer_ends=ends)


def assert_true(outcome: Outcome, requests: tuple[Request, ...] = REQUESTS) -> None:
    for request in requests:
        for sample_index in range(request.num_samples):
            sequence = outcome.sequences[request.request_id, sample_index]
            expected = reference_output(
                HashModel(), request, sample_index, max_model_len=MAX_MODEL_LEN
            )
            num_outputs = sequence.num_output_tokens
            assert tuple(sequence.output_token_ids) == expected.token_ids[:num_outputs]
            assert tuple(sequence.logprobs) == expected.logprobs[:num_outputs]
            if sequence.finish_reason is not FinishReason.ABORT:
                assert sequence.finish_reason is expected.finish_reason


def check_rarely(scheduler: Scheduler) -> None:
    if scheduler.stats.num_plans % 3 == 0:
        scheduler.check_integrity()


def after(num_ticks: int) -> Callable[[int, Transfer], tuple[int, int]]:
    """Every transfer ends whole, so many ticks after its plan."""
    return lambda tick, transfer: (num_ticks, transfer.stop - transfer.start)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("caching", [True, False])
def test_a_tier_changes_no_answer_and_saves_recomputation(caching: bool, depth: int) -> None:
    """Many preemptions in tiny pools (#16, #35, B03): every resume is a load, and none at fault."""
    for num_ticks in (0, 1, 4):
        num_without = num_with = 0
        for num_blocks in (6, 7, 9):
            scenario = make_scenario(num_blocks, depth, tier=None, caching=caching)
            num_without += run(scenario, observe=check_rarely).stats.num_recomputed_tokens
            scenario = replace(scenario, tier=OracleTier(), transfer_ends=after(num_ticks))
            outcome = run(scenario, observe=check_rarely)
            assert_true(outcome)
            assert outcome.stats.num_preemptions >= 3
            num_with += outcome.stats.num_recomputed_tokens
        assert num_with < num_without * (0.8 if caching else 0.4)


@pytest.mark.parametrize("depth", [1, 2])
def test_loads_and_stores_of_any_length_and_lateness(depth: int) -> None:
    """Every number of tokens that a load may bring, in turn, and tiers that forget."""
    for turn, max_blocks in itertools.product(range(7), (None, 2)):

        def ends(tick: int, transfer: Transfer, turn: int = turn) -> tuple[int, int]:
            num_tokens = transfer.stop - transfer.start
            return (turn + transfer.transfer_id) % 4, (turn * 3 + tick) % (num_tokens + 1)

        scenario = make_scenario(7, depth, tier=OracleTier(max_blocks), ends=ends)
        assert_true(run(scenario, observe=check_rarely))
