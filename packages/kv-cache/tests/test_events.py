"""KV events against a router that knows nothing but them: it must know what a match would find.

After any order of admissions, computations, releases, evictions, clears, bumps and resizes, the
longest prefix that the router holds by key alone is exactly what `match` gives.
"""

import functools
import hashlib
import itertools
import struct
import sys
from types import CodeType, FrameType
from typing import cast
from unittest import TestCase

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from syncline.kv_cache import (
    AllBlocksCleared,
    BlockId,
    BlocksRemoved,
    BlocksStored,
    BlockTable,
    CacheRoot,
    KVCacheManager,
    KVEvent,
    KVEventLog,
    PrefixIndex,
    StableChain,
    chain_key,
    stable_key,
    stable_root_key,
)
from syncline.kv_cache.prefix_index import pack_tokens
from syncline.kv_cache.testing import colliding_key

MAX_TOKENS = 4
SALTS = ("", "other")


@functools.cache
def naive_key(parent: bytes, token_ids: tuple[int, ...]) -> bytes:
    packed = b"".join(token_id.to_bytes(8, "little") for token_id in token_ids)
    return hashlib.sha256(parent + packed).digest()


def naive_root_key(*texts: str) -> bytes:
    sized = [struct.pack("<Q", len(t.encode())) + t.encode() for t in texts]
    return hashlib.sha256(b"syncline.kv.root" + b"".join(sized)).digest()


class Router:
    """Keeps what the events say, and refuses a history that cannot be."""

    def __init__(self) -> None:
        self.parents: dict[bytes, bytes | None] = {}

    def take(self, events: list[KVEvent]) -> None:
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.parents.clear()
            elif isinstance(event, BlocksRemoved):
                for key in event.keys:
                    del self.parents[key]
            else:
                self.store(event)
        assert all(parent is None or parent in self.parents for parent in self.parents.values())

    def store(self, event: BlocksStored) -> None:
        size = event.block_size
        assert len(event.token_ids) == size * len(event.keys)
        parent = event.parent_key
        chain = parent or naive_root_key(event.salt, event.adapter_id, event.kv_format)
        for i, key in enumerate(event.keys):
            assert key == naive_key(chain, event.token_ids[i * size : (i + 1) * size])
            assert key not in self.parents
            self.parents[key] = parent
            parent = chain = key

    def num_hit_tokens(self, root_key: bytes, token_ids: tuple[int, ...], size: int) -> int:
        key = root_key
        for i in range(len(token_ids) // size):
            key = naive_key(key, token_ids[i * size : (i + 1) * size])
            if key not in self.parents:
                return i * size
        return len(token_ids) // size * size


class EventMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(1, 6), block_size=st.integers(1, 2), collide=st.booleans())
    def create(self, num_blocks: int, block_size: int, collide: bool) -> None:
        self.log = KVEventLog()
        self.kv = KVCacheManager(
            num_blocks,
            block_size,
            kv_format="bf16",
            index=PrefixIndex(colliding_key if collide else chain_key),
            event_log=self.log,
        )
        self.router = Router()
        self.seen: object = None
        self.streams: list[tuple[list[int], BlockTable]] = []

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=MAX_TOKENS),
        salt=st.sampled_from(SALTS),
        shares=st.booleans(),
    )
    def admit(self, tokens: list[int], salt: str, shares: bool) -> None:
        """Without sharing, equal contents are computed twice and become canonical duplicates."""
        table = self.kv.new_table(cache_salt=salt)
        match = self.kv.match(table, tokens, len(tokens) - 1) if shares else None
        if self.kv.reserve(table, len(tokens), match) is not None:
            self.streams.append((tokens, table))

    @precondition(lambda self: self.streams)
    @rule(data=st.data(), num_computed=st.integers(1, MAX_TOKENS))
    def compute(self, data: st.DataObject, num_computed: int) -> None:
        tokens, table = data.draw(st.sampled_from(self.streams))
        self.kv.publish(table, tokens, min(num_computed, len(tokens)), self.kv.kv_epoch)

    @precondition(lambda self: self.streams)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.streams) - 1))
        self.kv.release(self.streams.pop(index)[1])

    @rule()
    def clear(self) -> None:
        self.kv.clear_index()

    @rule()
    def bump(self) -> None:
        self.kv.bump_epoch()

    @precondition(lambda self: not self.streams)
    @rule(num_blocks=st.integers(1, 6))
    def resize(self, num_blocks: int) -> None:
        self.kv.resize(num_blocks)

    @invariant()
    def the_router_knows_what_a_match_would_find(self) -> None:
        events = self.log.take_events()
        assert self.log.take_events() == []
        self.router.take(events)
        assert len(self.router.parents) <= self.kv.num_cached_blocks
        before, self.seen = self.seen, (self.kv.num_cached_blocks, self.kv.stats)
        if before == self.seen and not events:
            return  # Nothing was listed or unlisted.
        for salt in SALTS:
            root_key = naive_root_key(salt, "", "bf16")
            for tokens in itertools.product((0, 1), repeat=MAX_TOKENS):
                table = self.kv.new_table(cache_salt=salt)
                found = self.kv.match(table, tokens, MAX_TOKENS).num_tokens
                assert self.router.num_hit_tokens(root_key, tokens, self.kv.block_size) == found


EventMachine.TestCase.settings = settings(stateful_step_count=25, deadline=None)  # pyright: ignore[reportUnknownMemberType]  untyped there
TestEvents = cast(type[TestCase], EventMachine.TestCase)  # pyright: ignore[reportUnknownMemberType]  untyped there


def test_a_run_of_blocks_is_one_event_and_orphans_go_with_their_parent() -> None:
    log = KVEventLog()
    kv = KVCacheManager(3, 2, event_log=log)
    table = kv.new_table(cache_salt="s", adapter_id="lora")
    kv.reserve(table, 6)
    kv.publish(table, [1, 2, 3, 4, 5, 6], 6, kv.kv_epoch)
    (stored,) = log.take_events()
    assert isinstance(stored, BlocksStored)
    assert (stored.parent_key, stored.token_ids) == (None, (1, 2, 3, 4, 5, 6))
    assert (stored.block_size, stored.salt, stored.adapter_id) == (2, "s", "lora")
    assert len(stored.keys) == 3
    kv.release(table)
    other = kv.new_table()
    kv.reserve(other, 2)
    assert log.take_events() == [BlocksRemoved(keys=stored.keys[2:])]
    kv.reserve(other, 6)
    assert log.take_events() == [BlocksRemoved(keys=(stored.keys[1], stored.keys[0]))]
    kv.clear_index()
    assert log.take_events() == [AllBlocksCleared()]


def test_an_eviction_of_the_head_removes_its_tail_although_the_tail_is_still_listed() -> None:
    log = KVEventLog()
    index = PrefixIndex()
    index.listener = log
    root = CacheRoot()
    key = root.key()
    one, two, three = (pack_tokens([i]) for i in (1, 2, 3))
    first, _ = index.publish(key_of := chain_key(key, one), one, root, BlockId(0))
    assert first is not None
    index.publish(chain_key(key_of, two), two, first, BlockId(1))
    (stored,) = log.take_events()
    assert isinstance(stored, BlocksStored)
    index.forget(BlockId(0))
    assert log.take_events() == [BlocksRemoved(keys=stored.keys)]
    index.publish(chain_key(chain_key(key_of, two), three), three, first, BlockId(2))
    index.forget(BlockId(1))
    assert (len(index), log.take_events()) == (1, [])


def test_keys_are_the_same_in_every_process_and_unlike_for_unlike_contents() -> None:
    root = stable_root_key(salt="s", adapter_id="a", kv_format="bf16")
    key = stable_key(root, (1, 2, 2**40))
    assert key.hex() == "e99b94f5c27f7286e453f2c2efba2b0029ad0d6dbacd6ecc4044d287ffa40730"
    roots = {
        stable_root_key(),
        stable_root_key(salt="a"),
        stable_root_key(adapter_id="a"),
        stable_root_key(kv_format="a"),
        stable_root_key(salt="a", adapter_id="b"),
        stable_root_key(salt="ab"),
        stable_root_key(salt="\ud800"),
    }
    assert len(roots) == 7
    assert len({stable_key(root, (1,)), stable_key(root, (1, 0)), stable_key(root, (256,))}) == 3


@pytest.mark.parametrize("token_id", [-1, 2**64])
def test_a_token_id_that_does_not_fit_is_refused(token_id: int) -> None:
    with pytest.raises(ValueError, match="token_ids must be between"):
        stable_key(stable_root_key(), (1, token_id))


def test_a_chain_gives_the_keys_of_full_blocks_only() -> None:
    root = stable_root_key()
    chain = StableChain(root, 2)
    tokens = [1, 2, 3, 4, 5]
    first = stable_key(root, (1, 2))
    assert chain.keys(tokens, 1) == (first,)
    assert chain.keys([*tokens, 6], 3)[:2] == (first, stable_key(first, (3, 4)))
    assert chain.keys(tokens, 0) == ()
    for num_blocks in (-1, 3):
        with pytest.raises(ValueError, match="num_blocks must be in"):
            chain.keys(tokens, num_blocks)


def num_stable_keys(event_log: KVEventLog | None) -> int:
    """How often `stable_key` is called while a block is published."""
    kv = KVCacheManager(1, 1, event_log=event_log)
    table = kv.new_table()
    kv.reserve(table, 1)
    called: list[CodeType] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            called.append(frame.f_code)

    sys.setprofile(note)
    try:
        assert kv.publish(table, [7], 1, kv.kv_epoch) == 1
    finally:
        sys.setprofile(None)
    return called.count(stable_key.__code__)


def test_no_stable_key_is_computed_unless_a_log_is_given() -> None:
    assert num_stable_keys(None) == 0
    assert num_stable_keys(KVEventLog()) == 1


def test_an_id_that_cannot_be_packed_is_refused_and_changes_nothing() -> None:
    for event_log in (None, KVEventLog()):
        kv = KVCacheManager(1, 1, event_log=event_log)
        table = kv.new_table()
        kv.reserve(table, 1)
        for wrong in (-1, 2**32):
            with pytest.raises(ValueError, match="token_ids must be integers between"):
                kv.publish(table, [wrong], 1, kv.kv_epoch)
            with pytest.raises(ValueError, match="token_ids must be integers between"):
                kv.expect(table, [wrong], 1)
        assert kv.num_cached_blocks == 0 and not table.keys
        kv.check_integrity([table])
