"""Logprobs that stay exact where a token is all but certain.

A logprob is a float32 `log_softmax`, which rounds to a literal 0.0 once everything else together
holds less than about 6e-8. A trainer cannot tell such a zero from a logprob that was never written,
so the likeliest tokens are computed again, from what the others hold, in float64. Chooses nothing.

R rows, V ids that can be sampled, K listed tokens.
"""

from typing import Final

import torch
from torch import Tensor

from syncline.model_ops_rocm import SURE_LOGPROB

# Above it float32 has lost half its digits; the others then hold less than a thousandth.
_NEARLY_SURE: Final = -1e-3
# Where the chosen token stood: not -inf, as a row of nothing but -inf has no log_softmax.
_LOWEST: Final = torch.finfo(torch.float32).min


def exact_logprobs(logits_RV: Tensor, logprobs_R: Tensor, token_ids_R: Tensor) -> Tensor:
    """float64 logprobs of one token per row; each row depends on that row alone.

    `logprobs_R` is their float32 logprobs by `logits_RV`. What is not finite stays as it is.
    """
    exact_R = logprobs_R.to(torch.float64)
    rows_N = (logprobs_R > _NEARLY_SURE).nonzero()[:, 0]
    if rows_N.numel():
        exact_R[rows_N] = _from_the_others(logits_RV[rows_N], token_ids_R[rows_N][:, None])
    return exact_R


def exact_top(logits_RV: Tensor, logprobs_RK: Tensor, token_ids_RK: Tensor) -> Tensor:
    """The listed logprobs in float64. Only the likeliest token of a row can be nearly sure."""
    exact_RK = logprobs_RK.to(torch.float64)
    if logprobs_RK.shape[1]:
        exact_RK[:, 0] = exact_logprobs(logits_RV, logprobs_RK[:, 0], token_ids_RK[:, 0])
    return exact_RK


def _from_the_others(gaps_NV: Tensor, token_ids_N1: Tensor) -> Tensor:
    """-log(1 + sum of exp(l_i - l_chosen) over the others), and at most SURE_LOGPROB.

    `gaps_NV` comes as logits, and is used up. Gaps and their sum are float32, right to about 1e-6
    of the sum; what they come to, which could underflow there, is float64.
    """
    # The chosen token is the largest. In float32, as where a row was shaped: a row that another
    # row's temperature or filter made the batch shift already must not change by one bit.
    gaps_NV -= gaps_NV.amax(dim=-1, keepdim=True)
    gaps_NV.scatter_(1, token_ids_N1, _LOWEST)
    # A sum over a row may be split differently in a larger batch; log_softmax goes row by row.
    log_sum_N = -gaps_NV.log_softmax(dim=-1).amax(dim=-1).to(torch.float64)
    others_N = gaps_NV.amax(dim=-1).to(torch.float64) + log_sum_N
    return (-others_N.exp().log1p()).clamp(max=SURE_LOGPROB)
