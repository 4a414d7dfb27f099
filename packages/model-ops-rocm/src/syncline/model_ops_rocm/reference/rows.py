"""Embedding and row gather in PyTorch: rows of a table by index; knows no vocabulary's owner."""

import torch

from syncline.model_ops_rocm.arguments.dense import (
    EMBEDDING,
    GATHER_ROWS,
    check_embedding,
    check_gather_rows,
)
from syncline.model_ops_rocm.checks import refuse


def embedding(
    ids_T: torch.Tensor,
    weight_VH: torch.Tensor,
    *,
    first_id: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `contracts.Embedding`."""
    check_embedding(ids_T, weight_VH, first_id=first_id, out=out)
    if first_id is None:
        return _select(EMBEDDING, "ids", weight_VH, ids_T, out)
    rows = ids_T - first_id
    return _select_or_zero(weight_VH, rows, (rows < 0) | (rows >= weight_VH.shape[0]), out)


def gather_rows(
    x_TH: torch.Tensor, rows_R: torch.Tensor, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """See `contracts.GatherRows`."""
    check_gather_rows(x_TH, rows_R, out=out)
    is_padding = rows_R == -1
    try:
        return _select_or_zero(x_TH, rows_R, is_padding, out)
    except IndexError:
        refuse(GATHER_ROWS, "rows", f"be -1 or in [0, {x_TH.shape[0]})", "one outside")


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
