"""min_p, top_k and top_p: which tokens remain possible, decided per row and the same on every run.

Order as in vLLM: min_p first, then top_k, then top_p over what top_k left, renormalised. Two
choices differ from vLLM, for determinism: equal logits rank by lowest id, and top_k keeps exactly k
tokens, where vLLM keeps every tie of the k-th; so top_k=1 is greedy. A kept token always remains:
the likeliest one survives each filter.
"""

import torch
from torch import Tensor

from syncline.engine.sampling.batch import Filters

NEG_INF = float("-inf")


def apply_filters(logits_RV: Tensor, filters: Filters) -> None:
    """Set, in place, the logits of impossible tokens to -inf.

    The largest logit of every row must be 0 already: min_p then compares logits directly.
    """
    if filters.log_min_p_R1 is not None:
        logits_RV.masked_fill_(logits_RV < filters.log_min_p_R1, NEG_INF)
    if filters.sorted_rows_S is None or filters.top_k_S1 is None or filters.top_p_S1 is None:
        return
    rows_S = filters.sorted_rows_S
    logits_SV = logits_RV[rows_S]
    sorted_SV, order_SV = logits_SV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(logits_SV.shape[1], device=logits_SV.device)
    is_dropped_SV = rank_V >= filters.top_k_S1
    sorted_SV.masked_fill_(is_dropped_SV, NEG_INF)
    probs_SV = sorted_SV.to(torch.float64).softmax(dim=-1)
    # Mass of everything likelier: the token that crosses top_p is kept.
    before_SV = probs_SV.cumsum(dim=-1) - probs_SV
    is_dropped_SV |= before_SV >= filters.top_p_S1
    is_dropped_SV[:, 0] = False
    dropped_SV = torch.empty_like(is_dropped_SV).scatter_(1, order_SV, is_dropped_SV)
    logits_RV[rows_S] = logits_SV.masked_fill(dropped_SV, NEG_INF)
