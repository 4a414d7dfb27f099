"""Writing and copying KV blocks in PyTorch; knows slots and block ids, not who holds them."""

from collections.abc import Callable
from collections.abc import Sequence as SequenceABC
from typing import Final, NamedTuple

import torch

from syncline.model_ops_rocm.arguments.attention import check_copied, check_layout_write, pool_of
from syncline.model_ops_rocm.arguments.dense import (
    KV_COPY,
    KV_WRITE,
    check_copies_apart,
    check_host_pairs,
    check_kv_apart,
    check_kv_write,
)
from syncline.model_ops_rocm.checks import refuse, require_pairs
from syncline.model_ops_rocm.contracts.attention import KVScales
from syncline.model_ops_rocm.kv.layout import KVLayout
from syncline.model_ops_rocm.kv.support import KVSupport
from syncline.model_ops_rocm.kv.tokens import store_tokens
from syncline.model_ops_rocm.layouts.base import as_bits
from syncline.model_ops_rocm.reference.geometry import check_caches, stored_keys

SUPPORT: Final = KVSupport(op=KV_WRITE, backend="torch")


class TorchKVWrite:
    """See `contracts.KVWrite`."""

    __slots__ = ()

    @property
    def kv_support(self) -> KVSupport:
        return SUPPORT

    def __call__(  # noqa: PLR0913 - the contract's
        self,
        k_TKH: torch.Tensor,
        v_TKH: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        *,
        may_skip: bool = True,
        layout: KVLayout | None = None,
        kv_scales: KVScales | None = None,
    ) -> None:
        if layout is not None:
            pool = pool_of(KV_WRITE, k_cache, v_cache, layout, kv_scales)
            check_layout_write(k_TKH, v_TKH, pool, slot_mapping)
            check_kv_apart((k_cache, v_cache), k_TKH, v_TKH, slot_mapping, kv_scales, layout)
            write = _Write(k_TKH, v_TKH, pool.num_slots, layout.kernel_block_size)
            tensors = {"k": k_cache, "v": v_cache}
            if kv_scales is not None:
                tensors |= {"k_scale": kv_scales[0], "v_scale": kv_scales[1]}
            k, v, slots = _kept(write, slot_mapping, may_skip=may_skip)
            _refusing(write, lambda: store_tokens(pool, tensors, {"k": k, "v": v}, slots))
            return
        check_caches(KV_WRITE, k_cache, v_cache)
        num_tokens = check_kv_write(k_TKH, v_TKH, k_cache, slot_mapping)
        check_kv_apart((k_cache, v_cache), k_TKH, v_TKH, slot_mapping, kv_scales, layout)
        if num_tokens == 0:
            return
        num_blocks, _, block_size, _ = k_cache.shape
        write = _Write(k_TKH, v_TKH, num_blocks * block_size, block_size)
        k, v, slots = _kept(write, slot_mapping, may_skip=may_skip)
        where = (slots // block_size, slots % block_size)

        def store() -> None:
            # [NB, BS, K, D] by index, so the storage order of the keys does not matter.
            k_cache.transpose(1, 2).index_put_(where, k)
            v_cache.transpose(1, 2).index_put_(where, v)

        _refusing(write, store)


kv_write: Final = TorchKVWrite()


class _Write(NamedTuple):
    k: torch.Tensor
    v: torch.Tensor
    num_slots: int
    block_size: int


def _kept(
    write: _Write, slot_mapping: torch.Tensor, *, may_skip: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys, values and slots of the tokens that are written."""
    k, v, slots = write.k, write.v, slot_mapping.long()
    if not may_skip:
        # A negative index would count from the end: a broken promise must not reach the last block.
        return k, v, torch.where(slots < 0, write.num_slots, slots)
    if slots.numel() == 0:
        return k, v, slots
    lowest, highest = (int(bound) for bound in slots.aminmax())
    if lowest < -1 or highest >= write.num_slots:
        limit = f"be -1 or in [0, {write.num_slots})"
        refuse(KV_WRITE, "slot_mapping", limit, f"values from {lowest} to {highest}")
    if lowest < 0:
        kept = (slots >= 0).nonzero().squeeze(1)
        return k[kept], v[kept], slots[kept]
    return k, v, slots


def _refusing(write: _Write, store: Callable[[], None]) -> None:
    try:
        store()
    except IndexError:
        refuse(KV_WRITE, "slot_mapping", f"be in [0, {write.num_slots})", "one outside")


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
        if k_cache.is_contiguous() or k_cache.ndim != 4:
            check_copied(k_cache, v_cache)
        else:
            check_caches(KV_COPY, k_cache, v_cache)
        check_copies_apart(k_cache, v_cache, pairs if isinstance(pairs, torch.Tensor) else None)
        if isinstance(pairs, torch.Tensor):
            require_pairs(KV_COPY, pairs)
            pairs = [(int(one), int(other)) for one, other in pairs.tolist()]
            pairs = [pair for pair in pairs if -1 not in pair]
        check_host_pairs(k_cache.shape[0], pairs)
        if pairs:
            _copy_blocks(k_cache, v_cache, pairs)


def _copy_blocks(
    k_cache: torch.Tensor, v_cache: torch.Tensor, pairs: SequenceABC[tuple[int, int]]
) -> None:
    ids = torch.tensor(pairs, dtype=torch.int64, device=k_cache.device)
    sources, destinations = ids.unbind(1)
    keys = k_cache if k_cache.is_contiguous() else stored_keys(k_cache)
    for cache in (as_bits(keys), as_bits(v_cache)):
        cache.index_copy_(0, destinations, cache.index_select(0, sources))
