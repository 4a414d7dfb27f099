"""BlockPool against the obvious model: a Counter of holders and two ordered free lists."""

import tracemalloc
from collections import Counter
from typing import Any, cast
from unittest import TestCase

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from syncline.kv_cache import BlockId, BlockNotHeldError, BlockPool, IntegrityError, KVCacheManager


class BlockPoolMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(1, 8))
    def create(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.evicted: list[BlockId] = []
        self.pool = BlockPool(num_blocks, self.evicted.append)
        self.holders: Counter[BlockId] = Counter()
        self.free_order = [BlockId(i) for i in range(num_blocks)]
        self.evictable: list[BlockId] = []
        self.cached: set[BlockId] = set()

    @rule(num_blocks=st.integers(0, 9))
    def allocate(self, num_blocks: int) -> None:
        self.evicted.clear()
        got = self.pool.allocate(num_blocks)
        if num_blocks > len(self.free_order) + len(self.evictable):
            assert got is None
            assert not self.evicted
            return
        expected = (self.free_order + self.evictable)[:num_blocks]
        num_plain = min(num_blocks, len(self.free_order))
        assert got == expected
        assert self.evicted == expected[num_plain:]
        self.free_order = self.free_order[num_plain:]
        self.evictable = self.evictable[num_blocks - num_plain :]
        self.cached -= set(self.evicted)
        self.holders.update(expected)

    @precondition(lambda self: self.holders or self.evictable)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(sorted({*self.holders, *self.evictable})))
        self.pool.share([block_id])
        if block_id in self.evictable:
            self.evictable.remove(block_id)
        self.holders[block_id] += 1

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(sorted(self.holders)))
        self.pool.free([block_id])
        self.holders[block_id] -= 1
        if not self.holders[block_id]:
            del self.holders[block_id]
            (self.evictable if block_id in self.cached else self.free_order).append(block_id)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def mark(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(sorted(self.holders)))
        self.pool.mark_cached(block_id)
        self.cached.add(block_id)

    @rule(data=st.data())
    def unmark(self, data: st.DataObject) -> None:
        block_id = BlockId(data.draw(st.integers(0, self.num_blocks - 1)))
        self.pool.unmark_cached(block_id)
        self.cached.discard(block_id)
        if block_id in self.evictable:
            self.evictable.remove(block_id)
            self.free_order.append(block_id)

    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        block_id = BlockId(data.draw(st.integers(0, self.num_blocks - 1)))
        self.pool.touch(block_id)
        if block_id in self.evictable:
            self.evictable.remove(block_id)
            self.evictable.append(block_id)

    @rule(block_id=st.integers(-3, 10))
    def misuse_is_rejected(self, block_id: int) -> None:
        if block_id in self.holders:
            return
        with pytest.raises(BlockNotHeldError):
            self.pool.free([BlockId(block_id)])
        with pytest.raises(BlockNotHeldError):
            self.pool.mark_cached(BlockId(block_id))
        if block_id not in self.evictable:
            with pytest.raises(BlockNotHeldError):
                self.pool.share([BlockId(block_id)])

    @invariant()
    def every_block_is_free_or_held(self) -> None:
        assert self.pool.num_free_blocks + len(self.holders) == self.num_blocks
        assert self.pool.num_evictable_among(map(BlockId, range(self.num_blocks))) == len(
            self.evictable
        )
        self.pool.check([self.holders[BlockId(i)] for i in range(self.num_blocks)], self.cached)


TestBlockPool = cast(type[TestCase], BlockPoolMachine.TestCase)  # pyright: ignore[reportUnknownMemberType]  untyped there


@pytest.mark.parametrize("num_blocks", [0, -1])
def test_a_pool_needs_blocks(num_blocks: int) -> None:
    with pytest.raises(ValueError, match=f"num_blocks must be positive, got {num_blocks}"):
        BlockPool(num_blocks)


def test_a_negative_allocation_is_refused() -> None:
    with pytest.raises(ValueError, match="non-negative, got -1"):
        BlockPool(2).allocate(-1)


def test_free_keeps_what_it_did_before_the_block_nobody_holds() -> None:
    pool = BlockPool(3)
    taken = pool.allocate(2)
    assert taken is not None
    with pytest.raises(BlockNotHeldError) as error:
        pool.free([taken[0], BlockId(2), taken[1]])
    assert error.value.block_id == 2
    assert pool.num_free_blocks == 2


@pytest.mark.parametrize(
    ("holders", "cached", "message"),
    [
        ([1, 1, 0], set[BlockId](), "block 1 counts 0 holders, but 1"),
        ([0, 0, 0], set[BlockId](), "block 0 counts 1 holders, but 0"),
        ([1, 0, 0], {BlockId(1)}, "marks 0 blocks as cached"),
    ],
)
def test_check_sees_a_wrong_book(holders: list[int], cached: set[BlockId], message: str) -> None:
    pool = BlockPool(3)
    pool.allocate(1)
    with pytest.raises(IntegrityError, match=message):
        pool.check(holders, cached)


def test_a_pool_of_a_million_blocks_takes_few_bytes_for_each() -> None:
    tracemalloc.start()
    try:
        pool = BlockPool(1_000_000)
        num_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert pool.num_free_blocks == 1_000_000
    assert 1_000_000 < num_bytes < 16_000_000


def test_blocks_that_were_never_taken_go_before_those_that_were_freed() -> None:
    pool = BlockPool(5)
    first = pool.allocate(3)
    assert first is not None and first == [0, 1, 2]
    pool.free(first[::-1])
    assert pool.num_free_blocks == 5
    assert pool.allocate(4) == [3, 4, 2, 1]
    pool.check([0, 1, 1, 1, 1], set())
    with pytest.raises(IntegrityError):
        pool.check([1, 1, 1, 1, 1], set())


@pytest.mark.parametrize("size", [0, -1, 1.5, "4"])
def test_sizes_are_integers_above_zero(size: Any) -> None:
    with pytest.raises(ValueError, match=r"num_blocks must be (positive|an int), got"):
        BlockPool(size)
    with pytest.raises(ValueError, match=r"block_size must be (positive|an int), got"):
        KVCacheManager(4, size)
