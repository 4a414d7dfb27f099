"""The table from external names to slot regions, built once per model and total.

Every name that a checkpoint or a trainer may use is a key, matched exactly: no pattern, no
substring, no prefix that is stripped. Knows where a tensor lands, not what is done with it.
"""

import difflib
import heapq
import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from syncline.weight_sync.errors import UnknownNameError
from syncline.weight_sync.regions import (
    Region,
    describe,
    extents,
    intersection,
    relative,
    slices,
    volume,
    whole_region,
)
from syncline.weight_sync.slots import DerivedTensor, SlotSource, WeightSlot

MAX_NEAREST = 3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Landing:
    """`taken` of a sender's full tensor lands in `region` of `slot`."""

    slot: WeightSlot
    region: Region
    taken: Region
    sender_dims: tuple[int | None, ...]  # per slot dimension; None: a dimension only the slot has

    def cut(self, tensor: torch.Tensor, part: Region) -> tuple[Region, torch.Tensor] | None:
        """The share of a part that lands here: slot region and a view of that region's shape."""
        common = intersection(part, self.taken)
        if common is None or volume(self.region) == 0:
            return None
        offsets = relative(common, self.taken)
        region = tuple(
            own if dim is None else (own[0] + offsets[dim][0], own[0] + offsets[dim][1])
            for own, dim in zip(self.region, self.sender_dims, strict=True)
        )
        view = tensor[slices(relative(common, part))]
        return region, view.reshape(extents(region))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Target:
    """A name that feeds slots; `full_shape` is the sender's, `landings` may be on several slots."""

    name: str
    full_shape: tuple[int, ...]
    landings: tuple[Landing, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Alias:
    """Another name of a target's tensor, e.g. a tied head."""

    name: str
    target: Target


@dataclass(frozen=True, slots=True, kw_only=True)
class Ignored:
    """A name outside the table that the caller listed as not wanted."""

    name: str


class NameTable:
    """All names of one model on one rank.

    Separate and fused names of one slot are both sources of it; each update uses one spelling of
    each region. One name may feed several slots (a head that is tied but stored apart). `ignored`
    is asked only for names that are not in the table.
    """

    __slots__ = ("_aliases", "_derived", "_ignored", "_slots", "_targets")

    def __init__(
        self,
        slots: Iterable[WeightSlot],
        *,
        aliases: Mapping[str, str] | None = None,
        ignored: Callable[[str], bool] | Iterable[str] = (),
    ) -> None:
        """Raises ValueError when slots share memory or a name, or two sources of a name differ."""
        self._slots: dict[str, WeightSlot] = {}
        for slot in slots:
            if slot.name in self._slots:
                raise ValueError(f"slots must have distinct names, got {slot.name!r} twice")
            self._slots[slot.name] = slot
        _require_disjoint_storage(self._slots.values())
        self._aliases = dict(aliases or {})
        self._targets = _targets(self._slots.values(), self._aliases)
        self._derived = _derived(self._slots)
        self._require_aliases()
        self._ignored: Callable[[str], bool] | frozenset[str]
        if isinstance(ignored, str):
            raise ValueError(f"ignored must be several names or a function, got {ignored!r}")
        if callable(ignored):
            self._ignored = ignored
        else:
            self._ignored = frozenset(ignored)
            if known := sorted(self._ignored & {*self._targets, *self._aliases}):
                raise ValueError(f"ignored must not hold names of the table, got {known}")

    def _require_aliases(self) -> None:
        for alias, canonical in self._aliases.items():
            if alias in self._targets:
                raise ValueError(f"alias {alias!r} must not be a declared source itself")
            if canonical not in self._targets:
                raise ValueError(f"alias {alias!r} must name a source or slot, got {canonical!r}")
            fed = {landing.slot.name for landing in self._targets[canonical].landings}
            if alias in self._slots and alias not in fed:
                raise ValueError(f"alias {alias!r} is a slot, which {canonical!r} must feed")

    @property
    def slots(self) -> Mapping[str, WeightSlot]:
        return self._slots

    @property
    def targets(self) -> Mapping[str, Target]:
        return self._targets

    @property
    def aliases(self) -> Mapping[str, str]:
        return self._aliases

    @property
    def derived(self) -> tuple[DerivedTensor, ...]:
        return self._derived

    def stored_at(self) -> dict[int, torch.Tensor]:
        """By the address where its storage begins, a stored tensor; those without memory left out.

        Of now: memory that is released later may become a stranger's, at the same address.
        """
        found = {
            tensor.untyped_storage().data_ptr(): tensor
            for slot in self._slots.values()
            for tensor in slot.storage.values()
        }
        found.pop(0, None)
        return found

    def devices(self) -> set[torch.device]:
        return {tensor.device for slot in self._slots.values() for tensor in slot.storage.values()}

    def resolve(self, name: str) -> Target | Alias | Ignored:
        """Raises UnknownNameError, with the nearest names, for a name that nobody declared."""
        found = self.find(name)
        if found is None:
            raise UnknownNameError(name, self.nearest(name))
        return found

    def find(self, name: str) -> Target | Alias | Ignored | None:
        """None for a name that nobody declared."""
        if name in self._targets:
            return self._targets[name]
        if name in self._aliases:
            return Alias(name=name, target=self._targets[self._aliases[name]])
        unwanted = self._ignored(name) if callable(self._ignored) else name in self._ignored
        return Ignored(name=name) if unwanted else None

    def nearest(self, name: str) -> tuple[str, ...]:
        """The names that look most like this one, best first; meant for a message, not a match."""
        words = set(name.split("."))
        # A full comparison with every name of a large model takes a second: words first.
        likely = heapq.nlargest(
            64,
            (*self._targets, *self._aliases),
            key=lambda known: (len(words.intersection(known.split("."))), known),
        )
        return tuple(difflib.get_close_matches(name, likely, n=MAX_NEAREST, cutoff=0.6))

    def names_for(self, slot: WeightSlot, region: Region) -> tuple[str, ...]:
        """The external names that would bring elements of this region, the slot's own name last."""
        return tuple(
            source.name
            for source in _sources(slot, self._aliases)
            if intersection(source.region, region) is not None
        )


def _sources(slot: WeightSlot, aliases: Mapping[str, str]) -> tuple[SlotSource, ...]:
    """The declared sources and the slot's own name, unless that is a source or an alias itself."""
    if slot.name in aliases or any(source.name == slot.name for source in slot.sources):
        return slot.sources
    return (*slot.sources, SlotSource(name=slot.name, region=whole_region(slot.logical_shape)))


def _targets(slots: Iterable[WeightSlot], aliases: Mapping[str, str]) -> dict[str, Target]:
    shapes: dict[str, tuple[int, ...]] = {}
    landings: dict[str, list[Landing]] = {}
    for slot in slots:
        for source in _sources(slot, aliases):
            shape = shapes.setdefault(source.name, source.sender_shape)
            if shape != source.sender_shape:
                raise ValueError(
                    f"source {source.name!r} must have one full shape, "
                    f"got {shape} and {source.sender_shape} (slot {slot.name!r})"
                )
            landing = Landing(
                slot=slot,
                region=source.region,
                taken=source.sender_region,
                sender_dims=source.sender_dims(),
            )
            for other in landings.setdefault(source.name, []):
                if other.slot is slot and intersection(other.region, landing.region) is not None:
                    raise ValueError(
                        f"source {source.name!r} must land once in each element of "
                        f"{slot.name!r}, got {describe(other.region)} and "
                        f"{describe(landing.region)}"
                    )
            landings[source.name].append(landing)
    return {
        name: Target(name=name, full_shape=shapes[name], landings=tuple(each))
        for name, each in landings.items()
    }


def _derived(slots: Mapping[str, WeightSlot]) -> tuple[DerivedTensor, ...]:
    """Each derived tensor once, however many of its inputs list it."""
    found: dict[str, DerivedTensor] = {}
    for slot in slots.values():
        for derived in slot.derived:
            if found.setdefault(derived.name, derived) is not derived:
                raise ValueError(f"derived tensors must have distinct names, got {derived.name!r}")
            if unknown := sorted(set(derived.inputs) - set(slots)):
                raise ValueError(f"inputs of {derived.name!r} must be slots, got {unknown}")
    return tuple(found.values())


def _require_disjoint_storage(slots: Iterable[WeightSlot]) -> None:
    """Two slots in one memory would each be complete with half of the other's bytes: use an alias.

    Strided views are left out: their spans may interleave without sharing an element.
    """
    spans = sorted(
        (tensor.device.type, tensor.device.index or 0, tensor.data_ptr(), tensor.nbytes, slot.name)
        for slot in slots
        for tensor in slot.storage.values()
        if tensor.is_contiguous() and tensor.nbytes and tensor.data_ptr()
    )
    for (*device, start, size, name), (*other_device, other_start, _, other) in itertools.pairwise(
        spans
    ):
        if device == other_device and start + size > other_start:
            raise ValueError(f"slots must not share memory, got {name!r} and {other!r}")
