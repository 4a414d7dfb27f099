"""The hash chain of a table's full blocks: each block described once in the table's life.

Knows token lists and roots, not which blocks are cached or held. Token lists are append-only.
"""

from collections.abc import Callable
from collections.abc import Sequence as SequenceABC

from syncline.kv_cache.block_table import BlockTable
from syncline.kv_cache.prefix_index import (
    TOKEN_BYTES,
    Chunk,
    PrefixEntry,
    chain_key,
    pack_tokens,
)
from syncline.kv_cache.types import BlockKey, CacheRoot


def pack_blocks(table: BlockTable, token_ids: SequenceABC[int], first: int, stop: int) -> bytes:
    """The blocks [first, stop), all full, from the first byte on; bytes may follow.

    They are kept for the next call, until `drop_packed`. Raises ValueError for an id that cannot be
    packed.
    """
    size = table.block_size
    if not table.packed or first < table.packed_from:
        table.packed, table.packed_from = b"", first
    num_packed = table.packed_from * size + len(table.packed) // TOKEN_BYTES
    if num_packed < stop * size:
        table.packed += pack_tokens(token_ids[num_packed : stop * size])
    start = (first - table.packed_from) * size * TOKEN_BYTES
    return table.packed[start:] if start else table.packed


def drop_packed(table: BlockTable, stop: int) -> None:
    """Blocks before `stop` are not asked for again: forget what is packed if it ends there."""
    if len(table.packed) <= (stop - table.packed_from) * table.block_size * TOKEN_BYTES:
        table.packed = b""


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
    starts = range((len(keys) - first) * width, (num_full - first) * width, width)
    if key_of is chain_key:
        # `chain_key` written out: a call for each would take a third of the time. BlockKey is a new
        # name for int, no more.
        value: int = key
        values: list[int] = keys  # type: ignore[assignment]  # as said
        values += [value := hash((value, packed[start : start + width])) for start in starts]
        return
    for start in starts:
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
