"""Writing and copying KV blocks in PyTorch; knows slots and block ids, not who holds them."""

from collections.abc import Sequence as SequenceABC

import torch

from syncline.model_ops_rocm.arguments import (
    KV_COPY,
    KV_WRITE,
    check_host_pairs,
    check_kv_write,
)
from syncline.model_ops_rocm.checks import refuse, require_pairs
from syncline.model_ops_rocm.reference.geometry import check_caches, stored_keys

_POSITIVE = 2**63 - 1


def kv_write(
    k_TKH: torch.Tensor,
    v_TKH: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    may_skip: bool = True,
) -> None:
    """See `contracts.KVWrite`."""
    check_caches(KV_WRITE, k_cache, v_cache)
    if check_kv_write(k_TKH, v_TKH, k_cache, slot_mapping) == 0:
        return
    num_blocks, _, block_size, _ = k_cache.shape
    slots = slot_mapping.long()
    if may_skip:
        lowest, highest = (int(bound) for bound in slots.aminmax())
        if lowest < -1 or highest >= num_blocks * block_size:
            limit = f"be -1 or in [0, {num_blocks * block_size})"
            refuse(KV_WRITE, "slot_mapping", limit, f"values from {lowest} to {highest}")
        if lowest < 0:
            kept = (slots >= 0).nonzero().squeeze(1)
            slots, k_TKH, v_TKH = slots[kept], k_TKH[kept], v_TKH[kept]
    else:
        # A negative index would count from the end: a broken promise must not reach the last block.
        slots = slots & _POSITIVE
    where = (slots // block_size, slots % block_size)
    try:
        # [NB, BS, K, D] by index, so the storage order of the keys does not matter.
        k_cache.transpose(1, 2).index_put_(where, k_TKH)
        v_cache.transpose(1, 2).index_put_(where, v_TKH)
    except IndexError:
        refuse(KV_WRITE, "slot_mapping", f"be in [0, {num_blocks * block_size})", "one outside")


class TorchKVCopyBlocks:
    """See `contracts.KVCopyBlocks`. What it needs while it copies, PyTorch allocates."""

    __slots__ = ()

    def workspace_bytes(self, k_cache: torch.Tensor, max_pairs: int) -> int:
        return 0

    def __call__(
        self,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        pairs: SequenceABC[tuple[int, int]] | torch.Tensor,
        *,
        workspace: torch.Tensor | None = None,
    ) -> None:
        check_caches(KV_COPY, k_cache, v_cache)
        if isinstance(pairs, torch.Tensor):
            require_pairs(KV_COPY, pairs)
            pairs = [(int(one), int(other)) for one, other in pairs.tolist()]
            pairs = [pair for pair in pairs if -1 not in pair]
        if pairs:
            _copy_blocks(k_cache, v_cache, pairs)


def _copy_blocks(
    k_cache: torch.Tensor, v_cache: torch.Tensor, pairs: SequenceABC[tuple[int, int]]
) -> None:
    check_host_pairs(k_cache.shape[0], pairs)
    ids = torch.tensor(pairs, dtype=torch.int64, device=k_cache.device)
    sources, destinations = ids.unbind(1)
    for cache in (stored_keys(k_cache), v_cache):
        cache.index_copy_(0, destinations, cache.index_select(0, sources))
