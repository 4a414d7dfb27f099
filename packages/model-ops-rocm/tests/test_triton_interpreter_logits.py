"""Triton's kernels of the logits, interpreted on the CPU, where parity cases do not reach."""

import importlib
from typing import cast

import pytest
import torch

from syncline.model_ops_rocm import Distribution, Draw, Sample, select
from syncline.model_ops_rocm.contracts.logits import (
    WHOLE,
    CombinePartials,
    LogitsPartials,
    TokenLogprobs,
    TopLogprobs,
)
from syncline.model_ops_rocm.reference.philox import PURPOSE_ACCEPT, random_words, uniforms
from syncline.model_ops_rocm.triton import BACKEND
from syncline.model_ops_rocm.triton.configs import logits as configs

NAN = float("nan")
# Unsigned words wrap, which is what they are for; and -inf less itself is NaN.
pytestmark = [
    pytest.mark.usefixtures("interpreter"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_the_words_of_a_counter_are_those_of_the_reference(dtype: torch.dtype) -> None:
    philox = importlib.import_module("syncline.model_ops_rocm.triton.kernels.philox")
    make = torch.Generator().manual_seed(0)
    seeds = torch.randint(-(2**63), 2**63 - 1, (256,), generator=make)
    samples = torch.randint(0, 2**31, (256,), generator=make).to(dtype)
    positions = torch.randint(0, 2**31, (256,), generator=make).to(dtype)
    words = torch.zeros(256, 4, dtype=torch.int64)
    drawn = torch.zeros(256, dtype=torch.float64)
    philox.draws_kernel[(4,)](seeds, samples, positions, words, drawn, PURPOSE_ACCEPT, 64)
    expected = random_words(seeds, samples, positions, PURPOSE_ACCEPT)
    assert torch.equal(words, torch.stack(expected, dim=1))
    assert torch.equal(drawn, uniforms(seeds, samples, positions, PURPOSE_ACCEPT))


def test_a_cut_is_found_in_parts_of_a_row_that_a_step_of_the_search_did_not_read() -> None:
    # The parts that a step reads at once, 8,192 ids, lie far above one another.
    make = torch.Generator().manual_seed(4)
    logits = torch.randn(3, 3 * 8_192, generator=make).mul_(0.1)
    logits[:, 8_192:] -= 2.0
    logits[:, 16_384:] -= 2.0
    logits[:, 20_000] = torch.tensor([0.0, -1.5, 5.0])
    rows = torch.arange(3)
    draw = Draw(rows + 9, rows, rows)
    distribution = Distribution(
        torch.tensor([1.0, 0.7, 2.0]),
        torch.tensor([0, 9_000, 2]),
        torch.tensor([0.88, 0.9, 1.0]),
    )
    expected = select("sample", dtype=torch.float32)(logits, distribution, draw)
    got = cast(Sample, BACKEND.load()["sample"])(logits, distribution, draw)
    assert torch.equal(got[0], expected[0])
    torch.testing.assert_close(got[1], expected[1], rtol=2e-6, atol=1e-12)


@pytest.mark.parametrize(
    ("top_k", "top_p", "is_bounded"), [(0, 0.9, True), (1_000, 0.9, False), (0, 0.02, False)]
)
def test_the_cut_of_a_flat_row_is_found_in_what_was_collected(
    top_k: int, top_p: float, is_bounded: bool
) -> None:
    rows_of = importlib.import_module("syncline.model_ops_rocm.triton.ops.logits_rows")
    logits = torch.randn(1, 24_000, generator=torch.Generator().manual_seed(5))
    filters = torch.tensor([top_k]), torch.tensor([top_p])
    given = rows_of.Operands(logits, Distribution(None, *filters), WHOLE, 24_000, None, None)
    stats = rows_of.begin("sample", given).stats
    low, high, cut = stats.lows[0], stats.highs[0], stats.cuts[0]
    assert low <= cut < high  # not NaN or +inf: the row was not read again
    assert bool(high < logits.max()) == is_bounded
    expected = torch.sort(logits[0], descending=True).values
    if top_k:
        expected = expected[:top_k]
    weights = expected.double().exp()
    number = int((weights.cumsum(0) - weights < top_p * weights.sum()).sum())
    assert cut == expected[number - 1]


@pytest.mark.parametrize(
    ("dtype", "scale", "middle", "top_p"),
    [
        (torch.float32, 3.0, 0.0, 0.9),
        (torch.float32, 3.0, 0.0, 0.5),
        (torch.float32, 6.0, 0.0, 0.5),
        (torch.float32, 0.1, 0.0, 0.99),
        # The likeliest alone.
        (torch.float32, 3.0, 0.0, 0.0),
        # A float16 of 300 is a multiple of a quarter: hundreds of ids share each value.
        (torch.float16, 2.5, 300.0, 0.9),
        (torch.float16, 1.0, -300.0, 0.9),
        (torch.float16, 2.5, -600.0, 0.0),
    ],
    ids=str,
)
def test_a_bracket_holds_the_cut_of_a_peaked_row(
    dtype: torch.dtype, scale: float, middle: float, top_p: float
) -> None:
    rows_of = importlib.import_module("syncline.model_ops_rocm.triton.ops.logits_rows")
    make = torch.Generator().manual_seed(7)
    logits = torch.randn(3, 24_000, generator=make).mul_(scale).add_(middle).to(dtype)
    filters = Distribution(None, None, torch.full((3,), top_p))
    given = rows_of.Operands(logits, filters, WHOLE, 24_000, None, None)
    stats = rows_of.begin("sample", given).stats
    lows, highs, cuts = stats.lows[:3], stats.highs[:3], stats.cuts[:3]
    # Not +inf: no row was read again.
    assert bool(((lows <= cuts) & (cuts < highs) & (lows < float("inf"))).all()), (lows, highs)
    values = torch.sort(logits.double(), dim=1, descending=True).values
    weights = (values - values[:, :1]).exp()
    kept = (weights.cumsum(1) - weights < top_p * weights.sum(1, keepdim=True)).sum(1)
    last = kept.clamp(min=1)[:, None] - 1
    assert torch.equal(cuts.double(), values.gather(1, last)[:, 0])


@pytest.mark.parametrize("filters", [(), (None, [0.9]), ([40],), (None, None, [0.05])], ids=str)
def test_a_program_takes_several_tiles_where_there_are_many(
    monkeypatch: pytest.MonkeyPatch, filters: tuple[list[float] | None, ...]
) -> None:
    monkeypatch.setattr(configs, "_ENOUGH_PROGRAMS", 8)
    ops, rows, num_ids = BACKEND.load(), torch.arange(4), 4_500
    # The last program of a row has two, and of the last of those a part.
    assert configs.tiles_of_a_program(4, 5) == 3
    logits = torch.randn(4, num_ids, generator=torch.Generator().manual_seed(8)).mul_(3.0)
    logits[0, 2_100], logits[1, 1_030], logits[2, 4_499] = 30.0, 20.0, 15.0
    asked = Distribution(
        torch.tensor([0.0, 0.0, 0.7, 1.3]),
        *(one if one is None else torch.tensor(one * 4) for one in filters),
    )
    call = logits, asked, Draw(rows, rows, rows)
    got, expected = cast(Sample, ops["sample"])(*call), select("sample", dtype=torch.float32)(*call)
    assert torch.equal(got[0], expected[0])
    assert got[0].tolist()[:2] == [2_100, 1_030]
    torch.testing.assert_close(got[1], expected[1], rtol=2e-6, atol=1e-12)
    given = cast(TokenLogprobs, ops["token_logprobs"])(logits, got[0], distribution=asked)
    torch.testing.assert_close(given, expected[1], rtol=2e-6, atol=1e-12)


@pytest.mark.parametrize("num_ids", [300, 4_096])
@pytest.mark.parametrize("filters", [(), ([3], [0.5], [1.0])], ids=["plain", "filtered"])
def test_a_temperature_that_is_no_number_fails_its_row_alone(
    filters: tuple[list[float], ...], num_ids: int
) -> None:
    ops, rows = BACKEND.load(), torch.arange(5)
    logits = torch.randn(5, num_ids, generator=torch.Generator().manual_seed(6))
    temperature = torch.tensor([float("inf"), 0.5, float("nan"), -1.0, 0.0])
    asked = Distribution(temperature, *(torch.tensor(one * 5) for one in filters))
    is_bad = [True, False, True, True, False]
    ids, logprobs = cast(Sample, ops["sample"])(logits, asked, Draw(rows, rows, rows))
    expected = select("sample", dtype=torch.float32)(logits, asked, Draw(rows, rows, rows))
    assert (ids == -1).tolist() == logprobs.isnan().tolist() == is_bad
    assert torch.equal(ids, expected[0])
    given = cast(TokenLogprobs, ops["token_logprobs"])(logits, rows, distribution=asked)
    assert given.isnan().tolist() == is_bad
    _, top = cast(TopLogprobs, ops["top_logprobs"])(logits, 2, distribution=asked)
    assert top.isnan().any(dim=1).tolist() == is_bad
    partials = cast(LogitsPartials, ops["logits_partials"])(logits, temperature_R=temperature)
    assert partials[:, 0].isnan().tolist() == is_bad
    whole = cast(CombinePartials, ops["combine_partials"])(
        torch.ones(2, 5, 3, dtype=torch.float64), temperature_R=temperature
    )
    assert whole[:, 0].isnan().tolist() == is_bad


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [(0, 0.5, NAN), (3, NAN, 0.1), (0, NAN, NAN)])
def test_a_filter_that_is_no_number_fails_its_row_alone_unless_it_is_greedy(
    top_k: int, top_p: float, min_p: float
) -> None:
    rows, num_ids = torch.arange(4), 5_000
    logits = torch.randn(4, num_ids, generator=torch.Generator().manual_seed(7))
    asked = Distribution(
        torch.tensor([0.7, 1.0, 0.0, 1.0]),
        torch.full((4,), top_k),
        torch.tensor([top_p, 0.9, top_p, top_p]),
        torch.tensor([min_p, 0.0, min_p, min_p]),
    )
    is_bad = [True, False, False, True]
    call = logits, asked, Draw(rows, rows, rows)
    ids, logprobs = cast(Sample, BACKEND.load()["sample"])(*call)
    expected = select("sample", dtype=torch.float32)(*call)
    assert (ids == -1).tolist() == logprobs.isnan().tolist() == is_bad
    assert torch.equal(ids, expected[0])
    given = cast(TokenLogprobs, BACKEND.load()["token_logprobs"])(logits, rows, distribution=asked)
    assert given.isnan().tolist() == is_bad


def test_a_row_that_fills_a_region_is_read_again() -> None:
    rows_of = importlib.import_module("syncline.model_ops_rocm.triton.ops.logits_rows")
    logits = torch.full((1, 4_000), -3.0)
    logits[0, :1_000] = torch.arange(1_000) * -1e-3
    given = rows_of.Operands(
        logits, Distribution(None, torch.tensor([900])), WHOLE, 4_000, None, None
    )
    stats = rows_of.begin("sample", given).stats
    assert stats.ends[0] > rows_of.CAPACITY
    assert stats.lows[0] == float("inf")
    assert stats.cuts[0] == logits[0, 899]
