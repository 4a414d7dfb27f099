"""Slots and the name table: total, exact, and checked when they are declared."""

import pytest
import torch

from syncline.weight_sync import (
    Alias,
    DerivedTensor,
    Ignored,
    NameTable,
    SlotSource,
    Target,
    UnknownNameError,
    WeightSlot,
)
from syncline.weight_sync.regions import Region
from syncline.weight_sync.testing import (
    CycleEncoder,
    IdentityEncoder,
    ScaledEncoder,
    counting,
    make_slot,
)

QKV = (
    SlotSource(name="layers.0.q_proj.weight", region=((0, 4), (0, 2))),
    SlotSource(name="layers.0.k_proj.weight", region=((4, 6), (0, 2))),
    SlotSource(name="layers.0.v_proj.weight", region=((6, 8), (0, 2))),
)


def qkv_slot() -> WeightSlot:
    return make_slot("layers.0.qkv_proj.weight", (8, 2), IdentityEncoder(), QKV)


def target(table: NameTable, name: str) -> Target:
    found = table.resolve(name)
    assert isinstance(found, Target)
    return found


def test_separate_fused_and_own_names_all_resolve() -> None:
    table = NameTable([qkv_slot()])
    assert target(table, "layers.0.k_proj.weight").full_shape == (2, 2)
    assert target(table, "layers.0.k_proj.weight").landings[0].region == ((4, 6), (0, 2))
    assert target(table, "layers.0.qkv_proj.weight").landings[0].region == ((0, 8), (0, 2))
    assert set(table.targets) == {*(source.name for source in QKV), "layers.0.qkv_proj.weight"}


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("_orig_mod.layers.0.q_proj.weight", "layers.0.q_proj.weight"),
        ("module.layers.0.v_proj.weight", "layers.0.v_proj.weight"),
        ("layers.0.q_proj.base_layer.weight", "layers.0.q_proj.weight"),
        ("layers.0.k_proj.weight_scale", "layers.0.k_proj.weight"),
    ],
)
def test_a_name_that_is_not_exact_is_unknown_and_shows_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(UnknownNameError) as caught:
        NameTable([qkv_slot()]).resolve(name)
    assert caught.value.name == name
    assert caught.value.nearest is not None
    assert caught.value.nearest[0] == nearest
    assert nearest in str(caught.value)


def test_a_name_like_no_other_says_so() -> None:
    with pytest.raises(UnknownNameError, match="no name is near"):
        NameTable([qkv_slot()]).resolve("zzz")


def test_no_substring_of_a_name_is_ever_replaced() -> None:
    table = NameTable([qkv_slot()])
    for name in (
        "vision.q_proj.layers.0.q_proj.weight",
        "layers.0.q_proj.weight.q_proj.weight",
        "layers.0.xq_proj.weight",
        "layers.00.q_proj.weight",
    ):
        assert table.find(name) is None


def test_aliases_and_ignored_names_resolve_to_what_they_are() -> None:
    embed = make_slot("embed.weight", (4, 2), IdentityEncoder())
    table = NameTable(
        [embed], aliases={"lm_head.weight": "embed.weight"}, ignored=["rotary.inv_freq"]
    )
    found = table.resolve("lm_head.weight")
    assert isinstance(found, Alias)
    assert found.target.name == "embed.weight"
    assert table.resolve("rotary.inv_freq") == Ignored(name="rotary.inv_freq")


def test_a_predicate_ignores_only_names_outside_the_table() -> None:
    table = NameTable(
        [make_slot("embed.weight", (4, 2), IdentityEncoder())], ignored=lambda name: True
    )
    assert isinstance(table.resolve("embed.weight"), Target)
    assert isinstance(table.resolve("anything"), Ignored)


@pytest.mark.parametrize(
    ("aliases", "ignored", "match"),
    [
        ({"a": "nowhere"}, (), "must name a source or slot"),
        ({"a": "b", "b": "w"}, (), "must name a source or slot"),
        ({"source": "w"}, (), "must not be a declared source"),
        ({}, ("w",), "ignored must not hold names of the table"),
        ({"a": "w"}, ("a",), "ignored must not hold names of the table"),
        ({}, "w", "several names"),
        ({"other": "w"}, (), "which 'w' must feed"),
    ],
)
def test_a_table_that_contradicts_itself_is_refused(
    aliases: dict[str, str], ignored: tuple[str, ...] | str, match: str
) -> None:
    slots = [
        make_slot("w", (2,), IdentityEncoder(), (SlotSource(name="source", region=((0, 2),)),)),
        make_slot("other", (2,), IdentityEncoder()),
    ]
    with pytest.raises(ValueError, match=match):
        NameTable(slots, aliases=aliases, ignored=ignored)


def test_two_slots_of_one_name_or_one_memory_are_refused() -> None:
    one = make_slot("w", (2,), IdentityEncoder())
    with pytest.raises(ValueError, match="distinct names"):
        NameTable([one, make_slot("w", (2,), IdentityEncoder())])
    twin = WeightSlot(
        name="head", logical_shape=(1,), encoder=IdentityEncoder(),
        storage={"weight": one.storage["weight"][1:]},
    )  # fmt: skip
    with pytest.raises(ValueError, match="share memory, got 'w' and 'head'"):
        NameTable([one, twin])


def test_slots_may_be_neighbours_in_one_arena() -> None:
    arena = torch.zeros(6)
    slots = [
        WeightSlot(
            name=f"w{i}", logical_shape=(2,), encoder=IdentityEncoder(),
            storage={"weight": arena[2 * i : 2 * i + 2]},
        )
        for i in range(3)
    ]  # fmt: skip
    assert len(NameTable(slots).slots) == 3


@pytest.mark.parametrize(
    ("source", "match"),
    [
        (SlotSource(name="s", region=((0, 3), (0, 2))), "sources must cover the slot"),
        (SlotSource(name="s", region=((0, 5), (0, 2))), "region must lie within"),
        (SlotSource(name="s", region=((0, 4),)), "region must have 2 dimensions"),
        (SlotSource(name="s", region=((0, 4), (0, 2)), full_shape=(2, 4)), "cannot land in"),
        (SlotSource(name="s", region=((0, 4), (0, 2)), full_shape=(8, 2)), "cannot land in"),
        (
            SlotSource(
                name="s", region=((0, 4), (0, 2)), full_shape=(4, 2), taken=((4, 8), (0, 2))
            ),
            "taken must lie within",
        ),
    ],
)
def test_a_source_that_cannot_land_is_refused(source: SlotSource, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make_slot("w", (4, 2), IdentityEncoder(), (source,))


@pytest.mark.parametrize(
    ("full_shape", "taken", "region", "dims"),
    [
        ((4, 2), None, ((0, 1), (0, 4), (0, 2)), (None, 0, 1)),
        ((4, 1, 3), None, ((0, 4), (0, 3)), (0, 2)),
        ((1, 4), None, ((0, 4),), (1,)),
        ((1, 1), None, ((0, 1), (0, 1)), (0, 1)),
        ((), None, ((2, 3),), (None,)),
        ((8, 2), ((4, 8), (0, 2)), ((0, 4), (0, 2)), (0, 1)),
    ],
)
def test_a_source_may_differ_from_its_slot_by_dimensions_of_one(
    full_shape: tuple[int, ...],
    taken: Region | None,
    region: Region,
    dims: tuple[int | None, ...],
) -> None:
    source = SlotSource(name="s", region=region, full_shape=full_shape, taken=taken)
    assert source.sender_dims() == dims


def test_sources_of_one_name_must_agree_and_must_not_land_twice() -> None:
    whole = SlotSource(name="s", region=((0, 2),))
    with pytest.raises(ValueError, match="one full shape"):
        NameTable(
            [
                make_slot("a", (2,), IdentityEncoder(), (whole,)),
                make_slot("b", (3,), IdentityEncoder(), (SlotSource(name="s", region=((0, 3),)),)),
            ]
        )
    with pytest.raises(ValueError, match="must land once"):
        NameTable([make_slot("a", (2,), IdentityEncoder(), (whole, whole))])


def test_a_slot_is_checked_when_it_is_declared() -> None:
    with pytest.raises(ValueError, match="name must not be empty"):
        make_slot("", (2,), IdentityEncoder())
    with pytest.raises(ValueError, match="must take the whole slot"):
        make_slot("w", (4, 2), CycleEncoder())
    with pytest.raises(ValueError, match="at least one tensor"):
        WeightSlot(name="w", logical_shape=(2,), encoder=IdentityEncoder(), storage={})
    with pytest.raises(ValueError, match="got a meta tensor"):
        WeightSlot(
            name="w", logical_shape=(2,), encoder=IdentityEncoder(),
            storage={"weight": torch.zeros(2, device="meta")},
        )  # fmt: skip
    with pytest.raises(ValueError, match="logical_shape must be >= 0"):
        WeightSlot(
            name="w", logical_shape=(-1,), encoder=IdentityEncoder(),
            storage=IdentityEncoder().storage((1,)),
        )  # fmt: skip


@pytest.mark.parametrize("encoder", [IdentityEncoder(), ScaledEncoder()])
def test_a_slot_of_integers_stores_one_tensor_of_integers(
    encoder: IdentityEncoder | ScaledEncoder,
) -> None:
    with pytest.raises(ValueError, match="is_floating"):
        WeightSlot(
            name="w", logical_shape=(2, 2), encoder=encoder,
            storage=encoder.storage((2, 2)), is_floating=False,
        )  # fmt: skip


def test_derived_tensors_are_named_once_and_read_known_slots() -> None:
    def derived(inputs: tuple[str, ...]) -> DerivedTensor:
        return DerivedTensor(name="d", inputs=inputs, storage={}, recompute=lambda out, slots: None)

    one = derived(("a", "b"))
    slots = [make_slot(name, (2,), IdentityEncoder(), derived=(one,)) for name in "ab"]
    assert NameTable(slots).derived == (one,)
    with pytest.raises(ValueError, match="distinct names"):
        NameTable([*slots, make_slot("c", (2,), IdentityEncoder(), derived=(derived(()),))])
    with pytest.raises(ValueError, match=r"must be slots, got \['a', 'b'\]"):
        NameTable([make_slot("c", (2,), IdentityEncoder(), derived=(one,))])


def test_a_landing_cuts_a_view_of_the_part() -> None:
    source = SlotSource(
        name="s", region=((1, 2), (0, 2), (0, 3)), full_shape=(4, 3), taken=((2, 4), (0, 3))
    )
    slot = make_slot(
        "w",
        (2, 2, 3),
        IdentityEncoder(),
        (source, SlotSource(name="w", region=((0, 2),) * 2 + ((0, 3),))),
    )
    landing = target(NameTable([slot]), "s").landings[0]
    full = counting((4, 3))
    assert landing.cut(full[:2], ((0, 2), (0, 3))) is None
    cut = landing.cut(full[1:3, 1:], ((1, 3), (1, 3)))
    assert cut is not None
    region, view = cut
    assert region == ((1, 2), (0, 1), (1, 3))
    assert view.tolist() == [[[8, 9]]]
    assert view.untyped_storage().data_ptr() == full.untyped_storage().data_ptr()
