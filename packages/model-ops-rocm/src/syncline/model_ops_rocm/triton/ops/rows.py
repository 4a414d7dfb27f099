"""Embedding, and rows of activations by index, by Triton: one kernel."""

from typing import NamedTuple

import torch

from syncline.model_ops_rocm.arguments.dense import (
    EMBEDDING,
    GATHER_ROWS,
    check_embedding,
    check_gather_rows,
)
from syncline.model_ops_rocm.triton.kernels.rows import gather_rows_kernel
from syncline.model_ops_rocm.triton.launch import LAUNCHER, require_reachable


def embedding(
    ids_T: torch.Tensor,
    weight_VH: torch.Tensor,
    *,
    first_id: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `contracts.Embedding`."""
    check_embedding(ids_T, weight_VH, first_id=first_id, out=out)
    is_shard = first_id is not None
    constants = {"OUTSIDE_IS_ZERO": is_shard, "MINUS_ONE_IS_ZERO": False}
    source = _Source(op=EMBEDDING, table=weight_VH, first=first_id or 0)
    return _gather(source, ids_T, constants, out)


def gather_rows(
    x_TH: torch.Tensor, rows_R: torch.Tensor, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """See `contracts.GatherRows`."""
    check_gather_rows(x_TH, rows_R, out=out)
    constants = {"OUTSIDE_IS_ZERO": False, "MINUS_ONE_IS_ZERO": True}
    return _gather(_Source(op=GATHER_ROWS, table=x_TH, first=0), rows_R, constants, out)


class _Source(NamedTuple):
    op: str
    table: torch.Tensor
    first: int  # the index of the table's row 0


def _gather(
    source: _Source,
    ids: torch.Tensor,
    constants: dict[str, bool],
    out: torch.Tensor | None,
) -> torch.Tensor:
    op, table, first = source
    num_ids, width = ids.shape[0], table.shape[1]
    if out is None:
        out = torch.empty((num_ids, width), dtype=table.dtype, device=table.device)
    require_reachable(op, ids=ids, table=table, out=out)
    if num_ids == 0 or width == 0:
        return out
    chosen = LAUNCHER.config(op, table.dtype, width)
    LAUNCHER.launch(
        gather_rows_kernel,
        (num_ids, -(-width // chosen[1].constants["BLOCK_WIDTH"])),
        chosen,
        (
            *(ids, table, out, first, table.shape[0], ids.stride(0)),
            *table.stride(),
            *out.stride(),
        ),
        {"WIDTH": width, **constants},
    )
    return out
