"""Speed of mixture of experts: 128 experts, 8 of a token, 2,048 x 768, as Qwen3-30B-A3B has.

The floor is each distinct expert of a step once. Routing is random, another one for each call; all
experts together are 1.2 GB, so that none is found in the cache.
"""

from collections.abc import Callable, Iterator

import torch
from gpu_timing import Machine, Row, node_seconds

from syncline.model_ops_rocm import RowMajor, detect_arch, select

NUM_EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 128, 8, 2_048, 768
# Tokens -> the share that is promised.
TARGETS = {1: 0.75, 8: 0.80, 64: 0.88, 256: 0.83}
NUM_CALLS = 16


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
        for num_tokens in (1, 256):
            yield _routing(machine, num_tokens)


def _experts(
    machine: Machine,
    num_tokens: int,
    *,
    target: float | None = None,
    batch_invariant: bool = False,
    is_fp8: bool = False,
) -> Row:
    dtype = torch.bfloat16
    op = select("moe_experts", backend="triton", arch=detect_arch(), dtype=dtype)
    w13 = _random(NUM_EXPERTS, 2 * INTERMEDIATE, HIDDEN).mul_(HIDDEN**-0.5)
    w2 = _random(NUM_EXPERTS, HIDDEN, INTERMEDIATE).mul_(INTERMEDIATE**-0.5)
    scales = None
    if is_fp8:
        w13, w2 = w13.to(torch.float8_e4m3fn), w2.to(torch.float8_e4m3fn)
        scales = _scales_of(w13), _scales_of(w2)
    num_bytes = op.workspace_bytes(w13, TOP_K, num_tokens, dtype)
    workspace = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    calls: list[Callable[[], object]] = []
    num_distinct = 0
    for ids in _routings(num_tokens):
        x, out = _random(num_tokens, HIDDEN), _random(num_tokens, HIDDEN)
        weights = torch.rand(num_tokens, TOP_K, device="cuda").softmax(dim=1)
        num_distinct += len(torch.unique(ids))
        calls.append(
            lambda x=x, weights=weights, ids=ids, out=out: op(  # type: ignore[misc]  # defaults bind the operands
                *(x, w13, w2, weights, ids),
                layout=RowMajor(),
                scales=scales,
                batch_invariant=batch_invariant,
                out=out,
                workspace=workspace,
            )
        )
    of_expert = 3 * HIDDEN * INTERMEDIATE
    bytes_s = w13.itemsize * of_expert * num_distinct / len(calls) / machine.copy_bytes_per_s
    flop_s = 2 * of_expert * num_tokens * TOP_K / machine.matmul_flop_per_s
    return Row(
        op="moe_experts",
        shape=f"{num_tokens} x {TOP_K} of {NUM_EXPERTS}, {HIDDEN} x {INTERMEDIATE}",
        backend="triton",
        seconds=node_seconds(calls),
        floor_s=max(bytes_s, flop_s),
        target=target,
        note="batch_invariant" if batch_invariant else "e4m3fn per 128x128" if is_fp8 else "",
    )


def _scales_of(weight: torch.Tensor) -> torch.Tensor:
    """Some scale per 128 x 128."""
    num_experts, rows, columns = weight.shape
    return torch.rand(num_experts, rows // 128, columns // 128, device="cuda") + 0.5


def _routing(machine: Machine, num_tokens: int) -> Row:
    op = select("moe_route", backend="triton", arch=detect_arch(), dtype=torch.bfloat16)
    calls: list[Callable[[], object]] = []
    for _ in range(NUM_CALLS):
        logits = _random(num_tokens, NUM_EXPERTS)
        weights = torch.empty(num_tokens, TOP_K, device="cuda")
        out = weights, torch.empty_like(weights, dtype=torch.int32)
        calls.append(lambda logits=logits, out=out: op(logits, TOP_K, out=out))  # type: ignore[misc]  # as above
    return Row(
        op="moe_route",
        shape=f"{num_tokens} x {TOP_K} of {NUM_EXPERTS}",
        backend="triton",
        seconds=node_seconds(calls),
        floor_s=num_tokens * (2 * NUM_EXPERTS + 8 * TOP_K) / machine.copy_bytes_per_s,
    )


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
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")
