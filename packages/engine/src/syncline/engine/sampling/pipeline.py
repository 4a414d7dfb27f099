"""Logits to tokens and logprobs: the only path, whatever step the logits come from.

Order: padded vocabulary cut off -> forbidden ids (min_tokens) -> logit_bias -> penalties ->
temperature -> min_p, top_k, top_p -> sample -> logprob. A row of the result is a function of that
row's logits, parameters and tokens alone, bit for bit: no operation here reduces over rows, and
which shortcut a batch takes does not change a row.

R rows that sample, V ids that can be sampled, K listed tokens. Greedy rows (temperature 0) take the
largest logit, the lowest id on a tie; their distribution is that of temperature 1, unfiltered. All
other rows invert their cumulative distribution, in order of ids, at one counter-based uniform.

Source: order of vLLM v1 (`v1/sample/sampler.py`); randomness as `model_ops_rocm.uniforms` has it.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from syncline.engine.sampling.batch import SamplingBatch, Sparse
from syncline.engine.sampling.filters import NEG_INF, apply_filters
from syncline.engine.sampling.logprobs import exact_logprobs, exact_top
from syncline.engine.sampling.penalties import TokenHistory, apply_penalties
from syncline.model_ops_rocm import PURPOSE_SAMPLE, uniforms


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTokens:
    """What one step chose. A logprob that is not finite marks a row whose logits were no numbers:
    its token id is in range and means nothing."""

    token_ids_R: Tensor  # int64
    logprobs_R: Tensor  # float64, at most SURE_LOGPROB: never 0.0
    top_token_ids_LK: Tensor | None  # rows of SamplingBatch.top_logprobs, likeliest first
    top_logprobs_LK: Tensor | None  # float64 likewise; -inf where fewer tokens are possible


class LogitsPipeline:
    """Stateless but for what the model and the engine fix once."""

    __slots__ = ("_is_raw", "_true_vocab_size")

    def __init__(
        self,
        true_vocab_size: int,
        logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] = "processed_logprobs",
    ) -> None:
        if true_vocab_size < 1:
            raise ValueError(f"true_vocab_size must be positive, got {true_vocab_size}")
        self._true_vocab_size = true_vocab_size
        self._is_raw = logprobs_mode == "raw_logprobs"

    def forward(
        self,
        logits_RP: Tensor,
        batch: SamplingBatch,
        positions_R: Tensor,
        *,
        history: TokenHistory | None = None,
        uniform_R: Tensor | None = None,
    ) -> SampledTokens:
        """Choose one token per row. `logits_RP` may have padded columns, and is left as it was.

        positions_R   int64, the absolute position of the token to be chosen.
        history       the tokens of `batch.penalties`' rows; needed if and only if it has any.
        uniform_R     the draws of exactly these rows and positions, when the caller has them.
        """
        raw_logits_RV = self._real_logits(logits_RP)
        logits_RV = self._shape(raw_logits_RV, batch, positions_R, history)
        token_ids_R = self._choose(logits_RV, batch, positions_R, uniform_R)
        if self._is_raw:
            logits_RV = raw_logits_RV
        logprobs_RV = logits_RV.log_softmax(dim=-1)
        logprobs_R = logprobs_RV.gather(1, token_ids_R[:, None])[:, 0]
        logprobs_R = exact_logprobs(logits_RV, logprobs_R, token_ids_R)
        top_ids_LK, top_logprobs_LK = _top(logits_RV, logprobs_RV, batch)
        return SampledTokens(
            token_ids_R=token_ids_R,
            logprobs_R=logprobs_R,
            top_token_ids_LK=top_ids_LK,
            top_logprobs_LK=top_logprobs_LK,
        )

    def _real_logits(self, logits_RP: Tensor) -> Tensor:
        # Cut off, not filled with -inf: a padded id cannot be sampled, listed or normalised over
        # by anything that follows.
        if logits_RP.shape[1] < self._true_vocab_size:
            raise ValueError(
                f"true_vocab_size is {self._true_vocab_size}, "
                f"but the logits have {logits_RP.shape[1]} columns"
            )
        return logits_RP[:, : self._true_vocab_size].to(torch.float32).contiguous()

    def _shape(
        self,
        logits_RV: Tensor,
        batch: SamplingBatch,
        positions_R: Tensor,
        history: TokenHistory | None,
    ) -> Tensor:
        """The logits of the distribution that is sampled from; the input is left as it was."""
        if batch.forbidden or batch.bias or batch.penalties:
            logits_RV = logits_RV.clone()
        if batch.forbidden is not None:
            _forbid(logits_RV, batch.forbidden, positions_R)
        if batch.bias is not None:
            bias = batch.bias
            logits_RV.index_put_((bias.rows_N, bias.token_ids_N), bias.values_N, accumulate=True)
        if batch.penalties is not None:
            if history is None:
                raise ValueError("rows with penalties need their token history")
            apply_penalties(logits_RV, batch.penalties, history)
        if batch.temperature_R1 is None and batch.filters is None:
            return logits_RV
        # The largest logit becomes 0: no temperature can overflow, and dividing by 1 changes no
        # bit of log_softmax, which subtracts the maximum itself.
        logits_RV = logits_RV - logits_RV.amax(dim=-1, keepdim=True)
        if batch.temperature_R1 is not None:
            logits_RV /= batch.temperature_R1
        if batch.filters is not None:
            apply_filters(logits_RV, batch.filters)
        return logits_RV

    def _choose(
        self,
        logits_RV: Tensor,
        batch: SamplingBatch,
        positions_R: Tensor,
        uniform_R: Tensor | None,
    ) -> Tensor:
        if batch.is_all_greedy:
            return logits_RV.argmax(dim=-1)
        if uniform_R is None:
            uniform_R = draw(batch, positions_R)
        cdf_RV = logits_RV.softmax(dim=-1).to(torch.float64).cumsum(dim=-1)
        # u < 1, so the target lies below the total and the first sum above it belongs to an id
        # of positive probability.
        target_R1 = uniform_R[:, None] * cdf_RV[:, -1:]
        token_ids_R = torch.searchsorted(cdf_RV, target_R1, right=True)[:, 0]
        token_ids_R.clamp_(max=self._true_vocab_size - 1)  # Only a row of NaN finds no sum.
        if batch.greedy_R is not None:
            token_ids_R = torch.where(batch.greedy_R, logits_RV.argmax(dim=-1), token_ids_R)
        return token_ids_R


def draw(batch: SamplingBatch, positions: Tensor) -> Tensor:
    """The uniforms of the batch's rows at `positions`, [R] or [R, any number of positions]."""
    seeds, sample_index = batch.seeds_R, batch.sample_index_R
    if positions.dim() == 2:
        seeds, sample_index = seeds[:, None], sample_index[:, None]
    return uniforms(seeds, sample_index, positions, PURPOSE_SAMPLE)


def _forbid(logits_RV: Tensor, forbidden: Sparse, positions_R: Tensor) -> None:
    is_on_N = positions_R[forbidden.rows_N] < forbidden.values_N
    index = (forbidden.rows_N, forbidden.token_ids_N)
    logits_RV[index] = logits_RV[index].masked_fill(is_on_N, NEG_INF)


def _top(
    logits_RV: Tensor, logprobs_RV: Tensor, batch: SamplingBatch
) -> tuple[Tensor | None, Tensor | None]:
    if batch.top_logprobs is None:
        return None, None
    rows_L = batch.top_logprobs.rows_L
    ids_LK, values_LK = top_tokens(logprobs_RV[rows_L], max(batch.top_logprobs.counts))
    return ids_LK, exact_top(logits_RV[rows_L], values_LK, ids_LK)


def top_tokens(logprobs_LV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` likeliest ids per row and their logprobs, ties by lowest id."""
    # A stable sort, not topk: topk leaves open which of two equal tokens it lists.
    values_LV, ids_LV = logprobs_LV.sort(dim=-1, descending=True, stable=True)
    return ids_LV[:, :count], values_LV[:, :count]
