"""Paged attention in PyTorch: decode rows, then the others, over one layer's cache.

Checks the arguments and composes `decode` and `prefill`, or, for what a plain call does not have,
`attention_full`. What the layers of a step share, the indices, is derived once: the object
remembers the plan of the last metadata it saw, by identity.
"""

from functools import lru_cache
from typing import Final

import torch

from syncline.model_ops_rocm.arguments.attention import (
    PAGED_ATTENTION,
    AttentionOptions,
    check_attended,
    check_host_lengths,
    check_merge_states,
    check_paged_attention,
    pool_of,
)
from syncline.model_ops_rocm.arguments.dense import require_no_scales
from syncline.model_ops_rocm.checks import refuse
from syncline.model_ops_rocm.contracts.attention import AttentionMetadata, KVScales
from syncline.model_ops_rocm.kv.layout import KVLayout, KVOrder
from syncline.model_ops_rocm.kv.pool import KVPool
from syncline.model_ops_rocm.kv.support import KVSupport
from syncline.model_ops_rocm.reference.attention_full import StoredKV, full_attention
from syncline.model_ops_rocm.reference.decode import DecodePlan, decode_attention, plan_decode
from syncline.model_ops_rocm.reference.geometry import Geometry, check_caches, keys_are_d_major
from syncline.model_ops_rocm.reference.prefill import (
    PrefillGroup,
    plan_prefill,
    prefill_attention,
)

SUPPORT: Final = KVSupport(
    op=PAGED_ATTENTION,
    backend="torch",
    # The first two are read where they lie.
    orders=(
        KVOrder.HND,
        KVOrder.HND_D_MAJOR_KEYS,
        KVOrder.NHD,
        KVOrder.AITER_X,
        KVOrder.AITER_X_SHUFFLED_V,
    ),
)
_Plan = tuple[DecodePlan, tuple[PrefillGroup, ...]]


class TorchPagedAttention:
    """See `contracts.PagedAttention`. Holds the last step's metadata and its plan alive."""

    __slots__ = ("_last",)

    def __init__(self) -> None:
        # One attribute, read and replaced whole, so two threads can only recompute, not mix.
        self._last: tuple[AttentionMetadata, Geometry, _Plan] | None = None

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
        return 0

    def counters_size(
        self,
        q_TNH: torch.Tensor,
        k_cache: torch.Tensor,
        meta: AttentionMetadata,
        *,
        layout: KVLayout | None = None,
        batch_invariant: bool = False,
    ) -> int:
        return 0

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
        options = AttentionOptions(
            scale=scale,
            window=window,
            sinks_N=sinks_N,
            batch_invariant=batch_invariant,
            lse_TN=lse_TN,
        )
        if layout is None:
            require_no_scales(PAGED_ATTENTION, kv_scales)
            check_caches(PAGED_ATTENTION, k_cache, v_cache)
            pool = _pool_by_index(tuple(k_cache.shape), k_cache.dtype, keys_are_d_major(k_cache))
        else:
            pool = pool_of(PAGED_ATTENTION, k_cache, v_cache, layout, kv_scales)
        check_paged_attention(q_TNH, pool, meta, options)
        check_attended(q_TNH, (k_cache, v_cache, *(kv_scales or ())), meta, options, out)
        if options.is_plain and _is_plain(pool, meta):
            if pool.layout.order == KVOrder.HND_D_MAJOR_KEYS and layout is not None:
                k_cache = k_cache.transpose(2, 3)
            return self._plain(q_TNH, (k_cache, v_cache), meta, scale, out)
        check_host_lengths(meta, pool.layout.kernel_block_size)
        if layout is None and keys_are_d_major(k_cache):
            k_cache = k_cache.transpose(2, 3)
        if out is None:
            out = torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
        cache = StoredKV(
            pool=pool,
            k_cache=k_cache,
            v_cache=v_cache,
            scales=kv_scales,
            query_dtype=q_TNH.dtype,
        )
        if q_TNH.shape[0]:
            full_attention(q_TNH, cache, meta, options, out)
        return out

    def _plain(
        self,
        q_TNH: torch.Tensor,
        caches: tuple[torch.Tensor, torch.Tensor],
        meta: AttentionMetadata,
        scale: float,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        k_cache, v_cache = caches
        decode_plan, groups = self._plan(meta, _geometry(q_TNH, k_cache))
        num_decode = meta.num_decode_rows
        try:
            decoded = decode_attention(q_TNH[:num_decode], k_cache, v_cache, decode_plan, scale)
            if out is None:
                if num_decode == q_TNH.shape[0]:
                    return decoded
                out = torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
            out[:num_decode] = decoded
            out[num_decode:] = 0.0
            for group in groups:
                prefill_attention(q_TNH, k_cache, v_cache, group, scale=scale, out=out)
        except IndexError:
            limit = f"hold block ids in [0, {k_cache.shape[0]})"
            refuse(PAGED_ATTENTION, "meta.block_tables", limit, "others")
        return out

    def _plan(self, meta: AttentionMetadata, geometry: Geometry) -> _Plan:
        last = self._last
        if last is not None and last[0] is meta and last[1] == geometry:
            return last[2]
        check_host_lengths(meta, geometry.block_size)
        plan = (plan_decode(meta, geometry), plan_prefill(meta, geometry))
        if meta.seq_len_list is not None:
            self._last = (meta, geometry, plan)
        return plan


def merge_states(
    parts_PTNH: torch.Tensor,
    lse_PTN: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    lse_TN: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `contracts.MergeStates`."""
    check_merge_states(parts_PTNH, lse_PTN, out=out, lse_TN=lse_TN)
    if out is None:
        shape = parts_PTNH.shape[1:]
        out = torch.empty(shape, dtype=parts_PTNH.dtype, device=parts_PTNH.device)
    total = torch.logsumexp(lse_PTN, dim=0)
    is_empty = total == float("-inf")
    weights = torch.exp(lse_PTN - torch.where(is_empty, 0.0, total)).unsqueeze(3)
    parts = torch.where(lse_PTN.unsqueeze(3) == float("-inf"), 0.0, parts_PTNH.float())
    out.copy_((parts * weights).sum(dim=0))
    if lse_TN is not None:
        lse_TN.copy_(total)
    return out


@lru_cache(maxsize=64)
def _pool_by_index(shape: tuple[int, ...], dtype: torch.dtype, is_d_major: bool) -> KVPool:
    """The pool of a cache that is [NB, K, BS, D] by index, in whichever order it is stored."""
    num_blocks, num_kv_heads, block_size, head_dim = shape
    order = KVOrder.HND_D_MAJOR_KEYS if is_d_major else KVOrder.HND
    return KVPool(
        layout=KVLayout(order=order, dtype=dtype, kernel_block_size=block_size),
        num_blocks=max(num_blocks, 1),
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
    )


def _is_plain(pool: KVPool, meta: AttentionMetadata) -> bool:
    """Whether `decode` and `prefill` know all that the metadata and the pool have."""
    is_known = pool.layout.order in (KVOrder.HND, KVOrder.HND_D_MAJOR_KEYS)
    is_replayed = meta.seq_len_list is None
    has_prefill = meta.num_decode_rows != meta.seq_lens.shape[0]
    return (
        is_known
        and pool.layout.dtype.itemsize > 1
        and meta.decode_query_len == 1
        and not (is_replayed and has_prefill)
    )


def _geometry(q_TNH: torch.Tensor, k_cache: torch.Tensor) -> Geometry:
    num_blocks, num_kv_heads, block_size, head_dim = k_cache.shape
    return Geometry(
        num_blocks=num_blocks,
        num_kv_heads=num_kv_heads,
        group_size=q_TNH.shape[1] // num_kv_heads,
        block_size=block_size,
        head_dim=head_dim,
        # A bag's weights have the dtype of its rows, and q is not to be rounded to 16 bits.
        sums_keys=keys_are_d_major(k_cache) and k_cache.dtype == torch.float32,
    )
