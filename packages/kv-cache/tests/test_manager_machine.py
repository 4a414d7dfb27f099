"""KVCacheManager against the truth: an array that says which context each slot really holds.

The model writes KV (the whole token prefix, per slot) exactly where a table reserves it, copies
blocks when told to, and checks that everything a match hands out really holds that prefix.
"""

from typing import cast
from unittest import TestCase

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from syncline.kv_cache import BlockTable, KVCacheManager, Lease, PrefixIndex, chain_key
from syncline.kv_cache.testing import colliding_key

Context = tuple[str, int, tuple[int, ...]]  # Salt, epoch, tokens up to and with this position.


class Stream:
    """A sequence as its owner sees it: tokens, a table, and how far its KV is computed."""

    def __init__(self, tokens: list[int], salt: str, table: BlockTable) -> None:
        self.tokens = tokens
        self.salt = salt
        self.table = table
        self.num_computed = 0


class ManagerMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(1, 7),
        block_size=st.integers(1, 3),
        caching=st.booleans(),
        collide=st.booleans(),
    )
    def create(self, num_blocks: int, block_size: int, caching: bool, collide: bool) -> None:
        index = PrefixIndex(colliding_key if collide else chain_key)
        self.kv = KVCacheManager(num_blocks, block_size, enable_prefix_caching=caching, index=index)
        self.truth: dict[int, Context] = {}
        self.streams: list[Stream] = []
        self.leases: list[Lease] = []

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9),
        salt=st.sampled_from(["", "other"]),
        cacheable=st.booleans(),
    )
    def admit(self, tokens: list[int], salt: str, cacheable: bool) -> None:
        kv = self.kv
        table = kv.new_table(cache_salt=salt, cacheable=cacheable)
        match = kv.match(table, tokens, len(tokens) - 1)
        assert match == kv.match(table, tokens, len(tokens) - 1)
        assert match.num_tokens < len(tokens)
        if not (cacheable and kv.enable_prefix_caching):
            assert match.num_tokens == 0
        free_before = kv.num_free_blocks
        taken = kv.reserve(table, len(tokens), match)
        if taken is None:
            assert kv.num_free_blocks == free_before
            assert not table.block_ids
            return
        for source, destination in taken.copies:
            for offset in range(kv.block_size):
                slot = source * kv.block_size + offset
                self.truth[destination * kv.block_size + offset] = self.truth[slot]
        stream = Stream(tokens, salt, table)
        stream.num_computed = match.num_tokens
        for position, slot in enumerate(table.slots(0, match.num_tokens)):
            assert self.truth[slot] == self.context(stream, position)
        kv.expect(table, tokens, len(tokens))
        self.streams.append(stream)

    def context(self, stream: Stream, position: int) -> Context:
        return stream.salt, stream.table.root.kv_epoch, tuple(stream.tokens[: position + 1])

    @precondition(lambda self: self.streams)
    @rule(data=st.data(), num_tokens=st.integers(1, 5))
    def compute(self, data: st.DataObject, num_tokens: int) -> None:
        stream = data.draw(st.sampled_from(self.streams))
        kv, table = self.kv, stream.table
        stop = min(len(stream.tokens), stream.num_computed + num_tokens)
        shared = {b for s in self.streams if s is not stream for b in s.table.block_ids}
        for position in range(stream.num_computed, stop):
            (slot,) = table.slots(position, position + 1)
            assert slot // kv.block_size not in shared
            self.truth[slot] = self.context(stream, position)
        stream.num_computed = stop
        kv.publish(table, stream.tokens, stop, kv.kv_epoch)

    @precondition(lambda self: self.streams)
    @rule(data=st.data(), token=st.integers(0, 1))
    def grow(self, data: st.DataObject, token: int) -> None:
        stream = data.draw(st.sampled_from(self.streams))
        num_blocks = len(stream.table.block_ids)
        got = self.kv.reserve(stream.table, len(stream.tokens) + 1)
        if got is None:
            assert self.kv.num_free_blocks == 0
            assert len(stream.table.block_ids) == num_blocks
            return
        stream.tokens.append(token)

    @precondition(lambda self: self.streams)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        stream = data.draw(st.sampled_from(self.streams))
        self.streams.remove(stream)
        self.kv.release(stream.table)
        self.kv.release(stream.table)

    @precondition(lambda self: self.streams)
    @rule(data=st.data())
    def take_lease(self, data: st.DataObject) -> None:
        stream = data.draw(st.sampled_from(self.streams))
        self.leases.append(self.kv.lease(stream.table.block_ids))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def end_lease(self, data: st.DataObject) -> None:
        self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1))).release()

    @rule()
    def bump_epoch(self) -> None:
        before = self.kv.kv_epoch
        assert self.kv.bump_epoch() == before + 1
        assert self.kv.num_cached_blocks == 0

    @precondition(lambda self: not self.streams and not self.leases)
    @rule(num_blocks=st.integers(1, 7))
    def resize(self, num_blocks: int) -> None:
        self.kv.resize(num_blocks)
        self.truth.clear()
        assert self.kv.num_free_blocks == self.kv.num_blocks == num_blocks

    @invariant()
    def the_books_balance(self) -> None:
        self.kv.check_integrity(stream.table for stream in self.streams)
        held = {b for stream in self.streams for b in stream.table.block_ids}
        held |= {b for lease in self.leases for b in lease.block_ids}
        assert self.kv.num_free_blocks == self.kv.num_blocks - len(held)

    @invariant()
    def every_computed_position_still_holds_its_context(self) -> None:
        for stream in self.streams:
            slots = stream.table.slots(0, stream.num_computed)
            for position, slot in enumerate(slots):
                assert self.truth[slot] == self.context(stream, position)


TestManager = cast(type[TestCase], ManagerMachine.TestCase)  # pyright: ignore[reportUnknownMemberType]  untyped there
