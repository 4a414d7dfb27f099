"""Where the prompt of n samples comes from: a tier, another sample, or the one that came back."""

import dataclasses

import pytest

from syncline.scheduler_core import FinishReason, RowError
from syncline.scheduler_core.oracle import (
    HashModel,
    OracleTier,
    Scenario,
    reference_output,
    run,
)
from syncline.scheduler_core.testing import (
    make_config,
    make_request,
    make_result,
    make_scheduler,
    step,
)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("caching", [True, False])
def test_a_prompt_that_is_loaded_is_loaded_once_for_all_samples(caching: bool, depth: int) -> None:
    """A pool that the request in between fills: what the first left behind is in the tier only."""
    prompt = list(range(9))
    requests = (make_request("a", prompt, 2), make_request("z", 20, 12))
    samples = make_request("b", prompt, 4, num_samples=4)
    scenario = Scenario(
        requests=requests[:1],
        arrivals={6: requests[1:], 40: (samples,)},
        num_blocks=8,
        config=make_config(max_num_seqs=4, max_steps_in_flight=depth),
        enable_prefix_caching=caching,
        tier=OracleTier(),
    )
    outcome = run(scenario)
    assert outcome.stats.num_loaded_tokens == 8
    # The first sample computes what is behind the load, each other one the last token.
    assert outcome.stats.num_prefill_tokens == 9 + 20 + 1 + 3
    for i in range(4):
        expected = reference_output(HashModel(), samples, i, max_model_len=128)
        assert outcome.sequences["b", i].output_token_ids == list(expected.token_ids)


def test_the_prompt_of_a_sample_that_fails_is_held_no_longer() -> None:
    """Two rows: when the first sample fails, the third computes the prompt for the fourth."""
    config = make_config(max_num_seqs=2)
    scheduler = make_scheduler(enable_prefix_caching=False, config=config)
    scheduler.add(make_request("a", 10, 6, num_samples=4))
    step(scheduler)
    plan = scheduler.plan()
    assert plan is not None and [join.sample_index for join in plan.joined] == [1]
    errors = (RowError(row=0, message="nan"),)
    scheduler.apply(dataclasses.replace(make_result(plan), errors=errors))
    joins: list[tuple[int, int]] = []
    while scheduler.has_unfinished:
        scheduler.check_integrity()
        joins += [(j.sample_index, j.num_computed_tokens) for j in step(scheduler).joined]
    assert joins == [(2, 0), (3, 9)]
    reasons = [sequence.finish_reason for sequence in scheduler.take_finished()]
    assert reasons.count(FinishReason.ERROR) == 1


def test_a_preempted_sample_comes_back_by_the_held_prompt() -> None:
    """Six samples, three rows, no cache: its prompt is not computed again while others wait."""
    config = make_config(max_num_seqs=3)
    scheduler = make_scheduler(enable_prefix_caching=False, config=config)
    scheduler.add(make_request("a", 10, 8, num_samples=6))
    for _ in range(3):
        step(scheduler)
    assert scheduler.preempt_one() == 2
    (join,) = step(scheduler).joined
    assert (join.sample_index, join.num_computed_tokens) == (2, 9)
    scheduler.check_integrity()
    while scheduler.has_unfinished:
        step(scheduler)
    assert scheduler.stats.num_prefill_tokens == 10 + 5 + 1 + 2
