"""Blocks of KV cache: who holds them, and which computed prefixes can be shared."""

from syncline.kv_cache.block_pool import BlockPool
from syncline.kv_cache.block_table import BlockTable, Lease
from syncline.kv_cache.errors import (
    BlockNotHeldError,
    BlocksInUseError,
    IntegrityError,
    KVCacheError,
    LeaseError,
    StaleMatchError,
)
from syncline.kv_cache.manager import KVCacheManager
from syncline.kv_cache.prefix_index import PrefixEntry, PrefixIndex, chain_key
from syncline.kv_cache.types import (
    BlockId,
    BlockKey,
    CacheRoot,
    KVCacheStats,
    PrefixMatch,
    Reservation,
)

__all__ = [
    "BlockId",
    "BlockKey",
    "BlockNotHeldError",
    "BlockPool",
    "BlockTable",
    "BlocksInUseError",
    "CacheRoot",
    "IntegrityError",
    "KVCacheError",
    "KVCacheManager",
    "KVCacheStats",
    "Lease",
    "LeaseError",
    "PrefixEntry",
    "PrefixIndex",
    "PrefixMatch",
    "Reservation",
    "StaleMatchError",
    "chain_key",
]
