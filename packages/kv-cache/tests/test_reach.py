"""What a router hears is what a match can reach; what a hold has is given back."""

import pytest

from syncline.kv_cache import (
    AllBlocksCleared,
    BlocksStored,
    BlockTable,
    KVCacheManager,
    KVEvent,
    KVEventLog,
)


def published(kv: KVCacheManager, tokens: list[int]) -> BlockTable:
    table = kv.new_table()
    assert kv.reserve(table, len(tokens), kv.match(table, tokens, len(tokens) - 1)) is not None
    kv.publish(table, tokens, len(tokens), kv.kv_epoch)
    return table


def stored(events: list[KVEvent]) -> list[tuple[int, bool]]:
    """(blocks, whether they continue a chain) of each stored event."""
    return [
        (len(event.keys), event.parent_key is not None)
        for event in events
        if isinstance(event, BlocksStored)
    ]


def test_two_chains_are_two_events_however_close_they_come() -> None:
    log = KVEventLog()
    kv = KVCacheManager(8, 4, event_log=log)
    published(kv, [1] * 8)
    published(kv, [2] * 8)
    published(kv, [1] * 8 + [3] * 4)
    assert stored(log.take_events()) == [(2, False), (2, False), (1, True)]


def test_a_block_whose_parent_has_left_is_never_said_to_be_stored() -> None:
    log = KVEventLog()
    kv = KVCacheManager(8, 4, event_log=log)
    table = kv.new_table()
    assert kv.reserve(table, 8) is not None
    kv.publish(table, [1] * 8, 4, kv.kv_epoch)
    kv.clear_index()
    assert [type(event) for event in log.take_events()] == [BlocksStored, AllBlocksCleared]
    kv.publish(table, [1] * 8, 8, kv.kv_epoch)
    assert log.take_events() == []
    assert kv.match(kv.new_table(), [1] * 9, 8).num_tokens == 0


@pytest.mark.parametrize("num_prompt_tokens", range(1, 13))
def test_a_hold_parts_from_the_block_that_its_source_goes_on_writing(
    num_prompt_tokens: int,
) -> None:
    kv = KVCacheManager(16, 4, enable_prefix_caching=False)
    source = kv.new_table()
    assert kv.reserve(source, num_prompt_tokens + 1) is not None
    hold = kv.prompt_holds.take(source, num_prompt_tokens, kv.kv_epoch)
    assert hold is not None
    assert hold.num_tokens in (num_prompt_tokens - 1, (num_prompt_tokens - 1) // 4 * 4)
    copies = kv.prompt_holds.settle(hold)
    next_block = source.block_ids[num_prompt_tokens // 4]
    assert next_block not in hold.block_ids  # There the source writes its next position.
    assert all(source_id == next_block for source_id, _ in copies)
    kv.check_integrity([source])
    kv.release(source)
    kv.prompt_holds.drop(hold)
    assert kv.num_free_blocks == 16
    kv.check_integrity([])
