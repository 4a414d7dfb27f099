"""Two names of one tensor: either brings it, both must agree."""

import pytest
import torch

from syncline.weight_sync import (
    AliasMismatchError,
    DuplicateTensorError,
    IncompleteUpdateError,
    Mode,
    NameTable,
    SlotSource,
    Update,
    WeightSlot,
)
from syncline.weight_sync.testing import (
    CycleEncoder,
    IdentityEncoder,
    RecordingGuard,
    ScaledEncoder,
    StandIn,
    cold_bytes,
    counting,
    make_slot,
    snapshot,
    stored_bytes,
)

both_modes = pytest.mark.parametrize("mode", ["direct", "staged"])
every_encoder = pytest.mark.parametrize(
    "encoder",
    [IdentityEncoder(), CycleEncoder(), ScaledEncoder(), ScaledEncoder((None, None))],
    ids=["identity", "cycle", "row", "tensor"],
)
ways_to_send = pytest.mark.parametrize(
    "names", [["embed"], ["lm_head"], ["embed", "lm_head"], ["lm_head", "embed"]]
)
FULL = counting((6, 4))


def tied(encoder: StandIn) -> tuple[WeightSlot, NameTable]:
    slot = make_slot("embed", (6, 4), encoder)
    return slot, NameTable([slot], aliases={"lm_head": "embed"})


def begin(table: NameTable, mode: Mode = "direct") -> Update:
    return Update.begin(table, 1, guard=RecordingGuard(), mode=mode)


@every_encoder
@both_modes
@pytest.mark.parametrize(
    "names", [["embed"], ["lm_head"], ["embed", "lm_head"], ["lm_head", "embed"]]
)
def test_either_name_or_both_bring_the_tensor(
    encoder: StandIn, mode: Mode, names: list[str]
) -> None:
    slot, table = tied(encoder)
    update = begin(table, mode)
    for name in names:
        update.put(name, FULL)
    report = update.commit()
    assert stored_bytes(slot) == cold_bytes(slot, FULL)
    assert report.bytes_written == report.bytes_total
    assert report.num_tensors == len(names)
    assert report.aliases == (("lm_head",) if "lm_head" in names else ())


@every_encoder
@both_modes
@pytest.mark.parametrize("names", [["embed", "lm_head"], ["lm_head", "embed"]])
def test_two_names_with_two_contents_are_refused(
    encoder: StandIn, mode: Mode, names: list[str]
) -> None:
    slot, table = tied(encoder)
    update = begin(table, mode)
    update.put(names[0], FULL)
    other = FULL.clone()
    other[4, 1] = -100
    before = snapshot([slot])
    with pytest.raises(AliasMismatchError, match=f"{names[1]}.*{names[0]}") as caught:
        update.put(names[1], other)
    assert (caught.value.slot, caught.value.others) == ("embed", (names[0],))
    assert snapshot([slot]) == before
    update.commit()
    assert stored_bytes(slot) == cold_bytes(slot, FULL)


def test_contents_are_compared_as_they_are_stored() -> None:
    slot = make_slot("embed", (2,), IdentityEncoder(torch.bfloat16))
    update = begin(NameTable([slot], aliases={"lm_head": "embed"}))
    values = torch.tensor([1.0009765625, 3.0])
    update.put("embed", values)
    update.put("lm_head", values.bfloat16())
    update.commit()


@every_encoder
@both_modes
def test_the_two_names_may_be_cut_apart_differently(encoder: StandIn, mode: Mode) -> None:
    slot, table = tied(encoder)
    update = begin(table, mode)
    update.put("embed", FULL[:4], ((0, 4), (0, 4)))
    update.put("lm_head", FULL[:, 1:], ((0, 6), (1, 4)))
    update.put("embed", FULL[4:], ((4, 6), (0, 4)))
    update.put("lm_head", FULL[:, :1], ((0, 6), (0, 1)))
    update.commit()
    assert stored_bytes(slot) == cold_bytes(slot, FULL)


@pytest.mark.parametrize(("row", "column"), [(0, 0), (3, 1), (5, 3)])
def test_a_difference_in_one_element_shows_however_it_is_cut(row: int, column: int) -> None:
    slot, table = tied(IdentityEncoder())
    update = begin(table)
    other = FULL.clone()
    other[row, column] += 1
    with pytest.raises(AliasMismatchError):
        update.put("embed", FULL[:4], ((0, 4), (0, 4)))
        update.put("lm_head", other[:, 1:], ((0, 6), (1, 4)))
        update.put("embed", FULL[4:], ((4, 6), (0, 4)))
        update.put("lm_head", other[:, :1], ((0, 6), (0, 1)))
    assert slot.storage["weight"].any()


def test_each_name_is_refused_twice_on_its_own() -> None:
    _, table = tied(IdentityEncoder())
    update = begin(table)
    update.put("embed", FULL)
    update.put("lm_head", FULL)
    for name in ("embed", "lm_head"):
        with pytest.raises(DuplicateTensorError, match=name):
            update.put(name, FULL)


def test_a_part_of_an_alias_that_was_never_compared_is_incomplete() -> None:
    slot, table = tied(ScaledEncoder())
    update = begin(table)
    update.put("embed", FULL)
    update.put("lm_head", FULL[:, :2], ((0, 6), (0, 2)))
    with pytest.raises(IncompleteUpdateError) as caught:
        update.commit()
    assert [each.region for each in caught.value.missing] == [((0, 6), (2, 4))]
    update.put("lm_head", FULL[:, 2:], ((0, 6), (2, 4)))
    update.commit()
    assert stored_bytes(slot) == cold_bytes(slot, FULL)


def test_neither_name_alone_is_whole_when_each_brings_half_a_domain() -> None:
    _, table = tied(ScaledEncoder())
    update = begin(table)
    update.put("embed", FULL[:, :1], ((0, 6), (0, 1)))
    update.put("lm_head", FULL[:, 1:], ((0, 6), (1, 4)))
    with pytest.raises(IncompleteUpdateError) as caught:
        update.commit()
    assert [each.region for each in caught.value.missing] == [((0, 6), (0, 1))]


@pytest.mark.parametrize(
    "names", [["embed"], ["lm_head"], ["embed", "lm_head"], ["lm_head", "embed"]]
)
def test_a_tied_head_that_is_stored_apart_follows_the_embedding(names: list[str]) -> None:
    """One name feeds both slots, and the head's own name is the alias of it."""
    embed = make_slot("embed", (6, 4), IdentityEncoder())
    feed = (SlotSource(name="embed", region=((0, 6), (0, 4))),)
    head = make_slot("lm_head", (6, 4), CycleEncoder(), feed)
    update = begin(NameTable([embed, head], aliases={"lm_head": "embed"}))
    for name in names:
        update.put(name, FULL)
    assert update.commit().num_slots == 2
    for slot in (embed, head):
        assert stored_bytes(slot) == cold_bytes(slot, FULL)


def test_an_untied_head_that_does_not_come_is_missing() -> None:
    slots = [make_slot(name, (6, 4), IdentityEncoder()) for name in ("embed", "lm_head")]
    update = begin(NameTable(slots))
    update.put("embed", FULL)
    with pytest.raises(IncompleteUpdateError, match="lm_head"):
        update.commit()
