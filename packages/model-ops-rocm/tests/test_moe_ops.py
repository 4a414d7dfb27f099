"""Mixture of experts on the CPU against loops over tokens and experts, and exchanged over ranks."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any  # Any: keywords of calls that are wrong on purpose

import pytest
import torch
import torch.nn.functional as nn_functional

from syncline.model_ops_rocm import (
    ExpertMap,
    LayoutError,
    Quantised,
    RowMajor,
    Shuffle16x16,
    SortedPairs,
    select,
    sorted_capacity,
)
from syncline.model_ops_rocm.layouts import Shuffle32x16
from syncline.model_ops_rocm.quant import CodeType, Granularity

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
E4M3FN = torch.float8_e4m3fn
F32 = torch.float32
route = select("moe_route", dtype=F32)
sort = select("moe_sort", dtype=F32)
permute = select("moe_permute", dtype=F32)
combine = select("moe_combine", dtype=F32)
experts = select("moe_experts", dtype=F32)
OPS: dict[str, Callable[..., object]] = {
    "moe_route": route,
    "moe_sort": sort,
    "moe_permute": permute,
    "moe_combine": combine,
    "moe_experts": experts,
}


def randn(*shape: int, dtype: torch.dtype = F32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def some_ids(num_tokens: int, num_experts: int, top_k: int, seed: int = 0) -> torch.Tensor:
    drawn = randn(num_tokens, num_experts, seed=seed).argsort(dim=1)[:, :top_k]
    return drawn.to(torch.int32).contiguous()


def some_call(
    num_tokens: int,
    num_experts: int = 5,
    top_k: int = 3,
    dtype: torch.dtype = F32,
    intermediate: int = 16,
    hidden: int = 32,
) -> dict[str, Any]:
    return {
        "x_TH": randn(num_tokens, hidden, dtype=dtype),
        "w13": randn(num_experts, 2 * intermediate, hidden, dtype=dtype, seed=1),
        "w2": randn(num_experts, hidden, intermediate, dtype=dtype, seed=2),
        "weights_TK": randn(num_tokens, top_k, seed=3).softmax(dim=1),
        "ids_TK": some_ids(num_tokens, num_experts, top_k),
        "layout": RowMajor(),
    }


def naive_experts(call: dict[str, Any]) -> torch.Tensor:
    """One token and one slot after the other, each number rounded as the contract says."""
    x, dtype = call["x_TH"], call["x_TH"].dtype
    out = torch.zeros(x.shape)
    for token, ids in enumerate(call["ids_TK"].tolist()):
        for slot, expert in enumerate(ids):
            if expert < 0:
                continue
            gate_up = (call["w13"][expert].float() @ x[token].float()).to(dtype)
            gate, up = gate_up.float().chunk(2)
            activated = ((gate / (1 + (-gate).exp())).to(dtype).float() * up).to(dtype)
            y = (call["w2"][expert].float() @ activated.float()).to(dtype)
            out[token] += call["weights_TK"][token, slot] * y.float()
    return out.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("renormalise", [True, False])
def test_a_token_goes_to_its_k_likeliest_experts(dtype: torch.dtype, renormalise: bool) -> None:
    logits = randn(9, 13, dtype=dtype)
    weights, ids = route(logits, 4, renormalise=renormalise)
    assert (weights.dtype, ids.dtype) == (torch.float32, torch.int32)
    for row, found, weight in zip(logits.float(), ids.tolist(), weights, strict=True):
        assert found == sorted(range(13), key=lambda e: (-float(row[e]), e))[:4]
        parts = row.softmax(dim=0)[found]
        torch.testing.assert_close(weight, parts / parts.sum() if renormalise else parts)


def test_of_equal_logits_the_lower_expert_comes_first_and_a_nan_comes_last() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 1.0, 3.0], [2.0, float("nan"), 2.0, -1.0, 0.0]])
    weights, ids = route(logits, 5)
    assert ids.tolist() == [[1, 2, 4, 0, 3], [0, 2, 4, 3, 1]]
    assert not weights[0].isnan().any()
    assert weights[1].isnan().all()


def test_the_position_chooses_the_replica_and_padding_goes_nowhere() -> None:
    logits = randn(8, 4)
    replicas = torch.tensor([[5, 9, -1], [7, 0, 0], [1, 2, 3], [0, 0, 0]], dtype=torch.int32)
    counts = torch.tensor([3, 1, 2, 0], dtype=torch.int32)
    positions = torch.tensor([0, 1, 2, 3, 4, 5, 6, -1])
    plain, experts_of = route(logits, 3)
    weights, ids = route(logits, 3, expert_map=ExpertMap(replicas, counts), positions_T=positions)
    assert torch.equal(weights[:7], plain[:7])
    for position in range(7):
        for expert, got in zip(experts_of[position].tolist(), ids[position].tolist(), strict=True):
            count = int(counts[expert])
            assert got == (int(replicas[expert, position % count]) if count else -1)
    assert ids[7].tolist() == [-1, -1, -1]
    assert not weights[7].any()


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_pairs_are_sorted_by_group_and_padded_to_blocks(block_size: int) -> None:
    ids = some_ids(11, 6, 3)
    ids[::4, 1] = -1
    pairs, block_groups, counts, places = sort(ids, 3, block_size=block_size, group_size=2)
    flat = ids.flatten().tolist()
    wanted, wanted_groups = [], []
    for group in range(3):
        own = [pair for pair, expert in enumerate(flat) if expert // 2 == group]
        assert int(counts[group]) == len(own)
        own += [len(flat)] * (-len(own) % block_size)
        wanted += own
        wanted_groups += [group] * (len(own) // block_size)
    capacity = sorted_capacity(len(flat), 3, block_size)
    assert pairs.tolist() == wanted + [len(flat)] * (capacity - len(wanted))
    assert block_groups.tolist() == wanted_groups + [-1] * (
        capacity // block_size - len(wanted_groups)
    )
    for pair, place in enumerate(places.flatten().tolist()):
        assert place == (wanted.index(pair) if flat[pair] >= 0 else -1)


def test_any_routing_fits_the_capacity_and_the_worst_one_fills_it() -> None:
    for num_pairs, num_groups, block_size in ((7, 4, 4), (3, 8, 16), (64, 4, 16), (1, 1, 1)):
        capacity = sorted_capacity(num_pairs, num_groups, block_size)
        spread = torch.arange(num_pairs, dtype=torch.int32).remainder(num_groups)[:, None]
        skewed = spread.clamp(min=max(num_groups - 2, 0))
        for ids in (spread, skewed, torch.zeros_like(spread)):
            groups = sort(ids.contiguous(), num_groups, block_size=block_size).block_groups
            assert len(groups) * block_size == capacity
        one_each = torch.arange(min(num_pairs, num_groups)).int()
        rest = torch.zeros(num_pairs - len(one_each)).int()
        worst = torch.cat((one_each, rest))[:, None].contiguous()
        used = int((sort(worst, num_groups, block_size=block_size).block_groups >= 0).sum())
        assert capacity // block_size - used <= 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_experts_are_what_a_loop_makes_of_them(dtype: torch.dtype, batch_invariant: bool) -> None:
    call = some_call(7, dtype=dtype)
    call["ids_TK"][2, 1] = -1
    call["ids_TK"][4] = -1
    result = experts(**call, batch_invariant=batch_invariant)
    tolerance = {F32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}[dtype]
    torch.testing.assert_close(result, naive_experts(call), rtol=tolerance, atol=8 * tolerance)
    assert not result[4].any()
    assert result.dtype == dtype


@pytest.mark.parametrize("sizes", [{}, {"intermediate": 4, "hidden": 33}, {"hidden": 8}], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_token_has_the_same_bits_in_every_batch_if_that_is_asked_for(
    dtype: torch.dtype, sizes: dict[str, int]
) -> None:
    call = some_call(45, dtype=dtype, **sizes)
    rows = ("x_TH", "weights_TK", "ids_TK")
    whole = experts(**call, batch_invariant=True)
    for start, stop in ((0, 1), (44, 45), (3, 20), (10, 42)):
        part = call | {name: call[name][start:stop] for name in rows}
        assert torch.equal(experts(**part, batch_invariant=True), whole[start:stop])


def test_ranks_that_exchange_pairs_compute_what_one_rank_does() -> None:
    num_ranks, of_rank, top_k = 3, 2, 4
    call = some_call(10, num_ranks * of_rank, top_k)
    call["ids_TK"][::3, 2] = -1
    order = sort(call["ids_TK"], num_ranks, group_size=of_rank)
    sent, ids = permute(call["x_TH"], call["ids_TK"], order.pairs, group_size=of_rank)
    sizes = order.counts.tolist()
    assert (ids[: sum(sizes)] >= 0).all()
    assert (ids[sum(sizes) :] == -1).all()
    assert not sent[sum(sizes) :].any()
    received = []
    for rank, (x, own) in enumerate(
        zip(*(torch.split(one[: sum(sizes)], sizes) for one in (sent, ids)), strict=True)
    ):
        mine = slice(rank * of_rank, (rank + 1) * of_rank)
        y = experts(
            *(x, call["w13"][mine], call["w2"][mine], torch.ones(len(x), 1), own[:, None]),
            layout=RowMajor(),
            batch_invariant=True,
        )
        received.append(y)
    result = combine(torch.cat(received), call["weights_TK"], order.places)
    assert torch.equal(result, experts(**call, batch_invariant=True))


def test_a_layout_is_read_as_it_is_stored() -> None:
    call = some_call(6, intermediate=32)
    wanted = experts(**call)
    stored = {name: Shuffle16x16().apply(call[name]) for name in ("w13", "w2")}
    assert torch.equal(experts(**call | stored | {"layout": Shuffle16x16()}), wanted)
    assert not torch.allclose(experts(**call | stored), wanted)
    with pytest.raises(LayoutError, match=r"N % 32 == 0"):
        experts(**some_call(6, intermediate=24) | {"layout": Shuffle32x16()})


@pytest.mark.parametrize("per_block", [False, True])
def test_fp8_weights_are_codes_times_scales(per_block: bool) -> None:
    hidden, intermediate = 160, 144
    call = some_call(5) | {"x_TH": randn(5, hidden)}
    decoded, codes, scales = {}, {}, []
    for seed, (name, rows, columns) in enumerate(
        (("w13", 2 * intermediate, hidden), ("w2", hidden, intermediate))
    ):
        codes[name] = randn(5, rows, columns, seed=seed).to(E4M3FN)
        shape = (5, -(-rows // 128), -(-columns // 128)) if per_block else (5, rows, 1)
        scale = randn(*shape, seed=seed).abs()
        scales.append(scale)
        if per_block:
            scale = scale.repeat_interleave(128, 1)[:, :rows].repeat_interleave(128, 2)
        decoded[name] = codes[name].float() * scale[..., :columns]
    wanted = experts(**call | decoded)
    found = experts(**call | codes, scales=(scales[0], scales[1]))
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("per_block", [False, True])
def test_a_recipe_encodes_what_is_multiplied(per_block: bool) -> None:
    hidden, intermediate = 160, 144
    granularity = Granularity.BLOCK_1X128 if per_block else Granularity.TOKEN
    recipe = Quantised(granularity=granularity, code=CodeType.E4M3FN)

    def encoded(row: torch.Tensor) -> torch.Tensor:
        parts = []
        for start in range(0, len(row), 128 if per_block else len(row)):
            part = row[start : start + 128] if per_block else row
            scale = part.abs().max() / 448
            parts.append((part / scale).to(E4M3FN).float() * scale)
        return torch.cat(parts)

    call = some_call(4) | {"x_TH": randn(4, hidden)}
    w13, w2 = randn(5, 2 * intermediate, hidden).to(E4M3FN), randn(5, hidden, intermediate)
    blocks = ((5, 3, 2), (5, 2, 2)) if per_block else ((5, 2 * intermediate, 1), (5, hidden, 1))
    scales = torch.ones(blocks[0]), torch.ones(blocks[1])
    w2 = w2.to(E4M3FN)
    stored = {"w13": w13, "w2": w2, "scales": scales}
    wanted = torch.zeros(4, hidden)
    for token, ids in enumerate(call["ids_TK"].tolist()):
        for slot, expert in enumerate(ids):
            gate, up = (w13[expert].float() @ encoded(call["x_TH"][token])).chunk(2)
            activated = encoded(gate / (1 + (-gate).exp()) * up)
            y = w2[expert].float() @ activated
            wanted[token] += call["weights_TK"][token, slot] * y
    found = experts(**call | stored, recipe=recipe)
    # A code that rounds the other way moves one product by a sixteenth.
    error = (found - wanted).norm() / wanted.norm()
    assert float(error) < 2e-3
    plain = experts(**call | stored)
    assert float((plain - wanted).norm() / wanted.norm()) > 1e-2


def test_nothing_is_computed_for_no_tokens_and_no_result_is_kept_from_before() -> None:
    empty = some_call(0)
    assert experts(**empty).shape == (0, 32)
    assert sort(empty["ids_TK"], 5).counts.tolist() == [0] * 5
    call = some_call(3) | {"out": torch.full((3, 32), float("nan"))}
    call["ids_TK"].fill_(-1)
    assert experts(**call) is call["out"]
    assert not call["out"].any()


def test_what_a_skipped_pair_or_another_token_holds_does_not_matter() -> None:
    call = some_call(4)
    call["ids_TK"][1] = torch.tensor([-1, 3, -1])
    wanted = experts(**call)
    call["weights_TK"][1, 0] = float("nan")
    call["x_TH"][0] = float("nan")
    result = experts(**call)
    assert result[0].isnan().all()
    assert torch.equal(result[1:], wanted[1:])


def test_sums_are_taken_in_order_of_the_slots() -> None:
    y = torch.tensor([[1e8], [1.0], [-1e8], [float("nan")]])
    weights = torch.ones(2, 3)
    places = torch.tensor([[0, 1, 2], [0, 2, 1]], dtype=torch.int32)
    assert combine(y, weights, places).tolist() == [[0.0], [1.0]]


def wrong_calls() -> list[tuple[str, dict[str, Any], str]]:
    call = some_call(4)
    w13, w2, ids = call["w13"], call["w2"], call["ids_TK"]
    scales = (torch.ones(5, 32, 1), torch.ones(5, 32, 1))
    codes = {"w13": w13.to(E4M3FN), "w2": w2.to(E4M3FN)}
    row, block = (
        Quantised(granularity=one, code=CodeType.E4M3FN)
        for one in (Granularity.TOKEN, Granularity.BLOCK_1X128)
    )
    in_fp8 = call | codes | {"scales": scales}
    logits = {"logits_TE": randn(2, 5)}
    replicas = torch.zeros(5, 2, dtype=torch.int32)
    counts = torch.zeros(5, dtype=torch.int32)
    out = SortedPairs(*(torch.zeros(1, dtype=torch.int32) for _ in range(4)))
    by_five = {"ids_TK": ids, "num_groups": 5}
    return [
        (
            "moe_experts",
            call | {"w13": w13[:, :31].contiguous()},
            r"w13 must have shape \[E, 2I, 3",
        ),
        ("moe_experts", call | {"w2": w2[:4]}, r"w2 must have shape \[5, 32, 16\], got \[4, 32, 1"),
        ("moe_experts", call | {"w2": w2.half()}, r"w2 must be torch.float32, got torch.float16"),
        ("moe_experts", call | {"w13": w13.transpose(0, 1)[:5]}, r"w13 must have shape|contiguous"),
        ("moe_experts", call | {"ids_TK": ids.long()}, r"ids must be torch.int32, got torch.int64"),
        (
            "moe_experts",
            call | {"ids_TK": ids + 3},
            r"ids must be -1 or in \[0, 5\), got one outsi",
        ),
        (
            "moe_experts",
            call | {"weights_TK": torch.ones(4, 2)},
            r"weights must have shape \[4, 3\]",
        ),
        ("moe_experts", call | {"out": w2}, r"out must have shape \[4, 32\]"),
        ("moe_experts", call | {"scales": scales}, r"w13 must be fp8, both of one kind, as there"),
        ("moe_experts", call | codes, r"w13 must be torch.float32, got torch.float8_e4m3fn"),
        ("moe_experts", call | codes | {"scales": (scales[0], torch.ones(5, 32))}, r"scales\[1\]"),
        (
            "moe_experts",
            call | {"recipe": row},
            r"recipe must be None without scales, got token_e4",
        ),
        ("moe_experts", in_fp8 | {"recipe": block}, r"recipe must be per token, as scales, got 1x"),
        (
            "moe_experts",
            in_fp8 | {"recipe": replace(row, code=CodeType.E4M3FNUZ)},
            r"recipe must have codes of torch.float8_e4m3fn, as w13, and fp32 scales, got token_e",
        ),
        ("moe_route", logits | {"top_k": 6}, r"top_k must be in \[1, 5\], got 6"),
        (
            "moe_route",
            logits | {"top_k": 2, "positions_T": counts},
            r"positions must be one-dimens",
        ),
        (
            "moe_route",
            logits | {"top_k": 2, "expert_map": ExpertMap(replicas, counts)},
            r"positions must be given where experts have replicas, got None",
        ),
        (
            "moe_route",
            logits | {"top_k": 2, "expert_map": ExpertMap(replicas[:4], counts)},
            r"expert_map.replicas must have shape \[5, R\]",
        ),
        ("moe_sort", by_five | {"block_size": 6}, r"block_size must be a pow"),
        ("moe_sort", by_five | {"group_size": 2**28}, r"group_size must make at most 1073741824"),
        ("moe_sort", by_five | {"block_size": 2**28}, r"ids must need at most 1073741824 entries"),
        ("moe_sort", {"ids_TK": ids, "num_groups": 0}, r"num_groups must be positive, got 0"),
        ("moe_sort", {"ids_TK": ids, "num_groups": 2}, r"ids must be -1 or in \[0, 2\)"),
        ("moe_sort", by_five | {"out": out}, r"out.pairs must have shape"),
        (
            "moe_permute",
            {"x_TH": call["x_TH"], "ids_TK": ids, "pairs_C": ids},
            r"pairs must have 1 dimensions, got \[4, 3\]",
        ),
        (
            "moe_combine",
            {"y_CH": w2[0], "weights_TK": torch.ones(4, 3).T, "places_TK": ids},
            r"weights must be contiguous",
        ),
    ]


@pytest.mark.parametrize("number", range(26))
def test_a_wrong_argument_is_refused_by_name(number: int) -> None:
    op, call, message = wrong_calls()[number]
    with pytest.raises(ValueError, match=f"^{op}: {message}"):
        OPS[op](**call)


def test_silu_is_torchs() -> None:
    call = some_call(1, 1, 1) | {"weights_TK": torch.ones(1, 1)}
    gate, up = nn_functional.linear(call["x_TH"], call["w13"][0]).chunk(2, dim=1)
    wanted = nn_functional.linear(nn_functional.silu(gate) * up, call["w2"][0])
    torch.testing.assert_close(experts(**call), wanted)
