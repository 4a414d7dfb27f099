"""What an arena is, and the bookkeeping that every arena shares.

An arena owns one allocation per name, each under one tag, and hands out one Tensor object per
name that stays valid over sleep and wake: holders keep the object and rebind nothing. It
counts bytes as allocated (rounded up to ALIGNMENT), and never looks at what they mean.
A view, a Parameter or a `detach()` of a tensor is the holder's own: it does not follow a move.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence as SequenceABC
from typing import Protocol

import torch
from torch import Tensor

from syncline.graph_lifecycle.arena import memory
from syncline.graph_lifecycle.errors import ArenaError, ReleasedMemoryWrittenError
from syncline.graph_lifecycle.ledger import StorageLedger
from syncline.graph_lifecycle.receipts import ReceiptBook
from syncline.graph_lifecycle.types import ReleaseReceipt, RestoreReport, Tag

_ALLOCATABLE = (Tag.WEIGHTS, Tag.KV_CACHE, Tag.STATIC)
_RELEASABLE = (Tag.WEIGHTS, Tag.KV_CACHE)


class Arena(Protocol):
    """Memory by name and tag that can be given back and brought back."""

    @property
    def keeps_addresses(self) -> bool:
        """Does a restore bring every tensor back at its old address."""
        ...

    @property
    def ledger(self) -> StorageLedger | None:
        """Where live graphs are asked for before anything is freed or moved."""
        ...

    def allocate(
        self, name: str, shape: SequenceABC[int], dtype: torch.dtype, *, tag: Tag
    ) -> Tensor: ...

    def free(self, name: str) -> None: ...

    def tensor(self, name: str) -> Tensor: ...

    def names(self, tag: Tag) -> tuple[str, ...]: ...

    def release(self, tag: Tag) -> ReleaseReceipt: ...

    def restore(self, receipt: ReleaseReceipt) -> RestoreReport: ...

    def resident_bytes(self, tag: Tag) -> int: ...


class Allocation:
    """One name's memory: the Tensor object handed out and the storage it is bound to now."""

    __slots__ = ("dtype", "name", "num_bytes", "shape", "storage", "tag", "tensor")

    def __init__(self, *, name: str, tag: Tag, shape: tuple[int, ...], tensor: Tensor) -> None:
        self.name = name
        self.tag = tag
        self.shape = shape
        self.dtype = tensor.dtype
        self.tensor = tensor
        self.num_bytes = memory.padded_bytes(math.prod(shape) * tensor.dtype.itemsize)
        self.storage = tensor.untyped_storage()

    def bind(self, storage: torch.UntypedStorage) -> None:
        memory.bind(self.tensor, storage, self.shape, self.dtype)
        self.storage = storage


class BaseArena(ABC):
    """Names, tags, receipts and refusals; a subclass says how memory goes and comes back."""

    __slots__ = ("_allocations", "_book", "_device", "_ledger", "_released")

    def __init__(self, *, ledger: StorageLedger | None, device: torch.device) -> None:
        self._ledger = ledger
        self._device = device
        self._allocations: dict[str, Allocation] = {}
        self._released: set[Tag] = set()
        self._book: ReceiptBook[ReleaseReceipt] = ReceiptBook()

    @property
    @abstractmethod
    def keeps_addresses(self) -> bool: ...

    @abstractmethod
    def _new_storage(self, num_bytes: int, dtype: torch.dtype) -> torch.UntypedStorage:
        """Memory for a new allocation, or for one that comes back at a new address."""

    @abstractmethod
    def _give_back(self, allocation: Allocation) -> None:
        """Release the allocation's memory; afterwards what it is bound to reads poison."""

    @property
    def ledger(self) -> StorageLedger | None:
        return self._ledger

    def allocate(
        self, name: str, shape: SequenceABC[int], dtype: torch.dtype, *, tag: Tag
    ) -> Tensor:
        """A new contiguous tensor, its address a multiple of ALIGNMENT, its content undefined.

        A name is allocated once. ValueError for a name that is taken, a negative size, or a
        tag that holds no arena memory; ArenaError while the tag is released.
        """
        if name in self._allocations:
            raise ValueError(f"name {name!r} is allocated already")
        if tag not in _ALLOCATABLE:
            raise ValueError(f"tag must be one of {_listed(_ALLOCATABLE)}, got {tag!r}")
        sizes = tuple(shape)
        if any(size < 0 for size in sizes):
            raise ValueError(f"shape of {name!r} must be non-negative, got {sizes}")
        self._require_resident(tag, f"allocate {name!r}")
        with memory.outside_autograd():
            storage = self._new_storage(math.prod(sizes) * dtype.itemsize, dtype)
            tensor = memory.unbound(dtype, self._device)
            memory.bind(tensor, storage, sizes, dtype)
        self._allocations[name] = Allocation(name=name, tag=tag, shape=sizes, tensor=tensor)
        return tensor

    def free(self, name: str) -> None:
        """Give the name's memory back for good; its tensor reads poison from then on.

        StorageInUseError while a live graph reads it, whether or not addresses are kept.
        """
        allocation = self._find(name)
        self._require_resident(allocation.tag, f"free {name!r}")
        self._require_own([allocation])
        if self._ledger is not None:
            self._ledger.require_unread({name: allocation.tensor}, f"free {name!r}")
        with memory.outside_autograd():
            self._give_back(allocation)
        del self._allocations[name]

    def tensor(self, name: str) -> Tensor:
        """The object handed out by `allocate`, whatever state its tag is in."""
        return self._find(name).tensor

    def names(self, tag: Tag) -> tuple[str, ...]:
        return tuple(a.name for a in self._under(tag))

    def resident_bytes(self, tag: Tag) -> int:
        """Bytes held for the tag, each allocation rounded up to ALIGNMENT; 0 while released.

        The CPU spends at most 192 more per allocation on reaching an aligned address.
        """
        if tag in self._released:
            return 0
        return sum(a.num_bytes for a in self._under(tag))

    def release(self, tag: Tag) -> ReleaseReceipt:
        """Give the tag's memory back, content and all; the receipt brings the memory back.

        While released, the tensors keep shape and dtype and read poison. StorageInUseError if
        addresses are not kept and a live graph reads the tag; nothing is changed then.
        """
        if tag not in _RELEASABLE:
            raise ValueError(f"tag must be one of {_listed(_RELEASABLE)}, got {tag!r}")
        self._require_resident(tag, f"release {tag}")
        allocations = self._under(tag)
        self._require_own(allocations)
        tensors = {a.name: a.tensor for a in allocations}
        if self._ledger is not None and not self.keeps_addresses:
            self._ledger.require_unread(tensors, f"release {tag}")
        receipt = ReleaseReceipt(
            issuer=self._book.issuer,
            serial=self._book.next_serial(),
            tag=tag,
            num_bytes=self.resident_bytes(tag),
            names=tuple(tensors),
        )
        with memory.outside_autograd():
            for allocation in allocations:
                self._give_back(allocation)
        self._released.add(tag)
        if self._ledger is not None:
            self._ledger.mark_released(tensors)
        self._book.enter(receipt)
        return receipt

    def restore(self, receipt: ReleaseReceipt) -> RestoreReport:
        """Bring back every tensor of the receipt, same object, same shape, content lost.

        Consumes the receipt. If memory is short the allocator's error passes through, nothing
        has changed and the receipt stays open. ReleasedMemoryWrittenError if somebody wrote
        while the memory was released: it is poisoned afresh and the receipt stays open.
        """
        self._book.require_open([receipt])
        allocations = self._under(receipt.tag)
        self._require_own(allocations)
        with memory.outside_autograd():
            self._require_unwritten(receipt.tag, allocations)
            if not self.keeps_addresses:
                # All of it before the first tensor is rebound: it may not fit.
                storages = [self._new_storage(a.num_bytes, a.dtype) for a in allocations]
            if self._ledger is not None:
                self._ledger.mark_restored(a.tensor for a in allocations)
            if not self.keeps_addresses:
                for allocation, storage in zip(allocations, storages, strict=True):
                    allocation.bind(storage)
        self._released.discard(receipt.tag)
        self._book.consume([receipt])
        return RestoreReport(
            tag=receipt.tag,
            moved=not self.keeps_addresses,
            num_bytes=self.resident_bytes(receipt.tag),
        )

    def _under(self, tag: Tag) -> list[Allocation]:
        return [a for a in self._allocations.values() if a.tag == tag]

    def _find(self, name: str) -> Allocation:
        if name not in self._allocations:
            raise ValueError(f"name {name!r} is not allocated; names: {sorted(self._allocations)}")
        return self._allocations[name]

    def _require_resident(self, tag: Tag, action: str) -> None:
        if tag in self._released:
            raise ArenaError(f"{action} refused: {tag} is released")

    def _require_own(self, allocations: SequenceABC[Allocation]) -> None:
        # A holder that rebound its tensor took the name away from its memory: bytes could be
        # neither counted nor brought back, and readers of the old storage would stay stale.
        strayed = [
            a.name for a in allocations if a.tensor.untyped_storage()._cdata != a.storage._cdata
        ]
        if strayed:
            raise ArenaError(f"tensors {strayed} were bound to foreign memory by their holder")

    def _require_unwritten(self, tag: Tag, allocations: SequenceABC[Allocation]) -> None:
        written = [a for a in allocations if not memory.is_poison(a.storage, a.dtype)]
        for allocation in written:
            memory.fill_poison(allocation.storage, allocation.dtype)
        if written:
            raise ReleasedMemoryWrittenError(tag=tag, names=[a.name for a in written])


def _listed(tags: SequenceABC[Tag]) -> str:
    return ", ".join(tags)
