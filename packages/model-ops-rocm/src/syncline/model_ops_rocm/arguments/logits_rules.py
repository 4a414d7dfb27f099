"""What the ops on rules of logits refuse, on every backend; knows no backend."""

import torch

from syncline.model_ops_rocm.arguments.logits import check_floats, check_indices, check_shard
from syncline.model_ops_rocm.checks import (
    INDEX_DTYPES,
    refuse,
    require_apart,
    require_contiguous,
    require_dtype,
    require_index,
    require_kind,
    require_ndim,
    require_shape,
)
from syncline.model_ops_rocm.contracts.logits import Vocabulary
from syncline.model_ops_rocm.contracts.logits_rules import LogitsRules
from syncline.model_ops_rocm.memory import is_same_view

APPLY_RULES = "apply_logits_rules"
COUNT_TOKENS = "count_tokens"
WORD_BITS = 32


def check_rules(
    logits_RV: torch.Tensor,
    rules: LogitsRules,
    vocabulary: Vocabulary,
    out: torch.Tensor | None,
) -> int:
    """Returns how many columns are real ids."""
    op = APPLY_RULES
    require_kind(op, "rules", rules, LogitsRules)
    require_kind(op, "vocabulary", vocabulary, Vocabulary)
    num_real = check_shard(op, logits_RV, vocabulary._replace(partials_SRP=None))
    num_rows = logits_RV.shape[0]
    num_ids = vocabulary.first_id + num_real
    if rules.allowed_RW is not None:
        _check_table("allowed", rules.allowed_RW, (torch.int32,), num_rows)
        num_words = -(-num_ids // WORD_BITS)
        if rules.allowed_RW.shape[1] < num_words:
            limit = f"have at least {num_words} words in a row"
            refuse(op, "allowed", limit, list(rules.allowed_RW.shape))
    _check_forbidden(rules, num_rows)
    _check_together(rules, "bias_ids_RB", "bias_values_RB")
    if rules.bias_ids_RB is not None and rules.bias_values_RB is not None:
        _check_table("bias_ids", rules.bias_ids_RB, INDEX_DTYPES, num_rows)
        require_shape(op, "bias_values", rules.bias_values_RB, rules.bias_ids_RB.shape)
        require_dtype(op, "bias_values", rules.bias_values_RB, torch.float32)
        require_contiguous(op, "bias_values", rules.bias_values_RB)
    _check_penalties(rules, num_rows, num_ids)
    check_floats(op, "temperature", rules.temperature_R, num_rows)
    if out is not None:
        require_shape(op, "out", out, logits_RV.shape)
        if out.dtype not in (logits_RV.dtype, torch.float32):
            refuse(op, "out", f"be {logits_RV.dtype} or torch.float32", out.dtype)
        is_in_place = is_same_view(out, logits_RV)
        read = {"logits": None if is_in_place else logits_RV, **_named(rules)}
        require_apart(op, {"out": out}, read)
    return num_real


def _named(rules: LogitsRules) -> dict[str, torch.Tensor | None]:
    return {name.rpartition("_")[0]: tensor for name, tensor in rules._asdict().items()}


def check_counts(op: str, counts_SV: torch.Tensor) -> None:
    require_dtype(op, "counts", counts_SV, torch.int32)
    require_ndim(op, "counts", counts_SV, 2)
    require_contiguous(op, "counts", counts_SV)


def check_count_tokens(
    token_ids_T: torch.Tensor, rows_T: torch.Tensor, counts_SV: torch.Tensor
) -> None:
    check_counts(COUNT_TOKENS, counts_SV)
    require_index(COUNT_TOKENS, "token_ids", token_ids_T, None)
    check_indices(COUNT_TOKENS, "rows", rows_T, token_ids_T.shape[0])
    require_contiguous(COUNT_TOKENS, "token_ids", token_ids_T)
    read = {"token_ids": token_ids_T, "rows": rows_T}
    require_apart(COUNT_TOKENS, {"counts": counts_SV}, read)


def _check_forbidden(rules: LogitsRules, num_rows: int) -> None:
    _check_together(rules, "forbidden_ids_RF", "forbidden_until_R")
    _check_together(rules, "forbidden_ids_RF", "positions_R")
    if rules.forbidden_ids_RF is not None:
        _check_table("forbidden_ids", rules.forbidden_ids_RF, INDEX_DTYPES, num_rows)
    check_indices(APPLY_RULES, "forbidden_until", rules.forbidden_until_R, num_rows)
    check_indices(APPLY_RULES, "positions", rules.positions_R, num_rows)


def _check_penalties(rules: LogitsRules, num_rows: int, num_ids: int) -> None:
    penalties = {
        "repetition": rules.repetition_R,
        "frequency": rules.frequency_R,
        "presence": rules.presence_R,
    }
    for name, values in penalties.items():
        check_floats(APPLY_RULES, name, values, num_rows)
        if values is not None and rules.counts_SV is None:
            refuse(APPLY_RULES, "counts", f"be given with {name}", None)
    _check_together(rules, "counts_SV", "rows_R")
    check_indices(APPLY_RULES, "rows", rules.rows_R, num_rows)
    if rules.counts_SV is not None:
        check_counts(APPLY_RULES, rules.counts_SV)
        if num_rows and not rules.counts_SV.shape[0]:
            refuse(APPLY_RULES, "counts", "have a row", list(rules.counts_SV.shape))
        if rules.counts_SV.shape[1] < num_ids:
            limit = f"have at least {num_ids} entries in a row"
            refuse(APPLY_RULES, "counts", limit, list(rules.counts_SV.shape))


def _check_table(
    name: str, table: torch.Tensor, dtypes: tuple[torch.dtype, ...], num_rows: int
) -> None:
    if table.dtype not in dtypes:
        refuse(APPLY_RULES, name, f"be {' or '.join(map(str, dtypes))}", table.dtype)
    require_ndim(APPLY_RULES, name, table, 2)
    require_shape(APPLY_RULES, name, table, (num_rows, table.shape[1]))
    require_contiguous(APPLY_RULES, name, table)


def _check_together(rules: LogitsRules, one: str, other: str) -> None:
    given = rules._asdict()
    if (given[one] is None) != (given[other] is None):
        refuse(APPLY_RULES, one.rpartition("_")[0], f"be given with {other}", "one of the two")
