"""The hash chain of a table's full blocks: each block described once in the table's life.

Knows token lists and roots, not which blocks are cached or held. Token lists are append-only.
"""

from collections.abc import Callable

from syncline.kv_cache.block_table import BlockTable
from syncline.kv_cache.prefix_index import Chunk, PrefixEntry
from syncline.kv_cache.types import BlockKey, CacheRoot


def describe(
    table: BlockTable,
    token_ids: tuple[int, ...],
    num_full: int,
    key_of: Callable[[BlockKey, Chunk], BlockKey],
) -> None:
    """Key the full blocks up to `num_full` that have no key yet."""
    keys, size = table.keys, table.block_size
    if len(keys) >= num_full:
        return
    parent = keys[-1] if keys else table.root.key()
    for start in range(len(keys) * size, num_full * size, size):
        parent = key_of(parent, token_ids[start : start + size])
        keys.append(parent)


def adopt_chain(table: BlockTable, source: BlockTable, num_blocks: int) -> None:
    """The table's first `num_blocks` blocks are those of `source`: so are their keys and listing.

    Both have the same root. Source's blocks need not have keys yet.
    """
    if len(table.keys) < num_blocks:
        table.keys = source.keys[:num_blocks]
    parent = source.parent
    for _ in range(num_blocks, source.num_published):
        # None: cut by a collision, or no longer listed, so that nothing behind it could be hit.
        parent = parent.parent if isinstance(parent, PrefixEntry) else None
    table.parent = parent
    table.num_published = min(num_blocks, source.num_published)
    table.num_expected = table.num_published


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
        table.parent = table.root
