"""PrefixIndex against the obvious model: a dict from whole prefixes to the block that has them."""

from collections.abc import Callable
from typing import cast
from unittest import TestCase

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from syncline.kv_cache import BlockId, BlockKey, CacheRoot, PrefixEntry, PrefixIndex, chain_key
from syncline.kv_cache.prefix_index import Chunk, pack_tokens, unpack_tokens
from syncline.kv_cache.testing import colliding_key

ROOT = CacheRoot()
CHUNKS = st.tuples(st.integers(0, 1), st.integers(0, 1)).map(pack_tokens)
PREFIXES = st.lists(CHUNKS, min_size=1, max_size=3).map(tuple)


def find(
    index: PrefixIndex, key: BlockKey, chunk: Chunk, parent: PrefixEntry | CacheRoot
) -> PrefixEntry | None:
    """The entry with this content right behind the parent, or None."""
    return next(iter(index.find_run([key], [chunk], parent)), None)


class PrefixIndexMachine(RuleBasedStateMachine):
    """With `collide`, unlike contents share keys: then a hit may be missed, never be wrong."""

    @initialize(collide=st.booleans())
    def create(self, collide: bool) -> None:
        self.collide = collide
        self.index = PrefixIndex(colliding_key if collide else chain_key)
        self.content: dict[BlockId, tuple[Chunk, ...]] = {}  # What each listed block holds.
        self.next_block = 0

    def walk(self, prefix: tuple[Chunk, ...]) -> PrefixEntry | CacheRoot | None:
        node: PrefixEntry | CacheRoot = ROOT
        key = ROOT.key()
        for chunk in prefix:
            key = self.index.key_of(key, chunk)
            found = find(self.index, key, chunk, node)
            if found is None:
                return None
            node = found
        return node

    @rule(prefix=PREFIXES)
    def publish_behind_a_listed_parent(self, prefix: tuple[Chunk, ...]) -> None:
        parent = self.walk(prefix[:-1])
        if parent is None:
            return
        key = ROOT.key()
        for chunk in prefix:
            key = self.index.key_of(key, chunk)
        block_id = BlockId(self.next_block)
        self.next_block += 1
        known = [b for b, content in self.content.items() if content == prefix]
        entry, displaced = self.index.publish(key, prefix[-1], parent, block_id)
        if displaced is not None:
            del self.content[displaced]
        if entry is None:
            assert self.collide
        elif entry.block_id == block_id:
            # Listed now. An older copy may still stand in the index, unreachable, only while
            # its own parent is gone, and then it has the same key and was displaced.
            assert not set(known) - {displaced}
            self.content[block_id] = prefix
        else:
            assert self.content[entry.block_id] == prefix

    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        if self.content:
            block_id = data.draw(st.sampled_from(sorted(self.content)))
            self.index.forget(block_id)
            del self.content[block_id]

    @rule()
    def clear(self) -> None:
        assert self.index.clear() == set(self.content)
        self.content.clear()

    @rule(prefix=PREFIXES)
    def a_hit_is_the_very_prefix(self, prefix: tuple[Chunk, ...]) -> None:
        entry = self.walk(prefix)
        if isinstance(entry, PrefixEntry):
            assert self.content[entry.block_id] == prefix
        elif not self.collide and all(
            prefix[:n] in self.content.values() for n in range(1, len(prefix) + 1)
        ):
            # All there, and yet no hit: a forgotten ancestor was republished as another entry.
            assert self.next_block > len(self.content)

    @invariant()
    def entries_and_blocks_are_one_to_one(self) -> None:
        assert self.index.block_ids == set(self.content)
        assert len(self.index) == len(self.content)


TestPrefixIndex = cast(type[TestCase], PrefixIndexMachine.TestCase)  # pyright: ignore[reportUnknownMemberType]  untyped there


def listed(
    index: PrefixIndex, prefix: tuple[tuple[int, ...], ...], first_block: int
) -> list[PrefixEntry]:
    node: PrefixEntry | CacheRoot = ROOT
    key = ROOT.key()
    entries: list[PrefixEntry] = []
    for i, chunk in enumerate(map(pack_tokens, prefix)):
        key = index.key_of(key, chunk)
        entry, _ = index.publish(key, chunk, node, BlockId(first_block + i))
        assert entry is not None
        entries.append(entry)
        node = entry
    return entries


def test_a_child_of_a_forgotten_parent_is_never_hit_through_another_parent() -> None:
    # Keys collide for all contents of one parity: the key of the child is the same behind both.
    index = PrefixIndex(colliding_key)
    first, child = listed(index, ((0, 0), (1, 0)), 0)
    index.forget(first.block_id)
    (other,) = listed(index, ((1, 1),), 5)
    assert other.key == first.key
    assert find(index, child.key, child.chunk, other) is None


def test_the_first_copy_of_a_content_stays_canonical() -> None:
    index = PrefixIndex()
    (first,) = listed(index, ((1, 2),), 0)
    (again,) = listed(index, ((1, 2),), 7)
    assert again is first
    assert index.block_ids == {0}


def test_an_unreachable_copy_gives_way_to_a_reachable_one() -> None:
    index = PrefixIndex()
    first, _ = listed(index, ((1, 2), (3, 4)), 0)
    index.forget(first.block_id)
    _, child = listed(index, ((1, 2), (3, 4)), 10)
    assert child.block_id == 11
    assert index.block_ids == {10, 11}


def test_a_collision_with_a_reachable_entry_leaves_it_in_place() -> None:
    index = PrefixIndex(colliding_key)
    first, child = listed(index, ((0, 0), (1, 0)), 0)
    other = PrefixEntry(first.key, pack_tokens((1, 1)), ROOT, BlockId(9))
    assert index.publish(child.key, child.chunk, other, BlockId(8)) == (None, None)
    assert find(index, child.key, child.chunk, first) is child


def test_roots_separate_salt_adapter_format_and_epoch() -> None:
    roots = [
        CacheRoot(),
        CacheRoot(salt="a"),
        CacheRoot(adapter_id="a"),
        CacheRoot(kv_format="a"),
        CacheRoot(kv_epoch=1),
    ]
    assert len({root.key() for root in roots}) == len(roots)
    index = PrefixIndex()
    for i, root in enumerate(roots):
        chunk = pack_tokens((1,))
        assert find(index, index.key_of(root.key(), chunk), chunk, root) is None
        index.publish(index.key_of(root.key(), chunk), chunk, root, BlockId(i))
    assert len(index) == len(roots)


def test_the_root_key_does_not_depend_on_the_process() -> None:
    assert CacheRoot(salt="tenant", adapter_id="lora-1").key() == 2663462600047527445


def test_tokens_are_packed_without_loss_and_an_id_too_large_is_refused() -> None:
    token_ids = (0, 1, 2**16, 2**32 - 1)
    assert unpack_tokens(pack_tokens(token_ids)) == token_ids
    for wrong in (-1, 2**32):
        with pytest.raises(ValueError, match="token_ids must be integers between 0 and 2"):
            pack_tokens([5, wrong])


def keys_of(chunks: list[Chunk], key_of: Callable[[BlockKey, Chunk], BlockKey]) -> list[BlockKey]:
    keys: list[BlockKey] = []
    for chunk in chunks:
        keys.append(key_of(keys[-1] if keys else ROOT.key(), chunk))
    return keys


@pytest.mark.parametrize("forgotten", [None, 0, 1, 2, 3])
@pytest.mark.parametrize("asked_first", [None, 0, 1, 2, 3])
def test_a_run_that_nobody_asked_for_answers_like_its_blocks_one_by_one(
    forgotten: int | None, asked_first: int | None
) -> None:
    chunks = [pack_tokens((i, i)) for i in range(4)]
    keys = keys_of(chunks, chain_key)
    index = PrefixIndex()
    last, listed, _ = index.publish_run(keys, chunks, ROOT, [BlockId(10 + i) for i in range(4)])
    assert isinstance(last, PrefixEntry) and index.lists(last) and list(listed) == [10, 11, 12, 13]
    after = pack_tokens((9, 9))
    behind, _ = index.publish(chain_key(keys[-1], after), after, last, BlockId(14))
    if asked_first is not None:
        find(index, keys[asked_first], chunks[asked_first], ROOT)
    if forgotten is not None:
        index.forget(BlockId(10 + forgotten))
    parent: PrefixEntry | CacheRoot = ROOT
    hits: list[int] = []
    for key, chunk in zip(keys, chunks, strict=True):
        entry = find(index, key, chunk, parent)
        if entry is None:
            break
        hits.append(entry.block_id)
        parent = entry
    assert hits == list(range(10, 10 + (4 if forgotten is None else forgotten)))
    assert len(index) == 5 - (forgotten is not None)
    assert last.is_listed is index.lists(last) is (forgotten != 3)
    if forgotten is None:
        assert parent is last
        assert find(index, chain_key(keys[-1], after), after, parent) is behind
    assert index.clear() == {10, 11, 12, 13, 14} - (
        set() if forgotten is None else {10 + forgotten}
    )
    assert not last.is_listed and not len(index)


def test_a_run_with_colliding_keys_lists_what_can_be_told_apart() -> None:
    chunks = [pack_tokens((i, 0)) for i in (2, 4, 6)]
    keys = keys_of(chunks, colliding_key)
    assert len(set(keys)) < 3
    index = PrefixIndex(colliding_key)
    last, listed, displaced = index.publish_run(keys, chunks, ROOT, [BlockId(i) for i in range(3)])
    assert (last, list(listed), list(displaced)) == (None, [0], [])
    assert len(index) == 1 == len(index.block_ids)
