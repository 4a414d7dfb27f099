"""Logprobs of given tokens at many positions, without the logits of all of them at once.

The unfiltered distribution at temperature 1 over the real vocabulary: what a model says of a text,
whatever the sampling of the request. Used for prompts; chooses nothing.

Q positions, H hidden, V ids that can be sampled, K listed tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from syncline.engine.sampling.logprobs import exact_logprobs, exact_top
from syncline.engine.sampling.pipeline import top_tokens

MAX_LOGITS_ELEMENTS: Final = 1 << 24  # 64 MiB of float32; a few copies of it exist at a time.


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Per position the given token's logprob and the likeliest tokens; never a logprob of 0.0."""

    logprobs_Q: Tensor  # float64
    top_token_ids_QK: Tensor
    top_logprobs_QK: Tensor  # float64


def score_tokens(
    hidden_QH: Tensor,
    token_ids_Q: Tensor,
    compute_logits: Callable[[Tensor], Tensor],
    *,
    true_vocab_size: int,
    num_top: int,
    max_elements: int = MAX_LOGITS_ELEMENTS,
) -> Scores:
    """`token_ids_Q` int64, the tokens that `hidden_QH` are to predict, each a real id.

    At most `max_elements` logits, and at least one position, are computed at a time.
    """
    num_rows = max(1, max_elements // true_vocab_size)
    logprobs, top_ids, top_logprobs = [], [], []
    for hidden_CH, ids_C in zip(
        torch.split(hidden_QH, num_rows), torch.split(token_ids_Q, num_rows), strict=True
    ):
        logits_CV = compute_logits(hidden_CH)[:, :true_vocab_size].to(torch.float32)
        logprobs_CV = logits_CV.log_softmax(dim=-1)
        logprobs_C = logprobs_CV.gather(1, ids_C[:, None])[:, 0]
        logprobs.append(exact_logprobs(logits_CV, logprobs_C, ids_C))
        ids_CK, values_CK = (
            top_tokens(logprobs_CV, num_top)
            if num_top
            else (ids_C[:, None][:, :0], logprobs_CV[:, :0])
        )
        top_ids.append(ids_CK)
        top_logprobs.append(exact_top(logits_CV, values_CK, ids_CK))
    return Scores(
        logprobs_Q=torch.cat(logprobs),
        top_token_ids_QK=torch.cat(top_ids),
        top_logprobs_QK=torch.cat(top_logprobs),
    )
