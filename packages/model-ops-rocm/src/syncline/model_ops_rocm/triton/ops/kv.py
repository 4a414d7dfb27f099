"""Writing and copying KV blocks by Triton; knows slots and block ids, not who holds them."""

from collections.abc import Sequence as SequenceABC
from typing import Final

import torch

from syncline.model_ops_rocm.checks import (
    refuse,
    require_contiguous,
    require_dtype,
    require_float,
    require_index,
    require_ndim,
    require_pairs,
    require_shape,
    require_workspace,
)
from syncline.model_ops_rocm.triton.geometry import power_of_two
from syncline.model_ops_rocm.triton.kernels.kv import copy_blocks_kernel, kv_write_kernel
from syncline.model_ops_rocm.triton.launch import LAUNCHER, require_reachable

_WRITE = "kv_write"
_COPY = "kv_copy_blocks"


def kv_write(
    k_TKH: torch.Tensor,
    v_TKH: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    may_skip: bool = True,
) -> None:
    """See `contracts.KVWrite`; -1 costs nothing here, so `may_skip` changes nothing."""
    _check_caches(_WRITE, k_cache, v_cache)
    num_blocks, num_kv_heads, block_size, head_dim = k_cache.shape
    num_tokens = k_TKH.shape[0] if k_TKH.ndim else 0
    for name, tensor in (("k", k_TKH), ("v", v_TKH)):
        require_shape(_WRITE, name, tensor, (num_tokens, num_kv_heads, head_dim))
        require_dtype(_WRITE, name, tensor, k_cache.dtype)
    require_index(_WRITE, "slot_mapping", slot_mapping, num_tokens)
    require_reachable(_WRITE, k=k_TKH, v=v_TKH, k_cache=k_cache, v_cache=v_cache)
    require_reachable(_WRITE, slot_mapping=slot_mapping)
    if num_tokens == 0 or k_cache.numel() == 0:
        return
    chosen = LAUNCHER.config(_WRITE, k_cache.dtype, head_dim)
    LAUNCHER.launch(
        kv_write_kernel,
        (num_tokens, -(-num_kv_heads // chosen[1].constants["BLOCK_HEADS"])),
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
        _check_caches(_COPY, k_cache, v_cache)
        if not isinstance(pairs, torch.Tensor):
            pairs = self._from_host(k_cache, pairs)
            if workspace is None:
                num_bytes = self.workspace_bytes(k_cache, pairs.shape[0])
                workspace = torch.empty(num_bytes, dtype=torch.uint8, device=k_cache.device)
        require_pairs(_COPY, pairs)
        num_bytes = self.workspace_bytes(k_cache, pairs.shape[0])
        staged = require_workspace(_COPY, workspace, num_bytes)
        require_reachable(_COPY, k_cache=k_cache, v_cache=v_cache, pairs=pairs, workspace=staged)
        if num_bytes == 0:
            return
        halves = staged[:num_bytes].view(k_cache.dtype).chunk(2)
        self._copy((k_cache, v_cache), halves, pairs, from_pool=True)
        self._copy(halves, (k_cache, v_cache), pairs, from_pool=False)

    @staticmethod
    def _from_host(k_cache: torch.Tensor, pairs: SequenceABC[tuple[int, int]]) -> torch.Tensor:
        for pair in pairs:
            if not all(0 <= block_id < k_cache.shape[0] for block_id in pair):
                refuse(_COPY, "pairs", f"have block ids in [0, {k_cache.shape[0]})", pair)
        if len({destination for _, destination in pairs}) != len(pairs):
            refuse(_COPY, "pairs", "name each destination once", list(pairs))
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
        chosen = LAUNCHER.config(_COPY, pool.dtype, width)
        LAUNCHER.launch(
            copy_blocks_kernel,
            (pairs.shape[0], -(-width // chosen[1].constants["BLOCK_WIDTH"])),
            chosen,
            (*sources, *targets, pairs, pool.shape[0]),
            {"BLOCK_ELEMENTS": width, "FROM_POOL": from_pool},
        )


KV_COPY_BLOCKS: Final = TritonKVCopyBlocks()


def _check_caches(op: str, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
    require_float(op, "k_cache", k_cache)
    require_ndim(op, "k_cache", k_cache, 4)
    require_dtype(op, "v_cache", v_cache, k_cache.dtype)
    require_shape(op, "v_cache", v_cache, k_cache.shape)
    require_contiguous(op, "k_cache", k_cache)
    require_contiguous(op, "v_cache", v_cache)
