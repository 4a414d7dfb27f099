"""How a layer's keys and values lie in memory, as values; knows no block's owner and no step."""

from syncline.model_ops_rocm.kv.layout import KVLayout, KVOrder, KVScale, Side
from syncline.model_ops_rocm.kv.pool import KVPool
from syncline.model_ops_rocm.kv.support import KVSupport, require_agreement
from syncline.model_ops_rocm.kv.tokens import logical_caches, read_tokens, write_tokens

__all__ = [
    "KVLayout",
    "KVOrder",
    "KVPool",
    "KVScale",
    "KVSupport",
    "Side",
    "logical_caches",
    "read_tokens",
    "require_agreement",
    "write_tokens",
]
