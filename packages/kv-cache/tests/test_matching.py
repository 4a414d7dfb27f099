"""A match is a reading that may grow old: `verify` tells whether it still holds."""

import dataclasses

import pytest

from syncline.kv_cache import BlockId, BlockTable, CacheRoot, PrefixIndex, PrefixMatch
from syncline.kv_cache.chains import describe
from syncline.kv_cache.errors import StaleMatchError
from syncline.kv_cache.expectations import Expectations
from syncline.kv_cache.matching import longest_match, verify
from syncline.kv_cache.prefix_index import Chunk, PrefixEntry, pack_tokens

TOKENS = tuple(range(12))


def make_index() -> PrefixIndex:
    """The three blocks of TOKENS are listed as 5, 6 and 7."""
    index = PrefixIndex()
    parent: PrefixEntry | CacheRoot | None = CacheRoot()
    table = make_table(index)
    for i, key in enumerate(table.keys):
        assert parent is not None
        chunk = pack_tokens(TOKENS[4 * i : 4 * i + 4])
        parent, _ = index.publish(key, chunk, parent, BlockId(5 + i))
    return index


def chunks_of(tokens: tuple[int, ...]) -> list[Chunk]:
    return [pack_tokens(tokens[i : i + 4]) for i in range(0, len(tokens), 4)]


def make_table(index: PrefixIndex, tokens: tuple[int, ...] = TOKENS) -> BlockTable:
    table = BlockTable(CacheRoot(), 4, cacheable=True)
    describe(table, chunks_of(tokens), 0, len(tokens) // 4, index.key_of)
    return table


def match_in(index: PrefixIndex, max_tokens: int = 12, num_described: int = 3) -> PrefixMatch:
    return longest_match(
        index,
        Expectations(),
        make_table(index),
        chunks_of(TOKENS),
        num_described=num_described,
        max_tokens=max_tokens,
    )


def test_a_match_holds_until_one_of_its_entries_leaves_the_index() -> None:
    for lost in (5, 6, 7):
        index = make_index()
        match = match_in(index)
        last = verify(index, make_table(index), match)
        assert isinstance(last, PrefixEntry) and last.block_id == 7 and match.entries[2] is last
        index.forget(BlockId(lost))
        with pytest.raises(StaleMatchError) as error:
            verify(index, make_table(index), match)
        assert error.value.block_id == lost


def test_a_copied_block_is_verified_and_not_shared() -> None:
    index = make_index()
    match = match_in(index, 11)
    assert match.block_ids == (5, 6) and match.copy_source == 7 and match.num_tokens == 11
    shared = verify(index, make_table(index), match)
    assert isinstance(shared, PrefixEntry) and shared.block_id == 6
    index.forget(BlockId(7))
    with pytest.raises(StaleMatchError):
        verify(index, make_table(index), match)


def test_a_match_of_other_tokens_or_of_another_index_is_refused() -> None:
    index = make_index()
    match = match_in(index)
    for other in ((9, *TOKENS[1:]), (*TOKENS[:11], 9), TOKENS[:8], ()):
        with pytest.raises(StaleMatchError):
            verify(index, make_table(index, other), match)
    with pytest.raises(StaleMatchError):
        verify(make_index(), make_table(index), match)
    with pytest.raises(StaleMatchError):
        verify(index, make_table(index), dataclasses.replace(match, block_ids=match.block_ids[:2]))
    swapped = dataclasses.replace(match, block_ids=match.block_ids[::-1])
    with pytest.raises(StaleMatchError):
        verify(index, make_table(index), swapped)


def test_a_match_of_nothing_but_a_copied_first_block_hangs_from_the_root() -> None:
    index = make_index()
    match = match_in(index, 3, 1)
    assert match.block_ids == () and match.copy_source == 5
    assert verify(index, make_table(index), match) == CacheRoot()
