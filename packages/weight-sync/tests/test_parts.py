"""Rectangles of the sender's tensors: buckets, shards, experts, and domains that they cut."""

import itertools
import random

import pytest
import torch

from syncline.weight_sync import (
    DtypeMismatchError,
    DuplicateTensorError,
    IncompleteUpdateError,
    Mode,
    NameTable,
    Region,
    ShapeMismatchError,
    SlotSource,
    Update,
    WeightSlot,
)
from syncline.weight_sync.regions import slices
from syncline.weight_sync.testing import (
    CycleEncoder,
    IdentityEncoder,
    RecordingGuard,
    ScaledEncoder,
    StandIn,
    cold_bytes,
    counting,
    make_slot,
    stored_bytes,
)

both_modes = pytest.mark.parametrize("mode", ["direct", "staged"])
every_encoder = pytest.mark.parametrize(
    "encoder",
    [
        IdentityEncoder(),
        CycleEncoder(),
        ScaledEncoder(),
        ScaledEncoder((None, None)),
        ScaledEncoder((2, 2)),
        ScaledEncoder((None, 1)),
    ],
    ids=["identity", "cycle", "row", "tensor", "block", "column"],
)


def begin(*slots: WeightSlot, mode: Mode = "direct") -> Update:
    return Update.begin(NameTable(slots), 1, guard=RecordingGuard(), mode=mode)


def put_part(update: Update, name: str, full: torch.Tensor, part: Region) -> None:
    update.put(name, full[slices(part)], part)


@every_encoder
@both_modes
def test_every_single_cut_in_either_order_stores_the_cold_bytes(
    encoder: StandIn, mode: Mode
) -> None:
    full = counting((6, 4))
    for dim, size in enumerate((6, 4)):
        for cut in range(1, size):
            parts: list[Region] = []
            for interval in ((0, cut), (cut, size)):
                bounds = [(0, 6), (0, 4)]
                bounds[dim] = interval
                parts.append(tuple(bounds))
            for order in (parts, parts[::-1]):
                slot = make_slot("w", (6, 4), encoder)
                update = begin(slot, mode=mode)
                for part in order:
                    put_part(update, "w", full, part)
                report = update.commit()
                assert report.coverage == 1.0
                assert stored_bytes(slot) == cold_bytes(slot, full)


@every_encoder
@both_modes
def test_single_elements_in_any_order_store_the_cold_bytes(encoder: StandIn, mode: Mode) -> None:
    full = counting((6, 4))
    cells = list(itertools.product(range(6), range(4)))
    random.Random(0).shuffle(cells)
    slot = make_slot("w", (6, 4), encoder)
    update = begin(slot, mode=mode)
    for row, column in cells:
        put_part(update, "w", full, ((row, row + 1), (column, column + 1)))
        assert update.num_buffered_bytes <= full.nbytes
    assert update.num_buffered_bytes == 0
    update.commit()
    assert stored_bytes(slot) == cold_bytes(slot, full)


def test_a_part_that_cuts_a_domain_waits_and_the_domain_is_encoded_when_whole() -> None:
    full = counting((2, 4))
    slot = make_slot("w", (2, 4), ScaledEncoder())
    update = begin(slot)
    put_part(update, "w", full, ((0, 2), (0, 3)))
    assert update.num_buffered_bytes == 24
    assert update.bytes_written == 0
    assert not update.live_bytes_written
    put_part(update, "w", full, ((1, 2), (3, 4)))
    assert update.bytes_written == 4 + 4  # one row and its scale
    # The part that waits for row 0 is one copy of two rows; it goes when both are encoded.
    assert update.num_buffered_bytes == 24
    put_part(update, "w", full, ((0, 1), (3, 4)))
    assert update.num_buffered_bytes == 0
    assert update.commit().max_buffered_bytes == 24
    assert stored_bytes(slot) == cold_bytes(slot, full)


def test_whole_domains_inside_a_part_do_not_wait_for_its_edges() -> None:
    full = counting((9, 2))
    slot = make_slot("w", (9, 2), CycleEncoder())
    update = begin(slot)
    put_part(update, "w", full, ((1, 8), (0, 2)))
    assert update.bytes_written == 3 * 2 * 4
    assert update.num_buffered_bytes == 4 * 2 * 4


def test_a_domain_that_became_whole_does_not_wait_for_its_neighbours() -> None:
    full = counting((3, 4))
    slot = make_slot("w", (3, 4), CycleEncoder())
    update = begin(slot)
    put_part(update, "w", full, ((0, 1), (0, 2)))
    put_part(update, "w", full, ((1, 3), (0, 4)))
    assert update.bytes_written == 3 * 2 * 4
    put_part(update, "w", full, ((0, 1), (2, 4)))
    update.commit()
    assert stored_bytes(slot) == cold_bytes(slot, full)


def test_a_leftover_that_never_became_whole_is_incomplete() -> None:
    slot = make_slot("w", (2, 4), ScaledEncoder())
    update = begin(slot)
    put_part(update, "w", counting((2, 4)), ((0, 1), (0, 4)))
    put_part(update, "w", counting((2, 4)), ((1, 2), (0, 3)))
    with pytest.raises(IncompleteUpdateError) as caught:
        update.commit()
    assert [(each.slot, each.region) for each in caught.value.missing] == [("w", ((1, 2), (3, 4)))]


def test_a_part_may_be_overwritten_by_its_sender_once_put_returned() -> None:
    full = counting((2, 4))
    slot = make_slot("w", (2, 4), ScaledEncoder((None, None)))
    update = begin(slot)
    bucket = torch.empty(1, 4)
    for row in range(2):
        bucket.copy_(full[row : row + 1])
        update.put("w", bucket, ((row, row + 1), (0, 4)))
        bucket.fill_(torch.nan)
    update.commit()
    assert stored_bytes(slot) == cold_bytes(slot, full)


@both_modes
def test_elements_that_come_twice_are_refused_before_a_byte_is_written(mode: Mode) -> None:
    slot = make_slot("w", (4, 2), IdentityEncoder())
    update = begin(slot, mode=mode)
    put_part(update, "w", counting((4, 2)), ((0, 3), (0, 2)))
    for again in (((2, 4), (0, 2)), ((0, 3), (0, 2)), ((1, 2), (1, 2)), ((0, 4), (0, 2))):
        with pytest.raises(DuplicateTensorError, match="came twice") as caught:
            put_part(update, "w", torch.zeros(4, 2), again)
        assert caught.value.name == "w"
    put_part(update, "w", counting((4, 2)), ((3, 4), (0, 2)))
    update.commit()
    assert slot.storage["weight"].equal(counting((4, 2)))


def test_two_spellings_of_one_region_are_a_duplicate_that_names_both() -> None:
    sources = (
        SlotSource(name="gate", region=((0, 2), (0, 2))),
        SlotSource(name="up", region=((2, 4), (0, 2))),
    )
    update = begin(make_slot("gate_up", (4, 2), IdentityEncoder(), sources))
    update.put("gate", counting((2, 2)))
    with pytest.raises(DuplicateTensorError, match="gate_up, which gate fed") as caught:
        update.put("gate_up", counting((4, 2)))
    assert caught.value.region == ((0, 2), (0, 2))
    update.put("gate_up", counting((2, 2)), ((2, 4), (0, 2)))
    assert update.commit().num_tensors == 2


def test_an_empty_part_of_a_tensor_may_come_any_number_of_times() -> None:
    slot = make_slot("w", (2, 2), IdentityEncoder())
    update = begin(slot)
    for _ in range(2):
        update.put("w", torch.zeros(0, 2), ((2, 2), (0, 2)))
    assert not update.live_bytes_written
    update.put("w", counting((2, 2)))
    assert update.commit().bytes_written == 16


@pytest.mark.parametrize("part", [((0, 3), (0, 2)), ((0, 2),), ((2, 1), (0, 2))])
def test_a_part_outside_the_full_shape_is_a_bad_argument(part: Region) -> None:
    update = begin(make_slot("w", (2, 2), IdentityEncoder()))
    with pytest.raises(ValueError, match="part of w"):
        update.put("w", counting((2, 2)), part)


def test_a_domain_put_together_from_two_dtypes_is_refused() -> None:
    slot = make_slot("w", (1, 4), ScaledEncoder())
    update = begin(slot)
    update.put("w", counting((1, 2)), ((0, 1), (0, 2)))
    with pytest.raises(DtypeMismatchError, match=r"float32, as the other parts.*bfloat16"):
        update.put("w", counting((1, 2)).bfloat16(), ((0, 1), (2, 4)))
    update.put("w", counting((1, 2), 3), ((0, 1), (2, 4)))
    update.commit()
    assert stored_bytes(slot) == cold_bytes(slot, counting((1, 4)))


def test_tensors_larger_and_smaller_than_a_bucket_arrive_whole() -> None:
    """Buckets of 64 bytes cut 40, 100, 24 and 64 byte tensors wherever they end."""
    sizes = {"a": 10, "b": 25, "c": 6, "d": 16}
    slots = [make_slot(name, (size,), IdentityEncoder()) for name, size in sizes.items()]
    update = begin(*slots)
    room = 16
    for first, (name, size) in enumerate(sizes.items()):
        start = 0
        while start < size:
            stop = min(size, start + room)
            put_part(update, name, counting((size,), 100 * first), ((start, stop),))
            room -= stop - start
            room, start = room or 16, stop
    report = update.commit()
    assert (report.num_tensors, report.bytes_written) == (4, 57 * 4)
    for first, slot in enumerate(slots):
        assert stored_bytes(slot) == cold_bytes(slot, counting(slot.logical_shape, 100 * first))


def shards(world: int, dim: int) -> list[WeightSlot]:
    """Rank r holds rows or columns [4r / world, 4(r + 1) / world) of a square matrix."""
    size = 4 // world
    found = []
    for rank in range(world):
        shape, taken = [4, 4], [(0, 4), (0, 4)]
        shape[dim] = size
        taken[dim] = (rank * size, (rank + 1) * size)
        source = SlotSource(
            name="w",
            region=tuple((0, each) for each in shape),
            full_shape=(4, 4),
            taken=tuple(taken),
        )
        found.append(make_slot("w", tuple(shape), IdentityEncoder(), (source,)))
    return found


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("dim", [0, 1])
@both_modes
def test_each_rank_takes_its_declared_share_of_the_full_tensor(
    world: int, dim: int, mode: Mode
) -> None:
    """A square matrix fits both ways: the share is declared, never guessed from sizes."""
    full = counting((4, 4))
    for rank, slot in enumerate(shards(world, dim)):
        for version in range(3):
            update = Update.begin(NameTable([slot]), version, guard=RecordingGuard(), mode=mode)
            update.put("w", full * (version + 1))
            assert update.commit().coverage == 1.0
            share = full.chunk(world, dim)[rank] * (version + 1)
            assert slot.storage["weight"].equal(share)


def test_a_rank_local_tensor_is_refused_unless_it_says_which_part_it_is() -> None:
    slot = shards(2, 0)[1]
    update = begin(slot)
    with pytest.raises(ShapeMismatchError, match=r"must be \(4, 4\), got \(2, 4\)"):
        update.put("w", counting((2, 4)))
    assert not update.live_bytes_written
    update.put("w", counting((2, 4)), ((2, 4), (0, 4)))
    update.commit()
    assert slot.storage["weight"].equal(counting((2, 4)))


def test_a_part_for_another_rank_is_taken_and_writes_nothing() -> None:
    slot = shards(2, 0)[1]
    update = begin(slot)
    update.put("w", counting((2, 4)), ((0, 2), (0, 4)))
    assert not update.live_bytes_written
    with pytest.raises(IncompleteUpdateError):
        update.commit()


def expert_slot(rank: int, world: int) -> WeightSlot:
    """Two experts' gate and up, 4 rows each, as [expert, 2 * share, hidden]; every spelling."""
    share = 4 // world
    rows = (rank * share, (rank + 1) * share)
    sources = []
    for expert, (half, name) in itertools.product(range(2), enumerate(("gate", "up"))):
        sources.append(
            SlotSource(
                name=f"experts.{expert}.{name}_proj.weight",
                region=((expert, expert + 1), (half * share, (half + 1) * share), (0, 3)),
                full_shape=(4, 3),
                taken=(rows, (0, 3)),
            )
        )
    for half, name in itertools.product(range(2), ("gate_up_proj", "gate_up_proj.weight")):
        taken = (half * 4 + rows[0], half * 4 + rows[1])
        sources.append(
            SlotSource(
                name=f"experts.{name}",
                region=((0, 2), (half * share, (half + 1) * share), (0, 3)),
                full_shape=(2, 8, 3),
                taken=((0, 2), taken, (0, 3)),
            )
        )
    return make_slot("experts.w13", (2, 2 * share, 3), IdentityEncoder(), tuple(sources))


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("fused", [None, "experts.gate_up_proj", "experts.gate_up_proj.weight"])
def test_experts_arrive_alike_fused_and_one_by_one(world: int, fused: str | None) -> None:
    full = torch.stack([counting((8, 3), 100 * expert) for expert in range(2)])
    for rank in range(world):
        slot = expert_slot(rank, world)
        update = begin(slot)
        if fused is not None:
            update.put(fused, full)
        else:
            for expert, (half, name) in itertools.product(range(2), enumerate(("gate", "up"))):
                rows = full[expert, 4 * half : 4 * half + 4]
                update.put(f"experts.{expert}.{name}_proj.weight", rows)
        update.commit()
        share = 4 // world
        gate = full[:, rank * share : (rank + 1) * share]
        up = full[:, 4 + rank * share : 4 + (rank + 1) * share]
        assert slot.storage["weight"].equal(torch.cat([gate, up], dim=1))


def test_one_expert_left_out_is_named() -> None:
    update = begin(expert_slot(0, 1))
    for name in ("0.gate", "0.up", "1.up"):
        update.put(f"experts.{name}_proj.weight", counting((4, 3)))
    with pytest.raises(IncompleteUpdateError) as caught:
        update.commit()
    (missing,) = caught.value.missing
    assert missing.region == ((1, 2), (0, 4), (0, 3))
    assert missing.names[0] == "experts.1.gate_proj.weight"


def test_an_expert_of_another_rank_is_known_and_lands_nowhere() -> None:
    here = SlotSource(name="expert.0", region=((0, 1), (0, 2)), full_shape=(2,))
    there = SlotSource(name="expert.1", region=((0, 0), (0, 2)), full_shape=(2,))
    slot = make_slot("experts", (1, 2), IdentityEncoder(), (here, there))
    update = begin(slot)
    update.put("expert.1", counting((2,), 10))
    update.put("expert.0", counting((2,)))
    report = update.commit()
    assert (report.num_tensors, report.bytes_written) == (2, 8)
    assert slot.storage["weight"].tolist() == [[1, 2]]


def test_a_convolution_kernel_may_lack_the_dimension_of_one_that_its_sender_has() -> None:
    source = SlotSource(name="conv1d.weight", region=((0, 3), (0, 2)), full_shape=(3, 1, 2))
    slot = make_slot("conv", (3, 2), CycleEncoder(), (source,))
    full = counting((3, 1, 2))
    update = begin(slot)
    put_part(update, "conv1d.weight", full, ((0, 3), (0, 1), (1, 2)))
    put_part(update, "conv1d.weight", full, ((0, 3), (0, 1), (0, 1)))
    update.commit()
    assert stored_bytes(slot) == cold_bytes(slot, full.reshape(3, 2))
