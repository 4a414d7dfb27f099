"""Update against a naive model: which cells have come under which name, cell by cell.

The model knows each slot's cells and domains by loops of its own. It predicts every refusal, which
domains have been written, whether a commit succeeds, and the bytes after it: those of a first load
of the full new values. The package's region arithmetic is not used.
"""

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from syncline.weight_sync import (
    DtypeMismatchError,
    DuplicateTensorError,
    IncompleteUpdateError,
    Manifest,
    Mode,
    NameTable,
    NonFiniteWeightError,
    Region,
    ShapeMismatchError,
    SlotSource,
    StaleVersionError,
    UnknownNameError,
    Update,
    UpdateOptions,
    UpdateState,
    WeightSlot,
)
from syncline.weight_sync.testing import (
    CycleEncoder,
    FaultyEncoder,
    IdentityEncoder,
    RecordingGuard,
    ScaledEncoder,
    StandIn,
    addresses,
    all_cells,
    cold_bytes,
    snapshot,
    stored_bytes,
)

Cell = tuple[int, ...]
Place = tuple[str, Cell]  # slot, cell


SHAPES: dict[str, tuple[int, ...]] = {
    "qkv": (4, 2), "gate_up": (6, 4), "tensor": (2, 3), "embed": (3, 2), "mirror": (3, 2),
    "share": (2, 2), "scalar": (), "empty": (0, 3),
}  # fmt: skip
ENCODERS: dict[str, StandIn] = {
    "qkv": ScaledEncoder(),
    "gate_up": CycleEncoder(),
    "tensor": ScaledEncoder((None, None)),
    "embed": CycleEncoder(),
    "mirror": IdentityEncoder(torch.bfloat16),
    **dict.fromkeys(("share", "scalar", "empty"), IdentityEncoder()),
}


def domain_of(name: str, cell: Cell) -> Cell:
    """The cells of one scale or one tile have the same."""
    if name == "qkv":
        return cell[:1]
    if name in ("gate_up", "embed"):
        return (cell[0] // 3, cell[1] // 2)
    return () if name == "tensor" else cell


DOMAIN_BYTES = {"qkv": 2 + 4, "gate_up": 24, "tensor": 6 + 4, "embed": 24, "mirror": 2}
NAMES: dict[str, tuple[int, ...]] = {
    "q": (2, 2), "k": (1, 2), "v": (1, 2), "qkv": (4, 2), "gate": (2, 4), "up": (4, 4),
    "gate_up": (6, 4), "tensor": (2, 3), "embed": (3, 2), "head": (3, 2), "mirror": (3, 2),
    "share": (4, 2), "scalar": (), "empty": (0, 3),
}  # fmt: skip
ROWS_BEFORE = {"k": 2, "v": 3, "up": 2}
SPELLINGS = [
    ["q", "k", "v"], ["qkv"], ["gate", "up"], ["gate_up"], ["tensor"], ["embed"], ["head"],
    ["share"], ["scalar"],
]  # fmt: skip


def places(name: str, cell: Cell) -> list[Place]:
    """Where one element of a sender's tensor belongs."""
    if name in ("q", "k", "v", "gate", "up"):
        slot = "qkv" if len(name) == 1 else "gate_up"
        return [(slot, (cell[0] + ROWS_BEFORE.get(name, 0), cell[1]))]
    if name in ("embed", "head"):
        return [("embed", cell), ("mirror", cell)]
    if name == "share":
        return [("share", (cell[0] - 2, cell[1]))] if cell[0] >= 2 else []
    return [(name, cell)]


def rows(name: str, start: int, stop: int, columns: int) -> SlotSource:
    return SlotSource(name=name, region=((start, stop), (0, columns)))


def make_slots() -> list[WeightSlot]:
    half = ((0, 2), (0, 2))
    share = SlotSource(name="share", region=half, full_shape=(4, 2), taken=((2, 4), (0, 2)))
    sources = {
        "qkv": (rows("q", 0, 2, 2), rows("k", 2, 3, 2), rows("v", 3, 4, 2)),
        "gate_up": (rows("gate", 0, 2, 4), rows("up", 2, 6, 4)),
        "mirror": (rows("embed", 0, 3, 2),),
        "share": (share,),
    }
    return [
        WeightSlot(
            name=name,
            logical_shape=shape,
            encoder=FaultyEncoder(ENCODERS[name]),
            storage=ENCODERS[name].storage(shape),
            sources=sources.get(name, ()),
        )
        for name, shape in SHAPES.items()
    ]


class UpdateMachine(RuleBasedStateMachine):
    @initialize(data=st.data())
    def create(self, data: st.DataObject) -> None:
        self.slots = {slot.name: slot for slot in make_slots()}
        self.table = NameTable(self.slots.values(), aliases={"head": "embed"})
        self.guard = RecordingGuard(self.slots.values())
        self.addresses = addresses(self.slots.values())
        self.settled = snapshot(self.slots.values())  # the bytes while no live one is written
        self.current: int | None = None
        self.begin(data)

    def value(self, slot: str, cell: Cell) -> float:
        """What the slot shall hold: different in every slot, cell and update; exact in bf16."""
        place = 0
        for index, size in zip(cell, SHAPES[slot], strict=True):
            place = place * size + index
        slot = "embed" if slot == "mirror" else slot
        return float((1 + place + 7 * list(SHAPES).index(slot) + self.update.version) % 128)

    def tensor(self, name: str) -> torch.Tensor:
        full = torch.zeros(NAMES[name])
        for cell in all_cells(NAMES[name]):
            full[cell] = next((self.value(*place) for place in places(name, cell)), 5.0)
        return full

    def manifest(self, data: st.DataObject) -> Manifest | None:
        fused = {"apart": ["q", "k", "v", "gate", "up"], "fused": ["qkv", "gate_up"]}
        kind = data.draw(st.sampled_from([None, *fused]))
        if kind is None:
            return None
        names = [*fused[kind], "tensor", "embed", "share", "scalar", "empty"]
        return {name: (NAMES[name], torch.float32) for name in names}

    def begin(self, data: st.DataObject) -> None:
        """There is always an open update: whatever ends one begins the next."""
        mode: Mode = data.draw(st.sampled_from(["direct", "staged"]))
        step = data.draw(st.sampled_from([1, 1, 2, 0, -1]))
        manifest = self.manifest(data)
        version = max(0, step + (self.current or 0))
        options = UpdateOptions(current_version=self.current)
        if self.current is not None and version <= self.current:
            with pytest.raises(StaleVersionError):
                Update.begin(self.table, version, guard=self.guard, options=options)
            version = self.current + 1
        self.guard.calls.clear()
        self.update = Update.begin(
            self.table, version, guard=self.guard, manifest=manifest, mode=mode, options=options
        )
        self.announced = manifest
        self.came: dict[str, set[Cell]] = {}  # sent name -> its cells
        self.fed: dict[str, set[Place]] = {"": set(), "head": set()}  # stream -> slots' cells

    def send(self, name: str, part: Region | None) -> None:
        update = self.update
        full = self.tensor(name)
        cut = full if part is None else full[tuple(slice(*bounds) for bounds in part)]
        inside = [
            cell
            for cell in all_cells(NAMES[name])
            if part is None
            or all(start <= i < stop for i, (start, stop) in zip(cell, part, strict=True))
        ]
        fed = self.fed["head" if name == "head" else ""]
        reached = {place for cell in inside for place in places(name, cell)}
        known = self.came.get(name, set())
        if known & set(inside) or fed & reached or (name == "empty" and name in self.came):
            with pytest.raises(DuplicateTensorError):
                update.put(name, cut, part)
            return
        update.put(name, cut, part)
        self.came[name] = known | set(inside)
        fed |= reached

    def draw_part(self, data: st.DataObject, name: str) -> Region | None:
        if data.draw(st.booleans()):
            return None
        bounds = []
        for size in NAMES[name]:
            first, second = data.draw(st.tuples(*[st.integers(0, size)] * 2))
            bounds.append((min(first, second), max(first, second)))
        return tuple(bounds)

    def draw_name(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(self.announced or set(NAMES) - {"mirror"})))

    @rule(data=st.data())
    def put(self, data: st.DataObject) -> None:
        name = self.draw_name(data)
        self.send(name, self.draw_part(data, name))

    @rule(data=st.data())
    def put_a_whole_spelling(self, data: st.DataObject) -> None:
        """Row by row or cell by cell, in any order; what came already is refused."""
        names = data.draw(st.sampled_from([s for s in SPELLINGS if self.may_send(s)]))
        by_row = data.draw(st.booleans())
        for name in names:
            parts = [tuple((i, i + 1) for i in cell) for cell in all_cells(NAMES[name])]
            if by_row and len(NAMES[name]) == 2:
                rows, columns = NAMES[name]
                parts = [((row, row + 1), (0, columns)) for row in range(rows)]
            for part in data.draw(st.permutations(parts)):
                self.send(name, part)

    @rule(
        data=st.data(),
        fused=st.booleans(),
        by_row=st.booleans(),
        tied=st.sampled_from(["embed", "head", "both"]),
    )
    def finish(self, data: st.DataObject, fused: bool, by_row: bool, tied: str) -> None:
        """Send exactly what is missing, in any order; now a commit has to succeed."""
        apart = [["q", "k", "v", "gate", "up"], ["qkv", "gate_up"]]
        left: list[tuple[str, Region]] = []
        spelled = next(each for each in apart[:: -1 if fused else 1] if self.may_send(each))
        names = [*spelled, "tensor", "share", "scalar"]
        for name, other in (("embed", "head"), ("head", "embed")):
            if self.may_send([name]) and (tied != other or self.came.get(name)):
                names.append(name)
        if self.announced is not None and "embed" not in names:
            names.append("embed")
        for name in names:
            fed = self.fed["head" if name == "head" else ""]
            rows: dict[Cell, list[Cell]] = {}
            for cell in all_cells(NAMES[name]):
                if cell not in self.came.get(name, ()) and not fed & set(places(name, cell)):
                    rows.setdefault(cell[:1] if by_row else cell, []).append(cell)
            for cells in rows.values():
                # Of a row with gaps each cell on its own.
                whole = cells[-1][1:] == (len(cells) - 1,) if len(cells) > 1 else False
                for group in [cells] if whole else [[cell] for cell in cells]:
                    bounds = zip(group[0], group[-1], strict=True)
                    left.append((name, tuple((low, high + 1) for low, high in bounds)))
        for name, part in data.draw(st.permutations(left)):
            self.send(name, part)
        if self.announced is not None and "empty" not in self.came:
            self.send("empty", None)
        assert self.is_complete()
        self.commit(data)

    def may_send(self, names: list[str]) -> bool:
        return self.announced is None or set(names) <= set(self.announced)

    @rule(kind=st.sampled_from(["unknown", "shape", "nan", "integer"]))
    def put_nonsense(self, kind: str) -> None:
        update = self.update
        before = (update.bytes_written, update.num_buffered_bytes, snapshot(self.slots.values()))
        ones = torch.ones(2, 3)
        name, tensor, error = {
            "unknown": ("tensor.weight", ones, UnknownNameError),
            "shape": ("tensor", torch.ones(3, 2), ShapeMismatchError),
            "nan": ("tensor", ones * torch.nan, NonFiniteWeightError),
            "integer": ("tensor", ones.int(), DtypeMismatchError),
        }[kind]
        if self.came.get("tensor") and kind == "nan":
            error = DuplicateTensorError
        with pytest.raises(error):
            update.put(name, tensor)
        now = (update.bytes_written, update.num_buffered_bytes, snapshot(self.slots.values()))
        assert now == before

    @rule(data=st.data(), cause=st.sampled_from(["guard", "encoder"]))
    def put_that_fails(self, data: st.DataObject, cause: str) -> None:
        """Whatever fails, the part does not count and may be sent again."""
        update = self.update
        before = (update.bytes_written, update.num_buffered_bytes)
        live = snapshot(self.slots.values())
        if cause == "guard":
            self.guard.refuse = RuntimeError("not now")
        self.set_broken(cause == "encoder")
        try:
            self.put(data)
        except RuntimeError:
            assert (update.bytes_written, update.num_buffered_bytes) == before
            if cause == "guard" or update.mode == "staged":
                assert snapshot(self.slots.values()) == live
            else:
                assert update.live_bytes_written
        finally:
            self.guard.refuse = None
            self.set_broken(False)

    def set_broken(self, broken: bool) -> None:
        for slot in self.slots.values():
            assert isinstance(slot.encoder, FaultyEncoder)
            slot.encoder.broken = broken

    def written_domains(self) -> dict[str, set[Cell]]:
        """Slot -> domains of which every cell came in one stream; a cell is its own by default."""
        found: dict[str, set[Cell]] = {}
        for name, shape in SHAPES.items():
            members: dict[Cell, list[Place]] = {}
            for cell in all_cells(shape):
                members.setdefault(domain_of(name, cell), []).append((name, cell))
            found[name] = {
                domain
                for domain, mates in members.items()
                if any(fed.issuperset(mates) for fed in self.fed.values())
            }
        return found

    def is_complete(self) -> bool:
        written = self.written_domains()
        for name, shape in SHAPES.items():
            for cell in all_cells(shape):
                mates = {
                    (name, other)
                    for other in all_cells(shape)
                    if domain_of(name, other) == domain_of(name, cell)
                }
                # A domain that an alias brought in part was never read, so never compared.
                if any(0 < len(fed & mates) < len(mates) for fed in self.fed.values()):
                    return False
                if domain_of(name, cell) not in written[name]:
                    return False
        return set(self.announced or ()) <= set(self.came)

    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        update = self.update
        if not self.is_complete():
            before = snapshot(self.slots.values())
            with pytest.raises(IncompleteUpdateError) as caught:
                update.commit()
            assert caught.value.missing or caught.value.absent
            assert update.state is UpdateState.OPEN
            assert snapshot(self.slots.values()) == before
            return
        report = update.commit()
        assert report.coverage == 1.0
        assert report.num_tensors == len(self.came)
        for name, slot in self.slots.items():
            values = torch.zeros(SHAPES[name])
            for cell in all_cells(SHAPES[name]):
                values[cell] = self.value(name, cell)
            assert stored_bytes(slot) == cold_bytes(slot, values), name
        assert self.guard.calls == ["acquire", "first_write", "release"]
        assert self.guard.seen[-3] == self.guard.seen[-2] == self.settled
        self.settled = snapshot(self.slots.values())
        self.current = report.version
        self.begin(data)

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        report = self.update.abort("the model says so")
        assert report.live_bytes_written == bool(self.guard.calls)
        if not report.live_bytes_written:
            assert snapshot(self.slots.values()) == self.settled
        self.settled = snapshot(self.slots.values())
        self.begin(data)

    @invariant()
    def addresses_never_change(self) -> None:
        assert addresses(self.slots.values()) == self.addresses

    @invariant()
    def the_guard_is_held_exactly_while_live_bytes_are_written(self) -> None:
        held = self.update.live_bytes_written
        assert self.guard.held == held
        if not held:
            assert snapshot(self.slots.values()) == self.settled

    @invariant()
    def exactly_the_whole_domains_are_written(self) -> None:
        expected = sum(
            len(domains) * DOMAIN_BYTES.get(name, 4)
            for name, domains in self.written_domains().items()
        )
        assert self.update.bytes_written == expected
        if self.update.mode == "staged":
            assert not self.update.live_bytes_written
        elif expected:
            assert self.update.live_bytes_written


TestUpdate = UpdateMachine.TestCase
TestUpdate.settings = settings(settings.default, stateful_step_count=10)
