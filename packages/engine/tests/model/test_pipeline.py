"""LogitsPipeline: what is sampled, what is never sampled, and what a row may depend on."""

import math
import sys
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from syncline.engine.sampling.penalties import TokenHistory
from syncline.engine.sampling.pipeline import LogitsPipeline, draw, top_tokens
from syncline.engine.testing.sampling import assert_matches, batch_of, draws, resolved, sample
from syncline.model_ops_rocm import SURE_LOGPROB


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 2.0, "top_k": 3},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"top_k": 4, "top_p": 0.8, "min_p": 0.05, "temperature": 1.5},
    ],
)
def test_samples_follow_the_processed_distribution(params: dict[str, Any]) -> None:
    logits = torch.randn(8, generator=torch.Generator().manual_seed(3)) * 2
    sampling = resolved(8, seed=17, **params)
    got = sample(logits[None], [resolved(8, seed=17, logprobs=8, **params)])
    assert got.top_token_ids_LK is not None and got.top_logprobs_LK is not None
    probs = torch.zeros(8, dtype=torch.float64).scatter_(
        0, got.top_token_ids_LK[0], got.top_logprobs_LK[0].exp()
    )
    assert float(probs.sum()) == pytest.approx(1.0, abs=1e-6)
    assert_matches(Counter(draws(logits, sampling, 20_000)), probs)


def test_each_row_of_a_batch_follows_its_own_distribution() -> None:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(4, 6, generator=generator) * 2
    count = 5_000
    samplings = [resolved(6, seed=100 + row) for row in range(4)]
    batch = batch_of(samplings * count)
    positions = torch.arange(count).repeat_interleave(4)
    ids = LogitsPipeline(6).forward(logits.repeat(count, 1), batch, positions).token_ids_R
    for row in range(4):
        assert_matches(Counter(ids[row::4].tolist()), logits[row].softmax(0))


def test_samples_of_one_request_are_independent() -> None:
    # Equal logits, seed and position: only the sample index differs. Pairs must be independent.
    count = 6_000
    logits = torch.tensor([0.0, 0.0, 0.0]).expand(2 * count, -1)
    sampling = resolved(3, seed=9)
    batch = batch_of([sampling] * (2 * count), [0, 1] * count)
    positions = torch.arange(count).repeat_interleave(2)
    ids = LogitsPipeline(3).forward(logits, batch, positions).token_ids_R
    pairs = Counter((ids[0::2] * 3 + ids[1::2]).tolist())
    assert_matches(pairs, torch.full((9,), 1 / 9))


def test_rows_with_equal_prompts_but_other_seeds_differ() -> None:
    logits = torch.zeros(64, 1000)
    ids = sample(logits, [resolved(1000, seed=seed) for seed in range(64)]).token_ids_R
    assert len(set(ids.tolist())) > 55


def test_four_samples_of_one_seed_are_distinct_and_repeatable() -> None:
    logits = torch.zeros(4, 1000)
    sampling = resolved(1000, seed=42, n=4)
    pipeline = LogitsPipeline(1000)

    def run(order: list[int]) -> dict[int, list[int]]:
        batch = batch_of([sampling] * 4, order)
        ids = [
            pipeline.forward(logits, batch, torch.full((4,), position)).token_ids_R.tolist()
            for position in range(16)
        ]
        return {index: [step[row] for step in ids] for row, index in enumerate(order)}

    first = run([0, 1, 2, 3])
    assert run([3, 1, 0, 2]) == first
    assert len({tuple(tokens) for tokens in first.values()}) == 4


def test_neighbouring_seeds_at_the_edge_of_64_bits_differ() -> None:
    seeds = [2**64 - 2, 2**64 - 1, 0, 1, 2**32, 2**32 - 1]
    logits = torch.zeros(len(seeds), 100_000)
    ids = sample(logits, [resolved(100_000, seed=seed) for seed in seeds]).token_ids_R
    assert len(set(ids.tolist())) == len(seeds)


PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 1.0, 0.3, 1.7, 1e-30]),
        "top_k": st.sampled_from([0, 1, 5]),
        "top_p": st.sampled_from([1.0, 0.4]),
        "min_p": st.sampled_from([0.0, 0.3]),
        "logprobs": st.sampled_from([None, 3]),
        "repetition_penalty": st.sampled_from([1.0, 1.3]),
        "presence_penalty": st.sampled_from([0.0, 0.5]),
        "logit_bias": st.sampled_from([None, {2: 1.5}]),
        "min_tokens": st.sampled_from([0, 4]),
    }
)


@given(
    mine=PARAMS,
    others=st.lists(PARAMS, max_size=5),
    place=st.integers(0, 5),
    vocab=st.sampled_from([7, 64, 1000]),
    mode=st.sampled_from(["raw_logprobs", "processed_logprobs"]),
)
def test_a_row_is_the_same_bit_for_bit_whoever_shares_its_batch(
    mine: dict[str, Any], others: list[dict[str, Any]], place: int, vocab: int, mode: str
) -> None:
    generator = torch.Generator().manual_seed(vocab)
    params = list(others)
    place = min(place, len(params))
    params.insert(place, mine)
    logits = torch.randn(len(params), vocab + 3, generator=generator) * 5
    history = [torch.randint(0, vocab, (3 + row,)).tolist() for row in range(len(params))]
    samplings = [resolved(vocab, seed=7 + i, eos=(1,), **p) for i, p in enumerate(params)]
    whole = sample(logits, samplings, 2, mode, history)
    alone = sample(
        logits[place : place + 1], [samplings[place]], 2, mode, history[place : place + 1]
    )
    assert whole.token_ids_R[place] == alone.token_ids_R[0]
    assert whole.logprobs_R[place].item() == alone.logprobs_R[0].item()
    if alone.top_token_ids_LK is not None and alone.top_logprobs_LK is not None:
        assert whole.top_token_ids_LK is not None and whole.top_logprobs_LK is not None
        line = sum(1 for p in params[:place] if p["logprobs"])
        assert torch.equal(whole.top_token_ids_LK[line, :3], alone.top_token_ids_LK[0, :3])
        assert torch.equal(whole.top_logprobs_LK[line, :3], alone.top_logprobs_LK[0, :3])


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 5.0},
        {"top_k": 1},
        {"top_p": 0.9},
        {"min_p": 0.01},
        {"repetition_penalty": 2.0, "presence_penalty": 2.0},
        {"min_tokens": 3},
    ],
)
def test_padded_ids_are_never_sampled_listed_or_normalised_over(params: dict[str, Any]) -> None:
    # 10 real ids, 16 rows; the padding would win by far if anything looked at it.
    logits = torch.randn(200, 16, generator=torch.Generator().manual_seed(0))
    logits[:, 10:] = 1e4
    sampling = resolved(10, logprobs=10, eos=(3,), **params)
    batch = batch_of([sampling] * 200)
    history = TokenHistory(
        token_ids_PL=torch.arange(16).expand(200, -1), num_tokens_P1=torch.full((200, 1), 16)
    )
    got = LogitsPipeline(10).forward(logits, batch, torch.arange(200), history=history)
    assert int(got.token_ids_R.max()) < 10
    assert got.top_token_ids_LK is not None and got.top_logprobs_LK is not None
    assert int(got.top_token_ids_LK.max()) < 10
    total_L = got.top_logprobs_LK.exp().sum(-1)
    assert torch.allclose(total_L, torch.ones_like(total_L), atol=1e-5)
    assert bool(got.logprobs_R.isfinite().all())


@pytest.mark.parametrize(
    ("mode", "expected"), [("processed_logprobs", -0.01815), ("raw_logprobs", -0.12693)]
)
def test_a_logprob_is_of_the_mode_asked_for_and_never_a_logprob_over_temperature(
    mode: str, expected: float
) -> None:
    logits = torch.tensor([[2.0, 0.0]])
    got = next(
        got
        for seed in range(20)
        if (got := sample(logits, [resolved(2, seed=seed, temperature=0.5)], mode=mode))
        and got.token_ids_R[0] == 0
    )
    assert got.logprobs_R[0].item() == pytest.approx(expected, abs=1e-5)


def test_raw_logprobs_ignore_bias_penalties_and_filters() -> None:
    logits = torch.tensor([[1.0, 0.5, 0.0, -0.5]])
    sampling = resolved(
        4, temperature=0.7, top_k=1, logit_bias={3: 100.0}, presence_penalty=1.0, min_tokens=2,
        eos=(0,),
    )  # fmt: skip
    got = sample(logits, [sampling], mode="raw_logprobs", history=[[1, 2]])
    assert got.token_ids_R.tolist() == [3]
    assert got.logprobs_R[0].item() == logits.log_softmax(-1)[0, 3].item()


def test_greedy_takes_the_lowest_id_on_a_tie_in_any_batch() -> None:
    logits = torch.zeros(3, 50)
    logits[:, [7, 21, 33]] = 4.0
    greedy = resolved(50, temperature=0.0, top_k=30, top_p=0.9)
    hot = resolved(50, temperature=3.0, top_k=40, top_p=0.95)
    for samplings in ([greedy] * 3, [hot, greedy, hot], [greedy, hot, greedy]):
        ids = sample(logits, samplings).token_ids_R
        assert all(ids[row] == 7 for row, sampling in enumerate(samplings) if sampling is greedy)


def test_a_greedy_logprob_is_that_of_temperature_one_and_not_zero() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0]] * 2)
    for samplings in (
        [resolved(3, temperature=0.0)] * 2,
        [resolved(3, temperature=0.0, top_k=1), resolved(3, temperature=0.5, top_k=2)],
    ):
        got = sample(logits, samplings)
        assert got.logprobs_R[0].item() == logits.log_softmax(-1)[0, 2].item() != 0.0


def test_extreme_temperatures_and_logits_stay_finite() -> None:
    logits = torch.tensor([[1e4, -1e4, 9.99e3, 0.0]] * 3)
    samplings = [resolved(4, temperature=t) for t in (1e-30, 1.0, 1e30)]
    got = sample(logits, samplings)
    assert bool(got.logprobs_R.isfinite().all())
    assert got.token_ids_R.tolist()[:2] == [0, 0]


@pytest.mark.parametrize(
    ("gap", "temperature"),
    [(5.0, 1.0), (8.0, 1.0), (20.0, 1.0), (27.6, 1.0), (100.0, 1.0), (60.0, 0.1), (690.0, 1.0)],
)
def test_a_nearly_certain_token_keeps_its_logprob(gap: float, temperature: float) -> None:
    logits = torch.tensor([[0.0, gap, 0.0, -1.0]])
    gaps = [float(x - logits[0, 1]) / temperature for x in logits[0]]
    expected = -math.log1p(math.fsum(math.exp(x) for i, x in enumerate(gaps) if i != 1))
    got = sample(logits, [resolved(4, temperature=temperature, logprobs=2)])
    assert got.token_ids_R.tolist() == [1]
    assert got.logprobs_R[0].item() == pytest.approx(expected, rel=1e-5)
    assert got.logprobs_R[0].item() < 0.0
    assert got.top_logprobs_LK is not None
    assert got.top_logprobs_LK[0, 0].item() == got.logprobs_R[0].item()
    raw = sample(logits, [resolved(4, temperature=0.0)], mode="raw_logprobs")
    assert raw.logprobs_R[0].item() == pytest.approx(
        -math.log1p(2 * math.exp(-gap) + math.exp(-1.0 - gap)), rel=1e-5
    )


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.1, "logit_bias": {2: 100.0}, "top_k": 1},
        {"temperature": 1e-30},
        {"temperature": 0.0, "logit_bias": {2: 1e30}},
        {"top_p": 1e-9},
    ],
)
def test_a_token_without_a_rival_has_the_smallest_logprob_and_not_zero(
    params: dict[str, Any],
) -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -3.0]])
    got = sample(logits, [resolved(4, logprobs=2, **params)])
    assert got.token_ids_R.tolist() == [2]
    assert got.logprobs_R.tolist() == [SURE_LOGPROB] == [-sys.float_info.min]
    assert got.top_logprobs_LK is not None
    assert got.top_logprobs_LK[0, 0].item() == SURE_LOGPROB


def test_the_only_id_of_a_vocabulary_of_one_has_a_logprob() -> None:
    got = sample(torch.zeros(1, 1), [resolved(1)])
    assert got.logprobs_R.tolist() == [SURE_LOGPROB]


def test_a_nearly_certain_row_is_the_same_bit_for_bit_whoever_shares_its_batch() -> None:
    generator = torch.Generator().manual_seed(8)
    logits = torch.randn(37, 1001, generator=generator) * 3
    logits[::2, 500] = 14.3 + torch.arange(19) * 1.7
    greedy = resolved(1001, temperature=0.0, logprobs=1)
    whole = sample(logits, [greedy] * 37)
    # One row with a temperature makes the pipeline shift the logits of all.
    shifted = sample(logits, [greedy] * 36 + [resolved(1001, temperature=0.5)])
    for row in range(36):
        alone = sample(logits[row : row + 1], [greedy])
        assert whole.logprobs_R[row].item() == alone.logprobs_R[0].item() < 0.0
        assert shifted.logprobs_R[row].item() == alone.logprobs_R[0].item()


@pytest.mark.parametrize("field", ["repetition_penalty", "logit_bias"])
def test_the_largest_values_together_leave_numbers(field: str) -> None:
    for bias in (-1e30, 1e30):
        for penalty in (1e-6, 1e6):
            for temperature in (2.0**-126, 1e30):
                sampling = resolved(
                    4,
                    temperature=temperature,
                    repetition_penalty=penalty,
                    logit_bias=dict.fromkeys(range(4), bias) if field == "logit_bias" else None,
                )
                got = sample(
                    torch.tensor([[1e4, -1e4, 3.0, 0.0]]), [sampling], history=[[0, 1, 2, 3]]
                )
                assert math.isfinite(got.logprobs_R[0].item())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.5])
def test_a_row_that_is_no_number_has_no_finite_logprob_and_spoils_no_other(
    bad: float, temperature: float
) -> None:
    logits = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    clean = sample(logits, [resolved(8, temperature=temperature)] * 3)
    logits[1, 4] = bad
    got = sample(logits, [resolved(8, temperature=temperature)] * 3)
    assert not math.isfinite(got.logprobs_R[1].item())
    assert 0 <= int(got.token_ids_R[1]) < 8
    for row in (0, 2):
        assert got.token_ids_R[row] == clean.token_ids_R[row]
        assert got.logprobs_R[row] == clean.logprobs_R[row]


def test_listed_tokens_are_the_likeliest_and_ties_come_by_lowest_id() -> None:
    ids, values = top_tokens(torch.tensor([[0.1, 0.7, 0.7, 0.2, 0.7]]), 4)
    assert ids.tolist() == [[1, 2, 4, 3]]
    assert values[0].tolist() == pytest.approx([0.7, 0.7, 0.7, 0.2])


def test_a_window_of_draws_equals_the_draws_one_by_one() -> None:
    batch = batch_of([resolved(5, seed=seed) for seed in (3, 2**63 + 5)], [0, 4])
    window = draw(batch, torch.tensor([[10, 11, 12], [7, 8, 9]]))
    singles = torch.stack([draw(batch, torch.tensor([10 + i, 7 + i])) for i in range(3)], dim=1)
    assert torch.equal(window, singles)


def test_a_draw_on_a_boundary_belongs_to_the_next_possible_id() -> None:
    logits = torch.tensor([[0.0, 0.0, 0.0]] * 3)
    sampling = resolved(3, logit_bias={1: -1e30})
    got = LogitsPipeline(3).forward(
        logits,
        batch_of([sampling] * 3),
        torch.arange(3),
        uniform_R=torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64),
    )
    assert got.token_ids_R.tolist() == [0, 2, 2]


def test_logits_narrower_than_the_vocabulary_are_refused() -> None:
    with pytest.raises(ValueError, match=r"true_vocab_size is 9, but the logits have 8 columns"):
        sample(torch.zeros(1, 8), [resolved(9)])


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"logit_bias": {9: 1.0}}, r"logit_bias names token id 9; ids end at 8"),
        ({"logprobs": 10}, r"logprobs must be at most the vocabulary of 9, got 10"),
        ({"prompt_logprobs": 10}, r"prompt_logprobs must be at most the vocabulary of 9, got 10"),
        ({"stop_token_ids": [9]}, r"stop_token_ids names token id 9, .* ids end at 8"),
        (
            {"stop_token_ids": list(range(9)), "min_tokens": 1},
            r"min_tokens=1 forbids all 9 ids: stop_token_ids",
        ),
        ({"seed": 2**64}, r"seed must be in \[0, 2\*\*64\), got 18446744073709551616"),
    ],
)
def test_what_does_not_fit_the_model_is_refused(params: dict[str, Any], message: str) -> None:
    seed = params.pop("seed", 0)
    with pytest.raises(ValueError, match=message):
        resolved(9, seed=seed, **params)
