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
from syncline.kv_cache.events import (
    AllBlocksCleared,
    BlocksRemoved,
    BlocksStored,
    KVEvent,
    KVEventLog,
)
from syncline.kv_cache.manager import KVCacheManager
from syncline.kv_cache.matching import PrefixMatch
from syncline.kv_cache.prefix_index import IndexListener, PrefixEntry, PrefixIndex, chain_key
from syncline.kv_cache.prompt_hold import PromptHold, PromptHolds
from syncline.kv_cache.stable_keys import StableChain, StableKey, stable_key, stable_root_key
from syncline.kv_cache.types import (
    BlockId,
    BlockKey,
    CacheRoot,
    KVCacheStats,
    Reservation,
)

__all__ = [
    "AllBlocksCleared",
    "BlockId",
    "BlockKey",
    "BlockNotHeldError",
    "BlockPool",
    "BlockTable",
    "BlocksInUseError",
    "BlocksRemoved",
    "BlocksStored",
    "CacheRoot",
    "IndexListener",
    "IntegrityError",
    "KVCacheError",
    "KVCacheManager",
    "KVCacheStats",
    "KVEvent",
    "KVEventLog",
    "Lease",
    "LeaseError",
    "PrefixEntry",
    "PrefixIndex",
    "PrefixMatch",
    "PromptHold",
    "PromptHolds",
    "Reservation",
    "StableChain",
    "StableKey",
    "StaleMatchError",
    "chain_key",
    "stable_key",
    "stable_root_key",
]
