"""The plain values that the rooms of this package hand to each other; no behaviour."""

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from torch import Tensor

GraphKey: TypeAlias = Hashable
"""What a graph is called, e.g. ("decode", 8); unique over all stores of a registry."""

StepFunction: TypeAlias = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
"""A step to capture: named static inputs in, named outputs out."""


class Tag(StrEnum):
    """What a piece of memory is for, and so when it may sleep."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"
    GRAPHS = "graphs"
    STATIC = "static"  # Rope tables, calibrated scales, row state: never sleeps.


class TagState(StrEnum):
    """Where a tag stands."""

    AWAKE = "awake"
    ASLEEP = "asleep"


class FaultKind(StrEnum):
    """What happened to memory that a graph reads."""

    RELEASED = "released"  # asleep now; fine again after a wake at the same address
    FREED = "freed"  # its storage was freed, resized or moved
    REBOUND = "rebound"  # the Tensor object the step read is bound to other memory now
    DROPPED = "dropped"  # the Tensor object the step read is gone: somebody replaced it


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageFault:
    """One tensor that a graph reads, and why it may not."""

    tensor: str
    kind: FaultKind

    def __str__(self) -> str:
        return f"{self.tensor} was {self.kind}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureRequest:
    """One graph to capture: `fn` is called on static copies of `inputs`."""

    key: GraphKey
    store: str
    fn: StepFunction
    inputs: Mapping[str, Tensor]


Recapture: TypeAlias = Callable[[tuple[GraphKey, ...]], Iterable[CaptureRequest]]
"""Gives one request for each of the keys, in any order; called when graphs are to come back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureReport:
    """One graph captured: the storages it reads outside itself, the bytes its store now pins."""

    key: GraphKey
    store: str
    num_storages: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DegradedMode:
    """Graphs that should exist and do not, because a capture failed: those steps run eagerly."""

    missing: tuple[GraphKey, ...]
    key: GraphKey
    store: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseReceipt:
    """Memory of one tag, given back by an arena; `num_bytes` is what the restore brings back."""

    issuer: int
    serial: int
    tag: Tag
    num_bytes: int
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphReceipt:
    """Graphs released by a registry, as (key, store) in the order of their capture."""

    issuer: int
    serial: int
    graphs: tuple[tuple[GraphKey, str], ...]
    num_bytes: int

    @property
    def keys(self) -> tuple[GraphKey, ...]:
        return tuple(key for key, _ in self.graphs)


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreReport:
    """Memory of one tag, brought back; its contents are lost whether it moved or not."""

    tag: Tag
    moved: bool
    num_bytes: int
