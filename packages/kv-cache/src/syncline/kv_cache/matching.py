"""How much of a table's chain the prefix index holds; reads only, takes no block."""

from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass
from typing import Final

from syncline.kv_cache.block_table import BlockTable
from syncline.kv_cache.errors import StaleMatchError
from syncline.kv_cache.expectations import Expectations
from syncline.kv_cache.prefix_index import Chunk, PrefixEntry, PrefixIndex
from syncline.kv_cache.types import BlockId, BlockKey, CacheRoot


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixMatch:
    """What the prefix index holds of a token list; a reading, it takes no block.

    block_ids     full blocks to share, in order
    num_tokens    tokens whose KV need not be computed
    copy_source   set when the whole prompt is cached: the block to copy, whose last token alone
                  is recomputed (num_tokens is then one short of a block boundary)
    awaited_key   set when others compute the next full blocks now: the last block of that run.
                  Once nobody computes it any more, a new match says what has become of them
    entries       of `block_ids`, then of `copy_source`: each was compared with the tokens
    """

    block_ids: tuple[BlockId, ...] = ()
    num_tokens: int = 0
    copy_source: BlockId | None = None
    awaited_key: BlockKey | None = None
    entries: tuple[PrefixEntry, ...] = ()


NO_MATCH: Final = PrefixMatch()


def longest_match(
    index: PrefixIndex,
    expectations: Expectations,
    table: BlockTable,
    chunks: SequenceABC[Chunk],
    *,
    num_described: int,
    max_tokens: int,
) -> PrefixMatch:
    """The longest verified run of hits among the first `num_described` blocks, which have keys.

    chunks: of the same blocks at least. max_tokens: at most one token short of their end.
    """
    size = table.block_size
    entries = index.find_run(table.keys[:num_described], chunks, table.root)
    block_ids = tuple([entry.block_id for entry in entries])
    if len(entries) * size > max_tokens:
        return PrefixMatch(
            block_ids=block_ids[:-1],
            num_tokens=max_tokens,
            copy_source=block_ids[-1],
            entries=tuple(entries),
        )
    awaited_key = expectations.last_of_run(table.keys[len(entries) : num_described])
    if not entries and awaited_key is None:
        return NO_MATCH
    return PrefixMatch(
        block_ids=block_ids,
        num_tokens=len(entries) * size,
        awaited_key=awaited_key,
        entries=tuple(entries),
    )


def verify(index: PrefixIndex, table: BlockTable, match: PrefixMatch) -> PrefixEntry | CacheRoot:
    """The entry of the last shared block. Raises StaleMatchError if the match is not true now.

    The entries were compared with the tokens when the match was made, and what a listed entry says
    never changes: so being listed behind one another, under the table's keys, is enough.
    """
    block_ids = match.block_ids
    if match.copy_source is not None:
        block_ids = (*block_ids, match.copy_source)
    if len(match.entries) != len(block_ids) or len(table.keys) < len(block_ids):
        raise StaleMatchError(block_ids[-1])
    before: PrefixEntry | CacheRoot = table.root
    for entry, block_id, key in zip(match.entries, block_ids, table.keys, strict=False):
        if entry.link != before or entry.block_id != block_id or entry.key != key:
            raise StaleMatchError(block_id)  # One that is not listed any more has no parent.
        before = entry
    if isinstance(before, PrefixEntry) and not index.lists(before):
        raise StaleMatchError(before.block_id)
    return match.entries[len(match.block_ids) - 1] if match.block_ids else table.root
