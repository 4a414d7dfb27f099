"""What the ops of the logits refuse, on every backend; knows no backend."""

from collections.abc import Mapping

import torch

from syncline.model_ops_rocm.checks import (
    is_whole,
    refuse,
    require_apart,
    require_contiguous,
    require_dtype,
    require_float,
    require_index,
    require_kind,
    require_ndim,
    require_out,
    require_shape,
    require_tensors,
)
from syncline.model_ops_rocm.contracts.logits import Distribution, Draw, Vocabulary

SAMPLE = "sample"
TOKEN_LOGPROBS = "token_logprobs"
TOP_LOGPROBS = "top_logprobs"
LOGITS_PARTIALS = "logits_partials"
COMBINE_PARTIALS = "combine_partials"
NUM_PARTIALS = 3
Inputs = Mapping[str, torch.Tensor | None]


def check_logits(op: str, logits_RV: torch.Tensor, vocabulary: Vocabulary) -> int:
    """Returns how many columns are real ids."""
    num_real = check_shard(op, logits_RV, vocabulary)
    num_columns = logits_RV.shape[1]
    true_size, first_id, _, partials_SRP = vocabulary
    if partials_SRP is None:
        if first_id != 0:
            refuse(op, "vocabulary.first_id", "be 0 without partials of all shards", first_id)
        if true_size is not None and true_size > num_columns:
            refuse(op, "vocabulary.true_size", f"be at most the {num_columns} columns", true_size)
    return num_real


def check_shard(op: str, logits_RV: torch.Tensor, vocabulary: Vocabulary) -> int:
    """Likewise, of columns that may be a part of the vocabulary."""
    require_kind(op, "vocabulary", vocabulary, Vocabulary)
    require_float(op, "logits", logits_RV)
    require_ndim(op, "logits", logits_RV, 2)
    num_rows, num_columns = logits_RV.shape
    if num_columns == 0:
        refuse(op, "logits", "have at least one column", list(logits_RV.shape))
    true_size, first_id, shard, partials_SRP = vocabulary
    if first_id < 0:
        refuse(op, "vocabulary.first_id", "be non-negative", first_id)
    if partials_SRP is not None:
        check_partials(op, "vocabulary.partials", partials_SRP, num_rows)
        if not 0 <= shard < partials_SRP.shape[0]:
            refuse(op, "vocabulary.shard", f"be in [0, {partials_SRP.shape[0]})", shard)
    elif shard:
        refuse(op, "vocabulary.shard", "be 0 without partials", shard)
    if true_size is None:
        return num_columns
    if true_size < 1:
        refuse(op, "vocabulary.true_size", "be positive", true_size)
    return max(min(true_size - first_id, num_columns), 0)


def check_partials(op: str, name: str, partials_SRP: torch.Tensor, num_rows: int | None) -> None:
    """Contiguous float64 [S, R, 3] of at least one shard."""
    require_dtype(op, name, partials_SRP, torch.float64)
    require_ndim(op, name, partials_SRP, 3)
    shape = list(partials_SRP.shape)
    rows = shape[1] if num_rows is None else num_rows
    if shape[0] == 0 or shape[1:] != [rows, NUM_PARTIALS]:
        refuse(op, name, f"have shape [S, {rows}, {NUM_PARTIALS}] with S > 0", shape)
    require_contiguous(op, name, partials_SRP)


def check_distribution(
    op: str, distribution: Distribution, vocabulary: Vocabulary, num_rows: int
) -> None:
    require_kind(op, "distribution", distribution, Distribution)
    check_floats(op, "temperature", distribution.temperature_R, num_rows)
    check_indices(op, "top_k", distribution.top_k_R, num_rows)
    check_floats(op, "top_p", distribution.top_p_R, num_rows)
    check_floats(op, "min_p", distribution.min_p_R, num_rows)
    if vocabulary.partials_SRP is not None and distribution.is_filtered:
        refuse(op, "distribution", "have no filter for a shard of the vocabulary", "one")


def inputs_of(
    logits_RV: torch.Tensor,
    distribution: Distribution,
    vocabulary: Vocabulary,
    **others: torch.Tensor,
) -> Inputs:
    """What no result may share a byte with."""
    named = {name.removesuffix("_R"): one for name, one in distribution._asdict().items()}
    whole = {"logits": logits_RV, "vocabulary.partials": vocabulary.partials_SRP}
    return {**others, **named, **whole}


def check_draw(op: str, draw: Draw, num_rows: int) -> None:
    require_kind(op, "draw", draw, Draw)
    check_indices(op, "seeds", draw.seeds_R, num_rows)
    require_dtype(op, "seeds", draw.seeds_R, torch.int64)
    check_indices(op, "sample_index", draw.sample_index_R, num_rows)
    check_indices(op, "positions", draw.positions_R, num_rows)


def check_pair_out(
    op: str,
    out: tuple[torch.Tensor, torch.Tensor] | None,
    shape: tuple[int, ...],
    inputs: Inputs,
) -> None:
    """Ids and logprobs to write, contiguous."""
    if out is None:
        return
    require_tensors(op, "out", out)
    for name, tensor, dtype in zip(
        ("out[0]", "out[1]"), out, (torch.int64, torch.float64), strict=True
    ):
        require_shape(op, name, tensor, shape)
        require_dtype(op, name, tensor, dtype)
        require_contiguous(op, name, tensor)
    require_apart(op, {"out[0]": out[0], "out[1]": out[1]}, inputs)


def check_out(op: str, out: torch.Tensor | None, shape: tuple[int, ...], inputs: Inputs) -> None:
    """float64 to write, contiguous."""
    if out is not None:
        require_out(op, out, shape, torch.float64)
        require_contiguous(op, "out", out)
        require_apart(op, {"out": out}, inputs)


def check_num_top(logits_RV: torch.Tensor, num_top: int) -> None:
    if not (is_whole(num_top) and 1 <= num_top <= logits_RV.shape[1]):
        refuse(TOP_LOGPROBS, "num_top", f"be in [1, {logits_RV.shape[1]}]", num_top)


def check_floats(op: str, name: str, tensor: torch.Tensor | None, num_rows: int) -> None:
    """A contiguous float32 vector with an entry per row, if it is there."""
    if tensor is None:
        return
    require_dtype(op, name, tensor, torch.float32)
    require_shape(op, name, tensor, (num_rows,))
    require_contiguous(op, name, tensor)


def check_indices(op: str, name: str, tensor: torch.Tensor | None, num_rows: int) -> None:
    """A contiguous vector of int64 or int32 with an entry per row, if it is there."""
    if tensor is None:
        return
    require_index(op, name, tensor, num_rows)
    require_contiguous(op, name, tensor)
