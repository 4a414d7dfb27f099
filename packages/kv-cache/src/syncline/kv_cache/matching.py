"""How much of a table's chain the prefix index holds; reads only, takes no block."""

from syncline.kv_cache.block_table import BlockTable
from syncline.kv_cache.errors import StaleMatchError
from syncline.kv_cache.expectations import Expectations
from syncline.kv_cache.prefix_index import PrefixEntry, PrefixIndex
from syncline.kv_cache.types import BlockId, BlockKey, CacheRoot, PrefixMatch


def longest_match(
    index: PrefixIndex,
    expectations: Expectations,
    table: BlockTable,
    num_described: int,
    max_tokens: int,
) -> PrefixMatch:
    """The longest verified run of hits over the first `num_described` blocks, which have keys."""
    size = table.block_size
    parent: PrefixEntry | CacheRoot = table.root
    hits: list[BlockId] = []
    for i in range(num_described):
        entry = index.find(table.keys[i], table.chunks[i], parent)
        if entry is None:
            break
        parent = entry
        hits.append(entry.block_id)
    if len(hits) * size > max_tokens:
        source = hits.pop()
        return PrefixMatch(block_ids=tuple(hits), num_tokens=max_tokens, copy_source=source)
    return PrefixMatch(
        block_ids=tuple(hits),
        num_tokens=len(hits) * size,
        awaited_key=_last_expected(table, expectations, len(hits), num_described),
    )


def _last_expected(
    table: BlockTable, expectations: Expectations, start: int, stop: int
) -> BlockKey | None:
    """The key of the last block in the run from `start` on that others compute now."""
    last: BlockKey | None = None
    for key in table.keys[start:stop]:
        if key not in expectations:
            break
        last = key
    return last


def verify(index: PrefixIndex, table: BlockTable, match: PrefixMatch) -> PrefixEntry | CacheRoot:
    """The entry of the last shared block. Raises StaleMatchError if the match is not true now."""
    wanted = list(match.block_ids)
    if match.copy_source is not None:
        wanted.append(match.copy_source)
    entry: PrefixEntry | CacheRoot = table.root
    shared = entry
    for i, block_id in enumerate(wanted):
        if i >= len(table.keys):
            raise StaleMatchError(block_id)
        found = index.find(table.keys[i], table.chunks[i], entry)
        if found is None or found.block_id != block_id:
            raise StaleMatchError(block_id)
        entry = found
        if i < len(match.block_ids):
            shared = found
    return shared
