"""Repetition, frequency and presence penalties, from the token rows themselves.

Counts are derived from the tokens each time, never kept beside them: a sequence that was preempted
and joined again cannot have counts that disagree with its tokens. Knows no sampling method.
Source: vLLM's definitions (`model_executor/layers/utils.py`, apply_penalties): repetition over
prompt and output, frequency and presence over the output alone, in this order.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from syncline.engine.sampling.batch import Penalties


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenHistory:
    """The tokens of the rows in `Penalties.rows_P`, prompt first."""

    token_ids_PL: Tensor  # int64, [0, num_tokens) are tokens; what follows is anything
    num_tokens_P1: Tensor  # int64


def apply_penalties(logits_RV: Tensor, penalties: Penalties, history: TokenHistory) -> None:
    """Lower, in place, the logits of tokens that were used before."""
    rows_P = penalties.rows_P
    logits_PV = logits_RV[rows_P]
    ids_PL = history.token_ids_PL
    index_L = torch.arange(ids_PL.shape[1], device=ids_PL.device)
    is_token_PL = index_L < history.num_tokens_P1
    is_output_PL = is_token_PL & (index_L >= penalties.num_prompt_P1)
    # A prompt may hold ids that cannot be sampled (padding); they count for no logit.
    is_known_PL = ids_PL < logits_PV.shape[1]
    ids_PL = ids_PL.clamp(max=logits_PV.shape[1] - 1)
    count_PV = torch.zeros_like(logits_PV).scatter_add_(
        1, ids_PL, (is_token_PL & is_known_PL).to(logits_PV.dtype)
    )
    count_output_PV = torch.zeros_like(logits_PV).scatter_add_(
        1, ids_PL, (is_output_PL & is_known_PL).to(logits_PV.dtype)
    )
    repeated_PV = torch.where(
        logits_PV > 0,
        logits_PV / penalties.repetition_P1,
        logits_PV * penalties.repetition_P1,
    )
    logits_PV = torch.where(count_PV > 0, repeated_PV, logits_PV)
    logits_PV -= penalties.frequency_P1 * count_output_PV
    logits_PV -= penalties.presence_P1 * (count_output_PV > 0)
    logits_RV[rows_P] = logits_PV
