"""Speed of paged attention: decode against reading its KV once, prefill against a matmul.

Random numbers, and blocks in random order. A prefill's floor is that of its causal products alone,
that of merging to read the parts and to write their mean.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
import torch.nn.functional as F
from gpu_timing import Machine, Row, copy_seconds, node_seconds, num_operands, row_of_bytes
from torch.nn.attention import SDPBackend, sdpa_kernel

from syncline.model_ops_rocm import AttentionMetadata, detect_arch, select
from syncline.model_ops_rocm.kv import KVLayout, KVOrder, KVScale

HEAD_DIM: Final = 128
BLOCK_SIZE: Final = 64
SCALE: Final = HEAD_DIM**-0.5
_MERGED_HEADS: Final = 32
_FEW_BYTES: Final = 2**25  # so few that a copy of them does not reach the copy rate either


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Rows of equal length; every one has `query_len` queries, the last of its tokens."""

    num_rows: int
    context: int
    num_heads: int
    num_kv_heads: int
    query_len: int = 1
    is_fp8: bool = False
    batch_invariant: bool = False

    @property
    def kv_bytes(self) -> int:
        numbers = 2 * self.num_rows * self.context * self.num_kv_heads * HEAD_DIM
        return numbers if self.is_fp8 else 2 * numbers

    @property
    def name(self) -> str:
        extras = (", fp8 KV" if self.is_fp8 else "") + (", invariant" * self.batch_invariant)
        heads = f"heads {self.num_heads}/{self.num_kv_heads}"
        return f"{self.num_rows} x {self.context:,}, {heads}{extras}"


def rows(machine: Machine, *, quick: bool) -> Iterator[Row]:
    """The promised shapes; with others beside them unless `quick`."""
    for num_kv_heads in (8, 4):
        for num_rows, context, target in ((64, 2_048, 0.88), (256, 2_048, 0.88), (8, 512, 0.6)):
            shape = Shape(
                num_rows=num_rows, context=context, num_heads=32, num_kv_heads=num_kv_heads
            )
            yield _decode(machine, shape, target)
    yield from _prefill(
        machine,
        Shape(num_rows=1, context=8_192, num_heads=32, num_kv_heads=8, query_len=8_192),
        0.45,
    )
    if quick:
        return
    few = ((1, 512), (1, 1_024), (4, 512), (1, 2_048), (1, 4_096))
    for num_rows, context in (*few, (1, 32_768), (64, 512), (256, 512)):
        shape = Shape(num_rows=num_rows, context=context, num_heads=32, num_kv_heads=8)
        yield _decode(machine, shape, None)
    for is_fp8, batch_invariant in ((True, False), (False, True)):
        shape = Shape(
            num_rows=256,
            context=2_048,
            num_heads=32,
            num_kv_heads=8,
            is_fp8=is_fp8,
            batch_invariant=batch_invariant,
        )
        yield _decode(machine, shape, None)
    invariant = Shape(
        num_rows=1,
        context=8_192,
        num_heads=32,
        num_kv_heads=8,
        query_len=8_192,
        batch_invariant=True,
    )
    yield from _prefill(machine, invariant, None)
    for num_parts, num_tokens in ((2, 8_192), (8, 256)):
        yield _merge(machine, num_parts, num_tokens)


def _call(
    shape: Shape, seed: int, workspace: torch.Tensor, counters: torch.Tensor | None = None
) -> Callable[[], object]:
    """One call with its own pool."""
    op = select("paged_attention", backend="triton", arch=detect_arch(), dtype=torch.bfloat16)
    make = torch.Generator(device="cuda").manual_seed(seed)
    width = -(-shape.context // BLOCK_SIZE)
    num_blocks = shape.num_rows * width + 7
    size = (num_blocks, shape.num_kv_heads, BLOCK_SIZE, HEAD_DIM)
    k, v = (
        torch.randn(size, dtype=torch.bfloat16, device="cuda", generator=make) for _ in range(2)
    )
    layout, scales = None, None
    if shape.is_fp8:
        k, v = k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn)
        layout = KVLayout(
            order=KVOrder.HND,
            dtype=k.dtype,
            kernel_block_size=BLOCK_SIZE,
            scale=KVScale.TENSOR,
        )
        scales = (torch.ones(1, device="cuda"), torch.ones(1, device="cuda"))
    order = torch.randperm(num_blocks, device="cuda", generator=make)[: shape.num_rows * width]
    starts = torch.arange(shape.num_rows + 1, dtype=torch.int32, device="cuda")
    meta = AttentionMetadata(
        query_start_loc=starts * shape.query_len,
        seq_lens=torch.full((shape.num_rows,), shape.context, dtype=torch.int32, device="cuda"),
        block_tables=order.to(torch.int32).view(shape.num_rows, width),
        num_decode_rows=shape.num_rows if shape.query_len == 1 else 0,
        max_query_len=shape.query_len,
    )
    num_tokens = shape.num_rows * shape.query_len
    q = torch.randn(
        (num_tokens, shape.num_heads, HEAD_DIM),
        dtype=torch.bfloat16,
        device="cuda",
        generator=make,
    )
    out = torch.empty_like(q)
    return lambda: op(
        *(q, k, v, meta),
        scale=SCALE,
        layout=layout,
        kv_scales=scales,
        batch_invariant=shape.batch_invariant,
        out=out,
        workspace=workspace,
        counters=counters,
    )


def _decode(machine: Machine, shape: Shape, target: float | None) -> Row:
    workspace = torch.empty(2**26, dtype=torch.uint8, device="cuda")
    counters = torch.zeros(2**12, dtype=torch.int32, device="cuda")
    calls = [
        _call(shape, seed, workspace, counters) for seed in range(num_operands(shape.kv_bytes))
    ]
    note = ""
    if shape.kv_bytes <= _FEW_BYTES:
        note = f"a copy that moves as many bytes takes {copy_seconds(shape.kv_bytes) * 1e6:.1f} us"
    return row_of_bytes(
        machine,
        "decode attention",
        shape.name,
        calls,
        shape.kv_bytes,
        target=target,
        note=note,
    )


def _prefill(machine: Machine, shape: Shape, target: float | None) -> Iterator[Row]:
    """Ours, and PyTorch's on contiguous keys and values."""
    length = shape.context
    floor_s = 2 * length**2 * shape.num_heads * HEAD_DIM / machine.matmul_flop_per_s
    workspace = torch.empty(0, dtype=torch.uint8, device="cuda")
    ours = node_seconds([_call(shape, 0, workspace)] * 2)
    heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    q, k, v = (
        torch.randn(1, num, length, HEAD_DIM, dtype=torch.bfloat16, device="cuda") for num in heads
    )
    k, v = (one.repeat_interleave(shape.num_heads // shape.num_kv_heads, dim=1) for one in (k, v))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        theirs = node_seconds(
            [lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE)] * 2
        )
    for backend, seconds, promised in (("triton", ours, target), ("flash SDPA", theirs, None)):
        yield Row(
            op="prefill attention",
            shape=shape.name,
            backend=backend,
            seconds=seconds,
            floor_s=floor_s,
            target=promised,
        )


def _merge(machine: Machine, num_parts: int, num_tokens: int) -> Row:
    op = select("merge_states", backend="triton", arch=detect_arch(), dtype=torch.bfloat16)
    shape = (num_parts, num_tokens, _MERGED_HEADS)
    # Each has an lse in float32.
    num_bytes = (num_parts + 1) * num_tokens * _MERGED_HEADS * (2 * HEAD_DIM + 4)
    calls: list[Callable[[], object]] = []
    for _ in range(num_operands(num_bytes)):
        parts = torch.randn(*shape, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
        lse = torch.randn(shape, device="cuda")
        out, out_lse = torch.empty_like(parts[0]), torch.empty_like(lse[0])
        calls.append(partial(op, parts, lse, out=out, lse_TN=out_lse))
    return row_of_bytes(
        machine,
        "merge_states",
        f"{num_parts} parts of {num_tokens} x {_MERGED_HEADS} x {HEAD_DIM}",
        calls,
        num_bytes,
    )
