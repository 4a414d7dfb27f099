"""The hash chain of a table's full blocks: each block described once in the table's life.

Knows token lists and roots, not which blocks are cached or held. Token lists are append-only.
"""

from collections.abc import Callable
from collections.abc import Sequence as SequenceABC

from syncline.kv_cache.block_table import BlockTable
from syncline.kv_cache.prefix_index import Chunk, PrefixEntry
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


def adopt_chain(table: BlockTable, source: BlockTable, num_blocks: int) -> None:
    """The table's first `num_blocks` blocks are those of `source`: so are their keys and listing.

    Both have the same root. Source's blocks need not have keys yet.
    """
    if len(table.keys) < num_blocks:
        table.keys = source.keys[:num_blocks]
        table.chunks = source.chunks[:num_blocks]
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
        table.chunks.clear()
        table.parent = table.root
