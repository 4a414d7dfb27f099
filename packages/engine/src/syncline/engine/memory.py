"""The KV pool: how large a block is, how many there are, and the tensors that hold them.

One block more than the scheduler knows is allocated: the last one is reserved for padding and
warm-up rows, which may write but whose content nobody reads for a request. Unit: bytes and blocks.
"""

import os
from dataclasses import dataclass

import torch
from torch import Tensor

from syncline.engine.config import EngineConfig
from syncline.engine.errors import EngineConfigError
from syncline.engine.models.config import ModelConfig
from syncline.graph_lifecycle import Arena, Tag


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCache:
    """The KV cache of one layer, all blocks included.

    Both are [block, kv_head, block_size, head_dim] by index. Keys are stored with the last two
    dimensions exchanged: decode scores are then sums of stored rows, and no key is gathered.
    """

    stored_k_BKDC: Tensor
    v_BKCD: Tensor

    @property
    def k_BKCD(self) -> Tensor:
        # Made anew each time: an arena that moves on wake rebinds what it allocated, not views.
        return self.stored_k_BKDC.transpose(2, 3)


def kv_bytes_per_block(model: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Keys and values of `block_size` tokens in every layer."""
    return 2 * model.num_layers * model.kv_size * block_size * dtype.itemsize


def resolve_num_kv_blocks(config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> int:
    """Blocks for the scheduler: as configured, or what the memory holds beside the reserved one."""
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks
    num_bytes = kv_bytes_per_block(model, config.block_size, dtype)
    num_blocks = config.kv_cache_memory_bytes // num_bytes - 1
    if num_blocks < 1:
        raise EngineConfigError(
            f"kv_cache_memory_bytes must hold at least 2 blocks of {num_bytes} bytes, "
            f"got {config.kv_cache_memory_bytes}",
            field="kv_cache_memory_bytes",
        )
    return num_blocks


def machine_memory() -> int:
    """Bytes of main memory that this machine has, in use or not."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def check_kv_pool_fits(
    config: EngineConfig,
    model: ModelConfig,
    num_blocks: int,
    dtype: torch.dtype,
    available_bytes: int,
) -> None:
    """EngineConfigError for a pool that no allocator could give, before anything is allocated."""
    num_bytes = kv_bytes_per_block(model, config.block_size, dtype) * (num_blocks + 1)
    if num_bytes <= available_bytes:
        return
    field = "kv_cache_memory_bytes" if config.num_kv_blocks is None else "num_kv_blocks"
    value = config.kv_cache_memory_bytes if config.num_kv_blocks is None else num_blocks
    raise EngineConfigError(
        f"{field}={value} asks for a KV pool of {num_bytes} bytes, "
        f"this machine has {available_bytes} bytes of memory",
        field=field,
    )


def allocate_kv_pool(
    arena: Arena, model: ModelConfig, *, num_blocks: int, block_size: int, dtype: torch.dtype
) -> list[LayerCache]:
    """Per layer `num_blocks` blocks and the reserved one, whose id is `num_blocks`."""
    heads = (num_blocks + 1, model.num_kv_heads)
    k_shape = (*heads, model.head_dim, block_size)
    v_shape = (*heads, block_size, model.head_dim)
    return [
        LayerCache(
            stored_k_BKDC=arena.allocate(f"k_cache.{index}", k_shape, dtype, tag=Tag.KV_CACHE),
            v_BKCD=arena.allocate(f"v_cache.{index}", v_shape, dtype, tag=Tag.KV_CACHE),
        )
        for index in range(model.num_layers)
    ]
