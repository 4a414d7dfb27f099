"""Speed of mixture of experts: 128 experts, 8 of a token, 2,048 x 768, as Qwen3-30B-A3B has.

The floor is each distinct expert of a step once, or its products at the matmul rate of bfloat16.
Routing is random, another one for each call; all experts together are 1.2 GB, so that none is found
in the cache. Of sorting, permuting and combining the floor is the bytes that must move.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final, cast  # Any: the op, whose keywords differ

import torch
from gpu_timing import Machine, Row, node_seconds, num_operands, row_of_bytes

from syncline.model_ops_rocm import (
    Quantised,
    RowMajor,
    SortedPairs,
    detect_arch,
    select,
    sorted_capacity,
)
from syncline.model_ops_rocm.quant import CodeType, Granularity

NUM_EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 128, 8, 2_048, 768
# Tokens -> the share that is promised.
TARGETS = {1: 0.75, 8: 0.80, 64: 0.88, 256: 0.83}
NUM_CALLS = 16
NUM_RANKS: Final = 8
SORTED_BLOCK: Final = 64  # pairs of a block of one expert's
_DTYPE: Final = torch.bfloat16
_FP8: Final = torch.float8_e4m3fn


def rows(machine: Machine, *, quick: bool) -> Iterator[Row]:
    """The promised shapes; what the flag and routing cost, too, unless `quick`."""
    for num_tokens, target in TARGETS.items():
        yield _experts(machine, num_tokens, target=target)
    if not quick:
        for num_tokens in (1, 256, 4_096):
            yield _experts(machine, num_tokens, batch_invariant=True)
        for num_tokens in (2, 16, 1_024, 4_096):
            yield _experts(machine, num_tokens)
        for num_tokens in (1, 64, 256):
            yield _experts(machine, num_tokens, is_fp8=True)
        for recipe in (Granularity.BLOCK_1X128, Granularity.TOKEN):
            for num_tokens in (1, 8, 64, 256, 4_096):
                yield _experts_of_codes(machine, num_tokens, recipe)
        for num_tokens in (1, 256):
            yield _routing(machine, num_tokens)
        for num_tokens in (8_192, 256):
            yield _sort(machine, num_tokens, NUM_EXPERTS, SORTED_BLOCK)
            yield _sort(machine, num_tokens, NUM_RANKS, 1)
            yield _permute(machine, num_tokens)
            yield _combine(machine, num_tokens)


def _experts(
    machine: Machine,
    num_tokens: int,
    *,
    target: float | None = None,
    batch_invariant: bool = False,
    is_fp8: bool = False,
) -> Row:
    w13, w2 = _weights()
    more: dict[str, object] = {"batch_invariant": batch_invariant}
    note = "batch_invariant" if batch_invariant else ""
    if is_fp8:
        w13, w2 = w13.to(_FP8), w2.to(_FP8)
        more["scales"] = _scales(w13, 128), _scales(w2, 128)
        note = "e4m3fn per 128x128"
    return _row(machine, num_tokens, (w13, w2), more, note, target)


def _experts_of_codes(machine: Machine, num_tokens: int, granularity: Granularity) -> Row:
    """The experts where x and what SwiGLU gives are encoded, too."""
    w13, w2 = (weight.to(_FP8) for weight in _weights())
    is_row = granularity is Granularity.TOKEN
    scales = tuple(_scales(weight, 1 if is_row else 128) for weight in (w13, w2))
    recipe = Quantised(granularity=granularity, code=CodeType.E4M3FN)
    more = {"scales": scales, "recipe": recipe}
    note = f"e4m3fn by e4m3fn, per {'row' if is_row else '1x128 and 128x128'}"
    return _row(machine, num_tokens, (w13, w2), more, note, None)


def _weights() -> tuple[torch.Tensor, torch.Tensor]:
    w13 = _random(NUM_EXPERTS, 2 * INTERMEDIATE, HIDDEN).mul_(HIDDEN**-0.5)
    return w13, _random(NUM_EXPERTS, HIDDEN, INTERMEDIATE).mul_(INTERMEDIATE**-0.5)


def _row(
    machine: Machine,
    num_tokens: int,
    experts: tuple[torch.Tensor, torch.Tensor],
    more: dict[str, object],
    note: str,
    target: float | None,
) -> Row:
    op = cast(Any, select("moe_experts", backend="triton", arch=detect_arch(), dtype=_DTYPE))
    num_bytes = op.workspace_bytes(experts[0], TOP_K, num_tokens, _DTYPE)
    workspace = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    calls: list[Callable[[], object]] = []
    num_distinct = 0
    for ids in _routings(num_tokens):
        x, out = _random(num_tokens, HIDDEN), _random(num_tokens, HIDDEN)
        weights = torch.rand(num_tokens, TOP_K, device="cuda").softmax(dim=1)
        num_distinct += len(torch.unique(ids))
        calls.append(
            lambda x=x, weights=weights, ids=ids, out=out: op(  # type: ignore[misc]  # defaults bind the operands
                *(x, *experts, weights, ids),
                layout=RowMajor(),
                out=out,
                workspace=workspace,
                **more,
            )
        )
    of_expert = 3 * HIDDEN * INTERMEDIATE
    num_read = experts[0].itemsize * of_expert * num_distinct / len(calls)
    flop_s = 2 * of_expert * num_tokens * TOP_K / machine.matmul_flop_per_s
    return Row(
        op="moe_experts",
        shape=f"{num_tokens} x {TOP_K} of {NUM_EXPERTS}, {HIDDEN} x {INTERMEDIATE}",
        backend="triton",
        seconds=node_seconds(calls),
        floor_s=max(num_read / machine.copy_bytes_per_s, flop_s),
        target=target,
        note=note,
    )


def _scales(weight: torch.Tensor, block: int) -> torch.Tensor:
    """Some scale per row, or per block of so many rows and columns."""
    num_experts, rows, columns = weight.shape
    shape = (rows, 1) if block == 1 else (rows // block, columns // block)
    return torch.rand(num_experts, *shape, device="cuda") + 0.5


def _routing(machine: Machine, num_tokens: int) -> Row:
    op = select("moe_route", backend="triton", arch=detect_arch(), dtype=_DTYPE)
    calls: list[Callable[[], object]] = []
    for _ in range(NUM_CALLS):
        logits = _random(num_tokens, NUM_EXPERTS)
        weights = torch.empty(num_tokens, TOP_K, device="cuda")
        out = weights, torch.empty_like(weights, dtype=torch.int32)
        calls.append(lambda logits=logits, out=out: op(logits, TOP_K, out=out))  # type: ignore[misc]  # as above
    return row_of_bytes(
        machine,
        "moe_route",
        f"{num_tokens} x {TOP_K} of {NUM_EXPERTS}",
        calls,
        num_tokens * (2 * NUM_EXPERTS + 8 * TOP_K),
    )


def _sort(machine: Machine, num_tokens: int, num_groups: int, block_size: int) -> Row:
    op = select("moe_sort", backend="triton", arch=detect_arch(), dtype=_DTYPE)
    capacity = sorted_capacity(num_tokens * TOP_K, num_groups, block_size)
    shapes = ((capacity,), (capacity // block_size,), (num_groups,), (num_tokens, TOP_K))
    # Ids, sorted pairs and places; the rest is little.
    num_bytes = 4 * (2 * num_tokens * TOP_K + capacity)
    calls: list[Callable[[], object]] = []
    for _ in range(num_operands(num_bytes)):
        out = SortedPairs(
            *(torch.empty(shape, dtype=torch.int32, device="cuda") for shape in shapes)
        )
        sizes = {"block_size": block_size, "group_size": NUM_EXPERTS // num_groups}
        calls.append(partial(op, _ids(num_tokens), num_groups, **sizes, out=out))
    to = f"to {num_groups} ranks" if num_groups == NUM_RANKS else f"in blocks of {block_size}"
    shape = f"{num_tokens} x {TOP_K} of {NUM_EXPERTS}, {to}"
    return row_of_bytes(machine, "moe_sort", shape, calls, num_bytes, note="latency")


def _permute(machine: Machine, num_tokens: int) -> Row:
    """As ranks exchange tokens: each of them is read once and written for each of its experts."""
    op = select("moe_permute", backend="triton", arch=detect_arch(), dtype=_DTYPE)
    num_pairs = num_tokens * TOP_K
    num_bytes = 2 * HIDDEN * (num_tokens + num_pairs) + 12 * num_pairs
    calls: list[Callable[[], object]] = []
    for _ in range(num_operands(num_bytes)):
        ids = _ids(num_tokens)
        pairs = _by_rank(ids).pairs
        out = _random(num_pairs, HIDDEN), torch.empty_like(pairs)
        x = _random(num_tokens, HIDDEN)
        calls.append(partial(op, x, ids, pairs, group_size=NUM_EXPERTS // NUM_RANKS, out=out))
    shape = f"{num_tokens} x {TOP_K}, rows of {HIDDEN}"
    return row_of_bytes(machine, "moe_permute", shape, calls, num_bytes)


def _combine(machine: Machine, num_tokens: int) -> Row:
    op = select("moe_combine", backend="triton", arch=detect_arch(), dtype=_DTYPE)
    num_pairs = num_tokens * TOP_K
    num_bytes = 2 * HIDDEN * (num_tokens + num_pairs) + 8 * num_pairs
    calls: list[Callable[[], object]] = []
    for _ in range(num_operands(num_bytes)):
        places = _by_rank(_ids(num_tokens)).places
        weights = torch.rand(num_tokens, TOP_K, device="cuda").softmax(dim=1)
        y, out = _random(num_pairs, HIDDEN), _random(num_tokens, HIDDEN)
        calls.append(partial(op, y, weights, places, out=out))
    shape = f"{num_tokens} x {TOP_K}, rows of {HIDDEN}"
    return row_of_bytes(machine, "moe_combine", shape, calls, num_bytes)


def _by_rank(ids: torch.Tensor) -> SortedPairs:
    sort = select("moe_sort", backend="triton", arch=detect_arch(), dtype=_DTYPE)
    return sort(ids, NUM_RANKS, group_size=NUM_EXPERTS // NUM_RANKS)


def _ids(num_tokens: int) -> torch.Tensor:
    """Random ids, drawn on the device: there are many sets of them."""
    drawn = torch.rand(num_tokens, NUM_EXPERTS, device="cuda")
    return drawn.topk(TOP_K, dim=1).indices.to(torch.int32)


def _routings(num_tokens: int) -> Iterator[torch.Tensor]:
    """Random ids; of single tokens so that no two calls share an expert."""
    if num_tokens == 1:
        for _ in range(3):
            order = torch.randperm(NUM_EXPERTS).view(-1, 1, TOP_K)
            yield from order.to(torch.int32).cuda()
        return
    for _ in range(NUM_CALLS if num_tokens < 1_024 else 4):
        drawn = torch.rand(num_tokens, NUM_EXPERTS).argsort(dim=1)[:, :TOP_K]
        yield drawn.to(torch.int32).contiguous().cuda()


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=_DTYPE, device="cuda")
