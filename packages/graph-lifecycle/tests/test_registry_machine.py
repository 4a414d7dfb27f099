"""Arena, ledger, recorded store and registry together, against a model that only has cells.

In the model a cell is a piece of memory with one number in it. A name is bound to a cell, a
graph keeps cells. So the model knows what a replay reads, sound or stale, without any of the
bookkeeping under test: a bare store replay must read exactly that, and the registry must
refuse exactly when a graph's cell sleeps or is no longer its name's.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from syncline.graph_lifecycle import (
    ArenaError,
    CaptureError,
    CaptureRequest,
    FaultKind,
    GraphKey,
    GraphReceipt,
    GraphRegistry,
    PoisonArena,
    ReceiptError,
    RecordedStore,
    ReleaseReceipt,
    StaleGraphError,
    StepFunction,
    StorageInUseError,
    StorageLedger,
    Tag,
    UnknownGraphError,
)
from syncline.graph_lifecycle.testing import rebind

TAGS = (Tag.WEIGHTS, Tag.KV_CACHE)
NAMES = ("a", "b", "c")
KEYS = ("g0", "g1", "g2")
names = st.sampled_from(NAMES)
keys = st.sampled_from(KEYS)
tags = st.sampled_from(TAGS)


@dataclass(eq=False)
class Cell:
    value: float = math.nan


@dataclass(eq=False)
class Name:
    tag: Tag
    tensor: Tensor
    home: Cell = field(default_factory=Cell)
    bound: Cell = field(init=False)

    def __post_init__(self) -> None:
        self.bound = self.home


class RegistryMachine(RuleBasedStateMachine):
    @initialize(move=st.booleans())
    def create(self, move: bool) -> None:
        self.move = move
        self.ledger = StorageLedger()
        self.arena = PoisonArena(move, ledger=self.ledger)
        self.registry, self.store = GraphRegistry(self.ledger), RecordedStore()
        self.registry.add_store("s", self.store)
        self.names: dict[str, Name] = {}
        self.released: dict[Tag, ReleaseReceipt] = {}
        self.used_receipts: list[ReleaseReceipt] = []
        self.graphs: dict[str, dict[str, Cell]] = {}
        self.read_by: dict[str, tuple[str, ...]] = {}  # What each key was last captured on.
        self.missing: set[str] = set()
        self.receipts: list[GraphReceipt] = []

    # The model's questions.

    def asleep(self, name: str) -> bool:
        return self.names[name].tag in self.released

    def strayed(self, name: str) -> bool:
        return self.names[name].bound is not self.names[name].home

    def readers(self, cell: Cell) -> list[str]:
        return [key for key, cells in self.graphs.items() if cell in cells.values()]

    def faults(self, key: str) -> list[FaultKind]:
        found = []
        for name, cell in self.graphs[key].items():
            at_home = cell is self.names[name].home
            if at_home and self.asleep(name):
                found.append(FaultKind.RELEASED)
            elif cell is not self.names[name].bound:
                found.append(FaultKind.REBOUND)
        return found

    def under(self, tag: Tag) -> list[str]:
        return [name for name, entry in self.names.items() if entry.tag is tag]

    def step(self, on: tuple[str, ...], *, syncs: bool = False) -> StepFunction:
        tensors = [self.names[name].tensor for name in on]

        def fn(inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
            total = inputs["x"].clone()
            for tensor in tensors:
                total += tensor.sum()
            return {"y": total + total.item() if syncs else total}

        return fn

    def request(self, key: str, on: tuple[str, ...], *, syncs: bool = False) -> CaptureRequest:
        fn = self.step(on, syncs=syncs)
        return CaptureRequest(key=key, store="s", fn=fn, inputs={"x": torch.zeros(())})

    def keep(self, key: str, on: tuple[str, ...]) -> None:
        self.graphs[key] = {name: self.names[name].bound for name in on}
        self.read_by[key] = on
        self.missing.discard(key)

    def sleeps(self, on: tuple[str, ...]) -> bool:
        return any(self.asleep(name) and not self.strayed(name) for name in on)

    # Memory.

    @rule(name=names, tag=tags)
    def allocate(self, name: str, tag: Tag) -> None:
        if name in self.names:
            with pytest.raises(ValueError):
                self.arena.allocate(name, (2,), torch.float32, tag=tag)
        elif tag in self.released:
            with pytest.raises(ArenaError):
                self.arena.allocate(name, (2,), torch.float32, tag=tag)
        else:
            tensor = self.arena.allocate(name, (2,), torch.float32, tag=tag)
            self.names[name] = Name(tag, tensor)

    @rule(name=names, value=st.integers(-9, 9))
    def write(self, name: str, value: int) -> None:
        if name in self.names and not self.asleep(name):
            self.names[name].tensor.fill_(value)
            self.names[name].bound.value = value

    @rule(name=names)
    def free(self, name: str) -> None:
        if name not in self.names:
            with pytest.raises(ValueError):
                self.arena.free(name)
            return
        entry = self.names[name]
        if self.asleep(name) or self.strayed(name):
            with pytest.raises(ArenaError):
                self.arena.free(name)
        elif self.readers(entry.home):
            with pytest.raises(StorageInUseError) as caught:
                self.arena.free(name)
            assert list(caught.value.graphs) == self.readers(entry.home)
        else:
            self.arena.free(name)
            del self.names[name]
            for on in self.graphs.values():
                assert name not in on

    @rule(tag=tags)
    def release(self, tag: Tag) -> None:
        inside = self.under(tag)
        reading = {key for name in inside for key in self.readers(self.names[name].home)}
        if tag in self.released or any(self.strayed(name) for name in inside):
            with pytest.raises(ArenaError):
                self.arena.release(tag)
        elif self.move and reading:
            with pytest.raises(StorageInUseError) as caught:
                self.arena.release(tag)
            assert set(caught.value.graphs) == reading
        else:
            receipt = self.arena.release(tag)
            assert receipt.num_bytes == 256 * len(inside)
            self.released[tag] = receipt
            for name in inside:
                self.names[name].home.value = math.nan

    @precondition(lambda self: self.released)
    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        tag = data.draw(st.sampled_from(sorted(self.released)))
        receipt = self.released.pop(tag)
        report = self.arena.restore(receipt)
        assert (report.moved, report.num_bytes) == (self.move, receipt.num_bytes)
        self.used_receipts.append(receipt)
        if self.move:
            for name in self.under(tag):
                self.names[name].home = self.names[name].bound = Cell()

    @precondition(lambda self: self.used_receipts)
    @rule(data=st.data())
    def a_used_receipt_is_refused(self, data: st.DataObject) -> None:
        with pytest.raises(ReceiptError):
            self.arena.restore(data.draw(st.sampled_from(self.used_receipts)))

    @rule(name=names, value=st.integers(-9, 9))
    def rebind_behind_the_arenas_back(self, name: str, value: int) -> None:
        if name in self.names and not self.asleep(name):
            entry = self.names[name]
            rebind(entry.tensor, torch.full((2,), float(value)))
            entry.bound = Cell(value)

    # Graphs.

    @rule(key=keys, on=st.lists(names, unique=True))
    def capture(self, key: str, on: list[str]) -> None:
        chosen = tuple(name for name in on if name in self.names)
        request = self.request(key, chosen)
        if key in self.graphs:
            with pytest.raises(ValueError):
                self.registry.capture_all([request])
        elif self.sleeps(chosen):
            with pytest.raises(CaptureError):
                self.registry.capture_all([request])
            self.missing.add(key)
        else:
            self.registry.capture_all([request])
            self.keep(key, chosen)

    @rule(on=st.lists(names, unique=True), fail_at=st.integers(0, 2))
    def a_session_fails(self, on: list[str], fail_at: int) -> None:
        free = [key for key in KEYS if key not in self.graphs]
        if fail_at >= len(free):
            return
        chosen = tuple(n for n in on if n in self.names and not self.asleep(n))
        session = [
            self.request(key, chosen, syncs=index == fail_at) for index, key in enumerate(free)
        ]
        with pytest.raises(CaptureError):
            self.registry.capture_all(session)
        self.missing |= set(free)

    @rule(key=keys, x=st.integers(-9, 9))
    def replay(self, key: str, x: int) -> None:
        inputs = {"x": torch.tensor(float(x))}
        if key not in self.graphs:
            with pytest.raises(UnknownGraphError):
                self.registry.replay(key, inputs)
            return
        expected = x + sum(2 * cell.value for cell in self.graphs[key].values())
        read = float(self.store.replay(key, inputs)["y"])
        assert read == expected or (math.isnan(read) and math.isnan(expected))
        if self.faults(key):
            with pytest.raises(StaleGraphError) as caught:
                self.registry.replay(key, inputs)
            assert [fault.kind for fault in caught.value.faults] == self.faults(key)
            return
        read = float(self.registry.replay(key, inputs)["y"])
        assert read == expected or (math.isnan(read) and math.isnan(expected))

    @rule(chosen=st.sets(keys))
    def release_graphs(self, chosen: set[str]) -> None:
        live = [key for key in self.graphs if key in chosen]
        receipt = self.registry.release(keys=live)
        assert list(receipt.keys) == live
        self.receipts.append(receipt)
        for key in live:
            del self.graphs[key]

    @precondition(lambda self: self.receipts)
    @rule(data=st.data())
    def restore_graphs(self, data: st.DataObject) -> None:
        receipt = data.draw(st.sampled_from(self.receipts))
        wanted = [str(key) for key in receipt.keys if key not in self.graphs]
        on = {
            key: tuple(name for name in self.read_by[key] if name in self.names) for key in wanted
        }

        def recapture(asked: tuple[GraphKey, ...]) -> list[CaptureRequest]:
            assert list(asked) == wanted
            return [self.request(key, on[key]) for key in wanted]

        if any(self.sleeps(chosen) for chosen in on.values()):
            with pytest.raises(CaptureError):
                self.registry.restore(receipt, recapture)
            self.missing |= set(wanted)
            return
        self.registry.restore(receipt, recapture)
        self.receipts.remove(receipt)
        for key in wanted:
            self.keep(key, on[key])
        with pytest.raises(ReceiptError):
            self.registry.restore(receipt, recapture)

    # What always holds.

    @invariant()
    def registry_store_and_ledger_list_the_models_graphs(self) -> None:
        self.registry.check_integrity()
        assert list(self.registry.keys) == list(self.graphs)
        assert self.store.num_bytes == 8 * len(self.graphs)
        degraded = self.registry.degraded
        assert set(degraded.missing if degraded is not None else ()) == self.missing

    @invariant()
    def readers_and_audit_are_the_models(self) -> None:
        for entry in self.names.values():
            assert list(self.ledger.readers(entry.tensor)) == self.readers(entry.bound)
        stale = {key for key in self.graphs if self.faults(key)}
        assert set(self.registry.audit()) == stale

    @invariant()
    def memory_is_the_models(self) -> None:
        for tag in TAGS:
            expected = 0 if tag in self.released else 256 * len(self.under(tag))
            assert self.arena.resident_bytes(tag) == expected
        for name, entry in self.names.items():
            assert self.arena.tensor(name) is entry.tensor
            value = float(entry.tensor[0])
            assert value == entry.bound.value or (
                math.isnan(value) and math.isnan(entry.bound.value)
            )


TestRegistry = RegistryMachine.TestCase
