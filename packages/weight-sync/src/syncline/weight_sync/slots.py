"""What the owner of the weights declares: where each stored weight lives and who feeds it.

A slot is one stored weight: its logical shape on this rank, the tensors that hold its bytes, and
the encoder that alone knows how a logical region becomes those bytes. Knows no format and looks
inside no encoder. Regions count elements of the slot's logical shape.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from syncline.weight_sync.regions import (
    Region,
    difference_all,
    extents,
    require_within,
    volume,
    whole_region,
)


class Encoder(Protocol):
    """Turns logical values into stored bytes; pure, so that sending again writes the same bytes.

    The encodable regions form a grid: in every dimension there is a set of cuts, which holds 0 and
    the size, and a region is encodable if and only if all its bounds are cuts. The whole slot is
    always encodable, and so is every region when the format has neither scales nor tiles.
    """

    def encode_into(
        self, out: Mapping[str, torch.Tensor], source: torch.Tensor, region: Region
    ) -> None:
        """Write the stored bytes that `region` owns, in place; `source` has the region's shape."""
        ...

    def region_is_encodable(self, logical_shape: tuple[int, ...], region: Region) -> bool:
        """False when `region` cuts the domain of one scale or one tile of the layout."""
        ...

    def region_bytes(self, logical_shape: tuple[int, ...], region: Region) -> int:
        """Stored bytes that an encodable region owns; additive over disjoint regions."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotSource:
    """An external name and where its tensor lands in the slot.

    `full_shape` is the sender's full shape (None: the extents of `region`) and `taken` the
    rectangle of it that this rank stores (None: all of it). The two sides may differ by dimensions
    of size 1 only: one expert's (rows, columns) lands in (1, rows, columns) of a stacked slot.
    An empty `region` makes a name known that lands nowhere on this rank, e.g. another's expert.
    """

    name: str
    region: Region
    full_shape: tuple[int, ...] | None = None
    taken: Region | None = None

    @property
    def sender_shape(self) -> tuple[int, ...]:
        return extents(self.region) if self.full_shape is None else self.full_shape

    @property
    def sender_region(self) -> Region:
        return whole_region(self.sender_shape) if self.taken is None else self.taken

    def sender_dims(self) -> tuple[int | None, ...]:
        """For each dimension of the slot the sender's dimension; None where only the slot has it.

        Raises ValueError when the shapes differ by more than dimensions of size 1.
        """
        sizes, wanted = extents(self.sender_region), extents(self.region)
        if 0 in wanted:
            return (None,) * len(wanted)
        dims: list[int | None] = []
        at = 0
        for size in wanted:
            while at < len(sizes) and sizes[at] != size and sizes[at] == 1:
                at += 1
            if at < len(sizes) and sizes[at] == size:
                dims.append(at)
                at += 1
            elif size == 1:
                dims.append(None)
            else:
                break
        if len(dims) < len(wanted) or any(size != 1 for size in sizes[at:]):
            raise ValueError(
                f"source {self.name!r}: {sizes} of the sender cannot land in {wanted} of the slot"
            )
        return tuple(dims)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DerivedTensor:
    """A tensor computed from slots, refreshed inside every update, e.g. an absorbed projection.

    `recompute(out, inputs)` writes `out` (this storage) in place from the stored tensors of the
    input slots, keyed by slot name. It runs once per update, after the last slot is written.
    """

    name: str
    inputs: tuple[str, ...]
    storage: Mapping[str, torch.Tensor]
    recompute: Callable[
        [Mapping[str, torch.Tensor], Mapping[str, Mapping[str, torch.Tensor]]], None
    ]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WeightSlot:
    """One stored weight. Its own name is always accepted as well and then means all of it.

    `is_floating` says what the logical values are, which the stored dtypes cannot: packed 4-bit
    floats are stored as bytes. A slot of integers takes exactly the stored dtype.
    """

    name: str
    logical_shape: tuple[int, ...]
    encoder: Encoder
    storage: Mapping[str, torch.Tensor]
    sources: tuple[SlotSource, ...] = ()
    derived: tuple[DerivedTensor, ...] = ()
    is_floating: bool = True

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("name must not be empty")
        if any(size < 0 for size in self.logical_shape):
            raise ValueError(f"{self.name}: logical_shape must be >= 0, got {self.logical_shape}")
        self._require_storage()
        self._require_sources()
        whole = whole_region(self.logical_shape)
        if volume(whole) and not self.encoder.region_is_encodable(self.logical_shape, whole):
            raise ValueError(f"{self.name}: encoder must take the whole slot {whole}, it refuses")

    @property
    def num_bytes(self) -> int:
        """Stored bytes that a complete update writes."""
        whole = whole_region(self.logical_shape)
        return self.encoder.region_bytes(self.logical_shape, whole) if volume(whole) else 0

    def _require_storage(self) -> None:
        if not self.storage:
            raise ValueError(f"{self.name}: storage must hold at least one tensor")
        for key, tensor in self.storage.items():
            if tensor.is_meta:
                raise ValueError(
                    f"{self.name}: storage {key!r} must hold memory, got a meta tensor"
                )
        if not self.is_floating and len(self.storage) != 1:
            raise ValueError(
                f"{self.name}: storage must be one tensor when is_floating=False, "
                f"got {sorted(self.storage)}"
            )
        dtypes = [tensor.dtype for tensor in self.storage.values()]
        if not self.is_floating and dtypes[0].is_floating_point:
            raise ValueError(f"{self.name}: is_floating must be True for {dtypes[0]}, got False")

    def _require_sources(self) -> None:
        for source in self.sources:
            field = f"{self.name}: source {source.name!r}"
            require_within(source.region, self.logical_shape, f"{field}: region")
            require_within(source.sender_region, source.sender_shape, f"{field}: taken")
            source.sender_dims()
        whole = whole_region(self.logical_shape)
        left = difference_all(whole, (source.region for source in self.sources))
        if self.sources and left:
            raise ValueError(f"{self.name}: sources must cover the slot, {left} has none")
