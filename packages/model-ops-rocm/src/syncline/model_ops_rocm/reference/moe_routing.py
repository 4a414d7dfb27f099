"""Routing, sorting and combining of mixture of experts in PyTorch; knows no projection."""

import torch

from syncline.model_ops_rocm.arguments.moe import (
    MOE_SORT,
    check_moe_combine,
    check_moe_permute,
    check_moe_route,
    check_moe_sort,
)
from syncline.model_ops_rocm.checks import refuse
from syncline.model_ops_rocm.contracts.moe import ExpertMap, SortedPairs


def moe_route(
    logits_TE: torch.Tensor,
    top_k: int,
    *,
    renormalise: bool = True,
    expert_map: ExpertMap | None = None,
    positions_T: torch.Tensor | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `contracts.MoeRoute`."""
    check_moe_route(logits_TE, top_k, expert_map=expert_map, positions_T=positions_T, out=out)
    logits = logits_TE.float()
    ranked = logits.masked_fill(logits.isnan(), float("-inf"))
    # A stable sort keeps equal logits in the order of their experts; `topk` promises nothing.
    experts = ranked.sort(dim=1, descending=True, stable=True).indices[:, :top_k]
    weights = logits.softmax(dim=1).gather(1, experts)
    if renormalise:
        weights /= weights.sum(dim=1, keepdim=True)
    ids = experts if expert_map is None else _mapped(expert_map, experts, positions_T)
    if positions_T is not None:
        is_padding = (positions_T < 0).unsqueeze(1)
        ids, weights = ids.masked_fill(is_padding, -1), weights.masked_fill(is_padding, 0.0)
    if out is None:
        return weights, ids.to(torch.int32)
    return out[0].copy_(weights), out[1].copy_(ids)


def _mapped(
    expert_map: ExpertMap, experts: torch.Tensor, positions_T: torch.Tensor | None
) -> torch.Tensor:
    replicas, counts = expert_map
    count = counts[experts]
    position = 0 if positions_T is None else positions_T.long().clamp(min=0).unsqueeze(1)
    chosen = position % count.clamp(min=1)
    return replicas[experts, chosen.long()].masked_fill(count < 1, -1)


def moe_sort(
    ids_TK: torch.Tensor,
    num_groups: int,
    *,
    block_size: int = 1,
    group_size: int = 1,
    out: SortedPairs | None = None,
) -> SortedPairs:
    """See `contracts.MoeSort`."""
    capacity = check_moe_sort(
        ids_TK, num_groups, block_size=block_size, group_size=group_size, out=out
    )
    require_ids(MOE_SORT, ids_TK, num_groups * group_size)
    groups = ids_TK.flatten().long() // group_size
    is_kept = (groups >= 0) & (groups < num_groups)
    kept = is_kept.nonzero().flatten()
    kept = kept[groups[kept].sort(stable=True).indices]
    counts = torch.bincount(groups[kept], minlength=num_groups)
    blocks = (counts + block_size - 1) // block_size
    first = (blocks.cumsum(0) - blocks) * block_size  # of each group, in entries
    before = counts.cumsum(0) - counts
    ordered = groups[kept]
    at = first[ordered] + torch.arange(len(kept), device=kept.device) - before[ordered]
    pairs = torch.full((capacity,), ids_TK.numel(), dtype=torch.int32, device=kept.device)
    pairs[at] = kept.to(torch.int32)
    places = torch.full((ids_TK.numel(),), -1, dtype=torch.int32, device=kept.device)
    places[kept] = at.to(torch.int32)
    block_groups = torch.full((capacity // block_size,), -1, dtype=torch.int32, device=kept.device)
    listed = torch.repeat_interleave(blocks).to(torch.int32)
    block_groups[: len(listed)] = listed
    result = SortedPairs(pairs, block_groups, counts.to(torch.int32), places.view(ids_TK.shape))
    if out is None:
        return result
    return SortedPairs(*(one.copy_(other) for one, other in zip(out, result, strict=True)))


def moe_permute(
    x_TH: torch.Tensor,
    ids_TK: torch.Tensor,
    pairs_C: torch.Tensor,
    *,
    group_size: int = 1,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `contracts.MoePermute`."""
    check_moe_permute(x_TH, ids_TK, pairs_C, group_size=group_size, out=out)
    rows = x_TH.new_zeros((pairs_C.shape[0], x_TH.shape[1]))
    ids = torch.full_like(pairs_C, -1)
    found = ((pairs_C >= 0) & (pairs_C < ids_TK.numel())).nonzero().flatten()
    pairs = pairs_C[found].long()
    expert = ids_TK.flatten()[pairs]
    found, pairs, expert = (one[expert >= 0] for one in (found, pairs, expert))
    rows[found] = x_TH[pairs // ids_TK.shape[1]]
    ids[found] = expert % group_size
    return (rows, ids) if out is None else (out[0].copy_(rows), out[1].copy_(ids))


def moe_combine(
    y_CH: torch.Tensor,
    weights_TK: torch.Tensor,
    places_TK: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `contracts.MoeCombine`."""
    check_moe_combine(y_CH, weights_TK, places_TK, out=out)
    num_tokens, width = weights_TK.shape[0], y_CH.shape[1]
    total = torch.zeros((num_tokens, width), dtype=torch.float32, device=y_CH.device)
    is_kept = (places_TK >= 0) & (places_TK < y_CH.shape[0])
    for slot in range(weights_TK.shape[1]):
        rows = is_kept[:, slot].nonzero().flatten()
        summands = y_CH[places_TK[rows, slot].long()].float()
        total[rows] += weights_TK[rows, slot].unsqueeze(1) * summands
    return total.to(y_CH.dtype) if out is None else out.copy_(total)


def require_ids(op: str, ids: torch.Tensor, stop: int) -> None:
    """On the CPU, where a value can be looked at without waiting."""
    if ids.device.type == "cpu" and bool(((ids < -1) | (ids >= stop)).any()):
        refuse(op, "ids", f"be -1 or in [0, {stop})", "one outside")
