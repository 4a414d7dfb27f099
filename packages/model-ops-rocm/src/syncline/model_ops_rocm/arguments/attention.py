"""What the ops on the KV cache refuse, on every backend: the argument rules of `contracts`.

Cheap on purpose: shapes, dtypes and strides are read, no value on the device is. Knows no backend.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import torch

from syncline.model_ops_rocm.arguments.dense import KV_COPY, KV_WRITE, check_caches
from syncline.model_ops_rocm.checks import (
    FLOAT_DTYPES,
    INDEX_DTYPES,
    is_whole,
    refuse,
    require_apart,
    require_contiguous,
    require_dtype,
    require_float,
    require_index,
    require_kind,
    require_ndim,
    require_out,
    require_positive,
    require_shape,
    require_tensors,
)
from syncline.model_ops_rocm.contracts.attention import AttentionMetadata, KVScales
from syncline.model_ops_rocm.kv.layout import KVLayout, KVOrder, KVScale
from syncline.model_ops_rocm.kv.pool import KVPool
from syncline.model_ops_rocm.kv.support import KVSupport

PAGED_ATTENTION: Final = "paged_attention"
MERGE_STATES: Final = "merge_states"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOptions:
    """What a call of `contracts.PagedAttention` asks for besides its tensors of tokens."""

    scale: float
    window: int | None
    sinks_N: torch.Tensor | None
    batch_invariant: bool
    lse_TN: torch.Tensor | None

    @property
    def is_plain(self) -> bool:
        extras = (self.window, self.sinks_N, self.lse_TN)
        return not self.batch_invariant and all(extra is None for extra in extras)


@lru_cache(maxsize=256)
def _pool(layout: KVLayout, k_shape: tuple[int, ...]) -> KVPool | None:
    """The pool whose keys have this shape; None if no pool of the layout has."""
    expected_ndim = 5 if layout.order in (KVOrder.AITER_X, KVOrder.AITER_X_SHUFFLED_V) else 4
    if len(k_shape) != expected_ndim or 0 in k_shape[1:]:
        return None
    heads_at, dim_at = (2, 3) if layout.order == KVOrder.NHD else (1, 3)
    if layout.order == KVOrder.HND_D_MAJOR_KEYS:
        dim_at = 2
    head_dim = k_shape[2] * k_shape[4] if expected_ndim == 5 else k_shape[dim_at]
    pool = KVPool(
        layout=layout,
        num_blocks=max(k_shape[0], 1),
        block_size=layout.kernel_block_size,
        num_kv_heads=k_shape[heads_at],
        head_dim=head_dim,
    )
    return pool if pool.specs()["k"].shape[1:] == k_shape[1:] else None


def pool_of(
    op: str,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    layout: KVLayout,
    kv_scales: KVScales | None,
) -> KVPool:
    """What the tensors of a layer's cache are, by its layout. ValueError if they are not that."""
    require_kind(op, "layout", layout, KVLayout)
    require_dtype(op, "k_cache", k_cache, layout.dtype)
    require_dtype(op, "v_cache", v_cache, layout.dtype)
    pool = _pool(layout, tuple(k_cache.shape))
    if pool is None:
        refuse(op, "k_cache", f"have the shape of keys in {layout.describe()}", list(k_cache.shape))
    specs = pool.specs()
    require_shape(op, "v_cache", v_cache, (k_cache.shape[0], *specs["v"].shape[1:]))
    require_contiguous(op, "k_cache", k_cache)
    require_contiguous(op, "v_cache", v_cache)
    if layout.scale == KVScale.NONE:
        if kv_scales is not None:
            refuse(op, "kv_scales", f"be None for {layout.describe()}", "tensors")
        return pool
    if kv_scales is None:
        refuse(op, "kv_scales", f"be two tensors for {layout.describe()}", None)
    require_tensors(op, "kv_scales", kv_scales)
    for name, scale in zip(("k_scale", "v_scale"), kv_scales, strict=True):
        require_dtype(op, name, scale, torch.float32)
        require_shape(op, name, scale, specs[name].shape)
        require_contiguous(op, name, scale)
    return pool


def plain_layout(k_cache: torch.Tensor) -> KVLayout:
    """The layout of a cache that is [NB, K, BS, D] in storage too."""
    return KVLayout(
        order=KVOrder.HND, dtype=k_cache.dtype, kernel_block_size=max(k_cache.shape[2], 1)
    )


def require_support(op: str, support: KVSupport, pool: KVPool) -> None:
    """ValueError unless the implementation takes the pool."""
    wanted = support.why_not(pool.layout, pool.head_dim)
    if wanted is not None:
        got = f"{pool.layout.describe()} with head_dim {pool.head_dim}"
        refuse(op, "layout", f"have {wanted}", got)


def check_attended(
    q_TNH: torch.Tensor,
    cache: tuple[torch.Tensor, ...],
    meta: AttentionMetadata,
    options: AttentionOptions,
    out: torch.Tensor | None,
) -> None:
    """What is written, by a call that `check_paged_attention` found right; `cache` with scales."""
    op = PAGED_ATTENTION
    if out is not None:
        require_out(op, out, q_TNH.shape, q_TNH.dtype)
    results = {"out": out, "lse": options.lse_TN}
    if any(result is not None for result in results.values()):
        inputs = dict(zip(("k_cache", "v_cache", "k_scale", "v_scale"), cache, strict=False))
        inputs |= {"q": q_TNH, "meta.query_start_loc": meta.query_start_loc}
        inputs |= {"meta.seq_lens": meta.seq_lens, "meta.block_tables": meta.block_tables}
        require_apart(op, results, {**inputs, "sinks": options.sinks_N})


def check_paged_attention(
    q_TNH: torch.Tensor, pool: KVPool, meta: AttentionMetadata, options: AttentionOptions
) -> None:
    """The rules that hold for every layout."""
    op = PAGED_ATTENTION
    _check_metadata(op, meta)
    require_float(op, "q", q_TNH)
    if pool.layout.dtype in FLOAT_DTYPES:
        require_dtype(op, "q", q_TNH, pool.layout.dtype)
    require_ndim(op, "q", q_TNH, 3)
    num_tokens, num_heads, head_dim = q_TNH.shape
    if head_dim != pool.head_dim:
        refuse(op, "q", f"have the cache's head_dim {pool.head_dim}", head_dim)
    if num_heads == 0 or num_heads % pool.num_kv_heads != 0:
        refuse(op, "q", f"have a multiple of {pool.num_kv_heads} heads", num_heads)
    expected = meta.num_tokens
    if expected is not None and num_tokens != expected:
        refuse(op, "q", f"have the {expected} tokens of the metadata", num_tokens)
    if expected is None and num_tokens < meta.num_decode_tokens:
        refuse(op, "q", f"have at least {meta.num_decode_tokens} tokens", num_tokens)
    _check_options(num_tokens, num_heads, options)


def check_copied(k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
    """Two contiguous tensors that count blocks first and have as many elements in each."""
    require_dtype(KV_COPY, "v_cache", v_cache, k_cache.dtype)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.ndim < 2:
            refuse(KV_COPY, name, "have a dimension of blocks and others", list(cache.shape))
        require_contiguous(KV_COPY, name, cache)
    sizes = [(cache.shape[0], cache[:1].numel()) for cache in (k_cache, v_cache)]
    if sizes[0] != sizes[1]:
        limit = f"have {sizes[0][0]} blocks of {sizes[0][1]} elements"
        refuse(KV_COPY, "v_cache", limit, list(v_cache.shape))


def _check_metadata(op: str, meta: AttentionMetadata) -> None:
    require_kind(op, "meta", meta, AttentionMetadata)
    require_index(op, "meta.query_start_loc", meta.query_start_loc, None)
    require_index(op, "meta.seq_lens", meta.seq_lens, None)
    if meta.block_tables.dtype not in INDEX_DTYPES:
        refuse(op, "meta.block_tables", "be int64 or int32", meta.block_tables.dtype)
    require_contiguous(op, "meta.query_start_loc", meta.query_start_loc)
    require_contiguous(op, "meta.seq_lens", meta.seq_lens)


def check_layout_write(
    k_TKH: torch.Tensor, v_TKH: torch.Tensor, pool: KVPool, slot_mapping: torch.Tensor
) -> int:
    """The rules of a write into a layout; returns the number of tokens."""
    num_tokens = k_TKH.shape[0] if k_TKH.ndim else 0
    shape = (num_tokens, pool.num_kv_heads, pool.head_dim)
    for name, source in (("k", k_TKH), ("v", v_TKH)):
        require_shape(KV_WRITE, name, source, shape)
        if pool.layout.scale == KVScale.NONE:
            require_dtype(KV_WRITE, name, source, pool.layout.dtype)
        else:
            require_float(KV_WRITE, name, source)
    require_dtype(KV_WRITE, "v", v_TKH, k_TKH.dtype)
    require_index(KV_WRITE, "slot_mapping", slot_mapping, num_tokens)
    return num_tokens


def check_host_lengths(meta: AttentionMetadata, block_size: int) -> None:
    """Lengths that the table can hold, wherever the host can see them."""
    limit = meta.block_tables.shape[1] * block_size
    if meta.max_seq_len is not None:
        limit = min(limit, meta.max_seq_len)
    if meta.seq_len_list is None:
        _check_lengths_on_cpu(meta.seq_lens, limit)
        return
    for row, length in enumerate(meta.seq_len_list):
        if not 0 <= length <= limit:
            refuse(
                PAGED_ATTENTION, f"meta.seq_len_list of row {row}", f"be in [0, {limit}]", length
            )


def _check_lengths_on_cpu(seq_lens: torch.Tensor, limit: int) -> None:
    """Without a value that leaves the tensor: a recorded step asserts it at each replay."""
    if seq_lens.device.type != "cpu":
        return
    is_held = torch.all((seq_lens >= 0) & (seq_lens <= limit))
    try:
        torch._assert_async(is_held, f"{PAGED_ATTENTION}: meta.seq_lens must be in [0, {limit}]")
    except RuntimeError:
        if torch.all((seq_lens >= 0) & (seq_lens <= limit)):
            raise
        refuse(PAGED_ATTENTION, "meta.seq_lens", f"be in [0, {limit}]", seq_lens.tolist())


def _check_options(num_tokens: int, num_heads: int, options: AttentionOptions) -> None:
    op = PAGED_ATTENTION
    require_positive(op, "scale", options.scale)
    if options.window is not None and not (is_whole(options.window) and options.window >= 1):
        refuse(op, "window", "be None or positive and whole", options.window)
    if options.sinks_N is not None:
        require_float(op, "sinks", options.sinks_N)
        require_shape(op, "sinks", options.sinks_N, (num_heads,))
        require_contiguous(op, "sinks", options.sinks_N)
    if options.lse_TN is not None:
        require_shape(op, "lse", options.lse_TN, (num_tokens, num_heads))
        require_dtype(op, "lse", options.lse_TN, torch.float32)


def check_merge_states(
    parts_PTNH: torch.Tensor,
    lse_PTN: torch.Tensor,
    *,
    out: torch.Tensor | None,
    lse_TN: torch.Tensor | None,
) -> None:
    op = MERGE_STATES
    require_float(op, "parts", parts_PTNH)
    require_ndim(op, "parts", parts_PTNH, 4)
    if parts_PTNH.shape[0] == 0:
        refuse(op, "parts", "have at least one part", list(parts_PTNH.shape))
    require_dtype(op, "lse", lse_PTN, torch.float32)
    require_shape(op, "lse", lse_PTN, parts_PTNH.shape[:3])
    if out is not None:
        require_out(op, out, parts_PTNH.shape[1:], parts_PTNH.dtype)
    if lse_TN is not None:
        require_dtype(op, "lse_TN", lse_TN, torch.float32)
        require_shape(op, "lse_TN", lse_TN, parts_PTNH.shape[1:3])
    require_apart(op, {"out": out, "lse_TN": lse_TN}, {"parts": parts_PTNH, "lse": lse_PTN})


__all__ = [
    "MERGE_STATES",
    "PAGED_ATTENTION",
    "AttentionOptions",
    "check_attended",
    "check_caches",
    "check_copied",
    "check_host_lengths",
    "check_layout_write",
    "check_merge_states",
    "check_paged_attention",
    "plain_layout",
    "pool_of",
    "require_support",
]
