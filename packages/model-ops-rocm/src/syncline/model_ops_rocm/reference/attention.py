"""Paged attention in PyTorch: decode rows, then the others, over one layer's cache.

Checks the arguments and composes `decode` and `prefill`. What the layers of a step share, the
indices, is derived once: the object remembers the plan of the last metadata it saw, by identity.
"""

import torch

from syncline.model_ops_rocm.checks import (
    refuse,
    require_dtype,
    require_ndim,
    require_out,
)
from syncline.model_ops_rocm.contracts.attention import AttentionMetadata
from syncline.model_ops_rocm.reference.decode import DecodePlan, decode_attention, plan_decode
from syncline.model_ops_rocm.reference.geometry import Geometry, check_caches, keys_are_d_major
from syncline.model_ops_rocm.reference.prefill import (
    PrefillGroup,
    plan_prefill,
    prefill_attention,
)

_OP = "paged_attention"
_Plan = tuple[DecodePlan, tuple[PrefillGroup, ...]]


class TorchPagedAttention:
    """See `contracts.PagedAttention`. Holds the last step's metadata and its plan alive."""

    __slots__ = ("_last",)

    def __init__(self) -> None:
        # One attribute, read and replaced whole, so two threads can only recompute, not mix.
        self._last: tuple[AttentionMetadata, Geometry, _Plan] | None = None

    def __call__(
        self,
        q_TNH: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        meta: AttentionMetadata,
        *,
        scale: float,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        geometry = _check(q_TNH, k_cache, v_cache, meta)
        if out is not None:
            require_out(_OP, out, q_TNH.shape, q_TNH.dtype)
        decode_plan, groups = self._plan(meta, geometry)
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
            refuse(_OP, "meta.block_tables", f"hold block ids in [0, {k_cache.shape[0]})", "others")
        return out

    def _plan(self, meta: AttentionMetadata, geometry: Geometry) -> _Plan:
        last = self._last
        if last is not None and last[0] is meta and last[1] == geometry:
            return last[2]
        _check_lengths(meta, geometry.block_size)
        plan = (plan_decode(meta, geometry), plan_prefill(meta, geometry))
        if meta.seq_len_list is not None:
            self._last = (meta, geometry, plan)
        return plan


def _check(
    q_TNH: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, meta: AttentionMetadata
) -> Geometry:
    check_caches(_OP, k_cache, v_cache)
    require_dtype(_OP, "q", q_TNH, k_cache.dtype)
    require_ndim(_OP, "q", q_TNH, 3)
    num_tokens, num_heads, head_dim = q_TNH.shape
    num_blocks, num_kv_heads, block_size, cache_head_dim = k_cache.shape
    if head_dim != cache_head_dim:
        refuse(_OP, "q", f"have the cache's head_dim {cache_head_dim}", head_dim)
    if num_heads == 0 or num_heads % num_kv_heads != 0:
        refuse(_OP, "q", f"have a multiple of {num_kv_heads} heads", num_heads)
    starts = meta.query_start_list
    expected = meta.num_decode_rows if starts is None else starts[-1]
    if num_tokens != expected:
        refuse(_OP, "q", f"have the {expected} tokens of the metadata", num_tokens)
    return Geometry(
        num_blocks=num_blocks,
        num_kv_heads=num_kv_heads,
        group_size=num_heads // num_kv_heads,
        block_size=block_size,
        head_dim=head_dim,
        # A bag's weights have the dtype of its rows, and q is not to be rounded to 16 bits.
        sums_keys=keys_are_d_major(k_cache) and k_cache.dtype == torch.float32,
    )


def _check_lengths(meta: AttentionMetadata, block_size: int) -> None:
    limit = meta.block_tables.shape[1] * block_size
    for row, length in enumerate(meta.seq_len_list or ()):
        if not 0 <= length <= limit:
            refuse(_OP, f"meta.seq_len_list of row {row}", f"be in [0, {limit}]", length)
