"""AITER's routing and sorting of mixture of experts, number for number: for tests alone.

Sorting is this package's own, packed as AITER's kernels read it, which shows that one can stand for
the other. Grouped routing has no op here.
Source: ROCm/aiter e4048607a `aiter/ops/topk.py`, `op_tests/test_moe_sorting.py`.
"""

from typing import Final, NamedTuple

import torch

from syncline.model_ops_rocm.reference.moe_routing import moe_sort

_SLOT_BITS: Final = 24


class SortedTokens(NamedTuple):
    """What AITER's fused kernels take: `slot << 24 | token`, weights, and the expert of a block."""

    sorted_ids: torch.Tensor
    sorted_weights: torch.Tensor
    sorted_expert_ids: torch.Tensor
    num_valid_ids: torch.Tensor


def grouped_topk(
    logits_TE: torch.Tensor,
    top_k: int,
    groups: tuple[int, int],
    *,
    scoring: str = "softmax",
    bias_E: torch.Tensor | None = None,
    renormalise: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights, ids) from the best groups alone, ids ascending.

    `groups` is how many there are and how many are kept. A group's score is its largest, or with a
    bias the sum of its two largest biased ones; weights are unbiased.
    """
    num_groups, num_kept = groups
    logits = logits_TE.float()
    scores = logits.softmax(dim=-1) if scoring == "softmax" else logits.sigmoid()
    ranked = scores if bias_E is None else scores + bias_E
    grouped = ranked.view(len(ranked), num_groups, -1)
    of_group = grouped.amax(dim=-1) if bias_E is None else grouped.topk(2, dim=-1).values.sum(-1)
    best = of_group.topk(num_kept, dim=-1).indices
    is_kept = torch.zeros_like(of_group, dtype=torch.bool).scatter_(1, best, value=True)
    lowest = 0.0 if bias_E is None else float("-inf")
    masked = grouped.masked_fill(~is_kept.unsqueeze(-1), lowest).flatten(1)
    ids = masked.topk(top_k, dim=-1).indices.sort(dim=-1).values
    weights = scores.gather(1, ids)
    if renormalise:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights, ids.to(torch.int32)


def moe_sorting(
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    num_experts: int,
    block_size: int,
    *,
    expert_mask_E: torch.Tensor | None = None,
) -> SortedTokens:
    """A mask keeps the experts at 1 and numbers them anew; weights of padding are 0."""
    num_tokens, top_k = ids_TK.shape
    local = ids_TK
    if expert_mask_E is not None:
        numbers = expert_mask_E.cumsum(0) - 1
        local = numbers.masked_fill(expert_mask_E == 0, -1)[ids_TK.long()].to(torch.int32)
    found = moe_sort(local, num_experts, block_size=block_size)
    capacity = ids_TK.numel() + num_experts * block_size - top_k
    num_blocks = -(-capacity // block_size)
    num_valid = int((found.block_groups >= 0).sum()) * block_size
    pairs = torch.full((capacity,), ids_TK.numel(), dtype=torch.int64)
    pairs[:num_valid] = found.pairs[:num_valid].long()
    token, slot = pairs // top_k, pairs % top_k
    slot = slot.masked_fill(pairs == ids_TK.numel(), top_k)
    experts = torch.full((num_blocks,), -1, dtype=torch.int32)
    experts[: num_valid // block_size] = found.block_groups[: num_valid // block_size]
    return SortedTokens(
        sorted_ids=(slot << _SLOT_BITS | token).to(torch.int32),
        sorted_weights=torch.cat((weights_TK.flatten(), torch.zeros(1)))[pairs],
        sorted_expert_ids=experts,
        num_valid_ids=torch.tensor([num_valid, num_tokens], dtype=torch.int32),
    )
