"""Order relative to bytes: at the moment the guard is asked every live byte is still old."""

from collections.abc import Mapping

import pytest
import torch

from syncline.weight_sync import (
    DerivedTensor,
    IncompleteUpdateError,
    Mode,
    NameTable,
    Region,
    SlotSource,
    Update,
    UpdateState,
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

GATE_UP = (
    SlotSource(name="gate", region=((0, 3), (0, 4))),
    SlotSource(name="up", region=((3, 6), (0, 4))),
)
# Every way to the first live byte: name -> (slot, aliases, puts as name and part).
PATHS: dict[str, tuple[str, dict[str, str], list[tuple[str, Region | None]]]] = {
    "whole tensor": ("plain", {}, [("w", None)]),
    "shard": ("plain", {}, [("w", ((0, 3), (0, 4))), ("w", ((3, 6), (0, 4)))]),
    "fused": ("plain", {}, [("gate", None), ("up", None)]),
    "alias": ("plain", {"tied": "w"}, [("tied", None)]),
    "layout": ("cycle", {}, [("w", None)]),
    "quantised": ("scaled", {}, [("w", None)]),
    "waiting parts": ("scaled", {}, [("w", ((0, 6), (0, 1))), ("w", ((0, 6), (1, 4)))]),
}


def the_slot(kind: str) -> WeightSlot:
    encoders: dict[str, StandIn] = {
        "plain": IdentityEncoder(),
        "cycle": CycleEncoder(),
        "scaled": ScaledEncoder(),
    }
    slot = make_slot("w", (6, 4), encoders[kind], GATE_UP)
    for tensor in slot.storage.values():
        tensor.fill_(7)
    return slot


@both_modes
@pytest.mark.parametrize("path", list(PATHS))
def test_the_guard_is_asked_once_and_before_the_first_live_byte(mode: Mode, path: str) -> None:
    kind, aliases, puts = PATHS[path]
    slot = the_slot(kind)
    guard = RecordingGuard([slot])
    old = snapshot([slot])
    full = counting((6, 4))
    update = Update.begin(NameTable([slot], aliases=aliases), 1, guard=guard, mode=mode)
    assert guard.calls == []
    for name, part in puts:
        rows = {"gate": full[:3], "up": full[3:]}.get(name, full)
        cut = rows if part is None else rows[part[0][0] : part[0][1], part[1][0] : part[1][1]]
        if not guard.held:
            assert snapshot([slot]) == old
        update.put(name, cut, part)
        assert guard.held == (snapshot([slot]) != old)
    update.commit()
    assert guard.calls == ["acquire", "first_write", "release"]
    assert guard.seen[0] == guard.seen[1] == old
    assert guard.seen[2] == snapshot([slot]) != old
    assert stored_bytes(slot) == cold_bytes(slot, full)
    assert guard.reasons == ["weight update to version 1"]


def test_a_direct_update_holds_the_guard_until_it_ends() -> None:
    slots = [make_slot(name, (2,), IdentityEncoder()) for name in "ab"]
    guard = RecordingGuard(slots)
    update = Update.begin(NameTable(slots), 1, guard=guard)
    update.put("a", counting((2,)))
    assert guard.held
    with pytest.raises(IncompleteUpdateError):
        update.commit()
    assert guard.held
    update.put("b", counting((2,)))
    assert guard.held
    update.commit()
    assert guard.calls == ["acquire", "first_write", "release"]


def test_a_staged_update_holds_the_guard_for_the_swap_alone() -> None:
    slots = [make_slot(name, (2,), IdentityEncoder()) for name in "ab"]
    guard = RecordingGuard(slots)
    old = snapshot(slots)
    update = Update.begin(NameTable(slots), 1, guard=guard, mode="staged")
    for slot in slots:
        update.put(slot.name, counting((2,)))
        assert snapshot(slots) == old
    update.prepare()
    assert guard.calls == []
    update.commit()
    assert guard.calls == ["acquire", "first_write", "release"]
    assert guard.seen[1] == old


@both_modes
def test_a_guard_that_refuses_leaves_every_byte_and_the_update_as_they_were(mode: Mode) -> None:
    slot = make_slot("w", (2,), IdentityEncoder())
    guard = RecordingGuard([slot])
    old = snapshot([slot])
    guard.refuse = RuntimeError("a step is in flight")
    update = Update.begin(NameTable([slot]), 1, guard=guard, mode=mode)
    with pytest.raises(RuntimeError, match="a step is in flight"):
        update.put("w", counting((2,)))
        update.commit()
    assert snapshot([slot]) == old
    assert not update.live_bytes_written
    assert not update.guard_held
    assert update.state is UpdateState.OPEN
    guard.refuse = None
    if mode == "direct":
        update.put("w", counting((2,)))
    update.commit()
    assert slot.storage["weight"].tolist() == [1, 2]


class HookFails(RecordingGuard):
    __slots__ = ()

    def first_write(self) -> None:
        super().first_write()
        raise RuntimeError("the epoch cannot be raised")


def test_a_hook_that_fails_gives_the_guard_back_with_nothing_written() -> None:
    slot = make_slot("w", (2,), IdentityEncoder())
    guard = HookFails([slot])
    update = Update.begin(NameTable([slot]), 1, guard=guard)
    with pytest.raises(RuntimeError, match="epoch"):
        update.put("w", counting((2,)))
    assert guard.calls == ["acquire", "first_write", "release"]
    assert not slot.storage["weight"].any()
    assert not update.abort("hook").live_bytes_written


class ReleaseFails(RecordingGuard):
    __slots__ = ("failures",)

    def __init__(self, slot: WeightSlot) -> None:
        super().__init__([slot])
        self.failures = 1

    def release(self) -> None:
        if self.failures:
            self.failures -= 1
            raise RuntimeError("cannot resume")
        super().release()


@both_modes
@pytest.mark.parametrize("end", ["commit", "abort"])
def test_a_guard_that_cannot_be_given_back_keeps_the_update_open(mode: Mode, end: str) -> None:
    slot = make_slot("w", (2,), IdentityEncoder())
    guard = ReleaseFails(slot)
    update = Update.begin(NameTable([slot]), 1, guard=guard, mode=mode)
    update.put("w", counting((2,)))
    if mode == "staged" and end == "abort":
        update.abort("nothing was held")
        assert guard.calls == []
        return
    with pytest.raises(RuntimeError, match="cannot resume"):
        update.commit() if end == "commit" else update.abort("test")
    assert update.state is UpdateState.OPEN
    assert update.guard_held
    assert update.commit().coverage == 1.0
    assert guard.calls == ["acquire", "first_write", "release"]
    assert slot.storage["weight"].tolist() == [1, 2]


def test_two_direct_updates_cannot_write_at_once() -> None:
    slot = make_slot("w", (4,), IdentityEncoder())
    table, guard = NameTable([slot]), RecordingGuard()
    first = Update.begin(table, 1, guard=guard)
    second = Update.begin(table, 2, guard=guard)
    first.put("w", counting((2,)), ((0, 2),))
    with pytest.raises(RuntimeError, match="held already"):
        second.put("w", counting((4,), 50))
    first.put("w", counting((2,), 3), ((2, 4),))
    first.commit()
    assert slot.storage["weight"].tolist() == [1, 2, 3, 4]
    second.put("w", counting((4,), 50))
    second.commit()
    assert slot.storage["weight"].tolist() == [50, 51, 52, 53]


def doubled(storage: torch.Tensor, failures: int = 0) -> DerivedTensor:
    left = [failures]

    def recompute(
        out: Mapping[str, torch.Tensor], inputs: Mapping[str, Mapping[str, torch.Tensor]]
    ) -> None:
        if left[0]:
            left[0] -= 1
            raise RuntimeError("the recipe failed")
        torch.add(inputs["kv"]["weight"], inputs["kv"]["weight"], out=out["twice"])

    return DerivedTensor(
        name="kv.twice", inputs=("kv",), storage={"twice": storage}, recompute=recompute
    )


@both_modes
def test_derived_tensors_are_renewed_under_the_guard_and_in_place(mode: Mode) -> None:
    storage = torch.zeros(2)
    slot = make_slot("kv", (2,), IdentityEncoder(), derived=(doubled(storage),))
    holder = WeightSlot(
        name="twice", logical_shape=(2,), encoder=IdentityEncoder(), storage={"weight": storage}
    )
    guard = RecordingGuard([slot, holder])
    address = storage.data_ptr()
    for version in range(2):
        update = Update.begin(NameTable([slot]), version, guard=guard, mode=mode)
        update.put("kv", counting((2,), 10 * version))
        assert storage.tolist() == ([0, 0] if version == 0 else [0, 2])
        assert update.commit().derived == ("kv.twice",)
        assert storage.tolist() == [20 * version, 20 * version + 2]
    assert storage.data_ptr() == address
    assert guard.calls == ["acquire", "first_write", "release"] * 2
    assert guard.seen[1]["twice", "weight"] != guard.seen[2]["twice", "weight"]


@both_modes
def test_a_recipe_that_fails_commits_nothing_and_may_run_again(mode: Mode) -> None:
    storage = torch.zeros(2)
    slot = make_slot("kv", (2,), IdentityEncoder(), derived=(doubled(storage, failures=1),))
    guard = RecordingGuard()
    update = Update.begin(NameTable([slot]), 1, guard=guard, mode=mode)
    update.put("kv", counting((2,)))
    with pytest.raises(RuntimeError, match="recipe"):
        update.commit()
    assert update.state is UpdateState.OPEN
    assert update.live_bytes_written
    assert guard.held
    update.commit()
    assert storage.tolist() == [2, 4]
    assert guard.calls == ["acquire", "first_write", "release"]


@both_modes
def test_a_derived_tensor_is_live_even_where_no_slot_has_a_byte(mode: Mode) -> None:
    holder = make_slot("out", (2,), IdentityEncoder())

    def recompute(
        out: Mapping[str, torch.Tensor], inputs: Mapping[str, Mapping[str, torch.Tensor]]
    ) -> None:
        out["weight"].fill_(4)

    derived = DerivedTensor(name="d", inputs=(), storage=holder.storage, recompute=recompute)
    slot = make_slot("empty", (0, 2), IdentityEncoder(), derived=(derived,))
    guard = RecordingGuard([holder])
    old = snapshot([holder])
    Update.begin(NameTable([slot]), 1, guard=guard, mode=mode).commit()
    assert guard.calls == ["acquire", "first_write", "release"]
    assert guard.seen[1] == old != snapshot([holder])
