"""The hash chain of a table's full blocks: each block described once in the table's life.

Knows token lists and roots, not which blocks are cached or held. Token lists are append-only.
"""

from collections.abc import Callable
from collections.abc import Sequence as SequenceABC
from functools import lru_cache
from struct import Struct

from syncline.kv_cache.block_table import BlockTable
from syncline.kv_cache.prefix_index import (
    TOKEN_BYTES,
    Chunk,
    PrefixEntry,
    chain_key,
    pack_tokens,
)
from syncline.kv_cache.types import BlockKey, CacheRoot


def chunks_of(table: BlockTable, token_ids: SequenceABC[int], first: int, stop: int) -> list[Chunk]:
    """The tokens of the blocks from `first` on, all full, up to `stop` or farther.

    They are kept for the next call, until `drop_chunks`. Raises ValueError for an id that cannot be
    packed.
    """
    if not table.chunks or first < table.first_chunk:
        table.chunks, table.first_chunk = [], first
    size, width = table.block_size, table.block_size * TOKEN_BYTES
    num_known = table.first_chunk + len(table.chunks)
    if num_known < stop:
        packed = pack_tokens(token_ids[num_known * size : stop * size])
        table.chunks += _cutter(width, len(packed) // width).unpack(packed)
    return table.chunks[first - table.first_chunk :] if first > table.first_chunk else table.chunks


@lru_cache(maxsize=256)
def _cutter(width: int, num_chunks: int) -> Struct:
    return Struct(f"{width}s" * num_chunks)


def drop_chunks(table: BlockTable, stop: int) -> None:
    """Blocks before `stop` are not asked for again: forget the tokens if they end there."""
    if table.first_chunk + len(table.chunks) <= stop:
        table.chunks = []


def describe(
    table: BlockTable,
    chunks: SequenceABC[Chunk],
    first: int,
    num_full: int,
    key_of: Callable[[BlockKey, Chunk], BlockKey],
) -> None:
    """Key the full blocks up to `num_full` that have no key yet. chunks: those of the blocks from
    `first` on, which is at most the number of keys.
    """
    keys = table.keys
    if len(keys) >= num_full:
        return
    key = keys[-1] if keys else table.root.key()
    missing = chunks[len(keys) - first : num_full - first]
    if key_of is chain_key:
        # `chain_key` written out: a call for each would take a third of the time. BlockKey is a new
        # name for int, no more.
        value: int = key
        values: list[int] = keys  # type: ignore[assignment]  # as said
        values += [value := hash((value, chunk)) for chunk in missing]
        return
    for chunk in missing:
        key = key_of(key, chunk)
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
