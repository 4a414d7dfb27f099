"""The hash chain of a table's full blocks: each block described once in the table's life.

Knows token lists and roots, not which blocks are cached or held. Token lists are append-only.
"""

from collections.abc import Callable
from collections.abc import Sequence as SequenceABC

from syncline.kv_cache.block_table import BlockTable
from syncline.kv_cache.prefix_index import Chunk
from syncline.kv_cache.types import BlockKey, CacheRoot


def describe(
    table: BlockTable,
    token_ids: SequenceABC[int],
    num_full: int,
    key_of: Callable[[BlockKey, Chunk], BlockKey],
) -> None:
    """Key the full blocks up to `num_full` that have no key yet."""
    size = table.block_size
    for i in range(len(table.keys), num_full):
        chunk = tuple(token_ids[i * size : (i + 1) * size])
        parent_key = table.keys[-1] if table.keys else table.root.key()
        table.chunks.append(chunk)
        table.keys.append(key_of(parent_key, chunk))


def renew_root(table: BlockTable, kv_epoch: int) -> None:
    """Move an empty table that began in another epoch to this one."""
    if table.root.kv_epoch != kv_epoch:
        table.root = CacheRoot(
            salt=table.root.salt,
            adapter_id=table.root.adapter_id,
            kv_format=table.root.kv_format,
            kv_epoch=kv_epoch,
        )
        table.keys.clear()
        table.chunks.clear()
        table.parent = table.root
