"""Who waits for whom: a block is expected as long as one table is computing it, and no longer."""

import itertools

from syncline.kv_cache import BlockKey, KVCacheManager, PrefixIndex

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9]


def is_expected(kv: KVCacheManager) -> bool:
    return kv.match(kv.new_table(), PROMPT, 8).awaited_key is not None


def test_a_block_is_expected_until_the_last_table_that_computes_it_has_given_up() -> None:
    for order in itertools.permutations(range(3)):
        kv = KVCacheManager(16, 4)
        tables = [kv.new_table() for _ in range(3)]
        for table in tables:
            assert kv.reserve(table, 9) is not None
            kv.expect(table, PROMPT, 8)
        for i, last in zip(order, (False, False, True), strict=True):
            assert is_expected(kv)
            kv.release(tables[i])
            assert is_expected(kv) is not last
        kv.check_integrity([])


def test_a_block_expected_in_two_chunks_counts_once() -> None:
    kv = KVCacheManager(16, 4)
    table = kv.new_table()
    assert kv.reserve(table, 9) is not None
    for stop in (3, 5, 8, 8, 9):
        kv.expect(table, PROMPT, stop)
        kv.check_integrity([table])
    kv.release(table)
    assert not is_expected(kv)
    kv.check_integrity([])


def test_a_partial_block_is_expected_by_nobody() -> None:
    kv = KVCacheManager(16, 4)
    table = kv.new_table()
    assert kv.reserve(table, 9) is not None
    kv.expect(table, PROMPT, 3)
    assert not is_expected(kv)
    kv.expect(table, PROMPT, 4)
    assert is_expected(kv)


def test_a_table_of_an_older_epoch_expects_nothing_that_others_could_wait_for() -> None:
    kv = KVCacheManager(16, 4)
    table = kv.new_table()
    assert kv.reserve(table, 9) is not None
    kv.bump_epoch()
    kv.expect(table, PROMPT, 8)
    assert not is_expected(kv)
    assert table.num_expected == 0


def test_expectations_of_before_a_new_epoch_end_with_their_table() -> None:
    kv = KVCacheManager(16, 4)
    table = kv.new_table()
    assert kv.reserve(table, 9) is not None
    kv.expect(table, PROMPT, 8)
    kv.bump_epoch()
    assert not is_expected(kv)
    kv.check_integrity([table])
    kv.release(table)
    kv.check_integrity([])


def test_blocks_of_one_table_whose_keys_collide_are_expected_each_for_itself() -> None:
    kv = KVCacheManager(16, 4, index=PrefixIndex(lambda parent, chunk: BlockKey(0)))
    tables = [kv.new_table() for _ in range(2)]
    for table in tables:
        assert kv.reserve(table, 9) is not None
        kv.expect(table, PROMPT, 8)  # Two blocks, one key.
        kv.check_integrity(tables)
    kv.publish(tables[0], PROMPT, 4, kv.kv_epoch)
    kv.check_integrity(tables)
    kv.publish(tables[0], PROMPT, 8, kv.kv_epoch)
    kv.check_integrity(tables)
    assert is_expected(kv)
    kv.release(tables[1])
    kv.check_integrity(tables)
    assert not is_expected(kv)
