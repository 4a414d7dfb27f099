"""Parts of one slot on their way to its encoder: what has come, what waits, what is whole now.

A part that cuts a scale's domain or a layout's tile waits as a copy until the rest of the domain
has come; an encoder never sees a cut domain. What waits is never more than the slot itself, in the
sender's dtype. Nothing is written here, and nothing changes until `accept`, so a put that fails
later leaves no trace.
"""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass

import torch

from syncline.weight_sync.coverage import Coverage
from syncline.weight_sync.domains import DomainGrid
from syncline.weight_sync.errors import DtypeMismatchError
from syncline.weight_sync.regions import (
    Region,
    difference_all,
    extents,
    intersection,
    relative,
    slices,
)
from syncline.weight_sync.slots import WeightSlot
from syncline.weight_sync.tensors import in_bytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Piece:
    """Values of a slot's region; `tensor` has the region's shape."""

    region: Region
    tensor: torch.Tensor

    def cut(self, region: Region) -> "Piece":
        """A view of the elements of `region`, which lies inside this piece."""
        view = self.tensor[slices(relative(region, self.region))]
        return Piece(region=region, tensor=view)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Intake:
    """What the pieces of one put mean for a slot."""

    arrived: tuple[Region, ...]
    kept: tuple[Piece, ...]  # views of the sender's tensors; `accept` copies what has to wait
    ready: tuple[Piece, ...]  # disjoint, encodable, never emitted before


class Assembly:
    """One spelling of one slot. `emitted` is within `received`; between them lies what waits."""

    __slots__ = ("_emitted", "_grid", "_kept", "_num_buffered_bytes", "_received")

    def __init__(self, slot: WeightSlot, grid: DomainGrid) -> None:
        self._grid = grid
        self._received = Coverage(slot.logical_shape)
        self._emitted = Coverage(slot.logical_shape)
        self._kept: list[Piece] = []
        self._num_buffered_bytes = 0

    @property
    def num_waiting(self) -> int:
        """Elements that have come and that no encoder has seen."""
        return self._received.num_covered - self._emitted.num_covered

    @property
    def num_buffered_bytes(self) -> int:
        return self._num_buffered_bytes

    def overlaps(self, region: Region) -> list[Region]:
        return self._received.overlaps(region)

    def missing(self) -> list[Region]:
        return self._received.missing()

    def take(self, name: str, pieces: SequenceABC[Piece]) -> Intake:
        """Plan the arrival of new, disjoint pieces; changes nothing.

        Raises DtypeMismatchError when one domain would be put together from two dtypes.
        """
        arrived = tuple(piece.region for piece in pieces)
        if all(self._grid.encodable(region) for region in arrived):
            return Intake(arrived=arrived, kept=(), ready=tuple(pieces))
        planned = self._emitted.copy()
        ready: list[Piece] = []
        kept: list[Piece] = []
        touched: list[Region] = []
        for piece in pieces:
            for block in self._blocks(piece.region):
                common = intersection(block, piece.region)
                assert common is not None, f"{block} does not touch {piece.region}"
                if common == block:
                    planned.add(block)
                    ready.append(piece.cut(block))
                else:
                    kept.append(piece.cut(common))
                    touched.append(block)
        waiting = [*self._kept, *kept]
        for block in touched:
            for whole in self._whole_domains(block, arrived):
                for region in planned.missing(whole):
                    ready.append(_gathered(name, region, waiting))
                    planned.add(region)
        return Intake(arrived=arrived, kept=tuple(kept), ready=tuple(ready))

    def accept(self, intake: Intake) -> None:
        """The ready pieces were encoded; what is kept may be overwritten by its sender now."""
        for region in intake.arrived:
            self._received.add(region)
        for piece in intake.ready:
            self._emitted.add(piece.region)
        if intake.ready and self._kept:
            self._kept = [piece for piece in self._kept if not self._emitted.covers(piece.region)]
        self._kept.extend(
            Piece(region=piece.region, tensor=_clone(piece.tensor))
            for piece in intake.kept
            if not self._emitted.covers(piece.region)
        )
        if intake.kept:
            self._num_buffered_bytes = sum(piece.tensor.nbytes for piece in self._kept)

    def _whole_domains(self, block: Region, arrived: SequenceABC[Region]) -> list[Region]:
        """The domains of a block of which every element will have come."""
        if self._received.covers(block, arrived):
            return [block]
        corner = tuple((start, start + 1) for start, _ in block)
        if self._grid.hull(corner) == block:
            return []
        gaps = [
            gap
            for region in self._received.missing(block)
            for gap in difference_all(region, arrived)
        ]
        return difference_all(block, map(self._grid.hull, gaps))

    def _blocks(self, region: Region) -> list[Region]:
        return [region] if self._grid.encodable(region) else self._grid.blocks(region)


def _gathered(name: str, region: Region, kept: Iterable[Piece]) -> Piece:
    """One tensor for `region` from the pieces that hold its elements."""
    parts = [
        piece.cut(common)
        for piece in kept
        if (common := intersection(piece.region, region)) is not None
    ]
    first = parts[0].tensor
    bytes_of_first = in_bytes(first)
    whole = torch.empty(extents(region), dtype=bytes_of_first.dtype, device=first.device)
    for part in parts:
        if part.tensor.dtype != first.dtype:
            wanted = f"{first.dtype}, as the other parts of one scale domain"
            raise DtypeMismatchError(name, wanted, part.tensor.dtype)
        whole[slices(relative(part.region, region))].copy_(in_bytes(part.tensor))
    return Piece(region=region, tensor=whole.view(first.dtype))


def _clone(tensor: torch.Tensor) -> torch.Tensor:
    return in_bytes(tensor).clone().view(tensor.dtype)
