"""Calls of paged attention, and of merging its parts."""

from collections.abc import Mapping
from collections.abc import Sequence as SequenceABC
from typing import Final, NamedTuple

import torch

from syncline.model_ops_rocm.contracts import AttentionMetadata
from syncline.model_ops_rocm.kv import KVLayout, KVOrder, KVPool, KVScale, write_tokens
from syncline.model_ops_rocm.testing.parity import Arguments, Case, Maker

_SPARE_BLOCKS: Final = 3  # that no row owns
_NO_BLOCK: Final = -7  # past the entries in use


class Step(NamedTuple):
    """A step to make: of `max_lens`, the first `num_decode` are decode rows."""

    max_lens: tuple[int, ...]
    num_decode: int = 0
    heads: tuple[int, int] = (4, 2)
    block_size: int = 16
    head_dim: int = 32
    decode_query_len: int = 1
    max_query_len: int = 1
    on_host: bool = False
    order: KVOrder = KVOrder.HND
    code: torch.dtype | None = None
    scale: KVScale = KVScale.NONE
    window: int | None = None
    has_sinks: bool = False
    batch_invariant: bool = False
    index_dtype: torch.dtype = torch.int32
    num_counters: int = 0

    def layout(self, dtype: torch.dtype) -> KVLayout:
        return KVLayout(
            order=self.order,
            dtype=self.code or dtype,
            kernel_block_size=self.block_size,
            scale=self.scale,
        )

    @property
    def is_plain(self) -> bool:
        return self.order == KVOrder.HND and self.code is None


def _numbers(make: Maker, count: int, below: int) -> list[int]:
    """Numbers in [0, below), which may repeat; on the host."""
    return [int(make.distinct(1, below).item()) for _ in range(count)]


def _lengths(make: Maker, step: Step) -> tuple[list[int], list[int]]:
    """(queries, tokens) of each row. One row has none, where there are several."""
    queries, tokens = [], []
    for row, longest in enumerate(step.max_lens):
        is_decode = row < step.num_decode
        least = step.decode_query_len if is_decode else 1
        length = least + _numbers(make, 1, longest - least + 1)[0]
        if row == 2:
            length = 0
        most = min(step.max_query_len, length)
        queries.append(step.decode_query_len if is_decode else _numbers(make, 1, most + 1)[0])
        tokens.append(length)
    return queries, tokens


def _cache(
    make: Maker, step: Step, tokens: SequenceABC[int]
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A pool whose every byte that no token owns is NaN, and the block tables."""
    width = max((-(-longest // step.block_size) for longest in step.max_lens), default=0) + 1
    num_blocks = len(step.max_lens) * width + _SPARE_BLOCKS
    pool = KVPool(
        layout=step.layout(make.dtype),
        num_blocks=num_blocks,
        block_size=step.block_size,
        num_kv_heads=step.heads[1],
        head_dim=step.head_dim,
    )
    cache = {
        name: torch.full(spec.shape, 0x7F, dtype=torch.uint8).view(spec.dtype)
        if spec.dtype.itemsize == 1
        else torch.full(spec.shape, float("nan"), dtype=spec.dtype)
        for name, spec in pool.specs().items()
    }
    if step.scale in (KVScale.TENSOR, KVScale.HEAD):
        for name in ("k_scale", "v_scale"):
            cache[name] = make.randn(*cache[name].shape).cpu().float().abs() + 0.01
    tables = torch.full((len(step.max_lens), width), _NO_BLOCK, dtype=torch.int32)
    free = make.distinct(num_blocks, num_blocks).tolist()
    for row, length in enumerate(tokens):
        count = -(-length // step.block_size)
        tables[row, :count] = torch.tensor(free[row * width : row * width + count])
        positions = torch.arange(length)
        blocks = tables[row].long()[positions // step.block_size]
        k, v = (make.randn(length, step.heads[1], step.head_dim).cpu() for _ in range(2))
        if step.scale == KVScale.NONE:
            k, v = k.to(pool.layout.dtype), v.to(pool.layout.dtype)
        slots = blocks * step.block_size + positions % step.block_size
        write_tokens(pool, cache, k, v, slots)
    return {name: tensor.to(make.device) for name, tensor in cache.items()}, tables


def _metadata(
    make: Maker, step: Step, lengths: tuple[list[int], list[int]], tables: torch.Tensor
) -> AttentionMetadata:
    starts = [0]
    for query_len in lengths[0]:
        starts.append(starts[-1] + query_len)
    return AttentionMetadata(
        query_start_loc=torch.tensor(starts, dtype=step.index_dtype).to(make.device),
        seq_lens=torch.tensor(lengths[1], dtype=step.index_dtype).to(make.device),
        block_tables=tables.to(step.index_dtype).to(make.device),
        num_decode_rows=step.num_decode,
        query_start_list=tuple(starts) if step.on_host else None,
        seq_len_list=tuple(lengths[1]) if step.on_host else None,
        decode_query_len=step.decode_query_len,
        max_query_len=step.max_query_len,
    )


def _attention(label: str, step: Step) -> Case:
    def build(make: Maker) -> Arguments:
        lengths = _lengths(make, step)
        cache, tables = _cache(make, step, lengths[1])
        num_rest = len(step.max_lens) - step.num_decode
        num_tokens = step.num_decode * step.decode_query_len + num_rest * step.max_query_len
        if step.on_host:
            num_tokens = sum(lengths[0])
        num_heads, width = step.heads[0], step.heads[0] * step.head_dim
        q = make.randn(num_tokens, width, pad=8).view(num_tokens, num_heads, step.head_dim)
        out = make.nan(num_tokens, num_heads, step.head_dim + 8)
        call: Arguments = {
            "q_TNH": q,
            "k_cache": cache["k"],
            "v_cache": cache["v"],
            "meta": _metadata(make, step, lengths, tables),
            "scale": 0.3,
            "out": out[..., : step.head_dim],
            "lse_TN": torch.zeros(num_tokens, num_heads, device=make.device),
            "workspace": torch.zeros(1 << 20, dtype=torch.uint8, device=make.device),
            "window": step.window,
            "batch_invariant": step.batch_invariant,
        }
        if not step.is_plain:
            call["layout"] = step.layout(make.dtype)
        if step.scale != KVScale.NONE:
            call["kv_scales"] = (cache["k_scale"], cache["v_scale"])
        if step.num_counters:
            call["counters"] = torch.zeros(step.num_counters, dtype=torch.int32, device=make.device)
        if step.has_sinks:
            call["sinks_N"] = make.randn(num_heads)
        return call

    return Case(op="paged_attention", label=label, build=build, is_recordable=not step.on_host)


def _merge(num_parts: int, num_tokens: int, heads: int, head_dim: int) -> Case:
    def build(make: Maker) -> Arguments:
        shape = (num_parts, num_tokens, heads, head_dim)
        lse = make.randn(*shape[:3]).float()
        lse[0, :, 0] = float("-inf")
        lse[:, -1:] = float("-inf")
        parts = make.randn(*shape, pad=4)
        parts[0, :, 0] = float("nan")
        return {
            "parts_PTNH": parts,
            "lse_PTN": lse,
            "out": make.nan(*shape[1:]),
            "lse_TN": torch.zeros(shape[1:3], device=make.device),
        }

    label = f"{num_tokens}x{heads}x{head_dim}-of-{num_parts}"
    return Case(op="merge_states", label=label, build=build)


_MIXED: Final = Step(max_lens=(33, 40, 9), num_decode=2, max_query_len=21)
CASES: Final[tuple[Case, ...]] = (
    _attention("0x-rows", Step(max_lens=())),
    _attention("decode", Step(max_lens=(33, 1, 9, 70), num_decode=4)),
    _attention("decode-split", Step(max_lens=(600,), num_decode=1, heads=(7, 1), head_dim=24)),
    _attention("decode-on-host", Step(max_lens=(40, 17), num_decode=2, on_host=True)),
    _attention(
        "drafts",
        Step(max_lens=(33, 4, 9, 49), num_decode=4, decode_query_len=4, heads=(6, 2)),
    ),
    _attention(
        "prefill",
        Step(max_lens=(50, 17, 9, 64), max_query_len=40, heads=(3, 1), block_size=32, head_dim=16),
    ),
    _attention(
        "mixed",
        Step(max_lens=(33, 64, 9, 40, 21), num_decode=3, max_query_len=21, block_size=24),
    ),
    _attention(
        "mixed-on-host",
        Step(max_lens=(33, 64, 9, 40), num_decode=1, max_query_len=9, on_host=True),
    ),
    _attention(
        "window-and-sinks",
        Step(
            max_lens=(60, 33, 9, 70, 40), num_decode=3, max_query_len=20, window=20, has_sinks=True
        ),
    ),
    _attention(
        "split-window-and-sinks",
        Step(max_lens=(600,), num_decode=1, heads=(5, 1), window=300, has_sinks=True),
    ),
    _attention(
        "split-merged",
        Step(max_lens=(600, 70, 9, 130), num_decode=4, heads=(6, 2), num_counters=8),
    ),
    _attention(
        "split-drafts-merged",
        Step(
            max_lens=(600, 260),
            num_decode=2,
            decode_query_len=3,
            heads=(5, 1),
            block_size=128,
            window=300,
            has_sinks=True,
            num_counters=2,
        ),
    ),
    _attention("mixed-int64", _MIXED._replace(index_dtype=torch.int64)),
    _attention("invariant", _MIXED._replace(batch_invariant=True)),
    _attention(
        "invariant-window-and-sinks",
        _MIXED._replace(batch_invariant=True, window=9, has_sinks=True, block_size=32),
    ),
    *(
        _attention(f"mixed-{order}", _MIXED._replace(order=order))
        for order in KVOrder
        if order != KVOrder.HND
    ),
    *(
        _attention(
            f"mixed-{order}-{str(code).removeprefix('torch.float8_')}-{scale}",
            _MIXED._replace(order=order, code=code, scale=scale),
        )
        for order, code, scale in (
            (KVOrder.HND, torch.float8_e4m3fn, KVScale.TENSOR),
            (KVOrder.HND, torch.float8_e4m3fn, KVScale.TOKEN),
            (KVOrder.NHD, torch.float8_e4m3fn, KVScale.HEAD),
            (KVOrder.AITER_X, torch.float8_e4m3fnuz, KVScale.TOKEN),
            (KVOrder.AITER_X_SHUFFLED_V, torch.float8_e4m3fn, KVScale.NONE),
        )
    ),
    _merge(1, 1, 1, 8),
    _merge(3, 5, 7, 24),
    _merge(9, 0, 2, 16),
    _merge(10, 3, 5, 40),
    # So large a result that each program has more of it.
    _merge(2, 77, 46, 152),
    _merge(3, 65, 33, 256),
)
TOLERANCES: Final[Mapping[tuple[str, torch.dtype], tuple[float, float]]] = {
    ("paged_attention", torch.float32): (2e-5, 1e-5),
    ("paged_attention", torch.float16): (2**-8, 3e-3),
    ("paged_attention", torch.bfloat16): (2**-6, 2e-2),
    ("merge_states", torch.float32): (2e-6, 1e-6),
    ("merge_states", torch.float16): (2**-9, 1e-6),
    ("merge_states", torch.bfloat16): (2**-6, 1e-6),
}
