"""The hash chain of a table's full blocks: each block described once in the table's life.

Knows token lists and roots, not which blocks are cached or held. Token lists are append-only.
"""

from collections.abc import Callable
from collections.abc import Sequence as SequenceABC

from syncline.kv_cache.block_table import BlockTable
from syncline.kv_cache.prefix_index import TOKEN_BYTES, Chunk, PrefixEntry, pack_tokens
from syncline.kv_cache.types import BlockKey, CacheRoot


def pack_blocks(token_ids: SequenceABC[int], size: int, first: int, stop: int) -> bytes:
    """The blocks [first, stop), all full, from the first byte on; bytes may follow.

    Raises ValueError for an id that cannot be packed.
    """
    if first == 0 and len(token_ids) < (stop + 1) * size:
        return pack_tokens(token_ids)  # All but a rest: cutting that off would cost more.
    return pack_tokens(token_ids[first * size : stop * size])


def describe(
    table: BlockTable,
    packed: bytes,
    first: int,
    num_full: int,
    key_of: Callable[[BlockKey, Chunk], BlockKey],
) -> None:
    """Key the full blocks up to `num_full` that have no key yet. packed: the blocks from `first`
    on, which is at most the number of keys.
    """
    keys, width = table.keys, table.block_size * TOKEN_BYTES
    if len(keys) >= num_full:
        return
    key = keys[-1] if keys else table.root.key()
    for start in range((len(keys) - first) * width, (num_full - first) * width, width):
        key = key_of(key, packed[start : start + width])
        keys.append(key)


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
