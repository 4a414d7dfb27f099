"""Writing and copying KV blocks by Triton; knows slots and block ids, not who holds them."""

from collections.abc import Sequence as SequenceABC
from typing import Final, NamedTuple

import torch

from syncline.model_ops_rocm.arguments.attention import (
    check_copied,
    check_layout_write,
    pool_of,
    require_support,
)
from syncline.model_ops_rocm.arguments.dense import (
    KV_COPY,
    KV_WRITE,
    check_caches,
    check_copies_apart,
    check_host_pairs,
    check_kv_apart,
    check_kv_write,
)
from syncline.model_ops_rocm.checks import require_contiguous, require_pairs, workspace_of
from syncline.model_ops_rocm.contracts.attention import KVScales
from syncline.model_ops_rocm.kv.layout import KVLayout
from syncline.model_ops_rocm.kv.pool import KVPool
from syncline.model_ops_rocm.kv.support import KVSupport
from syncline.model_ops_rocm.quant import FP8_MAX, CodeType
from syncline.model_ops_rocm.triton.geometry import power_of_two
from syncline.model_ops_rocm.triton.kernels.kv import (
    copy_blocks_kernel,
    kv_write_kernel,
    kv_write_layout_kernel,
)
from syncline.model_ops_rocm.triton.kv_places import ORDERS, places_of, scales_per
from syncline.model_ops_rocm.triton.launch import IS_INTERPRETED, LAUNCHER, require_reachable
from syncline.model_ops_rocm.triton.targets import casts_natively

SUPPORT: Final = KVSupport(op=KV_WRITE, backend="triton", orders=ORDERS, max_head_dim=256)
_CODES: Final = {
    torch.float8_e4m3fn: CodeType.E4M3FN,
    torch.float8_e4m3fnuz: CodeType.E4M3FNUZ,
}


class TritonKVWrite:
    """See `contracts.KVWrite`; -1 costs nothing here, so `may_skip` changes nothing."""

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
        if layout is None:
            _check_caches(KV_WRITE, k_cache, v_cache)
            pool = None
            num_tokens = check_kv_write(k_TKH, v_TKH, k_cache, slot_mapping)
        else:
            pool = pool_of(KV_WRITE, k_cache, v_cache, layout, kv_scales)
            num_tokens = check_layout_write(k_TKH, v_TKH, pool, slot_mapping)
            require_support(KV_WRITE, SUPPORT, pool)
        check_kv_apart((k_cache, v_cache), k_TKH, v_TKH, slot_mapping, kv_scales, layout)
        scales = kv_scales or (None, None)
        require_reachable(KV_WRITE, k=k_TKH, v=v_TKH, k_cache=k_cache, v_cache=v_cache)
        require_reachable(KV_WRITE, slot_mapping=slot_mapping, k_scale=scales[0], v_scale=scales[1])
        if num_tokens == 0 or k_cache.numel() == 0:
            return
        if pool is None:
            _write_plain(k_TKH, v_TKH, k_cache, v_cache, slot_mapping)
        else:
            _write_stored(_Source(k_TKH, v_TKH, slot_mapping), (k_cache, v_cache), scales, pool)


kv_write: Final = TritonKVWrite()


class _Source(NamedTuple):
    k: torch.Tensor
    v: torch.Tensor
    slots: torch.Tensor


def _write_plain(
    k_TKH: torch.Tensor,
    v_TKH: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    num_blocks, num_kv_heads, block_size, head_dim = k_cache.shape
    chosen = LAUNCHER.config(KV_WRITE, k_cache.dtype, head_dim)
    LAUNCHER.launch(
        kv_write_kernel,
        (k_TKH.shape[0], -(-num_kv_heads // chosen[1].constants["BLOCK_HEADS"])),
        chosen,
        (
            *(k_TKH, v_TKH, k_cache, v_cache, slot_mapping, num_blocks * block_size),
            *k_TKH.stride(),
            *v_TKH.stride(),
            slot_mapping.stride(0),
        ),
        {
            "NUM_HEADS": num_kv_heads,
            "HEAD_DIM": head_dim,
            "BLOCK_SIZE": block_size,
            "BLOCK_DIM": power_of_two(head_dim),
        },
    )


def _write_stored(
    source: _Source,
    caches: tuple[torch.Tensor, torch.Tensor],
    scales: tuple[torch.Tensor | None, torch.Tensor | None],
    pool: KVPool,
) -> None:
    """Into the order and with the codes of a layout."""
    k, v, stored = source.k, source.v, caches
    if pool.layout.dtype.itemsize == 1:
        stored = (caches[0].view(torch.uint8), caches[1].view(torch.uint8))
        if k.itemsize == 1:
            k, v = k.view(torch.uint8), v.view(torch.uint8)
    chosen = LAUNCHER.config(
        KV_WRITE, torch.bfloat16 if k.itemsize == 1 else k.dtype, pool.head_dim
    )
    code = _CODES.get(pool.layout.dtype, CodeType.E4M3FN)
    places = places_of(pool)
    LAUNCHER.launch(
        kv_write_layout_kernel,
        (k.shape[0], -(-pool.num_kv_heads // chosen[1].constants["BLOCK_HEADS"])),
        chosen,
        (
            *(k, v, *stored, *scales, source.slots, pool.num_slots),
            *k.stride(),
            *v.stride(),
            source.slots.stride(0),
            *places[2:],
        ),
        {
            "KEYS": places.keys,
            "VALUES": places.values,
            "CODE": str(code),
            "NATIVE": casts_natively(chosen[0].arch, code) and not IS_INTERPRETED,
            "CLAMP": FP8_MAX.get(pool.layout.dtype, 0.0),
            "SCALES_PER": scales_per(pool),
            "NUM_HEADS": pool.num_kv_heads,
            "HEAD_DIM": pool.head_dim,
            "BLOCK_SIZE": pool.layout.kernel_block_size,
            "BLOCK_DIM": power_of_two(pool.head_dim),
        },
    )


class TritonKVCopyBlocks:
    """See `contracts.KVCopyBlocks`."""

    __slots__ = ()

    def workspace_bytes(self, k_cache: torch.Tensor, max_pairs: int) -> int:
        return 2 * max_pairs * k_cache[:1].numel() * k_cache.element_size()

    def __call__(
        self,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        pairs: SequenceABC[tuple[int, int]] | torch.Tensor,
        *,
        workspace: torch.Tensor | None = None,
    ) -> None:
        check_copied(k_cache, v_cache)
        if not isinstance(pairs, torch.Tensor):
            pairs = self._from_host(k_cache, pairs)
        require_pairs(KV_COPY, pairs)
        check_copies_apart(k_cache, v_cache, pairs)
        num_bytes = self.workspace_bytes(k_cache, pairs.shape[0])
        staged = workspace_of(KV_COPY, workspace, num_bytes, k_cache.device)
        require_reachable(KV_COPY, k_cache=k_cache, v_cache=v_cache, pairs=pairs, workspace=staged)
        if num_bytes == 0:
            return
        pools = (_elements(k_cache), _elements(v_cache))
        halves = staged[:num_bytes].view(pools[0].dtype).chunk(2)
        self._copy(pools, halves, pairs, from_pool=True)
        self._copy(halves, pools, pairs, from_pool=False)

    @staticmethod
    def _from_host(k_cache: torch.Tensor, pairs: SequenceABC[tuple[int, int]]) -> torch.Tensor:
        check_host_pairs(k_cache.shape[0], pairs)
        listed = [list(pair) for pair in pairs]
        return torch.tensor(listed, dtype=torch.int64, device=k_cache.device).reshape(-1, 2)

    @staticmethod
    def _copy(
        sources: SequenceABC[torch.Tensor],
        targets: SequenceABC[torch.Tensor],
        pairs: torch.Tensor,
        *,
        from_pool: bool,
    ) -> None:
        pool = sources[0] if from_pool else targets[0]
        width = pool[0].numel()
        dtype = pool.dtype if pool.is_floating_point() else torch.bfloat16
        chosen = LAUNCHER.config(KV_COPY, dtype, width)
        LAUNCHER.launch(
            copy_blocks_kernel,
            (pairs.shape[0], -(-width // chosen[1].constants["BLOCK_WIDTH"])),
            chosen,
            (*sources, *targets, pairs, pool.shape[0]),
            {"BLOCK_ELEMENTS": width, "FROM_POOL": from_pool},
        )


KV_COPY_BLOCKS: Final = TritonKVCopyBlocks()


def _elements(cache: torch.Tensor) -> torch.Tensor:
    """[NB, elements of a block]; codes as bytes, or two at once where they pair up."""
    flat = cache.flatten(1)
    if cache.itemsize != 1:
        return flat
    return flat.view(torch.int16 if flat.shape[1] % 2 == 0 else torch.uint8)


def _check_caches(op: str, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
    check_caches(op, k_cache, v_cache)
    require_contiguous(op, "k_cache", k_cache)
    require_contiguous(op, "v_cache", v_cache)
