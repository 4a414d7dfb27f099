"""Merging attention over parts of a context by Triton."""

from collections.abc import Iterable
from itertools import product
from typing import Final

import torch

from syncline.model_ops_rocm.arguments.attention import MERGE_STATES, check_merge_states
from syncline.model_ops_rocm.triton.configs.attention import (
    FEW_PARTS,
    MERGED_ELEMENTS,
    kind_of_merge,
)
from syncline.model_ops_rocm.triton.geometry import power_of_two
from syncline.model_ops_rocm.triton.kernels.merge import merge_kernel
from syncline.model_ops_rocm.triton.launch import LAUNCHER, overlaps, require_reachable

_AT_ONCE: Final = (2, 4, 8)
_ALIGNED: Final = 16  # elements, of which every vector is a part


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
    """The launch, for checked tensors; parts may be float32 for a narrower result."""
    num_parts, num_tokens, num_heads, head_dim = parts_PTNH.shape
    block_dim = power_of_two(head_dim)
    strides = (*parts_PTNH.stride()[:3], *out_TNH.stride()[:2])
    unit = _ALIGNED if all(stride % _ALIGNED == 0 for stride in strides) else 1
    for kind, at_once in _variants(num_parts, out_TNH.numel()):
        block_heads = max(MERGED_ELEMENTS[kind] // block_dim, 1)
        block_heads = min(block_heads, power_of_two(num_heads))
        chosen = LAUNCHER.config(MERGE_STATES, out_TNH.dtype, head_dim, kind)
        LAUNCHER.launch(
            merge_kernel,
            (num_tokens, -(-num_heads // block_heads)),
            chosen,
            (
                *(parts_PTNH, lse_PTN, out_TNH, lse_TN, num_parts),
                *(stride // unit for stride in strides),
                *(parts_PTNH.stride(3), out_TNH.stride(2)),
                *lse_PTN.stride(),
                *((0, 0) if lse_TN is None else lse_TN.stride()),
            ),
            {
                "NUM_HEADS": num_heads,
                "HEAD_DIM": head_dim,
                "UNIT": unit,
                "AT_ONCE": at_once,
                "BLOCK_HEADS": block_heads,
                "BLOCK_D": block_dim,
                "OVERLAP": overlaps(chosen[1]),
            },
        )


def _variants(num_parts: int, num_elements: int) -> Iterable[tuple[str, int]]:
    """(kind, parts that are asked for together) of a merge; while compiling, of any.

    What is asked for and is not there is computed, too, and dropped.
    """
    if LAUNCHER.is_preparing:
        pairs = product(MERGED_ELEMENTS, _AT_ONCE)
        return ((kind, number) for kind, number in pairs if not kind or number <= FEW_PARTS)
    at_once = next((number for number in _AT_ONCE if number >= num_parts), _AT_ONCE[-1])
    return ((kind_of_merge(num_parts, num_elements), at_once),)
