"""What one put brings to the slots it feeds, worked out before anything is written.

Holds the state of a slot in an update: its writer, and its streams of parts. All sources of a slot
and its own name share one stream, in which no element may come twice. Each alias has a stream of
its own: what another name of the same tensor has written already is compared, not written again.
"""

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass

import torch

from syncline.weight_sync.assembly import Assembly, Intake, Piece
from syncline.weight_sync.domains import DomainGrid
from syncline.weight_sync.errors import AliasMismatchError, DuplicateTensorError, MissingRegion
from syncline.weight_sync.names import NameTable, Target
from syncline.weight_sync.regions import Region, volume, whole_region
from syncline.weight_sync.slots import WeightSlot
from syncline.weight_sync.writer import SlotWriter

CANONICAL = ""  # the stream of all names of a slot that are no alias


class SlotState:
    """One slot in one update."""

    __slots__ = ("_grid", "_names", "_streams", "_writer")

    def __init__(self, slot: WeightSlot, *, staged: bool) -> None:
        self._writer = SlotWriter(slot, staged=staged)
        self._grid = DomainGrid(slot)
        self._streams: dict[str, Assembly] = {}
        self._names: list[str] = []

    @property
    def writer(self) -> SlotWriter:
        return self._writer

    def plan(self, name: str, key: str, pieces: SequenceABC[Piece]) -> "Delivery":
        """What these disjoint pieces, of a stream, mean; changes nothing.

        Raises DuplicateTensorError, AliasMismatchError or DtypeMismatchError.
        """
        stream = self._streams.get(key) or Assembly(self._writer.slot, self._grid)
        slot_name, others = self._writer.slot.name, tuple(self._names)
        for piece in pieces:
            for again in stream.overlaps(piece.region):
                detail = f"in slot {slot_name}, which {', '.join(others)} fed"
                raise DuplicateTensorError(name, again, detail)
        intake = stream.take(name, pieces)
        fresh = tuple(self._fresh(name, intake))
        return Delivery(state=self, name=name, key=key, stream=stream, intake=intake, fresh=fresh)

    def accept(self, delivery: "Delivery") -> None:
        """The fresh pieces of a delivery were written: count it."""
        delivery.stream.accept(delivery.intake)
        self._streams[delivery.key] = delivery.stream
        if delivery.name not in self._names:
            self._names.append(delivery.name)
        for piece in delivery.fresh:
            self._writer.accept(piece.region)

    def missing(self, table: NameTable) -> list[MissingRegion]:
        """What has to come before the slot is whole and nothing that came is left unread."""
        slot = self._writer.slot
        gaps = [stream.missing() for stream in self._streams.values() if stream.num_waiting]
        if not self._writer.written.is_complete:
            # Of several names of one tensor, report the one that is nearest to its end.
            every = [stream.missing() for stream in self._streams.values()]
            gaps = [min(every or [[whole_region(slot.logical_shape)]], key=_num_elements)]
        return [
            MissingRegion(slot=slot.name, region=region, names=table.names_for(slot, region))
            for gap in gaps
            for region in gap
        ]

    def _fresh(self, name: str, intake: Intake) -> Iterator[Piece]:
        """The ready blocks that nothing has written; what is written already must be the same."""
        written = self._writer.written
        for piece in intake.ready:
            seen = written.overlaps(piece.region)
            for region in seen:
                if not self._writer.holds(piece.cut(region)):
                    slot_name = self._writer.slot.name
                    raise AliasMismatchError(name, tuple(self._names), slot_name, region)
            for region in written.missing(piece.region) if seen else [piece.region]:
                yield piece.cut(region)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Delivery:
    """What one put brings to one slot; `fresh` are the blocks that have to be written."""

    state: SlotState
    name: str
    key: str
    stream: Assembly
    intake: Intake
    fresh: tuple[Piece, ...]

    @property
    def num_bytes(self) -> int:
        """Stored bytes that the fresh blocks own."""
        return sum(self.state.writer.owned_bytes(piece.region) for piece in self.fresh)

    def write(self) -> None:
        for piece in self.fresh:
            self.state.writer.write(piece)

    def accept(self) -> int:
        """Count it; returns by how many bytes what waits in memory has grown."""
        before = self.stream.num_buffered_bytes
        self.state.accept(self)
        return self.stream.num_buffered_bytes - before


def deliveries(
    states: Mapping[str, SlotState], target: Target, name: str, tensor: torch.Tensor, part: Region
) -> list[Delivery]:
    """What the rectangle `part` of a target brings to each slot, sent under `name`."""
    pieces: dict[str, list[Piece]] = {}
    for landing in target.landings:
        cut = landing.cut(tensor, part)
        if cut is not None:
            pieces.setdefault(landing.slot.name, []).append(Piece(region=cut[0], tensor=cut[1]))
    key = CANONICAL if name == target.name else name
    return [states[slot].plan(name, key, arriving) for slot, arriving in pieces.items()]


def _num_elements(regions: SequenceABC[Region]) -> int:
    return sum(map(volume, regions))
