"""What callers rely on, one scenario each, with its numbers."""

import pytest

from syncline.kv_cache import (
    BlockNotHeldError,
    BlocksInUseError,
    BlockTable,
    IntegrityError,
    KVCacheError,
    KVCacheManager,
    LeaseError,
    StaleMatchError,
)


def admit(kv: KVCacheManager, tokens: list[int], *, salt: str = "") -> BlockTable:
    """A table for `tokens`, reserved with whatever is cached, all computed and published."""
    table = kv.new_table(cache_salt=salt)
    assert kv.reserve(table, len(tokens), kv.match(table, tokens, len(tokens) - 1)) is not None
    kv.expect(table, tokens, len(tokens))
    kv.publish(table, tokens, len(tokens), kv.kv_epoch)
    return table


def cached(kv: KVCacheManager, tokens: list[int], *, salt: str = "") -> int:
    return kv.match(kv.new_table(cache_salt=salt), tokens, len(tokens) - 1).num_tokens


def test_reserve_takes_every_block_or_none() -> None:
    kv = KVCacheManager(4, 4)
    table = kv.new_table()
    assert kv.reserve(table, 17) is None
    assert kv.num_free_blocks == 4
    assert kv.reserve(table, 16) is not None
    assert table.num_tokens_capacity == 16
    assert kv.fits(16)
    assert not kv.fits(17)


def test_extend_each_gives_every_table_a_block_or_none() -> None:
    kv = KVCacheManager(3, 4)
    tables = [kv.new_table(), kv.new_table()]
    given = kv.extend_each(tables)
    assert given is not None
    assert [table.block_ids for table in tables] == [[given[0]], [given[1]]]
    assert kv.extend_each(tables) is None
    assert [len(table.block_ids) for table in tables] == [1, 1]
    kv.check_integrity(tables)


@pytest.mark.parametrize(("position", "num_blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_reserve_covers_positions_below_the_one_given(position: int, num_blocks: int) -> None:
    kv = KVCacheManager(4, 4)
    table = kv.new_table()
    assert kv.reserve(table, position) is not None
    assert len(table.block_ids) == num_blocks


def test_a_refused_admission_with_hits_has_no_side_effect() -> None:
    kv = KVCacheManager(4, 4)
    kv.release(admit(kv, [1] * 8))
    other = admit(kv, [9, 9, 9])
    table = kv.new_table()
    prompt = [1] * 8 + [2] * 8
    match = kv.match(table, prompt, 15)
    assert match.num_tokens == 8
    assert kv.reserve(table, 16, match) is None
    assert (kv.num_free_blocks, kv.num_cached_blocks, table.block_ids) == (3, 2, [])
    kv.release(other)
    reservation = kv.reserve(table, 16, kv.match(table, prompt, 15))
    assert reservation is not None
    assert len(reservation.new_block_ids) == 2
    kv.release(table)
    assert kv.num_free_blocks == 4


def test_a_reused_block_loses_its_old_content() -> None:
    kv = KVCacheManager(2, 4)
    first = [1, 2, 3, 4, 5]
    for fresh in range(100):
        kv.release(admit(kv, first))
        kv.release(admit(kv, [fresh + 10] * 8))
        assert cached(kv, first) == 0
        assert kv.num_cached_blocks <= 2


def test_a_fully_cached_prompt_copies_its_last_block_and_recomputes_one_token() -> None:
    kv = KVCacheManager(4, 4)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8]
    holder = admit(kv, prompt)
    table = kv.new_table()
    match = kv.match(table, prompt, 7)
    assert (match.num_tokens, match.copy_source) == (7, holder.block_ids[1])
    reservation = kv.reserve(table, 8, match)
    assert reservation is not None
    assert reservation.copies == ((holder.block_ids[1], table.block_ids[1]),)
    assert table.block_ids[0] == holder.block_ids[0]
    assert table.block_ids[1] != holder.block_ids[1]


def test_the_copy_source_is_the_last_block_to_be_evicted_for_the_copy() -> None:
    kv = KVCacheManager(2, 4)
    prompt = [1, 2, 3, 4]
    kv.release(admit(kv, prompt))
    kv.release(admit(kv, [7] * 4))
    table = kv.new_table()
    match = kv.match(table, prompt, 3)
    assert match.copy_source is not None
    reservation = kv.reserve(table, 4, match)
    assert reservation is not None
    assert reservation.copies == ((match.copy_source, reservation.new_block_ids[0]),)


def test_a_pool_of_one_block_reuses_the_copy_source_in_place() -> None:
    kv = KVCacheManager(1, 4)
    kv.release(admit(kv, [1, 2, 3, 4]))
    table = kv.new_table()
    reservation = kv.reserve(table, 4, kv.match(table, [1, 2, 3, 4], 3))
    assert reservation is not None
    assert reservation.copies == ()
    kv.check_integrity([table])


def test_only_computed_blocks_are_found_and_waited_for_until_then() -> None:
    kv = KVCacheManager(8, 4)
    prompt = [1] * 9
    first = kv.new_table()
    assert kv.reserve(first, 9) is not None
    assert kv.match(kv.new_table(), prompt, 8).awaited_key is None
    kv.expect(first, prompt, 8)
    match = kv.match(kv.new_table(), prompt, 8)
    assert (match.num_tokens, match.awaited_key) == (0, first.keys[1])
    # One that shares the first block only waits for that one.
    assert kv.match(kv.new_table(), [1] * 4 + [2] * 5, 8).awaited_key == first.keys[0]
    kv.publish(first, prompt, 7, kv.kv_epoch)
    match = kv.match(kv.new_table(), prompt, 8)
    assert (match.num_tokens, match.awaited_key) == (4, first.keys[1])
    kv.release(first)
    match = kv.match(kv.new_table(), prompt, 8)
    assert (match.num_tokens, match.awaited_key) == (4, None)
    kv.check_integrity([])


@pytest.mark.parametrize("how", ["published", "given up", "new epoch"])
def test_a_watched_key_is_told_once_when_nobody_computes_it_any_more(how: str) -> None:
    kv = KVCacheManager(8, 4)
    prompt = [1] * 8
    tables = [kv.new_table(), kv.new_table()]
    for table in tables:
        assert kv.reserve(table, 8) is not None
        kv.expect(table, prompt, 8)
    key = tables[0].keys[1]
    kv.watch(key)
    kv.watch(key)
    kv.release(tables[1])
    assert kv.take_settled() == [] and kv.is_awaited(key)
    if how == "published":
        kv.publish(tables[0], prompt, 4, kv.kv_epoch)
        assert kv.take_settled() == []
        kv.publish(tables[0], prompt, 8, kv.kv_epoch)
    elif how == "given up":
        kv.release(tables[0])
    else:
        kv.bump_epoch()
    assert kv.is_awaited(key)
    assert kv.take_settled() == [key] and kv.take_settled() == []
    assert not kv.is_awaited(key)
    kv.check_integrity([table for table in tables if table.block_ids])
    if how != "new epoch":
        with pytest.raises(ValueError, match="being computed"):
            kv.watch(key)


def test_a_withdrawn_table_keeps_its_blocks_and_publishes_again_after_its_release() -> None:
    kv = KVCacheManager(8, 4)
    prompt = [1] * 12
    table = kv.new_table()
    assert kv.reserve(table, 12) is not None
    kv.expect(table, prompt, 12)
    kv.publish(table, prompt, 4, kv.kv_epoch)
    kv.watch(table.keys[2])
    kv.withdraw(table)
    # Nobody waits for it any more, and what it had listed stays.
    assert kv.take_settled() == [table.keys[2]]
    match = kv.match(kv.new_table(), prompt, 11)
    assert (match.num_tokens, match.awaited_key) == (4, None)
    assert kv.publish(table, prompt, 12, kv.kv_epoch) == 0
    assert (kv.num_cached_blocks, kv.num_free_blocks) == (1, 5)
    kv.check_integrity([table])
    kv.release(table)
    kv.clear_index()
    assert kv.reserve(table, 12) is not None
    assert kv.publish(table, prompt, 12, kv.kv_epoch) == 3
    kv.check_integrity([table])


def test_a_stale_stamp_publishes_nothing() -> None:
    kv = KVCacheManager(4, 4)
    table = kv.new_table()
    assert kv.reserve(table, 8) is not None
    epoch = kv.kv_epoch
    kv.bump_epoch()
    assert kv.publish(table, [1] * 8, 8, epoch) == 0
    assert kv.publish(table, [1] * 8, 8, kv.kv_epoch) == 0
    assert kv.num_cached_blocks == 0
    kv.release(table)
    assert kv.reserve(table, 8, kv.match(table, [1] * 8, 7)) is not None
    assert kv.publish(table, [1] * 8, 8, kv.kv_epoch) == 2


def test_a_step_of_an_older_epoch_cannot_publish_into_a_renewed_table() -> None:
    kv = KVCacheManager(4, 4)
    table = admit(kv, [1] * 8)
    old_epoch = kv.kv_epoch
    kv.bump_epoch()
    kv.release(table)
    assert kv.reserve(table, 8) is not None
    assert kv.publish(table, [1] * 8, 8, old_epoch) == 0
    assert cached(kv, [1] * 9) == 0


def test_a_table_renewed_by_a_new_epoch_is_found_like_a_new_one() -> None:
    kv = KVCacheManager(4, 4)
    table = admit(kv, [1] * 8)
    kv.bump_epoch()
    kv.release(table)
    assert kv.reserve(table, 8) is not None
    assert kv.publish(table, [1] * 8, 8, kv.kv_epoch) == 2
    assert cached(kv, [1] * 9) == 8


def test_a_sequence_that_extends_a_shared_prefix_extends_the_chain() -> None:
    kv = KVCacheManager(8, 4)
    admit(kv, [1] * 4)
    admit(kv, [1] * 4 + [2] * 4)
    assert cached(kv, [1] * 4 + [2] * 5) == 8


def test_a_reservation_must_reach_beyond_its_match() -> None:
    kv = KVCacheManager(4, 4)
    admit(kv, [1] * 8)
    table = kv.new_table()
    match = kv.match(table, [1] * 8, 7)
    with pytest.raises(ValueError, match="exceed the match's 7 tokens"):
        kv.reserve(table, 4, match)
    assert not table.block_ids


def test_salts_do_not_share() -> None:
    kv = KVCacheManager(4, 4)
    admit(kv, [1] * 8, salt="a")
    assert cached(kv, [1] * 8, salt="b") == 0
    assert cached(kv, [1] * 9, salt="a") == 8


def test_without_prefix_caching_nothing_is_shared() -> None:
    kv = KVCacheManager(4, 4, enable_prefix_caching=False)
    admit(kv, [1] * 8)
    assert cached(kv, [1] * 8) == 0
    assert kv.num_cached_blocks == 0


def test_evicting_the_copy_keeps_the_canonical_block() -> None:
    kv = KVCacheManager(4, 4)
    tables = [kv.new_table() for _ in range(2)]
    for table in tables:
        assert kv.reserve(table, 4) is not None
    for table in tables:
        kv.publish(table, [1] * 4, 4, kv.kv_epoch)
    assert kv.num_cached_blocks == 1
    kv.check_integrity(tables)
    kv.release(tables[1])
    assert kv.reserve(kv.new_table(), 12) is not None
    assert cached(kv, [1] * 5) == 4


def test_least_recently_freed_content_is_evicted_first_tail_before_prefix() -> None:
    kv = KVCacheManager(4, 2)
    kv.release(admit(kv, [1] * 4))
    kv.release(admit(kv, [2] * 4))
    assert kv.reserve(kv.new_table(), 2) is not None
    assert (cached(kv, [1] * 5), cached(kv, [2] * 5)) == (2, 4)


def test_a_lease_keeps_blocks_that_their_sequence_gave_up() -> None:
    kv = KVCacheManager(2, 4)
    table = admit(kv, [1] * 8)
    lease = kv.lease(table.block_ids)
    kv.release(table)
    assert kv.num_free_blocks == 0
    with pytest.raises(BlocksInUseError) as error:
        kv.resize(3)
    assert error.value.num_held_blocks == 2
    lease.release()
    assert kv.num_free_blocks == 2
    with pytest.raises(LeaseError):
        lease.release()
    with pytest.raises(BlockNotHeldError):
        kv.lease(lease.block_ids)


def test_a_match_made_before_the_index_changed_is_refused() -> None:
    kv = KVCacheManager(4, 4)
    kv.release(admit(kv, [1] * 8))
    table = kv.new_table()
    match = kv.match(table, [1] * 9, 8)
    kv.clear_index()
    with pytest.raises(StaleMatchError):
        kv.reserve(table, 9, match)
    assert kv.num_free_blocks == 4


def test_a_table_with_blocks_takes_no_match() -> None:
    kv = KVCacheManager(4, 4)
    table = admit(kv, [1] * 4)
    with pytest.raises(KVCacheError, match="empty table"):
        kv.match(table, [1] * 8, 7)
    match = kv.match(kv.new_table(), [1] * 5, 4)
    with pytest.raises(KVCacheError, match="empty table"):
        kv.reserve(table, 8, match)


def test_publishing_more_than_is_reserved_is_refused() -> None:
    kv = KVCacheManager(4, 4)
    table = kv.new_table()
    assert kv.reserve(table, 4) is not None
    with pytest.raises(ValueError, match="at most 4"):
        kv.publish(table, [1] * 8, 8, kv.kv_epoch)


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 4), (4, 0), (-1, 4), (4, -4)])
def test_sizes_must_be_positive(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        KVCacheManager(num_blocks, block_size)


def test_a_forgotten_table_is_found_by_the_integrity_check() -> None:
    kv = KVCacheManager(4, 4)
    admit(kv, [1] * 4)
    with pytest.raises(IntegrityError, match="counts 1 holders, but 0"):
        kv.check_integrity([])


def test_positions_beyond_the_reservation_have_no_slot() -> None:
    kv = KVCacheManager(4, 4)
    table = kv.new_table()
    assert kv.reserve(table, 5) is not None
    assert table.slots(3, 5) == [table.block_ids[0] * 4 + 3, table.block_ids[1] * 4]
    with pytest.raises(ValueError, match=r"\[0, 8\)"):
        table.slots(7, 9)


def test_stats_count_what_happened() -> None:
    kv = KVCacheManager(2, 4)
    kv.release(admit(kv, [1] * 8))
    admit(kv, [2] * 4)
    stats = kv.stats
    assert (stats.num_blocks, stats.num_free_blocks, stats.num_cached_blocks) == (2, 1, 2)
    assert (stats.num_published_blocks, stats.num_evicted_blocks) == (3, 1)
