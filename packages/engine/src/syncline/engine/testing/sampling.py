"""Logits in, samples out, without a runner: rows and judgement that sampling tests share."""

import math
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from syncline.engine.sampling.batch import SamplingBatch, SamplingColumns
from syncline.engine.sampling.penalties import TokenHistory
from syncline.engine.sampling.pipeline import LogitsPipeline, SampledTokens
from syncline.engine.sampling.resolved import ResolvedSampling
from syncline.engine.sampling_params import SamplingParams

CPU = torch.device("cpu")


def resolved(
    true_vocab_size: int, seed: int = 1, eos: tuple[int, ...] = (), **params: Any
) -> ResolvedSampling:  # Any: SamplingParams checks its own fields
    return ResolvedSampling(
        params=SamplingParams(**params),
        seed=seed,
        true_vocab_size=true_vocab_size,
        eos_token_ids=frozenset(eos),
    )


def batch_of(
    samplings: list[ResolvedSampling],
    sample_indices: list[int] | None = None,
    num_prompt: int = 0,
) -> SamplingBatch:
    columns = SamplingColumns(len(samplings), CPU)
    indices = sample_indices or [0] * len(samplings)
    for row, (sampling, index) in enumerate(zip(samplings, indices, strict=True)):
        columns.join(row, sampling, index, num_prompt)
    return columns.batch(tuple(range(len(samplings))))


def sample(
    logits: Tensor,
    samplings: list[ResolvedSampling],
    position: int = 0,
    mode: str = "processed_logprobs",
    history: list[list[int]] | None = None,
    num_prompt: int = 0,
) -> SampledTokens:
    batch = batch_of(samplings, num_prompt=num_prompt)
    pipeline = LogitsPipeline(
        samplings[0].true_vocab_size,
        "raw_logprobs" if mode == "raw_logprobs" else "processed_logprobs",
    )
    token_history = None
    if batch.penalties is not None:
        assert history is not None
        rows = [history[row] for row in batch.penalties.rows_P.tolist()]
        width = max(len(row) for row in rows)
        token_history = TokenHistory(
            token_ids_PL=torch.tensor([row + [0] * (width - len(row)) for row in rows]),
            num_tokens_P1=torch.tensor([[len(row)] for row in rows]),
        )
    positions = torch.full((len(samplings),), position)
    return pipeline.forward(logits, batch, positions, history=token_history)


def draws(logits_V: Tensor, sampling: ResolvedSampling, count: int) -> list[int]:
    """Tokens sampled at positions 0 to count - 1, as one batch of rows."""
    batch = batch_of([sampling] * count)
    pipeline = LogitsPipeline(sampling.true_vocab_size)
    logits = logits_V.expand(count, -1)
    return pipeline.forward(logits, batch, torch.arange(count)).token_ids_R.tolist()


def assert_matches(counts: Counter[int], probs: Tensor) -> None:
    """Chi-square at five standard deviations; impossible tokens never appear."""
    total = sum(counts.values())
    possible = [i for i in range(probs.numel()) if probs[i] > 0]
    assert set(counts) <= set(possible)
    chi2 = sum(
        (counts[i] - total * float(probs[i])) ** 2 / (total * float(probs[i])) for i in possible
    )
    freedom = len(possible) - 1
    assert chi2 < freedom + 5 * math.sqrt(2 * freedom) + 5, chi2
