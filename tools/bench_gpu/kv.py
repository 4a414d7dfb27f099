"""Speed of writing keys and values to the cache and of copying its blocks: 8 heads of 128.

All calls share one pool of 4,096 blocks. A prefill fills them in random order; each row of a decode
step writes to a block of its own. k and v are views of what one product gives with q.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

import torch
from gpu_timing import Machine, Row, num_operands, row_of_bytes

from syncline.model_ops_rocm import CodeType, detect_arch, select
from syncline.model_ops_rocm.kv import KVLayout, KVOrder, KVPool, KVScale
from syncline.model_ops_rocm.triton.targets import casts_natively

NUM_HEADS: Final = 32
NUM_KV_HEADS: Final = 8
HEAD_DIM: Final = 128
BLOCK_SIZE: Final = 64
NUM_BLOCKS: Final = 4_096
_DTYPE: Final = torch.bfloat16


def rows(machine: Machine, *, quick: bool) -> Iterator[Row]:
    """None of them is promised."""
    if quick:
        return
    for scale in (KVScale.NONE, KVScale.TOKEN):
        stored = _stored(scale)
        for num_tokens, per_block in ((8_192, BLOCK_SIZE), (256, 1)):
            yield _write(machine, num_tokens, per_block, scale, stored)
    stored = _stored(KVScale.NONE)
    for num_pairs in (256, 1):
        yield _copy(machine, num_pairs, stored["k"], stored["v"])


def _layout(scale: KVScale) -> KVLayout:
    dtype = _DTYPE
    if scale is not KVScale.NONE:
        is_fnuz = casts_natively(detect_arch(), CodeType.E4M3FNUZ)
        dtype = torch.float8_e4m3fnuz if is_fnuz else torch.float8_e4m3fn
    return KVLayout(order=KVOrder.HND, dtype=dtype, kernel_block_size=BLOCK_SIZE, scale=scale)


def _stored(scale: KVScale) -> dict[str, torch.Tensor]:
    """What the pool is made of, random numbers in it."""
    pool = KVPool(
        layout=_layout(scale),
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
    )
    return {
        name: torch.randn(spec.shape, dtype=_DTYPE, device="cuda").to(spec.dtype)
        for name, spec in pool.specs().items()
    }


def _write(
    machine: Machine,
    num_tokens: int,
    per_block: int,
    scale: KVScale,
    stored: dict[str, torch.Tensor],
) -> Row:
    """Of `per_block` tokens in each block; without a scale the cache is [NB, K, BS, D] itself."""
    op = select("kv_write", backend="triton", arch=detect_arch(), dtype=_DTYPE)
    caches = stored["k"], stored["v"]
    write, of_head = partial(op), HEAD_DIM * (2 + caches[0].itemsize)
    if scale is not KVScale.NONE:
        scales = stored["k_scale"], stored["v_scale"]
        write, of_head = partial(op, layout=_layout(scale), kv_scales=scales), of_head + 4
    num_bytes = num_tokens * (2 * NUM_KV_HEADS * of_head + 4)
    order, heads = torch.randperm(NUM_BLOCKS, device="cuda"), NUM_HEADS + 2 * NUM_KV_HEADS
    calls: list[Callable[[], object]] = []
    for number in range(num_operands(num_bytes)):
        fused = torch.randn(num_tokens, heads, HEAD_DIM, dtype=_DTYPE, device="cuda")
        k, v = fused[:, NUM_HEADS:-NUM_KV_HEADS], fused[:, -NUM_KV_HEADS:]
        calls.append(partial(write, k, v, *caches, _slots(order, number, num_tokens, per_block)))
    return row_of_bytes(
        machine,
        "kv_write" if scale is KVScale.NONE else f"kv_write, {scale} scale",
        f"{num_tokens} x {NUM_KV_HEADS} x {HEAD_DIM}",
        calls,
        num_bytes,
    )


def _slots(order: torch.Tensor, number: int, num_tokens: int, per_block: int) -> torch.Tensor:
    """Of one call: the next blocks of `order`, each from a random offset on if not all of it."""
    num_blocks = num_tokens // per_block
    blocks = order.roll(-number * num_blocks)[:num_blocks, None]
    first = torch.randint(0, BLOCK_SIZE - per_block + 1, (num_blocks, 1), device="cuda")
    offsets = first + torch.arange(per_block, device="cuda")
    return (blocks * BLOCK_SIZE + offsets).flatten().int()


def _copy(machine: Machine, num_pairs: int, k_cache: torch.Tensor, v_cache: torch.Tensor) -> Row:
    """As samples of one prompt part where it ends within a block."""
    op = select("kv_copy_blocks", backend="triton", arch=detect_arch(), dtype=_DTYPE)
    num_bytes = 4 * num_pairs * k_cache[0].numel() * k_cache.itemsize
    workspace = torch.empty(
        op.workspace_bytes(k_cache, num_pairs), dtype=torch.uint8, device="cuda"
    )
    order = torch.randperm(NUM_BLOCKS, device="cuda")
    calls: list[Callable[[], object]] = []
    for number in range(num_operands(num_bytes)):
        pairs = order.roll(-2 * number * num_pairs)[: 2 * num_pairs].view(num_pairs, 2)
        calls.append(partial(op, k_cache, v_cache, pairs, workspace=workspace))
    return row_of_bytes(
        machine,
        "kv_copy_blocks",
        f"{num_pairs} of {BLOCK_SIZE} x {NUM_KV_HEADS} x {HEAD_DIM}",
        calls,
        num_bytes,
        note="two launches, between them a workspace, which the floor leaves out",
    )
