"""Routing, sorting and combining of mixture of experts by Triton."""

import torch

from syncline.model_ops_rocm.arguments.moe import (
    MOE_COMBINE,
    MOE_PERMUTE,
    MOE_ROUTE,
    MOE_SORT,
    check_moe_combine,
    check_moe_permute,
    check_moe_route,
    check_moe_sort,
)
from syncline.model_ops_rocm.contracts.moe import ExpertMap, SortedPairs
from syncline.model_ops_rocm.triton.configs.moe import MANY_PAIRS, SORTING_PROGRAMS, kind_of_sort
from syncline.model_ops_rocm.triton.geometry import power_of_two
from syncline.model_ops_rocm.triton.kernels.moe_routing import (
    combine_kernel,
    count_kernel,
    permute_kernel,
    route_kernel,
    sort_kernel,
)
from syncline.model_ops_rocm.triton.launch import LAUNCHER, Chosen, overlaps, require_reachable


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
    num_tokens, num_experts = logits_TE.shape
    if out is None:
        weights = torch.empty((num_tokens, top_k), dtype=torch.float32, device=logits_TE.device)
        out = weights, torch.empty_like(weights, dtype=torch.int32)
    require_reachable(MOE_ROUTE, logits=logits_TE, positions=positions_T)
    require_reachable(MOE_ROUTE, **{"out[0]": out[0], "out[1]": out[1]})
    replicas, counts = expert_map if expert_map is not None else (out[1], out[1])
    if expert_map is not None:
        require_reachable(MOE_ROUTE, **{"expert_map.replicas": replicas})
        require_reachable(MOE_ROUTE, **{"expert_map.num_replicas": counts})
    if num_tokens == 0:
        return out
    chosen = LAUNCHER.config(MOE_ROUTE, logits_TE.dtype, num_experts)
    positions = out[1] if positions_T is None else positions_T
    LAUNCHER.launch(
        route_kernel,
        (-(-num_tokens // chosen[1].constants["BLOCK_ROWS"]),),
        chosen,
        (
            *(logits_TE, *out, replicas, counts, positions, num_tokens),
            *logits_TE.stride(),
            0 if positions_T is None else positions_T.stride(0),
        ),
        {
            "NUM_EXPERTS": num_experts,
            "TOP_K": top_k,
            "RENORMALISE": renormalise,
            "HAS_POSITIONS": positions_T is not None,
            "MAX_REPLICAS": 0 if expert_map is None else replicas.shape[1],
            "OVERLAP": overlaps(chosen[1]),
            "BLOCK_EXPERTS": power_of_two(num_experts),
            "BLOCK_K": power_of_two(top_k),
        },
    )
    return out


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
    if out is None:
        shapes = ((capacity,), (capacity // block_size,), (num_groups,), ids_TK.shape)
        out = SortedPairs(
            *(torch.empty(shape, dtype=torch.int32, device=ids_TK.device) for shape in shapes)
        )
    require_reachable(MOE_SORT, ids=ids_TK)
    require_reachable(MOE_SORT, **{f"out.{name}": one for name, one in out._asdict().items()})
    launch_sort(ids_TK, out, block_size, group_size)
    return out


def launch_sort(
    ids_TK: torch.Tensor,
    out: SortedPairs,
    block_size: int,
    group_size: int,
) -> None:
    """No places are written if `out.places` is `ids_TK`, which is only read."""
    kinds = ("", MANY_PAIRS) if LAUNCHER.is_preparing else (kind_of_sort(ids_TK.numel()),)
    for kind in kinds:
        chosen = LAUNCHER.config(MOE_SORT, torch.int32, out.counts.shape[0], kind)
        is_counted = kind == MANY_PAIRS
        if is_counted:
            _launch_count(ids_TK, out.counts, group_size, chosen)
        _launch_places(ids_TK, out, block_size, group_size, chosen, is_counted=is_counted)


def _launch_count(
    ids_TK: torch.Tensor, counts: torch.Tensor, group_size: int, chosen: Chosen
) -> None:
    LAUNCHER.launch(
        count_kernel,
        (counts.shape[0],),
        chosen,
        (ids_TK, counts, ids_TK.numel()),
        {"GROUP_SIZE": group_size, "OVERLAP": overlaps(chosen[1])},
    )


def _launch_places(
    ids_TK: torch.Tensor,
    out: SortedPairs,
    block_size: int,
    group_size: int,
    chosen: Chosen,
    *,
    is_counted: bool,
) -> None:
    num_groups, num_pairs = out.counts.shape[0], ids_TK.numel()
    block_pairs = chosen[1].constants["BLOCK_PAIRS"]
    num_blocks = max(-(-num_pairs // block_pairs), 1)
    num_runs = min(num_blocks, max(SORTING_PROGRAMS // num_groups, 1)) if is_counted else 1
    blocks_each = -(-num_blocks // num_runs)
    LAUNCHER.launch(
        sort_kernel,
        (num_groups, -(-num_blocks // blocks_each)),
        chosen,
        (
            *(ids_TK, *out, num_pairs, blocks_each * block_pairs),
            *(out.pairs.shape[0], num_groups),
        ),
        {
            "GROUP_SIZE": group_size,
            "BLOCK_SIZE": block_size,
            "HAS_PLACES": out.places is not ids_TK,
            "IS_COUNTED": is_counted,
            "OVERLAP": overlaps(chosen[1]),
            "BLOCK_GROUPS": power_of_two(num_groups),
        },
    )


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
    num_entries, width = pairs_C.shape[0], x_TH.shape[1]
    if out is None:
        rows = torch.empty((num_entries, width), dtype=x_TH.dtype, device=x_TH.device)
        out = rows, torch.empty_like(pairs_C)
    require_reachable(MOE_PERMUTE, x=x_TH, ids=ids_TK, pairs=pairs_C)
    require_reachable(MOE_PERMUTE, **{"out[0]": out[0], "out[1]": out[1]})
    if num_entries == 0:
        return out
    chosen = LAUNCHER.config(MOE_PERMUTE, x_TH.dtype, width)
    LAUNCHER.launch(
        permute_kernel,
        # A row without width still has an id.
        (num_entries, max(1, -(-width // chosen[1].constants["BLOCK_WIDTH"]))),
        chosen,
        (
            *(x_TH, ids_TK, pairs_C, *out, ids_TK.numel()),
            *x_TH.stride(),
            *out[0].stride(),
        ),
        {
            "WIDTH": width,
            "TOP_K": ids_TK.shape[1],
            "GROUP_SIZE": group_size,
            "OVERLAP": overlaps(chosen[1]),
        },
    )
    return out


def moe_combine(
    y_CH: torch.Tensor,
    weights_TK: torch.Tensor,
    places_TK: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `contracts.MoeCombine`."""
    check_moe_combine(y_CH, weights_TK, places_TK, out=out)
    if out is None:
        shape = (weights_TK.shape[0], y_CH.shape[1])
        out = torch.empty(shape, dtype=y_CH.dtype, device=y_CH.device)
    require_reachable(MOE_COMBINE, y=y_CH, weights=weights_TK, places=places_TK, out=out)
    launch_combine(y_CH, (weights_TK, places_TK), out, y_CH.shape[0], by_pair=False)
    return out


def launch_combine(
    y: torch.Tensor,
    routing: tuple[torch.Tensor, torch.Tensor],
    out: torch.Tensor,
    stop: int,
    *,
    by_pair: bool,
) -> None:
    """`routing` is the weights and the places below `stop`; or `by_pair` ids, y lying by pairs."""
    num_tokens, width = out.shape
    if out.numel() == 0:
        return
    chosen = LAUNCHER.config(MOE_COMBINE, y.dtype, width)
    LAUNCHER.launch(
        combine_kernel,
        (num_tokens, -(-width // chosen[1].constants["BLOCK_WIDTH"])),
        chosen,
        (y, *routing, out, stop, *y.stride(), *out.stride()),
        {
            "WIDTH": width,
            "TOP_K": routing[0].shape[1],
            "BY_PAIR": by_pair,
            "OVERLAP": overlaps(chosen[1]),
        },
    )
