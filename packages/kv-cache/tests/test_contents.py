"""What makes two contents one: every token of the block, all that precedes it, and the root.

Keys are forced to collide here (`colliding_key`), so that whatever is trusted without being
compared is shared in error at once.
"""

import itertools
from typing import Any

import pytest

from syncline.kv_cache import BlockTable, KVCacheManager, PrefixIndex, StaleMatchError
from syncline.kv_cache.testing import colliding_key


def make_manager(num_blocks: int = 16, *, collides: bool = False) -> KVCacheManager:
    index = PrefixIndex(colliding_key) if collides else PrefixIndex()
    return KVCacheManager(num_blocks, 4, index=index)


def admit(kv: KVCacheManager, tokens: list[int], table: BlockTable | None = None) -> BlockTable:
    """A table for `tokens`, reserved with whatever is cached, all computed and published."""
    table = kv.new_table() if table is None else table
    assert kv.reserve(table, len(tokens), kv.match(table, tokens, len(tokens) - 1)) is not None
    kv.publish(table, tokens, len(tokens), kv.kv_epoch)
    return table


def cached(kv: KVCacheManager, tokens: list[int]) -> int:
    return kv.match(kv.new_table(), tokens, len(tokens) - 1).num_tokens


@pytest.mark.parametrize("collides", [False, True])
def test_contents_that_differ_in_any_one_token_share_nothing_from_there_on(collides: bool) -> None:
    kv = make_manager(collides=collides)
    prompt = list(range(10, 22))
    admit(kv, prompt)
    num_listed = kv.num_cached_blocks
    for position in range(12):
        other = prompt.copy()
        other[position] += 2  # Another content of the same parity.
        longest = min(position // 4 * 4, num_listed * 4)
        assert cached(kv, [*other, 1]) == longest
    assert cached(kv, [*prompt, 1]) == num_listed * 4


def test_with_two_keys_for_all_contents_every_hit_is_still_a_true_one() -> None:
    kv = make_manager(32, collides=True)
    contents = [list(chunks) for chunks in itertools.product((0, 1, 2), repeat=4)]
    admitted = contents[::9]
    tables = [admit(kv, [*first, 5]) for first in admitted]
    assert kv.num_cached_blocks <= 2
    for content in contents:
        if cached(kv, [*content, 5]):
            assert content in admitted
    kv.check_integrity(tables)


def test_a_chain_cut_by_a_collision_publishes_nothing_behind_it() -> None:
    kv = make_manager(collides=True)
    kept = admit(kv, [0, 0, 0, 0])
    cut = admit(kv, [2, 0, 0, 0, 1, 0, 0, 0])
    assert cut.keys[0] == kept.keys[0]
    assert kv.num_cached_blocks == 1
    assert cut.parent is None
    assert cached(kv, [2, 0, 0, 0, 1, 0, 0, 0, 9]) == 0
    assert cached(kv, [0, 0, 0, 0, 1, 0, 0, 0, 9]) == 4
    kv.check_integrity([kept, cut])


@pytest.mark.parametrize(("salt", "adapter_id"), [("tenant", ""), ("", "lora"), ("", "")])
def test_a_table_moved_to_a_new_epoch_keeps_its_salt_and_adapter(
    salt: str, adapter_id: str
) -> None:
    kv = make_manager()
    old = kv.new_table(cache_salt=salt, adapter_id=adapter_id)
    kv.bump_epoch()
    admit(kv, [1] * 8, old)
    for other_salt, other_adapter in [("tenant", ""), ("", "lora"), ("", "")]:
        table = kv.new_table(cache_salt=other_salt, adapter_id=other_adapter)
        is_same = (other_salt, other_adapter) == (salt, adapter_id)
        assert kv.match(table, [1] * 9, 8).num_tokens == (8 if is_same else 0)


def test_a_match_whose_content_moved_to_another_block_is_refused() -> None:
    kv = make_manager(2)
    kv.release(admit(kv, [1] * 4))
    table = kv.new_table()
    match = kv.match(table, [1] * 5, 4)
    evictor = kv.new_table()
    assert kv.reserve(evictor, 8) is not None
    assert evictor.block_ids[1] == match.block_ids[0]
    kv.publish(evictor, [1] * 4, 4, kv.kv_epoch)
    assert cached(kv, [1] * 5) == 4
    with pytest.raises(StaleMatchError) as error:
        kv.reserve(table, 5, match)
    assert error.value.block_id == match.block_ids[0]
    kv.check_integrity([evictor])


def test_a_sequence_that_began_with_a_copied_block_extends_the_chain_behind_the_original() -> None:
    kv = make_manager()
    first = admit(kv, [1] * 8)
    second = kv.new_table()
    assert kv.reserve(second, 12, kv.match(second, [1] * 8, 7)) is not None
    tokens = [1] * 8 + [2] * 4
    assert kv.publish(second, tokens, 12, kv.kv_epoch) == 1
    match = kv.match(kv.new_table(), [*tokens, 3], 12)
    assert match.block_ids == (*first.block_ids, second.block_ids[2])
    kv.check_integrity([first, second])


def test_a_new_epoch_or_another_size_lists_nothing_of_before() -> None:
    kv = make_manager(4)
    kv.release(admit(kv, [1] * 8))
    assert kv.bump_epoch() == 1
    assert (kv.kv_epoch, kv.num_cached_blocks, cached(kv, [1] * 9)) == (1, 0, 0)
    kv.release(admit(kv, [1] * 8))
    kv.resize(6)
    assert (kv.num_blocks, kv.num_cached_blocks, cached(kv, [1] * 9)) == (6, 0, 0)
    kv.check_integrity([])


def test_a_table_that_opted_out_neither_hits_nor_is_listed_nor_awaited() -> None:
    kv = make_manager()
    listed = admit(kv, [1] * 8)
    aside = kv.new_table(cacheable=False)
    assert kv.match(aside, [1] * 9, 8).num_tokens == 0
    assert kv.reserve(aside, 12) is not None
    assert not set(aside.block_ids) & set(listed.block_ids)
    kv.expect(aside, [2] * 12, 12)
    assert kv.match(kv.new_table(), [2] * 9, 8).awaited_key is None
    assert kv.publish(aside, [2] * 12, 12, kv.kv_epoch) == 0
    assert (cached(kv, [2] * 9), cached(kv, [1] * 9)) == (0, 8)
    kv.check_integrity([listed, aside])


@pytest.mark.parametrize("num_computed_tokens", [-1, 7, 8])
def test_nothing_is_listed_for_tokens_that_were_not_given(num_computed_tokens: int) -> None:
    kv = KVCacheManager(4, 4)
    table = kv.new_table()
    kv.reserve(table, 8)
    with pytest.raises(ValueError, match="num_computed_tokens must be in"):
        kv.publish(table, [1, 2, 3, 4, 5, 6], num_computed_tokens, 0)
    assert kv.num_cached_blocks == 0
    assert kv.publish(table, [1, 2, 3, 4, 5, 6], 6, 0) == 1


def test_a_lease_holds_what_an_iterator_names() -> None:
    kv = KVCacheManager(4, 4)
    table = kv.new_table()
    kv.reserve(table, 8)
    block_ids: Any = iter(table.block_ids)
    lease = kv.lease(block_ids)
    kv.release(table)
    assert (lease.block_ids, kv.num_free_blocks) == ((0, 1), 2)
