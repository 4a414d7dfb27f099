"""A prompt hold against arrays: what samples share and copy is the prompt, no block is lost."""

import itertools

import pytest

from syncline.kv_cache import BlockTable, KVCacheError, KVCacheManager, PrefixIndex, PromptHold
from syncline.kv_cache.testing import colliding_key

SIZE = 4
Copies = tuple[tuple[int, int], ...]


class Device:
    """What each slot holds: the tokens up to and with its position."""

    def __init__(self, kv: KVCacheManager) -> None:
        self.kv = kv
        self.slots: dict[int, tuple[int, ...]] = {}

    def copy(self, copies: Copies) -> None:
        for source, destination in copies:
            for offset in range(SIZE):
                value = self.slots.get(source * SIZE + offset)
                self.slots.pop(destination * SIZE + offset, None)
                if value is not None:
                    self.slots[destination * SIZE + offset] = value

    def write(self, table: BlockTable, tokens: list[int], start: int, stop: int) -> None:
        for position, slot in zip(range(start, stop), table.slots(start, stop), strict=True):
            self.slots[slot] = tuple(tokens[: position + 1])

    def reads(self, table: BlockTable, tokens: list[int], stop: int) -> bool:
        slots = table.slots(0, stop)
        return all(self.slots.get(s) == tuple(tokens[: p + 1]) for p, s in enumerate(slots))


def computed(kv: KVCacheManager, device: Device, prompt: list[int]) -> BlockTable:
    table = kv.new_table()
    match = kv.match(table, prompt, len(prompt) - 1)
    reservation = kv.reserve(table, len(prompt), match)
    assert reservation is not None
    device.copy(reservation.copies)
    device.write(table, prompt, match.num_tokens, len(prompt))
    kv.publish(table, prompt, len(prompt), kv.kv_epoch)
    return table


def hold_of(kv: KVCacheManager, table: BlockTable, num_tokens: int) -> PromptHold:
    hold = kv.prompt_holds.take(table, num_tokens, kv.kv_epoch)
    assert hold is not None
    return hold


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("collide", [True, False])
def test_every_sample_finds_the_prompt_and_writes_into_blocks_of_its_own(
    caching: bool, collide: bool
) -> None:
    """Every prompt length to 13, every moment of parting, the source going on or released."""
    for num_tokens, settles_after, source_ends in itertools.product(
        range(1, 14), range(4), (False, True)
    ):
        index = PrefixIndex(colliding_key) if collide else None
        kv = KVCacheManager(40, SIZE, enable_prefix_caching=caching, index=index)
        device = Device(kv)
        computed(kv, device, [9, 9, 9, 9, 8, 8, 8, 8, 7])
        prompt = [i % 3 for i in range(num_tokens)]
        source = computed(kv, device, prompt)
        hold = hold_of(kv, source, num_tokens)
        assert hold.num_tokens == num_tokens - 1
        if source_ends:
            kv.release(source)
        tables: list[BlockTable] = []
        for i in range(3):
            if i == settles_after:
                device.copy(kv.prompt_holds.settle(hold))
                if not source_ends:
                    assert kv.reserve(source, num_tokens + 1) is not None
                    device.write(source, [*prompt, 50], num_tokens, num_tokens + 1)
            table = kv.new_table()
            reservation = kv.prompt_holds.reserve(table, num_tokens, hold, is_last=i == 2)
            assert reservation is not None
            device.copy(reservation.copies)
            assert device.reads(table, prompt, num_tokens - 1)
            tables.append(table)
        kv.prompt_holds.drop(hold)
        written = [table.block_ids[(num_tokens - 1) // SIZE] for table in tables]
        assert len(set(written)) == 3 and not set(written) & set(source.block_ids)
        for table, token in zip(tables, (1, 2, 3), strict=True):
            tokens = [*prompt, token]
            device.write(table, tokens, num_tokens - 1, num_tokens)
            kv.publish(table, prompt, num_tokens, kv.kv_epoch)
            assert kv.reserve(table, num_tokens + 1) is not None
            device.write(table, tokens, num_tokens, num_tokens + 1)
        for table, token in zip(tables, (1, 2, 3), strict=True):
            assert device.reads(table, [*prompt, token], num_tokens + 1)
            kv.publish(table, [*prompt, token], num_tokens + 1, kv.kv_epoch)
        for table in (source, *tables):
            kv.release(table)
        # Whatever is in the index now is what it says.
        again = computed(kv, device, [*prompt, 1, 5])
        assert device.reads(again, [*prompt, 1, 5], num_tokens + 2)


def test_the_last_sample_takes_over_a_tail_that_is_the_holds_own() -> None:
    kv = KVCacheManager(4, SIZE)
    device = Device(kv)
    prompt = [1] * 7
    source = computed(kv, device, prompt)
    hold = hold_of(kv, source, 7)
    tail = source.block_ids[1]
    kv.release(source)
    assert kv.num_free_blocks == 2
    first, last = kv.new_table(), kv.new_table()
    reservation = kv.prompt_holds.reserve(first, 7, hold)
    assert reservation is not None and reservation.copies == ((tail, first.block_ids[1]),)
    reservation = kv.prompt_holds.reserve(last, 7, hold, is_last=True)
    assert reservation is not None and reservation.copies == ()
    assert last.block_ids[1] == tail and kv.num_free_blocks == 1
    kv.check_integrity([first, last])
    kv.prompt_holds.drop(hold)
    kv.check_integrity([first, last])


def test_a_listed_tail_is_copied_by_the_last_sample_too() -> None:
    """The prompt ends with its block, so that a hit may read it at any time."""
    kv = KVCacheManager(4, SIZE)
    source = computed(kv, Device(kv), [1] * 8)
    hold = hold_of(kv, source, 8)
    kv.release(source)
    table = kv.new_table()
    reservation = kv.prompt_holds.reserve(table, 8, hold, is_last=True)
    assert reservation is not None
    assert reservation.copies == ((hold.tail, table.block_ids[1]),)


def test_a_hold_without_a_block_for_its_tail_keeps_the_full_blocks() -> None:
    kv = KVCacheManager(2, SIZE)
    source = computed(kv, Device(kv), [1] * 7)
    hold = hold_of(kv, source, 7)
    assert (
        hold.is_tail_borrowed and hold.num_tokens == 6 and kv.prompt_holds.num_freed_by(hold) == 0
    )
    assert kv.prompt_holds.settle(hold) == ()
    assert (hold.num_tokens, hold.tail) == (4, None)
    kv.check_integrity([source])
    table = kv.new_table()
    assert kv.prompt_holds.reserve(table, 7, hold) is None
    assert table.block_ids == [] and kv.num_free_blocks == 0
    kv.release(source)
    assert kv.prompt_holds.num_freed_by(hold) == 1
    assert kv.prompt_holds.reserve(table, 7, hold) is not None
    kv.check_integrity([table])


def test_what_a_hold_cannot_be_used_for_is_refused_and_changes_nothing() -> None:
    kv = KVCacheManager(8, SIZE)
    source = computed(kv, Device(kv), [1] * 6)
    for num_tokens in (0, 9):
        with pytest.raises(ValueError, match="num_prompt_tokens"):
            kv.prompt_holds.take(source, num_tokens, kv.kv_epoch)
    assert kv.prompt_holds.take(source, 6, kv.kv_epoch + 1) is None
    hold = hold_of(kv, source, 6)
    with pytest.raises(ValueError, match="up_to_position"):
        kv.prompt_holds.reserve(kv.new_table(), 5, hold)
    with pytest.raises(KVCacheError, match="empty table"):
        kv.prompt_holds.reserve(source, 6, hold)
    for other in (kv.new_table(cache_salt="x"), kv.new_table(adapter_id="x")):
        with pytest.raises(KVCacheError, match="another salt"):
            kv.prompt_holds.reserve(other, 6, hold)
    kv.bump_epoch()
    assert kv.prompt_holds.take(source, 6, kv.kv_epoch) is None
    with pytest.raises(KVCacheError, match="epoch"):
        kv.prompt_holds.reserve(kv.new_table(), 6, hold)
    kv.check_integrity([source])
    kv.prompt_holds.drop(hold)
    for action in (kv.prompt_holds.drop, kv.prompt_holds.drop_tail, kv.prompt_holds.settle):
        with pytest.raises(KVCacheError, match="dropped"):
            action(hold)
    kv.check_integrity([source])
    kv.release(source)
    assert kv.num_free_blocks == 8


def test_what_a_sample_computes_behind_the_prompt_can_be_hit() -> None:
    """Its chain goes on where the shared blocks end, whatever the prompt's length."""
    for num_tokens in range(1, 13):
        kv = KVCacheManager(20, SIZE)
        device = Device(kv)
        prompt = list(range(num_tokens))
        hold = hold_of(kv, computed(kv, device, prompt), num_tokens)
        sample = kv.new_table()
        reservation = kv.prompt_holds.reserve(sample, 16, hold)
        assert reservation is not None
        tokens = [*prompt, *range(50, 66 - num_tokens)]
        kv.publish(sample, tokens, 16, kv.kv_epoch)
        match = kv.match(kv.new_table(), [*tokens, 9], 16)
        assert match.num_tokens == 16
        assert match.block_ids[num_tokens // SIZE :] == tuple(
            sample.block_ids[num_tokens // SIZE :]
        )
