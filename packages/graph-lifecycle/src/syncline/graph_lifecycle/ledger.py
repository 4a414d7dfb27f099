"""Which storages every live graph reads, and what has happened to them since.

A captured graph keeps addresses, not Tensor objects, so the ledger counts in storages. It also
watches the Tensor objects that led to them: one that is bound to other memory, or gone, means
that its owner replaced the memory and the graph still reads the old one. It frees nothing
and replays nothing; arenas and the registry ask it.

Source: the storage manifest proposed for vLLM (RFC #48941: references recorded at capture,
checked after a reload, fail closed). Differs: asleep is a state apart from gone.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from syncline.graph_lifecycle.errors import StaleGraphError, StorageInUseError
from syncline.graph_lifecycle.types import FaultKind, GraphKey, StorageFault

# Storage identity, offset, shape, stride, dtype: what a device graph has baked into its kernels.
_Placement = tuple[int, int, torch.Size, tuple[int, ...], torch.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Watch:
    """One Tensor object seen at capture, and where it was bound then."""

    label: str
    ref: TensorWeakRef | None  # None: it did not outlive the capture; its storage still counts.
    placement: _Placement
    storage: torch.UntypedStorage  # Held, so that its identity cannot be given to another one.
    data_ptr: int
    num_bytes: int


class StorageLedger:
    """The storages that live graphs read, by graph and by storage."""

    __slots__ = ("_generation", "_readers", "_released", "_watches")

    def __init__(self) -> None:
        self._generation = 0
        self._watches: dict[GraphKey, list[_Watch]] = {}
        self._readers: dict[int, dict[GraphKey, None]] = {}
        self._released: dict[int, tuple[str, torch.UntypedStorage]] = {}

    @property
    def generation(self) -> int:
        """Raised whenever an arena releases or brings back a storage."""
        return self._generation

    @property
    def keys(self) -> tuple[GraphKey, ...]:
        return tuple(self._watches)

    def record(self, graph_key: GraphKey, tensors: Iterable[Tensor]) -> None:
        """Note that `graph_key` reads the storages of `tensors`.

        Raises StaleGraphError, with nothing recorded, if one of them is released now: a graph
        captured on memory that is asleep was captured on nothing.
        """
        if graph_key in self._watches:
            raise ValueError(f"graph_key {graph_key!r} is recorded already")
        watches = [_watch(tensor) for tensor in tensors]
        asleep = [w for w in watches if w.placement[0] in self._released]
        if asleep:
            faults = [
                StorageFault(tensor=self._released[w.placement[0]][0], kind=FaultKind.RELEASED)
                for w in asleep
            ]
            raise StaleGraphError(key=graph_key, faults=faults)
        self._watches[graph_key] = watches
        for watch in watches:
            self._readers.setdefault(watch.placement[0], {})[graph_key] = None

    def settle(self, graph_key: GraphKey) -> None:
        """Stop watching the Tensor objects that did not outlive the capture.

        Call it once nothing of the capture holds on to them. Their storages stay recorded;
        from now on an object that disappears is a fault.
        """
        self._watches[graph_key] = [
            watch if _tensor(watch) is not None else replace(watch, ref=None)
            for watch in self._watches[graph_key]
        ]

    def forget(self, graph_key: GraphKey) -> None:
        """The graph is gone; a key that was never recorded is no fault."""
        self._watches.pop(graph_key, None)
        for identity in [i for i, keys in self._readers.items() if graph_key in keys]:
            del self._readers[identity][graph_key]
            if not self._readers[identity]:
                del self._readers[identity]

    def readers(self, tensor: Tensor) -> tuple[GraphKey, ...]:
        """The live graphs that read any byte of the tensor's storage, in order of capture."""
        return tuple(self._readers.get(_identity(tensor), ()))

    def num_storages(self, graph_key: GraphKey) -> int:
        return sum(graph_key in keys for keys in self._readers.values())

    def require_unread(self, tensors: Mapping[str, Tensor], action: str) -> None:
        """Raise StorageInUseError if a live graph reads one of the named tensors' storages."""
        read = {name: keys for name, t in tensors.items() if (keys := self.readers(t))}
        if read:
            graphs = dict.fromkeys(key for keys in read.values() for key in keys)
            raise StorageInUseError(action=action, names=tuple(read), graphs=tuple(graphs))

    def mark_released(self, tensors: Mapping[str, Tensor]) -> None:
        """The named tensors' storages are asleep: replaying or capturing on them is refused."""
        self._generation += 1
        for name, tensor in tensors.items():
            self._released[_identity(tensor)] = (name, tensor.untyped_storage())

    def mark_restored(self, tensors: Iterable[Tensor]) -> None:
        """The storages that `tensors` are bound to are no longer asleep."""
        self._generation += 1
        for tensor in tensors:
            self._released.pop(_identity(tensor), None)

    def faults(self, graph_key: GraphKey) -> tuple[StorageFault, ...]:
        """Everything wrong now with what the graph reads; empty means it may be replayed."""
        found = (self._fault(watch) for watch in self._watches[graph_key])
        return tuple(fault for fault in found if fault is not None)

    def _fault(self, watch: _Watch) -> StorageFault | None:
        identity = watch.placement[0]
        if identity in self._released:
            return StorageFault(tensor=self._released[identity][0], kind=FaultKind.RELEASED)
        storage = watch.storage
        if storage.data_ptr() != watch.data_ptr or storage.nbytes() != watch.num_bytes:
            return StorageFault(tensor=watch.label, kind=FaultKind.FREED)
        if watch.ref is None:
            return None
        tensor = _tensor(watch)
        if tensor is None:
            return StorageFault(tensor=watch.label, kind=FaultKind.DROPPED)
        if _placement(tensor) != watch.placement:
            return StorageFault(tensor=watch.label, kind=FaultKind.REBOUND)
        return None


def _watch(tensor: Tensor) -> _Watch:
    storage = tensor.untyped_storage()
    return _Watch(
        label=f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}",
        ref=TensorWeakRef(tensor),
        placement=_placement(tensor),
        storage=storage,
        data_ptr=storage.data_ptr(),
        num_bytes=storage.nbytes(),
    )


def _tensor(watch: _Watch) -> Tensor | None:
    if watch.ref is None:
        return None
    found: Tensor | None = watch.ref()
    return found


def _identity(tensor: Tensor) -> int:
    # The address of the storage's own object: unlike data_ptr it outlives a resize and tells
    # two empty storages apart.
    identity: int = tensor.untyped_storage()._cdata
    return identity


def _placement(tensor: Tensor) -> _Placement:
    return (
        _identity(tensor),
        int(tensor.storage_offset()),
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
    )
