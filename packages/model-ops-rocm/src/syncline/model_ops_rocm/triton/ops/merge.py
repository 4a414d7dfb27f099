"""Merging attention over parts of a context by Triton."""

from typing import Final

import torch

from syncline.model_ops_rocm.arguments.attention import MERGE_STATES, check_merge_states
from syncline.model_ops_rocm.triton.geometry import power_of_two
from syncline.model_ops_rocm.triton.kernels.merge import merge_kernel
from syncline.model_ops_rocm.triton.launch import LAUNCHER, overlaps, require_reachable

_TILE_ELEMENTS: Final = 256


def merge_states(
    parts_PTNH: torch.Tensor,
    lse_PTN: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    lse_TN: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `contracts.MergeStates`."""
    check_merge_states(parts_PTNH, lse_PTN, out=out, lse_TN=lse_TN)
    if out is None:
        shape = parts_PTNH.shape[1:]
        out = torch.empty(shape, dtype=parts_PTNH.dtype, device=parts_PTNH.device)
    require_reachable(MERGE_STATES, parts=parts_PTNH, lse=lse_PTN, out=out, lse_TN=lse_TN)
    if out.numel() != 0:
        launch_merge(parts_PTNH, lse_PTN, out, lse_TN)
    return out


def launch_merge(
    parts_PTNH: torch.Tensor,
    lse_PTN: torch.Tensor,
    out_TNH: torch.Tensor,
    lse_TN: torch.Tensor | None,
) -> None:
    """The one launch, for checked tensors; parts may be float32 for a narrower result."""
    num_parts, num_tokens, num_heads, head_dim = parts_PTNH.shape
    block_dim = power_of_two(head_dim)
    block_heads = min(max(_TILE_ELEMENTS // block_dim, 1), power_of_two(num_heads))
    chosen = LAUNCHER.config(MERGE_STATES, out_TNH.dtype, head_dim)
    LAUNCHER.launch(
        merge_kernel,
        (num_tokens, -(-num_heads // block_heads)),
        chosen,
        (
            *(parts_PTNH, lse_PTN, out_TNH, lse_TN, num_parts),
            *parts_PTNH.stride(),
            *lse_PTN.stride(),
            *out_TNH.stride(),
            *((0, 0) if lse_TN is None else lse_TN.stride()),
        ),
        {
            "NUM_HEADS": num_heads,
            "HEAD_DIM": head_dim,
            "BLOCK_HEADS": block_heads,
            "BLOCK_D": block_dim,
            "OVERLAP": overlaps(chosen[1]),
        },
    )
