"""Paged attention by Triton: one launch for the decode rows, one for the others.

Decode rows may be split along KV: then their parts lie in the workspace, and a third launch merges
them. How often depends on capture-time numbers alone.
"""

from typing import Final

import torch

from syncline.model_ops_rocm.arguments.attention import (
    PAGED_ATTENTION,
    AttentionOptions,
    check_attended,
    check_host_lengths,
    check_paged_attention,
    plain_layout,
    pool_of,
    require_support,
)
from syncline.model_ops_rocm.arguments.dense import check_caches, require_no_scales
from syncline.model_ops_rocm.checks import require_counters
from syncline.model_ops_rocm.contracts.attention import AttentionMetadata, KVScales
from syncline.model_ops_rocm.kv.layout import KVLayout, KVOrder
from syncline.model_ops_rocm.kv.support import KVSupport
from syncline.model_ops_rocm.triton.configs.attention import MAX_HEAD_DIM
from syncline.model_ops_rocm.triton.kernels.attention import prefill_kernel
from syncline.model_ops_rocm.triton.kv_places import ORDERS, places_of
from syncline.model_ops_rocm.triton.launch import LAUNCHER, require_reachable
from syncline.model_ops_rocm.triton.ops.attention_decode import decode, parts_bytes, units_up_to
from syncline.model_ops_rocm.triton.ops.attention_step import (
    Cache,
    Step,
    cache_pointers,
    chosen_for,
    constants_of,
)

SUPPORT: Final = KVSupport(
    op=PAGED_ATTENTION,
    backend="triton",
    orders=ORDERS,
    block_sizes=(16, 256),
    max_head_dim=MAX_HEAD_DIM,
    head_dim_multiple=8,
)


class TritonPagedAttention:
    """See `contracts.PagedAttention`."""

    __slots__ = ()

    @property
    def kv_support(self) -> KVSupport:
        return SUPPORT

    def workspace_bytes(
        self,
        q_TNH: torch.Tensor,
        k_cache: torch.Tensor,
        meta: AttentionMetadata,
        *,
        layout: KVLayout | None = None,
        batch_invariant: bool = False,
    ) -> int:
        if batch_invariant:
            return 0
        _, num_heads, head_dim = q_TNH.shape
        places = layout or plain_layout(k_cache)
        num_kv_heads = k_cache.shape[2 if places.order == KVOrder.NHD else 1]
        return max(
            (
                parts_bytes(units.num_splits, num_rows * meta.decode_query_len, num_heads, head_dim)
                for num_rows, units in units_up_to(
                    *(meta, num_heads, num_kv_heads, places.kernel_block_size, LAUNCHER.arch)
                )
            ),
            default=0,
        )

    def counters_size(
        self,
        q_TNH: torch.Tensor,
        k_cache: torch.Tensor,
        meta: AttentionMetadata,
        *,
        layout: KVLayout | None = None,
        batch_invariant: bool = False,
    ) -> int:
        if batch_invariant:
            return 0
        places = layout or plain_layout(k_cache)
        num_kv_heads = k_cache.shape[2 if places.order == KVOrder.NHD else 1]
        return max(
            (
                units.num_units
                for _, units in units_up_to(
                    *(meta, q_TNH.shape[1], num_kv_heads, places.kernel_block_size, LAUNCHER.arch)
                )
            ),
            default=0,
        )

    def __call__(  # noqa: PLR0913 - the contract's
        self,
        q_TNH: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        meta: AttentionMetadata,
        *,
        scale: float,
        layout: KVLayout | None = None,
        kv_scales: KVScales | None = None,
        window: int | None = None,
        sinks_N: torch.Tensor | None = None,
        batch_invariant: bool = False,
        out: torch.Tensor | None = None,
        lse_TN: torch.Tensor | None = None,
        workspace: torch.Tensor | None = None,
        counters: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if layout is None:
            require_no_scales(PAGED_ATTENTION, kv_scales)
            check_caches(PAGED_ATTENTION, k_cache, v_cache)
            layout = plain_layout(k_cache)
        pool = pool_of(PAGED_ATTENTION, k_cache, v_cache, layout, kv_scales)
        options = AttentionOptions(
            scale=scale,
            window=window,
            sinks_N=sinks_N,
            batch_invariant=batch_invariant,
            lse_TN=lse_TN,
        )
        check_paged_attention(q_TNH, pool, meta, options)
        require_support(PAGED_ATTENTION, SUPPORT, pool)
        check_host_lengths(meta, layout.kernel_block_size)
        check_attended(q_TNH, (k_cache, v_cache, *(kv_scales or ())), meta, options, out)
        if out is None:
            out = torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
        cache = Cache(pool, k_cache, v_cache, kv_scales)
        step = Step(q_TNH, cache, meta, options, out)
        _require_reachable(step)
        if counters is not None:
            require_counters(PAGED_ATTENTION, counters, 0)
            require_reachable(PAGED_ATTENTION, counters=counters)
        if batch_invariant:
            # Every row by one kernel with one shape of tile, its KV walked from the first token on.
            _many(step, "invariant", first_row=0, num_tokens=q_TNH.shape[0])
            return out
        decode(step, workspace, counters)
        num_rest = q_TNH.shape[0] - meta.num_decode_tokens
        _many(step, "prefill", first_row=meta.num_decode_rows, num_tokens=num_rest)
        return out


PAGED: Final = TritonPagedAttention()


def _require_reachable(step: Step) -> None:
    meta, scales = step.meta, step.cache.scales or (None, None)
    require_reachable(
        PAGED_ATTENTION,
        q=step.q,
        k_cache=step.cache.k,
        v_cache=step.cache.v,
        k_scale=scales[0],
        v_scale=scales[1],
        out=step.out,
        sinks=step.options.sinks_N,
        lse=step.options.lse_TN,
    )
    require_reachable(
        PAGED_ATTENTION,
        query_start_loc=meta.query_start_loc,
        seq_lens=meta.seq_lens,
        block_tables=meta.block_tables,
    )


def _many(step: Step, kind: str, *, first_row: int, num_tokens: int) -> None:
    """The rows from `first_row` on, which have any number of queries, `num_tokens` together."""
    meta = step.meta
    num_rows = meta.seq_lens.shape[0] - first_row
    if num_tokens == 0:
        return
    chosen = chosen_for(step, kind)
    block_m = chosen[1].constants["BLOCK_M"]
    packed = min(step.group, block_m)
    num_groups = -(-step.group // packed)
    lse = step.options.lse_TN
    LAUNCHER.launch(
        prefill_kernel,
        (
            step.cache.pool.num_kv_heads * num_groups,
            # A partial block of each row, and of the tokens past the last row.
            num_tokens // (block_m // packed) + num_rows + 1,
        ),
        chosen,
        (
            *cache_pointers(step, chosen, step.out, lse),
            *(meta.query_start_loc, meta.seq_lens, meta.block_tables, step.options.scale),
            *(first_row, num_rows, step.q.shape[0]),
            *step.q.stride(),
            *step.out.stride(),
            *((0, 0) if lse is None else lse.stride()),
            *meta.block_tables.stride(),
            meta.block_tables.shape[1] * step.cache.pool.layout.kernel_block_size,
            *places_of(step.cache.pool)[2:],
        ),
        constants_of(step, chosen) | {"PACKED": packed},
    )
