"""The transaction: what is open, what a commit promises, what an abort leaves behind."""

from collections.abc import Callable

import pytest
import torch

from syncline.weight_sync import (
    EncoderContractError,
    IncompleteUpdateError,
    Mode,
    NameTable,
    SlotSource,
    StaleVersionError,
    UnknownNameError,
    Update,
    UpdateOptions,
    UpdateState,
    UpdateStateError,
    WeightSlot,
    stored_checksums,
)
from syncline.weight_sync.checksums import combined_checksum
from syncline.weight_sync.regions import Region
from syncline.weight_sync.testing import (
    CycleEncoder,
    FaultyEncoder,
    IdentityEncoder,
    RecordingGuard,
    ScaledEncoder,
    addresses,
    cold_bytes,
    counting,
    make_slot,
    snapshot,
    stored_bytes,
    ticking_clock,
)

MODES: tuple[Mode, ...] = ("direct", "staged")
both_modes = pytest.mark.parametrize("mode", MODES)


def two_slots() -> list[WeightSlot]:
    return [
        make_slot("plain", (4, 2), IdentityEncoder()),
        make_slot("laid_out", (3, 4), CycleEncoder()),
    ]


@both_modes
def test_a_committed_update_stores_what_a_cold_load_stores(mode: Mode) -> None:
    slots = two_slots()
    update = Update.begin(NameTable(slots), 1, guard=RecordingGuard(), mode=mode)
    for slot in slots:
        update.put(slot.name, counting(slot.logical_shape))
    update.commit()
    for slot in slots:
        assert stored_bytes(slot) == cold_bytes(slot, counting(slot.logical_shape))


@both_modes
def test_the_report_tells_what_happened_in_numbers(mode: Mode) -> None:
    slots = two_slots()
    table = NameTable(slots, ignored=["inv_freq"])
    options = UpdateOptions(clock=ticking_clock(), with_checksum=True)
    update = Update.begin(table, 7, guard=RecordingGuard(), mode=mode, options=options)
    update.put("inv_freq", counting((3,)))
    for slot in slots:
        update.put(slot.name, counting(slot.logical_shape))
    report = update.commit()
    assert (report.version, report.mode) == (7, mode)
    assert (report.num_tensors, report.num_slots) == (2, 2)
    assert report.bytes_written == report.bytes_total == (8 + 12) * 4
    assert report.coverage == 1.0
    assert report.ignored == ("inv_freq",)
    assert report.aliases == report.derived == ()
    assert report.max_buffered_bytes == 0
    assert report.checksum == combined_checksum(stored_checksums(slots))
    expected = {"check", "encode", "wait", "total"} | ({"swap"} if mode == "staged" else set())
    assert set(report.seconds) == expected
    assert report.seconds["encode"] == 2.0
    assert report.seconds["total"] > sum(report.seconds[phase] for phase in expected - {"total"})


@both_modes
def test_addresses_never_change(mode: Mode) -> None:
    slots = [*two_slots(), make_slot("scaled", (4, 2), ScaledEncoder())]
    before = addresses(slots)
    tensors = {(slot.name, key): tensor for slot in slots for key, tensor in slot.storage.items()}
    for version in range(3):
        update = Update.begin(NameTable(slots), version, guard=RecordingGuard(), mode=mode)
        for slot in slots:
            update.put(slot.name, counting(slot.logical_shape, version))
        update.commit()
        assert addresses(slots) == before
    for slot in slots:
        for key, tensor in slot.storage.items():
            assert tensor is tensors[slot.name, key]


@both_modes
def test_what_captured_the_storage_before_an_update_reads_the_new_bytes(mode: Mode) -> None:
    slots = two_slots()
    captured = [slot.storage["weight"].view(-1) for slot in slots]
    update = Update.begin(NameTable(slots), 1, guard=RecordingGuard(), mode=mode)
    for slot in slots:
        update.put(slot.name, counting(slot.logical_shape))
    update.commit()
    for view, slot in zip(captured, slots, strict=True):
        assert bytes(view.view(torch.uint8).tolist()) == stored_bytes(slot)["weight"]
        assert view.count_nonzero() == view.numel()


@both_modes
def test_the_same_update_three_times_stores_the_same_bytes(mode: Mode) -> None:
    slots = [
        make_slot("laid_out", (3, 4), CycleEncoder()),
        make_slot("scaled", (4, 2), ScaledEncoder()),
        make_slot("untouched", (3, 2), CycleEncoder()),
    ]
    table = NameTable(slots[:2])
    slots[2].storage["weight"].fill_(5)
    seen = []
    for version in range(3):
        update = Update.begin(table, version, guard=RecordingGuard(), mode=mode)
        for slot in slots[:2]:
            update.put(slot.name, torch.full(slot.logical_shape, 3.0) * counting((1, 1)))
        update.commit()
        seen.append(snapshot(slots))
    assert seen[0] == seen[1] == seen[2]
    scale, weight = slots[1].storage["scale"], slots[1].storage["weight"]
    assert torch.allclose(weight * scale, torch.tensor(3.0))
    update = Update.begin(table, 3, guard=RecordingGuard(), mode=mode)
    for slot in slots[:2]:
        update.put(slot.name, counting(slot.logical_shape))
    update.commit()
    for slot in slots[:2]:
        assert stored_bytes(slot) == cold_bytes(slot, counting(slot.logical_shape))
    assert slots[2].storage["weight"].eq(5).all()


def test_an_update_of_some_slots_is_an_update_of_their_table() -> None:
    slots = two_slots()
    with pytest.raises(IncompleteUpdateError, match="laid_out"):
        update = Update.begin(NameTable(slots), 1, guard=RecordingGuard(), mode="staged")
        update.put("plain", counting((4, 2)))
        update.commit()
    assert not slots[0].storage["weight"].any()
    update = Update.begin(NameTable(slots[:1]), 1, guard=RecordingGuard())
    update.put("plain", counting((4, 2)))
    assert update.commit().coverage == 1.0


@both_modes
def test_an_incomplete_commit_lists_everything_and_can_be_mended(mode: Mode) -> None:
    sources = (
        SlotSource(name="q", region=((0, 2), (0, 2))),
        SlotSource(name="k", region=((2, 3), (0, 2))),
        SlotSource(name="v", region=((3, 4), (0, 2))),
    )
    slots = [make_slot("qkv", (4, 2), IdentityEncoder(), sources), *two_slots()]
    guard = RecordingGuard()
    update = Update.begin(NameTable(slots), 1, guard=guard, mode=mode)
    update.put("k", counting((1, 2)))
    update.put("plain", counting((2, 2)), ((0, 2), (0, 2)))
    with pytest.raises(IncompleteUpdateError) as caught:
        update.commit()
    missing = {(each.slot, each.region): each.names for each in caught.value.missing}
    assert missing == {
        ("qkv", ((0, 2), (0, 2))): ("q", "qkv"),
        ("qkv", ((3, 4), (0, 2))): ("v", "qkv"),
        ("plain", ((2, 4), (0, 2))): ("plain",),
        ("laid_out", ((0, 3), (0, 4))): ("laid_out",),
    }
    assert "4 region(s) of 3 slot(s)" in str(caught.value)
    assert "qkv[3:4, 0:2] (from v or qkv)" in str(caught.value)
    assert update.state is UpdateState.OPEN
    assert guard.held == update.guard_held == (mode == "direct")
    update.put("q", counting((2, 2)))
    update.put("v", counting((1, 2)))
    update.put("plain", counting((2, 2)), ((2, 4), (0, 2)))
    update.put("laid_out", counting((3, 4)))
    assert update.commit().coverage == 1.0
    assert not guard.held


def test_a_long_list_is_cut_in_the_message_and_whole_in_the_attribute() -> None:
    slots = [make_slot(f"w{i}", (1,), IdentityEncoder()) for i in range(50)]
    update = Update.begin(NameTable(slots), 1, guard=RecordingGuard())
    with pytest.raises(IncompleteUpdateError, match="and 30 more") as caught:
        update.commit()
    assert len(caught.value.missing) == 50


@both_modes
@pytest.mark.parametrize("end", ["commit", "abort"])
def test_after_its_end_every_operation_names_the_state(mode: Mode, end: str) -> None:
    update = Update.begin(
        NameTable([make_slot("w", (2,), IdentityEncoder())]), 4, guard=RecordingGuard(), mode=mode
    )
    update.put("w", counting((2,)))
    if end == "commit":
        update.commit()
    else:
        update.abort("test")
    state = {"commit": "committed", "abort": "aborted"}[end]
    assert update.state.value == state
    calls: dict[str, Callable[[], object]] = {
        "put": lambda: update.put("w", counting((2,))),
        "prepare": update.prepare,
        "commit": update.commit,
        "abort": lambda: update.abort("again"),
    }
    for action, call in calls.items():
        with pytest.raises(UpdateStateError, match=f"cannot {action}.*version 4 is {state}") as got:
            call()
        assert (got.value.action, got.value.state) == (action, state)


def test_an_abort_before_a_live_byte_leaves_the_old_weights_valid() -> None:
    slots = two_slots()
    before = snapshot(slots)
    guard = RecordingGuard()
    update = Update.begin(NameTable(slots), 1, guard=guard, mode="staged")
    update.put("plain", counting((4, 2)))
    report = update.abort("the trainer went away")
    assert not report.live_bytes_written
    assert (report.version, report.reason) == (1, "the trainer went away")
    assert (report.num_tensors, report.bytes_written, report.bytes_total) == (1, 32, 80)
    assert snapshot(slots) == before
    assert guard.calls == []


def test_an_abort_after_a_live_byte_says_so_and_a_full_update_repairs_it() -> None:
    slots = two_slots()
    guard = RecordingGuard()
    update = Update.begin(NameTable(slots), 1, guard=guard)
    seen = [update.live_bytes_written]
    update.put("plain", counting((4, 2)))
    seen.append(update.live_bytes_written)
    assert seen == [False, True]
    assert update.abort("no reason").live_bytes_written
    assert guard.calls == ["acquire", "first_write", "release"]
    update = Update.begin(NameTable(slots), 2, guard=guard)
    for slot in slots:
        update.put(slot.name, counting(slot.logical_shape, 100))
    update.commit()
    for slot in slots:
        assert stored_bytes(slot) == cold_bytes(slot, counting(slot.logical_shape, 100))


@both_modes
def test_nothing_of_an_aborted_update_completes_a_later_one(mode: Mode) -> None:
    """One half before the abort, the other half after it: never a weight of two trainer states."""
    halves = (
        SlotSource(name="gate", region=((0, 2), (0, 4))),
        SlotSource(name="up", region=((2, 4), (0, 4))),
    )
    slot = make_slot("gate_up", (4, 4), ScaledEncoder((None, None)), halves)
    table = NameTable([slot])
    first = Update.begin(table, 1, guard=RecordingGuard(), mode=mode)
    first.put("gate", counting((2, 4)))
    assert first.num_buffered_bytes == 32
    assert not first.abort("lost").live_bytes_written
    assert first.num_buffered_bytes == 0
    second = Update.begin(table, 2, guard=RecordingGuard(), mode=mode)
    second.put("up", counting((2, 4)))
    with pytest.raises(IncompleteUpdateError) as caught:
        second.commit()
    assert [each.region for each in caught.value.missing] == [((0, 2), (0, 4))]
    second.put("gate", counting((2, 4), 50))
    second.commit()
    assert stored_bytes(slot) == cold_bytes(
        slot, torch.cat([counting((2, 4), 50), counting((2, 4))])
    )


@both_modes
def test_an_encoder_that_fails_half_way_does_not_count(mode: Mode) -> None:
    good = make_slot("good", (2,), IdentityEncoder())
    encoder = FaultyEncoder(IdentityEncoder(), broken=True)
    bad = WeightSlot(
        name="bad", logical_shape=(2,), storage=IdentityEncoder().storage((2,)), encoder=encoder
    )
    guard = RecordingGuard()
    update = Update.begin(NameTable([good, bad]), 1, guard=guard, mode=mode)
    with pytest.raises(RuntimeError, match="half way"):
        update.put("bad", counting((2,)))
    assert update.live_bytes_written == (mode == "direct")
    assert (bad.storage["weight"][0] == 77) == (mode == "direct")
    assert update.bytes_written == 0
    update.put("good", counting((2,)))
    with pytest.raises(IncompleteUpdateError, match="bad"):
        update.commit()
    encoder.broken = False
    update.put("bad", counting((2,), 5))
    update.commit()
    assert bad.storage["weight"].tolist() == [5, 6]


def test_a_put_that_fails_in_one_of_its_slots_may_be_sent_again_whole() -> None:
    source = (SlotSource(name="tied", region=((0, 2),)),)
    first = make_slot("embed", (2,), IdentityEncoder(), source)
    encoder = FaultyEncoder(IdentityEncoder(), broken=True)
    storage = IdentityEncoder().storage((2,))
    second = WeightSlot(
        name="head", logical_shape=(2,), storage=storage, sources=source, encoder=encoder
    )
    update = Update.begin(NameTable([first, second]), 1, guard=RecordingGuard())
    with pytest.raises(RuntimeError, match="half way"):
        update.put("tied", counting((2,)))
    encoder.broken = False
    update.put("tied", counting((2,)))
    assert update.commit().bytes_written == 16
    assert second.storage["weight"].tolist() == [1, 2]


def test_a_refused_name_leaves_the_update_open_and_a_resync_succeeds() -> None:
    slots = two_slots()
    guard = RecordingGuard()
    update = Update.begin(NameTable(slots), 1, guard=guard, mode="staged")
    update.put("plain", counting((4, 2)))
    with pytest.raises(UnknownNameError):
        update.put("plain.weight", counting((4, 2)))
    assert update.state is UpdateState.OPEN
    assert not update.abort("unknown name").live_bytes_written
    update = Update.begin(NameTable(slots), 1, guard=guard, mode="staged")
    for slot in slots:
        update.put(slot.name, counting(slot.logical_shape))
    assert update.commit().version == 1


@pytest.mark.parametrize("version", [-1, True, 1.0, "1", None])
def test_a_version_is_an_int_of_at_least_zero(version: int) -> None:
    with pytest.raises(ValueError, match="version must be an int >= 0"):
        Update.begin(NameTable([]), version, guard=RecordingGuard())


def test_a_version_is_newer_than_the_current_one_or_equal_where_allowed() -> None:
    table, guard = NameTable([]), RecordingGuard()
    equal = UpdateOptions(current_version=3, allow_equal_version=True)
    assert Update.begin(table, 0, guard=guard).version == 0
    assert Update.begin(table, 4, guard=guard, options=UpdateOptions(current_version=3)).version
    assert Update.begin(table, 3, guard=guard, options=equal).version == 3
    for version, options in ((3, UpdateOptions(current_version=3)), (2, equal)):
        with pytest.raises(StaleVersionError) as caught:
            Update.begin(table, version, guard=guard, options=options)
        assert (caught.value.version, caught.value.current) == (version, 3)


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="mode must be"):
        Update.begin(NameTable([]), 1, guard=RecordingGuard(), mode="both")  # type: ignore[arg-type]  # the test


def test_no_rank_commits_unless_every_rank_is_prepared() -> None:
    ranks = [two_slots() for _ in range(2)]
    before = [snapshot(slots) for slots in ranks]
    updates = [
        Update.begin(NameTable(slots), 1, guard=RecordingGuard(), mode="staged") for slots in ranks
    ]
    for update in updates:
        update.put("plain", counting((4, 2)))
    updates[0].put("laid_out", counting((3, 4)))
    updates[0].prepare()
    with pytest.raises(IncompleteUpdateError, match="laid_out"):
        updates[1].prepare()
    for update, slots, old in zip(updates, ranks, before, strict=True):
        assert not update.abort("rank 1 is incomplete").live_bytes_written
        assert snapshot(slots) == old


def test_an_encoder_whose_blocks_do_not_add_up_is_named_and_not_committed() -> None:
    class Miscounting(IdentityEncoder):
        def region_bytes(self, logical_shape: tuple[int, ...], region: Region) -> int:
            return 1

    slot = make_slot("w", (4,), Miscounting())
    update = Update.begin(NameTable([slot]), 1, guard=RecordingGuard())
    update.put("w", counting((2,)), ((0, 2),))
    update.put("w", counting((2,)), ((2, 4),))
    with pytest.raises(EncoderContractError, match="own 2 bytes, the slot 1"):
        update.commit()


def test_an_update_of_an_empty_table_commits_and_asks_nobody() -> None:
    guard = RecordingGuard()
    report = Update.begin(NameTable([]), 1, guard=guard, mode="staged").commit()
    assert (report.coverage, report.bytes_total) == (1.0, 0)
    assert guard.calls == []
