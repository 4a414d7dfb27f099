"""Masks, bias, penalties and temperature in PyTorch; draws nothing.

Source: order and definitions of vLLM v1 (`v1/sample/sampler.py`, `apply_penalties`).
"""

import torch

from syncline.model_ops_rocm.arguments.logits_rules import (
    WORD_BITS,
    check_count_tokens,
    check_rules,
)
from syncline.model_ops_rocm.contracts.logits import WHOLE, Vocabulary
from syncline.model_ops_rocm.contracts.logits_rules import IN_PROMPT, LogitsRules

_NEG_INF = float("-inf")


def apply_logits_rules(
    logits_RV: torch.Tensor,
    rules: LogitsRules,
    *,
    vocabulary: Vocabulary = WHOLE,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `contracts.ApplyLogitsRules`."""
    num_real = check_rules(logits_RV, rules, vocabulary, out)
    ids_V = torch.arange(logits_RV.shape[1], device=logits_RV.device) + vocabulary.first_id
    x_RV = logits_RV.to(torch.float32, copy=True)
    x_RV[:, num_real:] = _NEG_INF
    if rules.allowed_RW is not None:
        word_V = (ids_V // WORD_BITS).clamp(max=rules.allowed_RW.shape[1] - 1)
        words = rules.allowed_RW[:, word_V]
        x_RV.masked_fill_((words >> (ids_V % WORD_BITS).to(torch.int32)) & 1 == 0, _NEG_INF)
    if rules.forbidden_ids_RF is not None:
        assert rules.positions_R is not None and rules.forbidden_until_R is not None
        is_on_R1 = (rules.positions_R < rules.forbidden_until_R)[:, None]
        for ids_R in rules.forbidden_ids_RF.unbind(dim=1):
            x_RV.masked_fill_((ids_R[:, None] == ids_V) & is_on_R1, _NEG_INF)
    if rules.bias_ids_RB is not None and rules.bias_values_RB is not None:
        for ids_R, values_R in zip(
            rules.bias_ids_RB.unbind(dim=1), rules.bias_values_RB.unbind(dim=1), strict=True
        ):
            biased_RV = x_RV + values_R[:, None]
            x_RV = torch.where(ids_R[:, None] == ids_V, biased_RV, x_RV)
    if rules.counts_SV is not None:
        x_RV = _penalised(x_RV, rules, slice(vocabulary.first_id, vocabulary.first_id + num_real))
    if rules.temperature_R is not None:
        x_RV /= rules.temperature_R.masked_fill(rules.temperature_R == 0.0, 1.0)[:, None]
    return x_RV.to(logits_RV.dtype) if out is None else out.copy_(x_RV)


def _penalised(x_RV: torch.Tensor, rules: LogitsRules, ids: slice) -> torch.Tensor:
    assert rules.counts_SV is not None and rules.rows_R is not None
    num_real = ids.stop - ids.start
    is_row_R1 = ((rules.rows_R >= 0) & (rules.rows_R < rules.counts_SV.shape[0]))[:, None]
    rows_R = rules.rows_R.clamp(0, max(rules.counts_SV.shape[0] - 1, 0))
    entries = rules.counts_SV[rows_R, ids].masked_fill(~is_row_R1, 0)
    counts = (entries & ~IN_PROMPT).to(torch.float32)
    x = x_RV[:, :num_real]
    if rules.repetition_R is not None:
        repetition_R1 = rules.repetition_R[:, None]
        repeated = torch.where(x > 0.0, x / repetition_R1, x * repetition_R1)
        x = torch.where(entries != 0, repeated, x)
    if rules.frequency_R is not None:
        x = x - rules.frequency_R[:, None] * counts
    if rules.presence_R is not None:
        x = torch.where(counts > 0.0, x - rules.presence_R[:, None], x)
    return torch.cat((x, x_RV[:, num_real:]), dim=1)


def count_tokens(
    token_ids_T: torch.Tensor,
    rows_T: torch.Tensor,
    counts_SV: torch.Tensor,
    *,
    is_prompt: bool = False,
) -> None:
    """See `contracts.CountTokens`."""
    check_count_tokens(token_ids_T, rows_T, counts_SV)
    num_rows, num_ids = counts_SV.shape
    is_known_T = (token_ids_T >= 0) & (token_ids_T < num_ids) & (rows_T >= 0) & (rows_T < num_rows)
    where_N = (rows_T.to(torch.int64) * num_ids + token_ids_T)[is_known_T]
    flat = counts_SV.view(-1)
    if is_prompt:
        flat[where_N] = flat[where_N] | IN_PROMPT  # equal places get equal numbers
    else:
        flat.index_add_(0, where_N, torch.ones_like(where_N, dtype=torch.int32))
