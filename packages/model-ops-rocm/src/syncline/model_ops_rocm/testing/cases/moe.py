"""Calls of the ops of mixture of experts: routing, sorting, projections and sums."""

from collections.abc import Mapping
from typing import Final

import torch

from syncline.model_ops_rocm.contracts.moe import ExpertMap, SortedPairs, sorted_capacity
from syncline.model_ops_rocm.formats.quantised import Quantised
from syncline.model_ops_rocm.layouts import RowMajor, Shuffle16x16
from syncline.model_ops_rocm.quant.scheme import CodeType, Granularity
from syncline.model_ops_rocm.testing.parity import Arguments, Case, Maker

TOLERANCES: Final[Mapping[tuple[str, torch.dtype], tuple[float, float]]] = {
    # Weights are float32 in every dtype; exp and the order of sums differ.
    ("moe_route", torch.float32): (4e-6, 1e-8),
    ("moe_route", torch.float16): (4e-6, 1e-8),
    ("moe_route", torch.bfloat16): (4e-6, 1e-8),
    # Inputs are normal numbers and results of the order of 1: a rounding of an intermediate that
    # falls differently moves a result by about 2^-11, or 2^-8, of its summands.
    ("moe_experts", torch.float32): (1e-5, 1e-5),
    ("moe_experts", torch.float16): (2**-9, 4e-3),
    ("moe_experts", torch.bfloat16): (2**-6, 3e-2),
}


def _route(
    num_tokens: int, num_experts: int, top_k: int, *, pad: int = 0, ties: bool = False, **more: bool
) -> Case:
    def build(make: Maker) -> Arguments:
        logits = make.randn(num_tokens, num_experts, pad=pad)
        if ties:
            logits.copy_(logits.round())
        shape = (num_tokens, top_k)
        weights = torch.full(shape, float("nan"), device=make.device)
        ids = torch.full(shape, -7, dtype=torch.int32, device=make.device)
        call: Arguments = {"logits_TE": logits, "top_k": top_k, "out": (weights, ids)}
        return call | more

    suffix = ("-ties" if ties else "") + "".join(f"-{name}" for name in more)
    return Case(op="moe_route", label=f"{num_tokens}x{num_experts}-{top_k}{suffix}", build=build)


def _route_replicas(make: Maker) -> Arguments:
    """Experts with 0, 1, 2 or 3 replicas, some elsewhere; entries beyond are no ids."""
    num_experts, replicas = 12, 3
    counts = (make.distinct(num_experts, 48, torch.int32) % (replicas + 1)).contiguous()
    ids = make.distinct(num_experts * replicas, 64, torch.int32).view(num_experts, replicas)
    ids = torch.where(ids % 5 == 0, -1, ids).to(torch.int32)
    behind = torch.arange(replicas, device=make.device)[None] >= counts[:, None]
    ids = ids.masked_fill(behind, 2**30).contiguous()
    positions = make.distinct(9, 100_000)
    positions[::4] = -1
    return {
        "logits_TE": make.randn(9, num_experts, pad=2),
        "top_k": 5,
        "expert_map": ExpertMap(ids, counts),
        "positions_T": positions,
    }


def _route_special(make: Maker) -> Arguments:
    logits = make.randn(5, 7)
    logits[0, 2], logits[1, :] = float("nan"), float("-inf")
    logits[2, :5], logits[3, 6] = float("-inf"), float("inf")
    return {"logits_TE": logits, "top_k": 4, "renormalise": False}


def draw_ids(make: Maker, num_tokens: int, num_experts: int, top_k: int) -> torch.Tensor:
    """int32 [T, k]; no token takes an expert twice."""
    drawn = [make.distinct(top_k, num_experts, torch.int32) for _ in range(num_tokens)]
    if not drawn:
        return torch.empty((0, top_k), dtype=torch.int32, device=make.device)
    return torch.stack(drawn)


def _sort(
    num_tokens: int, num_groups: int, top_k: int, block_size: int, *, group_size: int = 1
) -> Case:
    def build(make: Maker) -> Arguments:
        ids = draw_ids(make, num_tokens, num_groups * group_size, top_k)
        ids.flatten()[1::5] = -1
        capacity = sorted_capacity(ids.numel(), num_groups, block_size)
        shapes = ((capacity,), (capacity // block_size,), (num_groups,), ids.shape)
        out = [torch.full(one, -7, dtype=torch.int32, device=make.device) for one in shapes]
        return {
            "ids_TK": ids,
            "num_groups": num_groups,
            "block_size": block_size,
            "group_size": group_size,
            "out": SortedPairs(*out),
        }

    label = f"{num_tokens}x{top_k}-of-{num_groups}x{group_size}-block-{block_size}"
    return Case(op="moe_sort", label=label, build=build)


def _permute(num_tokens: int, top_k: int, width: int, group_size: int) -> Case:
    def build(make: Maker) -> Arguments:
        num_entries = num_tokens * top_k + 3
        pairs = make.distinct(num_entries, num_entries, torch.int32)
        ids = draw_ids(make, num_tokens, 4 * group_size, top_k)
        ids.flatten()[1::4] = -1
        row_ids = torch.full((num_entries,), -7, dtype=torch.int32, device=make.device)
        return {
            "x_TH": make.randn(num_tokens, width, pad=5),
            "ids_TK": ids,
            "pairs_C": pairs,
            "group_size": group_size,
            "out": (make.nan(num_entries, width + 2)[:, :width], row_ids),
        }

    return Case(op="moe_permute", label=f"{num_tokens}x{top_k}x{width}", build=build)


def _combine(num_tokens: int, top_k: int, width: int) -> Case:
    def build(make: Maker) -> Arguments:
        num_rows = num_tokens * top_k + 3
        places = make.distinct(num_tokens * top_k, num_rows, torch.int32).view(num_tokens, top_k)
        places[::3, 0] = -1
        places[1:2] = -1
        y = make.randn(num_rows, width, pad=4)
        # A row that nobody names may hold anything.
        y[torch.isin(torch.arange(num_rows, device=make.device), places, invert=True)] = float(
            "nan"
        )
        return {
            "y_CH": y,
            "weights_TK": Maker(torch.float32, make.device).randn(num_tokens, top_k),
            "places_TK": places,
            "out": make.nan(num_tokens, width + 3)[:, :width],
        }

    return Case(op="moe_combine", label=f"{num_tokens}x{top_k}x{width}", build=build)


def experts_call(
    make: Maker, num_tokens: int, num_experts: int, top_k: int, hidden: int, intermediate: int
) -> Arguments:
    """Weights and x of a size that makes results of the order of 1, row-major."""
    call: Arguments = {
        "x_TH": make.randn(num_tokens, hidden, pad=8),
        "w13": make.randn(num_experts, 2 * intermediate, hidden).mul_(hidden**-0.5),
        "w2": make.randn(num_experts, hidden, intermediate).mul_(intermediate**-0.5),
        # Drawn and divided on the CPU: another device's last bits differ.
        "weights_TK": Maker(torch.float32, seed=1)
        .randn(num_tokens, top_k)
        .softmax(dim=-1)
        .to(make.device),
        "ids_TK": draw_ids(make, num_tokens, num_experts, top_k),
        "layout": RowMajor(),
        "out": make.nan(num_tokens, hidden + 8)[:, :hidden],
    }
    return call


def _experts(
    num_tokens: int,
    sizes: tuple[int, int, int, int],  # experts, k, hidden, intermediate
    *,
    shuffled: bool = False,
    invariant: bool = False,
) -> Case:
    def build(make: Maker) -> Arguments:
        num_experts, top_k, hidden, intermediate = sizes
        call = experts_call(make, num_tokens, num_experts, top_k, hidden, intermediate)
        ids = call["ids_TK"]
        assert isinstance(ids, torch.Tensor)
        ids.flatten()[2::7] = -1
        ids[1:2] = -1
        if shuffled:
            call["layout"] = layout = Shuffle16x16()
            for name in ("w13", "w2"):
                weight = call[name]
                assert isinstance(weight, torch.Tensor)
                call[name] = layout.apply(weight)
        return call | {"batch_invariant": invariant}

    label = f"{num_tokens}x{sizes[1]}-of-{sizes[0]}-{sizes[2]}x{sizes[3]}"
    label += ("-shuffled" if shuffled else "") + ("-invariant" if invariant else "")
    return Case(op="moe_experts", label=label, build=build)


def _experts_fp8(
    num_tokens: int,
    sizes: tuple[int, int, int, int],
    *,
    per_block: bool,
    shuffled: bool = False,
    encoded: bool = False,
    invariant: bool = False,
) -> Case:
    """Codes of e4m3fn, with scales of a size that makes weights as those of `experts_call`; with
    `encoded`, codes of x and of what SwiGLU gives, too."""

    def build(make: Maker) -> Arguments:
        num_experts, top_k, hidden, intermediate = sizes
        call = experts_call(make, num_tokens, num_experts, top_k, hidden, intermediate)
        scales = []
        for name in ("w13", "w2"):
            weight = call[name]
            assert isinstance(weight, torch.Tensor)
            codes = (weight.cpu().float() * 64.0).to(torch.float8_e4m3fn).to(make.device)
            call[name] = Shuffle16x16().apply(codes) if shuffled else codes
            rows, columns = -(-weight.shape[1] // 128), -(-weight.shape[2] // 128)
            shape = (rows, columns) if per_block else (weight.shape[1], 1)
            drawn = Maker(torch.float32).randn(num_experts, *shape)
            scales.append(((drawn * 0.2).exp() / 64.0).to(make.device))
        if shuffled:
            call["layout"] = Shuffle16x16()
        if encoded:
            granularity = Granularity.BLOCK_1X128 if per_block else Granularity.TOKEN
            call["recipe"] = Quantised(granularity=granularity, code=CodeType.E4M3FN)
            ids = call["ids_TK"]
            assert isinstance(ids, torch.Tensor)
            ids.flatten()[2::7] = -1
        return call | {"scales": tuple(scales), "batch_invariant": invariant}

    label = f"{num_tokens}x{sizes[1]}-of-{sizes[0]}-{sizes[2]}x{sizes[3]}-fp8"
    label += ("-per-block" if per_block else "-per-row") + ("-shuffled" if shuffled else "")
    label += ("-encoded" if encoded else "") + ("-invariant" if invariant else "")
    # Results of the order of 1 are sums of tens of summands of at most about a half, each of which
    # may move by a step of e4m3fn, an eighth of it.
    return Case(op="moe_experts", label=label, build=build, jump=2**-4 if encoded else 0.0)


CASES: Final[tuple[Case, ...]] = (
    _route(0, 8, 2),
    _route(1, 1, 1),
    _route(5, 128, 8, pad=3),
    _route(3, 60, 4, renormalise=False),
    _route(3, 17, 17, ties=True),
    Case(op="moe_route", label="replicas", build=_route_replicas),
    Case(op="moe_route", label="nan-and-inf", build=_route_special),
    _sort(0, 4, 2, 16),
    _sort(1, 3, 1, 1),
    _sort(9, 5, 3, 16),
    _sort(40, 24, 8, 32),
    _sort(300, 8, 4, 16),
    _sort(33, 4, 6, 1, group_size=3),
    # Counted first, then put to their places by one program of each group, and by several.
    _sort(520, 130, 4, 16),
    _sort(5_003, 3, 2, 1, group_size=2),
    _sort(1_801, 90, 5, 16),
    # The fewest that are counted, and the most that are not.
    _sort(205, 7, 5, 8),
    _sort(256, 7, 4, 8),
    _permute(0, 2, 8, 2),
    _permute(5, 3, 33, 3),
    _permute(2, 1, 1_030, 1),
    _combine(0, 2, 8),
    _combine(1, 1, 1),
    _combine(7, 3, 33),
    _combine(4, 8, 1_030),
    _experts(0, (4, 2, 32, 16)),
    _experts(1, (8, 8, 64, 48)),
    _experts(3, (5, 2, 40, 24)),
    _experts(2, (3, 3, 288, 32), shuffled=True),
    _experts(21, (4, 2, 96, 48)),
    _experts(40, (3, 2, 72, 17)),
    _experts(24, (6, 2, 64, 32), shuffled=True),
    _experts(130, (2, 1, 32, 32)),
    _experts(5, (4, 2, 48, 40), invariant=True),
    _experts_fp8(3, (4, 2, 160, 96), per_block=True),
    _experts_fp8(20, (3, 2, 64, 32), per_block=False, shuffled=True),
    _experts_fp8(1, (4, 3, 160, 96), per_block=True, encoded=True),
    _experts_fp8(20, (3, 2, 64, 160), per_block=True, shuffled=True, encoded=True),
    _experts_fp8(7, (5, 2, 144, 40), per_block=False, encoded=True),
    _experts_fp8(9, (3, 2, 136, 72), per_block=False, encoded=True, invariant=True),
)
