"""Names and values that the rooms of this package share; no behaviour beyond a hash root.

Unit: a block is `block_size` consecutive token slots in every layer of the model.
"""

import functools
import hashlib
from dataclasses import dataclass
from typing import NewType

BlockId = NewType("BlockId", int)
"""Index of a block in the pool, 0 to num_blocks - 1."""

BlockKey = NewType("BlockKey", int)
"""Value of the hash chain at the end of one full block. Shorter than the content: never trusted
without comparing the content."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheRoot:
    """Where a hash chain starts: two sequences share KV only if all of this agrees.

    `salt` separates tenants or multimodal payloads, `adapter_id` LoRA adapters, `kv_format` dtypes
    and layouts of the cache, `kv_epoch` everything computed before KV content lost its meaning.
    """

    salt: str = ""
    adapter_id: str = ""
    kv_format: str = ""
    kv_epoch: int = 0

    def key(self) -> BlockKey:
        """The chain value before the first block; the same in every process."""
        return _root_key(self.salt, self.adapter_id, self.kv_format, self.kv_epoch)


@functools.lru_cache(maxsize=64)  # Most sequences of an engine share one root.
def _root_key(salt: str, adapter_id: str, kv_format: str, kv_epoch: int) -> BlockKey:
    text = repr((salt, adapter_id, kv_format, kv_epoch))
    return BlockKey(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """What `reserve` took: the new blocks at the table's end, and copies to make before writing.

    copies: (source, destination) pairs; the destination is one of `new_block_ids`.
    """

    new_block_ids: tuple[BlockId, ...] = ()
    copies: tuple[tuple[BlockId, BlockId], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheStats:
    """A snapshot of counters (since construction) and gauges, all in blocks."""

    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_evicted_blocks: int
    num_published_blocks: int
