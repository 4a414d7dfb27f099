"""Stand-ins and probes for tests of whatever uses this package; nothing here is for production."""

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceABC
from dataclasses import replace

import torch
from torch import Tensor

from syncline.graph_lifecycle.arena import PlainArena, PoisonArena, memory
from syncline.graph_lifecycle.arena.base import Arena
from syncline.graph_lifecycle.ledger import StorageLedger
from syncline.graph_lifecycle.registry import GraphRegistry
from syncline.graph_lifecycle.residency import Residency
from syncline.graph_lifecycle.stores import RecordedStore
from syncline.graph_lifecycle.types import (
    CaptureRequest,
    GraphKey,
    ReleaseReceipt,
    RestoreReport,
    StepFunction,
    Tag,
)


def is_poisoned(tensor: Tensor) -> bool:
    """Does every byte of the tensor's storage hold the poison of its dtype."""
    return memory.is_poison(tensor.untyped_storage(), tensor.dtype)


def rebind(tensor: Tensor, to: Tensor) -> None:
    """Bind `tensor` to the memory of `to`, as a careless holder would."""
    tensor.set_(to.untyped_storage(), to.storage_offset(), to.size(), to.stride())


class TinyStep:
    """A step that reads weights, writes and reads KV, and reads a static table.

    A two-layer MLP whose result is written into the KV slots of its rows and read back from
    them. Everything is allocated in `arena`; called on {"x": [T, hidden], "slot_mapping": [T]}.
    """

    __slots__ = ("down", "kv", "scale", "up")
    hidden = 8
    num_slots = 16

    def __init__(self, arena: Arena) -> None:
        def allocate(name: str, shape: tuple[int, ...], tag: Tag) -> Tensor:
            return arena.allocate(name, shape, torch.float32, tag=tag)

        self.up = allocate("up", (2 * self.hidden, self.hidden), Tag.WEIGHTS)
        self.down = allocate("down", (self.hidden, 2 * self.hidden), Tag.WEIGHTS)
        self.kv = allocate("kv", (self.num_slots, self.hidden), Tag.KV_CACHE)
        self.scale = allocate("scale", (self.hidden,), Tag.STATIC)
        self.scale.copy_(torch.arange(1, self.hidden + 1) / self.hidden)

    def load(self, seed: int) -> None:
        """Write every weight in place, as a function of `seed`, and blank the KV."""
        generator = torch.Generator().manual_seed(seed)
        for weight in (self.up, self.down):
            weight.copy_(torch.randn(weight.shape, generator=generator))
        self.kv.zero_()

    def inputs(self, seed: int, num_rows: int = 3) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return {
            "x": torch.randn((num_rows, self.hidden), generator=generator),
            "slot_mapping": torch.randperm(self.num_slots, generator=generator)[:num_rows],
        }

    def __call__(self, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        hidden = torch.nn.functional.silu(torch.nn.functional.linear(inputs["x"], self.up))
        out = torch.nn.functional.linear(hidden, self.down)
        self.kv.index_copy_(0, inputs["slot_mapping"], out)
        return {"out": out + self.kv.index_select(0, inputs["slot_mapping"]) * self.scale}


class InjectedFailure(Exception):
    """Raised where a test asked for a failure."""


class FakeStore:
    """A store whose graphs are names: says what it is told to read, fails where it is told to.

    `fail_at` is the number of the capture that fails, counted from 0 over the store's life.
    A failing capture leaves half-made entries behind, as real stores do: one under its key and
    one under a key of its own. Every entry pins `bytes_per_graph`.
    """

    __slots__ = (
        "_entries",
        "_reads",
        "error",
        "fail_at",
        "fails_to_discard",
        "leaked_bytes",
        "num_captures",
    )
    bytes_per_graph = 1 << 10

    def __init__(self, reads: Callable[[GraphKey], SequenceABC[Tensor]] = lambda key: ()) -> None:
        self._reads = reads
        self._entries: dict[GraphKey, StepFunction] = {}
        self.num_captures = 0
        self.fail_at: int | None = None
        self.error: BaseException = InjectedFailure("capture failed")
        self.fails_to_discard: set[GraphKey] = set()
        self.leaked_bytes = 0

    @property
    def keys(self) -> tuple[GraphKey, ...]:
        return tuple(self._entries)

    @property
    def num_bytes(self) -> int:
        return len(self._entries) * self.bytes_per_graph + self.leaked_bytes

    def capture(
        self, key: GraphKey, fn: StepFunction, inputs: Mapping[str, Tensor]
    ) -> tuple[Tensor, ...]:
        self._entries[key] = fn
        self.num_captures += 1
        if self.fail_at == self.num_captures - 1:
            self._entries[key, "piece"] = fn
            raise self.error
        return tuple(self._reads(key))

    def replay(self, key: GraphKey, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return self._entries[key](inputs)

    def discard(self, key: GraphKey) -> None:
        if key in self.fails_to_discard:
            raise InjectedFailure(f"discarding {key!r} failed")
        self._entries.pop(key, None)


class FlakyArena:
    """An arena whose next restores go wrong: `errors` are raised first, then `shortfalls` taken.

    A shortfall is a number of bytes by which the restored memory is smaller than before; a
    release of such memory issues a receipt for what there is, as a true arena would.
    """

    __slots__ = ("_inner", "_issued", "_missing", "errors", "shortfalls")

    def __init__(self, inner: Arena) -> None:
        self._inner = inner
        self.errors: list[Exception] = []
        self.shortfalls: list[int] = []
        self._missing: dict[Tag, int] = {}
        self._issued: dict[int, ReleaseReceipt] = {}  # By serial: the inner arena's receipt.

    @property
    def keeps_addresses(self) -> bool:
        return self._inner.keeps_addresses

    @property
    def ledger(self) -> StorageLedger | None:
        return self._inner.ledger

    def allocate(
        self, name: str, shape: SequenceABC[int], dtype: torch.dtype, *, tag: Tag
    ) -> Tensor:
        return self._inner.allocate(name, shape, dtype, tag=tag)

    def free(self, name: str) -> None:
        self._inner.free(name)

    def tensor(self, name: str) -> Tensor:
        return self._inner.tensor(name)

    def names(self, tag: Tag) -> tuple[str, ...]:
        return self._inner.names(tag)

    def release(self, tag: Tag) -> ReleaseReceipt:
        receipt = self._inner.release(tag)
        self._issued[receipt.serial] = receipt
        return replace(receipt, num_bytes=receipt.num_bytes - self._missing.pop(tag, 0))

    def restore(self, receipt: ReleaseReceipt) -> RestoreReport:
        if self.errors:
            raise self.errors.pop(0)
        report = self._inner.restore(self._issued[receipt.serial])
        if self.shortfalls:
            self._missing[receipt.tag] = self.shortfalls.pop(0)
        return report

    def resident_bytes(self, tag: Tag) -> int:
        return self._inner.resident_bytes(tag) - self._missing.get(tag, 0)


def _arena(kind: str, ledger: StorageLedger) -> Arena:
    if kind == "plain":
        return PlainArena(ledger=ledger)
    return PoisonArena(kind == "poison_moving", ledger=ledger)


class Rig:
    """A tiny engine: one step in one arena of a kind, three graphs that read different tags.

    `kind` is "poison", "poison_moving" or "plain"; the graphs are "step" (weights, KV, static),
    "weights" and "kv". It captures again what a sleep released, unless `fail_recapture`.
    """

    __slots__ = (
        "arena",
        "fail_recapture",
        "num_recaptures",
        "registry",
        "residency",
        "step",
        "store",
    )

    def __init__(self, kind: str = "poison", *, recapture: bool = True) -> None:
        ledger = StorageLedger()
        self.arena = FlakyArena(_arena(kind, ledger))
        self.step = TinyStep(self.arena)
        self.registry = GraphRegistry(ledger)
        self.store = RecordedStore()
        self.registry.add_store("full", self.store)
        self.fail_recapture = False
        self.num_recaptures = 0
        self.residency = Residency(
            self.arena, self.registry, recapture=self.recapture if recapture else None
        )

    def load(self, seed: int = 0) -> None:
        self.residency.require("update_weights")
        self.step.load(seed)
        self.residency.mark_weights_valid()

    def request(self, key: GraphKey) -> CaptureRequest:
        fns: dict[str, StepFunction] = {
            "step": self.step,
            "weights": lambda i: {"out": self.step.up.sum(0)},
            "kv": lambda i: {"out": self.step.kv.sum(0)},
        }
        inputs = self.step.inputs(seed=1) if key == "step" else {}
        return CaptureRequest(key=key, store="full", fn=fns[str(key)], inputs=inputs)

    def recapture(self, keys: tuple[GraphKey, ...]) -> Iterable[CaptureRequest]:
        self.num_recaptures += 1
        if self.fail_recapture:
            raise InjectedFailure("no memory left")
        return [self.request(key) for key in keys]

    def capture(self, *keys: str) -> None:
        self.residency.require("capture")
        self.registry.capture_all(self.request(key) for key in keys)

    def assert_replay_equals_eager(self) -> None:
        inputs = self.step.inputs(seed=5)
        replayed = self.registry.replay("step", inputs)["out"].clone()
        assert torch.equal(replayed, self.step(inputs)["out"])
        assert not replayed.isnan().any()

    @property
    def tensors(self) -> list[Tensor]:
        return [self.step.up, self.step.down, self.step.kv, self.step.scale]
