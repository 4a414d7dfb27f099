"""The promise: pool, budget, depth, sharing and aborts change the speed, never the answer."""

import itertools

import pytest

from syncline.scheduler_core import FinishReason, Request, Sequence, StopRules
from syncline.scheduler_core.oracle import (
    HashModel,
    Outcome,
    Scenario,
    apply_at_once,
    apply_when_full,
    reference_output,
    run,
)
from syncline.scheduler_core.testing import (
    assert_reference,
    check_every,
    make_config,
    make_request,
)

MAX_MODEL_LEN = 40
RULES = StopRules(
    max_tokens=14, min_tokens=2, stop_token_ids=frozenset({11}), eos_token_ids=frozenset({12})
)


def make_requests(num_samples: int) -> tuple[Request, ...]:
    shared = [3, 1, 4, 1, 5, 9, 2, 6]
    return (
        make_request("a", shared, stop=RULES, num_samples=num_samples),
        make_request("b", [*shared, 7], stop=RULES, num_samples=num_samples),
        make_request("c", 13, 9, num_samples=num_samples),
        make_request("d", 3, 18, num_samples=num_samples),
        make_request("e", shared, stop=RULES),
    )


# "d" ends with 21 tokens, "c" with 22: the longest needs 21 slots, six blocks of four.
POOLS = {"roomy": 80, "tight": 12, "exactly fitting": 6, "one short": 5}
NUM_SLOTS_ONE_SHORT = 20


def assert_true(requests: tuple[Request, ...], outcome: Outcome, num_slots: int) -> None:
    """Every output is the reference, or a truthful beginning of it."""
    for request in requests:
        for sample_index in range(request.num_samples):
            sequence = outcome.sequences[request.request_id, sample_index]
            expected = reference_output(
                HashModel(), request, sample_index, max_model_len=MAX_MODEL_LEN
            )
            assert_reference(sequence, expected, may_abort=True, num_slots=num_slots)
            num_outputs = sequence.num_output_tokens
            assert sequence.version_runs == ([(0, num_outputs)] if num_outputs else [])


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("budget", [4, 64, 512])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_every_output_is_that_of_the_roomy_synchronous_run(
    pool: str, budget: int, depth: int
) -> None:
    for caching, num_samples in itertools.product((True, False), (1, 3)):
        requests = make_requests(num_samples)
        config = make_config(
            max_num_seqs=4,
            max_num_batched_tokens=budget,
            max_model_len=MAX_MODEL_LEN,
            max_steps_in_flight=depth,
        )
        scenario = Scenario(
            requests=requests,
            num_blocks=POOLS[pool],
            config=config,
            enable_prefix_caching=caching,
            lateness=apply_at_once if depth == 1 else apply_when_full,
        )
        outcome = run(scenario, observe=check_every(3))
        assert_true(requests, outcome, POOLS[pool] * 4)
        capped = [s for s in outcome.sequences.values() if s.finish_detail.startswith("kv")]
        assert bool(capped) == (pool == "one short")
        if pool == "roomy":
            assert outcome.stats.num_preemptions == 0


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_an_abort_at_any_tick_leaves_the_others_as_they_were(depth: int) -> None:
    requests = make_requests(2)
    config = make_config(
        max_num_seqs=4,
        max_num_batched_tokens=16,
        max_model_len=MAX_MODEL_LEN,
        max_steps_in_flight=depth,
    )
    for num_blocks, victim in ((80, "a"), (9, "a"), (9, "d")):
        for tick in range(0, 40, 3):
            scenario = Scenario(
                requests=requests,
                num_blocks=num_blocks,
                config=config,
                aborts={tick: (victim,), tick + 2: (victim, "unknown")},
            )
            outcome = run(scenario, observe=check_every(3))
            assert_true(requests, outcome, num_blocks * 4)
            aborted = {
                key[0]
                for key, sequence in outcome.sequences.items()
                if sequence.finish_reason is FinishReason.ABORT
            }
            assert aborted <= {victim}


@pytest.mark.parametrize("lateness", [0, 1, 2])
def test_results_may_be_late_by_any_number_of_steps(lateness: int) -> None:
    requests = make_requests(1)
    config = make_config(max_num_seqs=4, max_model_len=MAX_MODEL_LEN, max_steps_in_flight=3)
    for num_blocks in (80, 9):
        scenario = Scenario(
            requests=requests,
            num_blocks=num_blocks,
            config=config,
            lateness=lambda tick, num: max(0, num - lateness),
        )
        assert_true(requests, run(scenario), num_blocks * 4)


def test_a_single_sequence_in_the_smallest_pool_that_holds_it() -> None:
    """Every prompt length and block size around the boundaries, at every depth."""
    for block_size, prompt, depth in itertools.product((1, 2, 3, 4), range(1, 9), (1, 2, 3)):
        request = make_request("a", prompt, 7)
        num_slots = prompt + 6
        for num_blocks in (-(-num_slots // block_size), -(-num_slots // block_size) + 1):
            scenario = Scenario(
                requests=(request,),
                num_blocks=num_blocks,
                block_size=block_size,
                config=make_config(max_model_len=MAX_MODEL_LEN, max_steps_in_flight=depth),
            )
            outcome = run(scenario)
            assert outcome.stats.num_preemptions == 0
            sequence: Sequence = outcome.sequences["a", 0]
            assert sequence.num_output_tokens == 7
            assert sequence.finish_detail == "max_tokens 7"
