"""What bias, penalties, filters and min_tokens do to a row before it is sampled."""

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from syncline.engine.testing.sampling import resolved, sample


@given(st.lists(st.integers(-3, 3), min_size=2, max_size=12), st.integers(1, 12))
def test_top_k_keeps_exactly_k_with_the_lowest_ids_on_ties(values: list[int], k: int) -> None:
    logits = torch.tensor([[float(value) for value in values]])
    got = sample(logits, [resolved(len(values), top_k=k, logprobs=len(values))])
    assert got.top_token_ids_LK is not None and got.top_logprobs_LK is not None
    kept = got.top_token_ids_LK[0][got.top_logprobs_LK[0].isfinite()].tolist()
    expected = sorted(range(len(values)), key=lambda i: (-values[i], i))[:k]
    assert kept == expected


@example(values=[0.0, 0.0, 2.0, 2.76207063631699e-24], top_p=0.9, min_p=0.0, top_k=0)
@given(
    st.lists(st.floats(-4, 4, width=32), min_size=2, max_size=12),
    st.sampled_from([0.05, 0.3, 0.5, 0.9, 0.999]),
    st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    st.integers(0, 12),
)
def test_filters_keep_what_a_plain_loop_keeps(
    values: list[float], top_p: float, min_p: float, top_k: int
) -> None:
    logits = torch.tensor([values])
    sampling = resolved(len(values), top_p=top_p, min_p=min_p, top_k=top_k, logprobs=len(values))
    got = sample(logits, [sampling])
    assert got.top_token_ids_LK is not None and got.top_logprobs_LK is not None
    kept = set(got.top_token_ids_LK[0][got.top_logprobs_LK[0].isfinite()].tolist())

    # Less than a unit in the last place of the largest apart, two logits are a tie.
    values = (logits[0] - logits.max()).tolist()
    ranked = sorted(range(len(values)), key=lambda i: (-values[i], i))
    limit = values[ranked[0]] + (math.log(min_p) if min_p else -math.inf)
    ranked = [i for i in ranked if values[i] >= limit][: top_k or None]
    mass = [math.exp(values[i] - values[ranked[0]]) for i in ranked]
    margins = []  # Rounding decides a boundary that is hit exactly; such a case says nothing.
    expected = set()
    for rank, i in enumerate(ranked):
        before = sum(mass[:rank]) / sum(mass)
        margins.append(abs(before - top_p))
        if before < top_p:
            expected.add(i)
    near = min(margins) < 1e-6 or any(0 < abs(v - limit) < 1e-5 for v in values)
    assert near or kept == expected


def test_penalties_follow_the_definitions() -> None:
    logits = torch.tensor([[1.0, -1.0, 2.0, 0.5, 3.0]])
    sampling = resolved(
        5, temperature=0.0, repetition_penalty=2.0, frequency_penalty=0.25, presence_penalty=0.5,
        logprobs=5,
    )  # fmt: skip
    # Prompt [0, 1], output [2, 2, 1]: 0 is repeated only, 1 counts once, 2 twice.
    got = sample(logits, [sampling], history=[[0, 1, 2, 2, 1]], num_prompt=2)
    expected = torch.tensor([0.5, -2.0 - 0.25 - 0.5, 1.0 - 0.5 - 0.5, 0.5, 3.0]).log_softmax(-1)
    assert got.top_token_ids_LK is not None and got.top_logprobs_LK is not None
    order = got.top_token_ids_LK[0]
    assert torch.allclose(got.top_logprobs_LK[0].float(), expected[order])


def test_penalties_of_one_row_leave_the_others_alone_and_count_only_real_tokens() -> None:
    logits = torch.tensor([[1.0, 0.9, 0.0]] * 3)
    plain = resolved(3, temperature=0.0)
    penalised = resolved(3, temperature=0.0, presence_penalty=2.0)
    # The third row's history is padded with zeros by the helper: they are no tokens.
    got = sample(logits, [plain, penalised, penalised], history=[[0], [0, 0, 0], [1]])
    assert got.token_ids_R.tolist() == [0, 1, 0]


def test_a_bias_moves_one_token_of_one_row() -> None:
    logits = torch.zeros(2, 4)
    got = sample(
        logits,
        [
            resolved(4, temperature=0.0, logit_bias={2: 5.0, 3: -100.0}),
            resolved(4, temperature=0.0),
        ],
    )
    assert got.token_ids_R.tolist() == [2, 0]
    assert got.logprobs_R[1].item() == pytest.approx(math.log(0.25))
    assert torch.equal(logits, torch.zeros(2, 4)), "the caller's logits are not written"


def test_min_tokens_forbids_every_stopping_id_until_enough_tokens_exist() -> None:
    # The model prefers EOS (2), then the stop id (4), then 5.
    logits = torch.tensor([[0.0, 0.0, 9.0, 0.0, 8.0, 7.0]])
    sampling = resolved(
        6, temperature=0.0, min_tokens=3, max_tokens=8, eos=(2,), stop_token_ids=[4]
    )
    # Prompt of 10: the token at position 10 is the first output.
    got = [sample(logits, [sampling], p, num_prompt=10).token_ids_R.item() for p in range(10, 14)]
    assert got == [5, 5, 5, 2]
    ignoring = resolved(6, temperature=0.0, min_tokens=3, eos=(2,), ignore_eos=True)
    assert sample(logits, [ignoring], 10, num_prompt=10).token_ids_R.item() == 2


def test_a_bias_cannot_lift_a_forbidden_id() -> None:
    logits = torch.zeros(1, 3)
    sampling = resolved(3, temperature=0.0, min_tokens=1, eos=(1,), logit_bias={1: 100.0})
    assert sample(logits, [sampling]).token_ids_R.item() == 0
