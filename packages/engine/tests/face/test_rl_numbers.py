"""The demo's arithmetic: mismatch, rewards, advantages, the clipped loss and the verdict."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from syncline.engine.rl.mismatch import measure_mismatch
from syncline.engine.rl.task import (
    ANSWER_NUMBERS,
    draw_starts,
    group_advantages,
    prompt_text,
    reward,
)
from syncline.engine.rl.verdict import DemoStep, judge


def test_equal_logprobs_have_no_mismatch() -> None:
    logprobs = torch.tensor([[-0.5, -1.25], [-2.0, -0.01]])
    mismatch = measure_mismatch(logprobs, logprobs.clone())
    assert (mismatch.k3_kl, mismatch.chi2_token) == (0.0, 0.0)


def test_mismatch_follows_its_formulas() -> None:
    old = torch.tensor([[-1.0, -2.0]], dtype=torch.float64)
    roll = torch.tensor([[-1.5, -1.8]], dtype=torch.float64)
    deltas = (0.5, -0.2)
    k3 = sum(math.exp(d) - d - 1 for d in deltas) / 2
    chi2 = sum(math.exp(2 * d) for d in deltas) / 2 - 1
    mismatch = measure_mismatch(old, roll)
    assert mismatch.k3_kl == pytest.approx(k3, rel=1e-12)
    assert mismatch.chi2_token == pytest.approx(chi2, rel=1e-12)


def test_a_tiny_mismatch_is_not_lost_in_rounding() -> None:
    old = torch.full((4, 8), -1.0, dtype=torch.float64)
    mismatch = measure_mismatch(old + 1e-6, old)
    assert mismatch.k3_kl == pytest.approx(0.5e-12, rel=1e-3)


def test_one_wrecked_token_shows_in_chi2_and_stays_finite() -> None:
    old = torch.zeros(100, 10, dtype=torch.float64)
    roll = old.clone()
    roll[3, 3] = -40.0
    assert measure_mismatch(old, roll).chi2_token > 1e10


def test_mismatch_refuses_unequal_shapes() -> None:
    with pytest.raises(ValueError, match="one non-empty shape"):
        measure_mismatch(torch.zeros(2, 3), torch.zeros(3, 2))


def test_the_reward_is_the_share_of_right_numbers_in_their_places() -> None:
    assert prompt_text(7) == "00000007,00000008,00000009,"
    assert reward(7, "00000010,00000011,00000012,") == 1.0
    assert reward(7, "00000010,00000012,00000012,") == pytest.approx(2 / 3)
    assert reward(7, "00000011,00000012,00000013,") == 0.0
    assert reward(7, "") == 0.0
    assert ANSWER_NUMBERS == 3


def test_starts_depend_on_seed_and_step_alone() -> None:
    assert draw_starts(4, 1, 2) == draw_starts(4, 1, 2)
    assert draw_starts(4, 1, 2) != draw_starts(4, 1, 3)
    assert draw_starts(4, 1, 2) != draw_starts(4, 2, 2)


def test_advantages_are_centred_within_each_group() -> None:
    advantages = group_advantages([1.0, 0.0, 1.0, 0.0, 0.5, 0.5, 0.5, 0.5], 4)
    deviation = (1 / 3) ** 0.5  # Of the sample: four values half a unit from their mean.
    assert advantages[:4] == pytest.approx([0.5 / deviation, -0.5 / deviation] * 2)
    assert advantages[4:] == [0.0] * 4


def test_rewards_must_be_whole_groups() -> None:
    with pytest.raises(ValueError, match="whole groups"):
        group_advantages([1.0, 0.0, 1.0], 2)


GOOD = DemoStep(
    step=0,
    mean_reward=0.5,
    tokens_per_s=1.0,
    num_preemptions=3,
    num_missing=0,
    sync_s=0.1,
    sync_bytes=10,
    coverage=1.0,
    slept_bytes=10,
    k3_kl=1e-10,
    chi2_token=0.0,
)


def good_steps() -> list[DemoStep]:
    return [replace(GOOD, step=i, mean_reward=0.5 + 0.05 * i) for i in range(8)]


def test_a_row_is_json_even_without_numbers() -> None:
    plain = replace(GOOD, mean_reward=math.nan, chi2_token=math.inf).to_json()
    assert (plain["mean_reward"], plain["chi2_token"]) == (None, None)
    assert plain["k3_kl"] == 1e-10


def test_a_good_run_passes() -> None:
    verdict = judge(good_steps(), 8)
    assert verdict.passed
    assert verdict.reward_gain == pytest.approx(0.3)
    assert verdict.num_preemptions == 24


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"k3_kl": 1e-6}, "k3_kl"),
        ({"k3_kl": math.nan}, "k3_kl"),
        ({"coverage": 0.999}, "covered"),
        ({"num_missing": 1}, "missing"),
        ({"mean_reward": math.nan}, "reward"),
    ],
)
def test_one_bad_step_fails_the_run(change: dict[str, Any], reason: str) -> None:
    for position in (0, 7):
        steps = good_steps()
        steps[position] = replace(steps[position], **change)
        verdict = judge(steps, 8)
        assert not verdict.passed
        assert any(reason in failure for failure in verdict.failures)


def test_too_small_a_gain_no_preemption_or_a_missing_step_fails_the_run() -> None:
    flat = [replace(step, mean_reward=0.5) for step in good_steps()]
    assert "less than" in judge(flat, 8).failures[0]
    calm = [replace(step, num_preemptions=0) for step in good_steps()]
    assert "preempted" in judge(calm, 8).failures[0]
    assert "7 of 8" in judge(good_steps()[:7], 8).failures[0]
    assert not judge([], 8).passed
