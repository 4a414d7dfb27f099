"""Scoring in chunks, and draws made in windows, equal what is done at once and one by one."""

import math

import pytest
import torch

from syncline.engine.runner.draws import WINDOW, DrawWindow
from syncline.engine.runner.inputs import Membership
from syncline.engine.sampling.batch import SamplingColumns
from syncline.engine.sampling.pipeline import draw
from syncline.engine.sampling.resolved import ResolvedSampling
from syncline.engine.sampling.scoring import score_tokens
from syncline.engine.sampling_params import SamplingParams
from syncline.model_ops_rocm import SURE_LOGPROB

CPU = torch.device("cpu")


@pytest.mark.parametrize("max_elements", [1, 30, 1000])
def test_scores_do_not_depend_on_the_chunk_and_no_chunk_is_larger(max_elements: int) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(17, 6, generator=generator)
    head = torch.randn(12, 6, generator=generator)
    ids = torch.randint(0, 10, (17,), generator=generator)
    sizes: list[int] = []

    def compute_logits(hidden_CH: torch.Tensor) -> torch.Tensor:
        sizes.append(hidden_CH.shape[0])
        return hidden_CH @ head.T

    scores = score_tokens(
        hidden, ids, compute_logits, true_vocab_size=10, num_top=3, max_elements=max_elements
    )
    expected = (hidden @ head.T)[:, :10].log_softmax(-1)
    assert torch.allclose(
        scores.logprobs_Q.float(), expected.gather(1, ids[:, None])[:, 0], atol=1e-6
    )
    assert torch.equal(scores.top_token_ids_QK, expected.topk(3).indices)
    assert torch.allclose(scores.top_logprobs_QK.float(), expected.topk(3).values, atol=1e-6)
    assert max(sizes) <= max(1, max_elements // 10) and sum(sizes) == 17


def test_the_score_of_a_certain_token_is_exact_and_never_zero() -> None:
    logits = torch.tensor([[0.0, 30.0, 0.0], [0.0, 800.0, 0.0], [0.0, 1.0, 0.0]])
    ids = torch.tensor([1, 1, 0])
    scores = score_tokens(logits, ids, lambda hidden: hidden, true_vocab_size=3, num_top=2)
    near, sure, plain = scores.logprobs_Q.tolist()
    assert near == pytest.approx(-2 * math.exp(-30.0), rel=2e-6)
    assert sure == SURE_LOGPROB
    assert plain == logits[2].log_softmax(0)[0].item()
    assert scores.top_logprobs_QK[:2, 0].tolist() == [near, sure]


def membership(seeds: list[int], temperature: float = 1.0) -> Membership:
    columns = SamplingColumns(len(seeds), CPU)
    for row, seed in enumerate(seeds):
        params = SamplingParams(temperature=temperature)
        columns.join(row, ResolvedSampling(params=params, seed=seed, true_vocab_size=9), row, 3)
    rows = tuple(range(len(seeds)))
    return Membership(
        rows=rows,
        request_ids=("",) * len(rows),
        rows_Y=torch.tensor(rows),
        sampling=columns.batch(rows),
    )


def test_a_window_gives_the_draw_of_every_step_and_starts_anew_for_other_rows() -> None:
    first, second = membership([1, 2**40 + 7, 3]), membership([4, 5])
    window = DrawWindow(CPU)
    position = torch.tensor([10, 500, 3])
    for step in range(2 * WINDOW + 3):
        got = window.next(first, position + step)
        assert got is not None
        assert torch.equal(got, draw(first.sampling, position + step))
    for start in (20, 21):
        got = window.next(second, torch.tensor([start, start + 9]))
        assert got is not None
        assert torch.equal(got, draw(second.sampling, torch.tensor([start, start + 9])))
    for start in (70, 71, 72):
        got = window.next(first, position + start)
        assert got is not None
        assert torch.equal(got, draw(first.sampling, position + start))


def test_greedy_rows_draw_nothing() -> None:
    assert DrawWindow(CPU).next(membership([1, 2], 0.0), torch.tensor([1, 2])) is None
