"""Writing and copying KV blocks by Triton; knows slots and block ids, not who holds them."""

from collections.abc import Sequence as SequenceABC
from typing import Final

import torch

from syncline.model_ops_rocm.arguments import (
    KV_COPY,
    KV_WRITE,
    check_caches,
    check_host_pairs,
    check_kv_write,
)
from syncline.model_ops_rocm.checks import require_contiguous, require_pairs, require_workspace
from syncline.model_ops_rocm.triton.geometry import power_of_two
from syncline.model_ops_rocm.triton.kernels.kv import copy_blocks_kernel, kv_write_kernel
from syncline.model_ops_rocm.triton.launch import LAUNCHER, require_reachable


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
    _check_caches(KV_WRITE, k_cache, v_cache)
    num_blocks, num_kv_heads, block_size, head_dim = k_cache.shape
    num_tokens = check_kv_write(k_TKH, v_TKH, k_cache, slot_mapping)
    require_reachable(KV_WRITE, k=k_TKH, v=v_TKH, k_cache=k_cache, v_cache=v_cache)
    require_reachable(KV_WRITE, slot_mapping=slot_mapping)
    if num_tokens == 0 or k_cache.numel() == 0:
        return
    chosen = LAUNCHER.config(KV_WRITE, k_cache.dtype, head_dim)
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
        _check_caches(KV_COPY, k_cache, v_cache)
        if not isinstance(pairs, torch.Tensor):
            pairs = self._from_host(k_cache, pairs)
            if workspace is None:
                num_bytes = self.workspace_bytes(k_cache, pairs.shape[0])
                workspace = torch.empty(num_bytes, dtype=torch.uint8, device=k_cache.device)
        require_pairs(KV_COPY, pairs)
        num_bytes = self.workspace_bytes(k_cache, pairs.shape[0])
        staged = require_workspace(KV_COPY, workspace, num_bytes)
        require_reachable(KV_COPY, k_cache=k_cache, v_cache=v_cache, pairs=pairs, workspace=staged)
        if num_bytes == 0:
            return
        halves = staged[:num_bytes].view(k_cache.dtype).chunk(2)
        self._copy((k_cache, v_cache), halves, pairs, from_pool=True)
        self._copy(halves, (k_cache, v_cache), pairs, from_pool=False)

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
        chosen = LAUNCHER.config(KV_COPY, pool.dtype, width)
        LAUNCHER.launch(
            copy_blocks_kernel,
            (pairs.shape[0], -(-width // chosen[1].constants["BLOCK_WIDTH"])),
            chosen,
            (*sources, *targets, pairs, pool.shape[0]),
            {"BLOCK_ELEMENTS": width, "FROM_POOL": from_pool},
        )


KV_COPY_BLOCKS: Final = TritonKVCopyBlocks()


def _check_caches(op: str, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
    check_caches(op, k_cache, v_cache)
    require_contiguous(op, "k_cache", k_cache)
    require_contiguous(op, "v_cache", v_cache)
