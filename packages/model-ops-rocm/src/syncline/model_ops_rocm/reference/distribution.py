"""Rows of logits as distributions in PyTorch: float64 throughout, so that others have an oracle.

A gap is a logit less the largest of its row, over the temperature; its exponential is the weight of
an id, and the likeliest weighs 1. What cannot be drawn has the gap -inf. Draws nothing.
"""

from typing import Final, NamedTuple

import torch

from syncline.model_ops_rocm.contracts.logits import SURE_LOGPROB, Distribution, Vocabulary

NEG_INF: Final = float("-inf")
NAN: Final = float("nan")


class Rows(NamedTuple):
    """What is known of each row."""

    gaps_RV: torch.Tensor  # over the columns of this vocabulary, or shard of it
    best_R: torch.Tensor  # the likeliest id
    others_R: torch.Tensor  # the weight of all others; NaN if the row is no numbers
    is_bad_R: torch.Tensor
    mass_SR: torch.Tensor  # of every shard, relative to the largest logit of all

    def logprobs_of(self, columns: torch.Tensor, first_id: int) -> torch.Tensor:
        """float64 [R, N] of columns [R, N], at most SURE_LOGPROB; NaN in a bad row."""
        gaps = self.gaps_RV.gather(1, columns)
        is_best = columns + first_id == self.best_R[:, None]
        gaps = torch.where(is_best & (gaps > NEG_INF), 0.0, gaps)
        logprobs = (gaps - self.others_R.log1p()[:, None]).clamp(max=SURE_LOGPROB)
        return logprobs.masked_fill(self.is_bad_R[:, None], NAN)


def rows_of(
    logits_RV: torch.Tensor, distribution: Distribution, vocabulary: Vocabulary, num_real: int
) -> Rows:
    """The distributions of the first `num_real` columns."""
    x_RV = real_logits(logits_RV, num_real)
    divisor_R, is_greedy_R, is_bad_R = divisors(distribution.temperature_R, x_RV)
    if vocabulary.partials_SRP is not None:
        whole_RP, mass_SR = combined(vocabulary.partials_SRP, divisor_R)
        gaps_RV = (x_RV - whole_RP[:, :1]) / divisor_R[:, None]
        best_R, others_R = whole_RP[:, 2].nan_to_num(-1.0).to(torch.int64), whole_RP[:, 1]
        is_bad_R |= ~whole_RP[:, 0].isfinite()
    else:
        gaps_RV = (x_RV - x_RV.amax(dim=1, keepdim=True)) / divisor_R[:, None]
        if distribution.is_filtered:
            kept_RV = is_kept(gaps_RV, distribution) | is_greedy_R[:, None]
            gaps_RV = torch.where(kept_RV, gaps_RV, NEG_INF)
            is_bad_R |= _has_nan(distribution) & ~is_greedy_R
        best_R, others_R = best_and_others(gaps_RV)
        best_R = best_R + vocabulary.first_id
        mass_SR = 1.0 + others_R[None, :]
    is_bad_R |= ~(others_R < float("inf"))
    return Rows(gaps_RV, best_R, others_R, is_bad_R, mass_SR)


def real_logits(logits_RV: torch.Tensor, num_real: int) -> torch.Tensor:
    """float64 of the real columns; one column of -inf if there are none."""
    if num_real == 0:
        return torch.full_like(logits_RV[:, :1], NEG_INF, dtype=torch.float64)
    return logits_RV[:, :num_real].to(torch.float64)


def divisors(
    temperature_R: torch.Tensor | None, x_RV: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """float64 [R], 1 for a greedy row; which rows are greedy; which temperatures are no numbers."""
    if temperature_R is None:
        temperature_R = x_RV.new_ones(x_RV.shape[0])
    is_greedy_R = temperature_R == 0.0
    divisor_R = temperature_R.to(torch.float64).masked_fill(is_greedy_R, 1.0)
    is_bad_R = ~((temperature_R >= 0.0) & (temperature_R < float("inf")))
    return divisor_R, is_greedy_R, is_bad_R


def best_and_others(gaps_RV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The likeliest column, the lowest on a tie, and the weight of all the others; NaN if bad."""
    best_R = gaps_RV.argmax(dim=1)  # the first of equals
    others_RV = gaps_RV.scatter(1, best_R[:, None], NEG_INF)
    # With a NaN or +inf in the row, or nothing but -inf, the gap of the best is no number.
    return best_R, others_RV.exp().sum(dim=1) + gaps_RV.gather(1, best_R[:, None])[:, 0] * 0.0


def combined(
    partials_SRP: torch.Tensor, divisor_R: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The partials of the union, [R, 3], and each shard's mass relative to its largest, [S, R]."""
    largest_SR, others_SR, ids_SR = partials_SRP.unbind(dim=2)
    largest_R = largest_SR.amax(dim=0)
    is_empty_SR = largest_SR == NEG_INF
    gaps_SR = ((largest_SR - largest_R) / divisor_R).masked_fill(is_empty_SR, NEG_INF)
    mass_SR = (1.0 + others_SR) * gaps_SR.exp()
    winner_1R = largest_SR.argmax(dim=0, keepdim=True)
    of_winner_R = others_SR.gather(0, winner_1R)[0]
    others_R = of_winner_R + mass_SR.scatter(0, winner_1R, 0.0).sum(dim=0)
    best_R = ids_SR.gather(0, winner_1R)[0]
    is_nan_R = largest_R.isnan() | others_R.isnan()
    whole_RP = torch.stack((largest_R, others_R, best_R), dim=1)
    return torch.where(is_nan_R[:, None], whole_RP.new_tensor([NAN, NAN, -1.0]), whole_RP), mass_SR


def _has_nan(distribution: Distribution) -> torch.Tensor:
    """Whether a row's top_p or min_p is no number; bool [R], or a scalar where there are none."""
    given = [one.isnan() for one in (distribution.top_p_R, distribution.min_p_R) if one is not None]
    return torch.stack(given).any(dim=0) if given else torch.tensor(False)


def is_kept(gaps_RV: torch.Tensor, distribution: Distribution) -> torch.Tensor:
    """Which ids the filters leave; bool [R, V]."""
    kept_RV = torch.ones_like(gaps_RV, dtype=torch.bool)
    if distribution.min_p_R is not None:
        share_R = distribution.min_p_R.to(torch.float64).nan_to_num(0.0).clamp(0.0, 1.0)
        kept_RV &= gaps_RV >= share_R.log()[:, None]
    if distribution.top_k_R is None and distribution.top_p_R is None:
        return kept_RV
    sorted_RV, order_RV = gaps_RV.masked_fill(~kept_RV, NEG_INF).sort(
        dim=1, descending=True, stable=True
    )
    if distribution.top_k_R is not None:
        rank_V = torch.arange(gaps_RV.shape[1], device=gaps_RV.device)
        k_R1 = distribution.top_k_R[:, None]
        sorted_RV = sorted_RV.masked_fill((rank_V >= k_R1) & (k_R1 > 0), NEG_INF)
    is_first_RV = sorted_RV > NEG_INF
    if distribution.top_p_R is not None:
        weights_RV = sorted_RV.exp()
        running_RV = weights_RV.cumsum(dim=1)
        p_R1 = distribution.top_p_R.to(torch.float64)[:, None]
        before_RV = running_RV - weights_RV
        is_first_RV &= (before_RV < p_R1 * running_RV[:, -1:]) | ~(p_R1 < 1.0)
    is_first_RV[:, 0] = True
    return kept_RV & torch.zeros_like(kept_RV).scatter_(1, order_RV, is_first_RV)
