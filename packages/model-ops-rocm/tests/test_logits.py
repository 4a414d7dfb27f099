"""What the logits' contracts promise, by the reference, against plain Python."""

import math
from collections.abc import Callable
from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.model_ops_rocm import SURE_LOGPROB, Distribution, Draw, Vocabulary, select
from syncline.model_ops_rocm.reference.philox import PURPOSE_SAMPLE, seed_to_int64, uniforms

NAN, INF = float("nan"), float("inf")
sample = select("sample", dtype=torch.float32)
token_logprobs = select("token_logprobs", dtype=torch.float32)
top_logprobs = select("top_logprobs", dtype=torch.float32)
partials_of = select("logits_partials", dtype=torch.float32)
combine = select("combine_partials", dtype=torch.float32)


def draw_of(num_rows: int, seed: int = 1) -> Draw:
    rows = torch.arange(num_rows)
    return Draw(torch.full((num_rows,), seed_to_int64(seed)), rows, rows + 3)


def distribution_of(
    num_rows: int, temperature: float = 1.0, k: int = 0, p: float = 1.0, min_p: float = 0.0
) -> Distribution:
    return Distribution(
        torch.full((num_rows,), temperature),
        torch.full((num_rows,), k),
        torch.full((num_rows,), p),
        torch.full((num_rows,), min_p),
    )


def naive(row: list[float], temperature: float, k: int, p: float, min_p: float) -> list[float]:
    """The probabilities of one row, by the contract's words."""
    if temperature == 0.0:
        temperature, k, p, min_p = 1.0, 0, 1.0, 0.0
    weights = [math.exp((x - max(row)) / temperature) for x in row]
    ranked = sorted(range(len(row)), key=lambda i: (-row[i], i))
    kept = [i for i in ranked if weights[i] >= min_p]
    kept = kept[:k] if k > 0 else kept
    total = sum(weights[i] for i in kept)
    if p < 1.0:
        before = 0.0
        for count, i in enumerate(kept):
            if before >= p * total and count > 0:
                kept = kept[:count]
                break
            before += weights[i]
    total = sum(weights[i] for i in kept)
    return [weights[i] / total if i in set(kept) else 0.0 for i in range(len(row))]


ROWS = st.lists(st.integers(-40, 40).map(lambda i: i / 8), min_size=1, max_size=30)


@settings(deadline=None)
@given(
    ROWS,
    st.sampled_from([0.0, 0.25, 1.0, 3.0]),
    st.integers(0, 31),
    st.sampled_from([1.0, 0.97, 0.51, 0.13]),
    st.sampled_from([0.0, 0.03, 0.31]),
    st.integers(0, 2**64 - 1),
)
def test_a_token_is_drawn_from_the_distribution_that_the_words_describe(
    row: list[float], temperature: float, k: int, p: float, min_p: float, seed: int
) -> None:
    probabilities = naive(row, temperature, k, p, min_p)
    distribution, draw = distribution_of(1, temperature, k, p, min_p), draw_of(1, seed)
    ids, logprobs = sample(torch.tensor([row]), distribution, draw)
    u = float(uniforms(*draw, PURPOSE_SAMPLE))
    token = int(ids)
    if temperature == 0.0:
        assert token == row.index(max(row))
    else:
        before = sum(probabilities[:token])
        assert before - 1e-9 <= u <= before + probabilities[token] + 1e-9
    assert probabilities[token] > 0.0
    expected = min(math.log(probabilities[token]), SURE_LOGPROB)
    assert float(logprobs) == pytest.approx(expected, rel=1e-9, abs=1e-12)
    listed, values = top_logprobs(torch.tensor([row]), len(row), distribution=distribution)
    ranked = sorted(range(len(row)), key=lambda i: (-probabilities[i], i))
    ranked = [i for i in ranked if probabilities[i] > 0.0]
    assert listed[0].tolist() == [*ranked, *[-1] * (len(row) - len(ranked))]
    own = token_logprobs(torch.tensor([row]), ids, distribution=distribution)
    assert torch.equal(own, logprobs)
    assert values[0, : len(ranked)].tolist() == sorted(values[0, : len(ranked)].tolist())[::-1]


def test_every_token_is_drawn_as_often_as_it_should() -> None:
    row = torch.tensor([0.0, 2.0, -INF, 1.0, 1.5, -1.0])
    num_draws = 20_000
    positions = torch.arange(num_draws)
    draw = Draw(torch.full((num_draws,), 7), torch.zeros_like(positions), positions)
    ids, _ = sample(row.expand(num_draws, -1), distribution_of(num_draws, 0.7), draw)
    expected = (row / 0.7).softmax(0) * num_draws
    counts = torch.bincount(ids, minlength=6)
    assert counts[2] == 0
    possible = expected > 0
    chi_square = ((counts - expected) ** 2 / expected)[possible].sum()
    assert chi_square < 20.5  # 4 degrees of freedom: one in 2,500


def test_equal_rows_draw_apart_and_a_row_draws_alike_whatever_shares_the_batch() -> None:
    row = torch.randn(1, 50, generator=torch.Generator().manual_seed(0))
    draw = draw_of(40)
    ids, logprobs = sample(row.expand(40, -1), distribution_of(40), draw)
    assert len(set(ids.tolist())) > 10
    for i in (0, 17, 39):
        one = Draw(*(part[i : i + 1] for part in draw))
        alone = sample(row, distribution_of(1), one)
        assert (int(alone[0]), float(alone[1])) == (int(ids[i]), float(logprobs[i]))


def test_a_padded_id_is_never_chosen_listed_or_summed() -> None:
    row = torch.tensor([[0.0, 1.0, 9.0, NAN]]).repeat(64, 1)
    vocabulary = Vocabulary(2)
    for temperature in (0.0, 1.0, 50.0):
        distribution = distribution_of(64, temperature)
        ids, _ = sample(row, distribution, draw_of(64), vocabulary=vocabulary)
        assert set(ids.tolist()) <= {0, 1}
    values = token_logprobs(row[:2], torch.tensor([1, 2]), vocabulary=vocabulary)
    assert float(values[0].exp()) == pytest.approx(math.e / (1 + math.e))
    assert values[1].isnan()
    listed, logprobs = top_logprobs(row[:1], 3, vocabulary=vocabulary)
    assert listed.tolist() == [[1, 0, -1]]
    assert logprobs[0, 2] == -INF


@pytest.mark.parametrize("row", [[NAN, 1.0], [1.0, INF], [-INF, -INF], [NAN, NAN], [INF, INF]])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_no_numbers_is_an_error_and_never_a_token(
    row: list[float], temperature: float
) -> None:
    logits, distribution = torch.tensor([row, [0.0, 1.0]]), distribution_of(2, temperature, k=1)
    ids, logprobs = sample(logits, distribution, draw_of(2))
    assert ids.tolist() == [-1, 1]
    assert logprobs.isnan().tolist() == [True, False]
    assert token_logprobs(logits, torch.tensor([0, 0])).isnan().tolist() == [True, False]
    listed, values = top_logprobs(logits, 1)
    assert listed.tolist() == [[-1], [1]]
    assert values.isnan().tolist() == [[True], [False]]


def test_a_temperature_that_is_no_number_and_a_padding_row_give_no_token() -> None:
    distribution = Distribution(torch.tensor([-1.0, NAN, 1.0, INF, 1.0]))
    draw = draw_of(5)
    draw.positions_R[2] = -1
    ids, logprobs = sample(torch.zeros(5, 3), distribution, draw)
    assert ids.tolist()[:4] == [-1] * 4
    assert logprobs.isnan().tolist() == [True, True, True, True, False]
    assert token_logprobs(torch.zeros(1, 3), torch.tensor([-1])).tolist() == [0.0]


def test_a_logprob_is_exact_where_a_token_is_all_but_certain_and_never_zero() -> None:
    for gap in (20.0, 100.0, 700.0):
        logits = torch.tensor([[0.0, gap, 0.0]])
        _, logprobs = sample(logits, distribution_of(1, 0.0), draw_of(1))
        assert float(logprobs) == pytest.approx(-2.0 * math.exp(-gap), rel=1e-12)
    _, logprobs = sample(torch.tensor([[0.0, 1e5]]), distribution_of(1), draw_of(1))
    assert float(logprobs) == SURE_LOGPROB
    values = token_logprobs(torch.zeros(1, 1), torch.tensor([0]))
    assert values.tolist() == [SURE_LOGPROB]


def test_shards_together_answer_as_the_whole_does() -> None:
    make = torch.Generator().manual_seed(3)
    logits = torch.randn(60, 90, generator=make) * 2
    logits[4], logits[5, :30], logits[6, 70] = NAN, -INF, INF
    temperature_R = torch.tensor([1.0, 0.0, 0.4, 5.0]).repeat(15)
    distribution, draw = Distribution(temperature_R), draw_of(60)
    ids = torch.randint(0, 84, (60,), generator=make)
    bounds = [(0, 30), (30, 64), (64, 86), (86, 90)]  # the last has no real id
    partials = torch.stack(
        [
            partials_of(
                logits[:, start:stop],
                temperature_R=temperature_R,
                vocabulary=Vocabulary(84, start),
            )
            for start, stop in bounds
        ]
    )
    whole = Vocabulary(84)
    parts: list[tuple[torch.Tensor, ...]] = []
    for shard, (start, stop) in enumerate(bounds):
        vocabulary = Vocabulary(84, start, shard, partials)
        local = logits[:, start:stop]
        scores = token_logprobs(local, ids, distribution=distribution, vocabulary=vocabulary)
        parts.append((*sample(local, distribution, draw, vocabulary=vocabulary), scores))
    tokens, logprobs, scores = (torch.stack(part).amax(dim=0) for part in zip(*parts, strict=True))
    expected = sample(logits, distribution, draw, vocabulary=whole)
    assert torch.equal(tokens, expected[0])
    torch.testing.assert_close(logprobs, expected[1], rtol=1e-12, atol=0.0, equal_nan=True)
    expected_scores = token_logprobs(logits, ids, distribution=distribution, vocabulary=whole)
    torch.testing.assert_close(scores, expected_scores, rtol=1e-12, atol=0.0, equal_nan=True)
    combined = combine(partials, temperature_R=temperature_R)
    of_whole = partials_of(logits, temperature_R=temperature_R, vocabulary=whole)
    torch.testing.assert_close(combined, of_whole, rtol=1e-12, atol=0.0, equal_nan=True)
    in_groups = torch.stack([combine(partials[:2], temperature_R=temperature_R), partials[2]])
    torch.testing.assert_close(
        combine(in_groups, temperature_R=temperature_R),
        of_whole,
        rtol=1e-12,
        atol=0.0,
        equal_nan=True,
    )


def test_bad_arguments_are_refused_by_name() -> None:
    logits, one = torch.zeros(2, 8), torch.ones(2)
    draw, plain = draw_of(2), Distribution(one)
    partials = torch.zeros(3, 2, 3, dtype=torch.float64)
    shard = Vocabulary(first_id=8, shard=1, partials_SRP=partials)

    def of(op: object, *args: object, **kwargs: object) -> Callable[[], object]:
        return lambda: cast(Callable[..., object], op)(*args, **kwargs)

    def drawn(distribution: Distribution = plain, **kwargs: object) -> Callable[[], object]:
        return of(sample, logits, distribution, draw, **kwargs)

    refusals = {
        "sample: logits must be float32, bfloat16": of(sample, logits.long(), plain, draw),
        "sample: logits must have 2 dimensions": of(sample, logits[0], plain, draw),
        "logits must have at least one column": of(sample, logits[:, :0], plain, draw),
        "temperature must be torch.float32": drawn(Distribution(one.double())),
        r"temperature must have shape \[2\]": drawn(Distribution(one[:1])),
        "top_k must be int64 or int32": drawn(Distribution(top_k_R=one)),
        "seeds must be torch.int64": of(sample, logits, plain, draw._replace(seeds_R=one.int())),
        "true_size must be at most the 8 columns": drawn(vocabulary=Vocabulary(9)),
        "true_size must be positive": drawn(vocabulary=Vocabulary(0)),
        "first_id must be 0 without partials": drawn(vocabulary=Vocabulary(first_id=8)),
        "have no filter for a shard": drawn(Distribution(top_p_R=one), vocabulary=shard),
        r"shard must be in \[0, 3\), got 3": drawn(vocabulary=shard._replace(shard=3)),
        r"out\[1\] must be torch.float64": drawn(out=(one.long(), one)),
        "token_logprobs: token_ids must be int64": of(token_logprobs, logits, one),
        r"top_logprobs: num_top must be in \[1, 8\]": of(top_logprobs, logits, 0),
        "combine_partials: partials must have 3": of(combine, partials[0]),
        "combine_partials: partials must be torch": of(combine, partials.float()),
    }
    for message, call in refusals.items():
        with pytest.raises(ValueError, match=message):
            call()
