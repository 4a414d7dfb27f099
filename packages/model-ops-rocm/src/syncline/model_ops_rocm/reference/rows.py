"""Embedding and row gather in PyTorch: rows of a table by index; knows no vocabulary's owner."""

import torch

from syncline.model_ops_rocm.checks import (
    refuse,
    require_float,
    require_index,
    require_ndim,
    require_out,
)

_EMBEDDING = "embedding"
_GATHER = "gather_rows"


def embedding(
    ids_T: torch.Tensor,
    weight_VH: torch.Tensor,
    *,
    first_id: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `contracts.Embedding`."""
    require_float(_EMBEDDING, "weight", weight_VH)
    require_ndim(_EMBEDDING, "weight", weight_VH, 2)
    require_index(_EMBEDDING, "ids", ids_T, None)
    if out is not None:
        shape = (ids_T.shape[0], weight_VH.shape[1])
        require_out(_EMBEDDING, out, shape, weight_VH.dtype)
    if first_id is None:
        return _select(_EMBEDDING, "ids", weight_VH, ids_T, out)
    if first_id < 0:
        refuse(_EMBEDDING, "first_id", "be None or non-negative", first_id)
    rows = ids_T - first_id
    return _select_or_zero(weight_VH, rows, (rows < 0) | (rows >= weight_VH.shape[0]), out)


def gather_rows(
    x_TH: torch.Tensor, rows_R: torch.Tensor, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """See `contracts.GatherRows`."""
    require_float(_GATHER, "x", x_TH)
    require_ndim(_GATHER, "x", x_TH, 2)
    require_index(_GATHER, "rows", rows_R, None)
    if out is not None:
        require_out(_GATHER, out, (rows_R.shape[0], x_TH.shape[1]), x_TH.dtype)
    is_padding = rows_R == -1
    try:
        return _select_or_zero(x_TH, rows_R, is_padding, out)
    except IndexError:
        refuse(_GATHER, "rows", f"be -1 or in [0, {x_TH.shape[0]})", "one outside")


def _select_or_zero(
    table: torch.Tensor, rows: torch.Tensor, is_zero: torch.Tensor, out: torch.Tensor | None
) -> torch.Tensor:
    # A table without rows has none to read in a zero row's place.
    padded = table if table.shape[0] else table.new_zeros((1, table.shape[1]))
    selected = padded.index_select(0, rows.masked_fill(is_zero, 0))
    selected.masked_fill_(is_zero.unsqueeze(1), 0.0)
    return selected if out is None else out.copy_(selected)


def _select(
    op: str, argument: str, table: torch.Tensor, rows: torch.Tensor, out: torch.Tensor | None
) -> torch.Tensor:
    try:
        selected = table.index_select(0, rows)
    except IndexError:
        refuse(op, argument, f"be in [0, {table.shape[0]})", "one outside")
    return selected if out is None else out.copy_(selected)
