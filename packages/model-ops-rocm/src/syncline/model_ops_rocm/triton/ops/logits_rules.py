"""Masks, bias, penalties and temperature by Triton, and the counts that penalties read."""

from typing import Final

import torch

from syncline.model_ops_rocm.arguments.logits_rules import (
    APPLY_RULES,
    COUNT_TOKENS,
    check_count_tokens,
    check_rules,
)
from syncline.model_ops_rocm.checks import refuse
from syncline.model_ops_rocm.contracts.logits import WHOLE, Vocabulary
from syncline.model_ops_rocm.contracts.logits_rules import LogitsRules
from syncline.model_ops_rocm.triton.geometry import power_of_two
from syncline.model_ops_rocm.triton.kernels.logits_rules import count_tokens_kernel, rules_kernel
from syncline.model_ops_rocm.triton.launch import LAUNCHER, require_reachable

MAX_LISTED: Final = 4_096


def apply_logits_rules(
    logits_RV: torch.Tensor,
    rules: LogitsRules,
    *,
    vocabulary: Vocabulary = WHOLE,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `contracts.ApplyLogitsRules`."""
    num_real = check_rules(logits_RV, rules, vocabulary, out)
    num_forbidden = _num_listed("forbidden_ids", rules.forbidden_ids_RF)
    num_biased = _num_listed("bias_ids", rules.bias_ids_RB)
    if out is None:
        out = torch.empty(logits_RV.shape, dtype=logits_RV.dtype, device=logits_RV.device)
    require_reachable(APPLY_RULES, logits=logits_RV, out=out, **rules._asdict())
    num_rows, num_columns = logits_RV.shape
    if num_rows == 0:
        return out
    counts_SV = rules.counts_SV
    chosen = LAUNCHER.config(APPLY_RULES, logits_RV.dtype, num_columns)
    LAUNCHER.launch(
        rules_kernel,
        (num_rows, -(-num_columns // chosen[1].constants["BLOCK_WIDTH"])),
        chosen,
        (
            *(logits_RV, out),
            *(logits_RV if one is None else one for one in rules),
            *(*logits_RV.stride(), *out.stride(), num_columns, num_real, vocabulary.first_id),
            0 if rules.allowed_RW is None else rules.allowed_RW.shape[1],
            *(num_forbidden, num_biased),
            *((0, 0) if counts_SV is None else counts_SV.shape),
        ),
        {
            # Another view of the same memory would be written where it is not read.
            "IN_PLACE": out.data_ptr() == logits_RV.data_ptr() and out.dtype == logits_RV.dtype,
            "HAS_ALLOWED": rules.allowed_RW is not None,
            "HAS_COUNTS": counts_SV is not None,
            "HAS_REPETITION": rules.repetition_R is not None,
            "HAS_FREQUENCY": rules.frequency_R is not None,
            "HAS_PRESENCE": rules.presence_R is not None,
            "HAS_TEMPERATURE": rules.temperature_R is not None,
            "FORBIDDEN": power_of_two(num_forbidden) if num_forbidden else 0,
            "BIASED": power_of_two(num_biased) if num_biased else 0,
        },
    )
    return out


def count_tokens(
    token_ids_T: torch.Tensor,
    rows_T: torch.Tensor,
    counts_SV: torch.Tensor,
    *,
    is_prompt: bool = False,
) -> None:
    """See `contracts.CountTokens`."""
    check_count_tokens(token_ids_T, rows_T, counts_SV)
    require_reachable(COUNT_TOKENS, token_ids=token_ids_T, rows=rows_T, counts=counts_SV)
    num_tokens = token_ids_T.shape[0]
    if num_tokens == 0:
        return
    chosen = LAUNCHER.config(COUNT_TOKENS, torch.int32, 1)
    LAUNCHER.launch(
        count_tokens_kernel,
        (-(-num_tokens // chosen[1].constants["BLOCK_WIDTH"]),),
        chosen,
        (token_ids_T, rows_T, counts_SV, num_tokens, *counts_SV.shape),
        {"IS_PROMPT": is_prompt},
    )


def _num_listed(name: str, ids: torch.Tensor | None) -> int:
    number = 0 if ids is None else ids.shape[1]
    if number > MAX_LISTED:
        refuse(APPLY_RULES, name, f"list up to {MAX_LISTED} ids in a row", number)
    return number
