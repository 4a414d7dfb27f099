"""Stand-ins for tests of whatever drives an update: encoders, a guard, a clock.

The encoders are small, exact and made to be sensitive: the layout has order 3 because an
involution hides being applied twice, and a scale's domain can be a row, a block or everything.
They are no formats: what a kernel reads is another package's matter.
"""

import ctypes
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from syncline.weight_sync.regions import (
    Region,
    extents,
    intersection,
    relative,
    slices,
    volume,
    whole_region,
)
from syncline.weight_sync.slots import DerivedTensor, Encoder, SlotSource, WeightSlot
from syncline.weight_sync.tensors import as_bytes

TILE = (3, 2)


@dataclass(frozen=True, slots=True)
class IdentityEncoder:
    """Stores the values row-major in the dtype of the storage; every region is encodable."""

    dtype: torch.dtype = torch.float32

    def storage(self, shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
        return {"weight": torch.zeros(shape, dtype=self.dtype)}

    def encode_into(
        self, out: Mapping[str, torch.Tensor], source: torch.Tensor, region: Region
    ) -> None:
        out["weight"][slices(region)].copy_(source)

    def region_is_encodable(self, logical_shape: tuple[int, ...], region: Region) -> bool:
        return True

    def region_bytes(self, logical_shape: tuple[int, ...], region: Region) -> int:
        return volume(region) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class CycleEncoder:
    """A layout: in each tile of 3 x 2 the element at flat place i is stored at (i + 2) % 6.

    Applied three times it is the identity, once or twice it is not. Matrices of whole tiles only.
    """

    dtype: torch.dtype = torch.float32

    def storage(self, shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
        return {"weight": torch.zeros(shape, dtype=self.dtype)}

    def encode_into(
        self, out: Mapping[str, torch.Tensor], source: torch.Tensor, region: Region
    ) -> None:
        height, width = TILE
        rows, columns = extents(region)
        tiles = source.to(self.dtype).reshape(rows // height, height, columns // width, width)
        flat = tiles.transpose(1, 2).reshape(rows // height, columns // width, height * width)
        moved = torch.roll(flat, shifts=2, dims=-1)
        tiles = moved.reshape(rows // height, columns // width, height, width).transpose(1, 2)
        out["weight"][slices(region)].copy_(tiles.reshape(rows, columns))

    def region_is_encodable(self, logical_shape: tuple[int, ...], region: Region) -> bool:
        return all(
            start % step == 0 and stop % step == 0
            for (start, stop), step in zip(region, TILE, strict=True)
        )

    def region_bytes(self, logical_shape: tuple[int, ...], region: Region) -> int:
        return volume(region) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class ScaledEncoder:
    """Matrices as int8 with one float32 scale per block, the scale being the largest value / 127.

    `block` gives rows and columns per scale, None all of them: (1, None) is a scale per row. A
    block of zeros has the scale 1.
    """

    block: tuple[int | None, int | None] = (1, None)

    def storage(self, shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
        height, width = self._steps(shape)
        scales = (-(-shape[0] // height), -(-shape[1] // width))
        return {
            "weight": torch.zeros(shape, dtype=torch.int8),
            "scale": torch.ones(scales, dtype=torch.float32),
        }

    def encode_into(
        self, out: Mapping[str, torch.Tensor], source: torch.Tensor, region: Region
    ) -> None:
        weight, scale = out["weight"], out["scale"]
        height, width = self._steps(tuple(weight.shape))
        for i, j in itertools.product(range(scale.shape[0]), range(scale.shape[1])):
            block = ((i * height, (i + 1) * height), (j * width, (j + 1) * width))
            inside = intersection(block, region)
            if inside is None:
                continue
            values = source[slices(relative(inside, region))].to(weight.device, torch.float32)
            largest = values.abs().max()
            scale[i, j] = torch.where(largest == 0, 1.0, largest / 127)
            weight[slices(inside)].copy_((values / scale[i, j]).round())

    def region_is_encodable(self, logical_shape: tuple[int, ...], region: Region) -> bool:
        return all(
            start % step == 0 and (stop % step == 0 or stop == size)
            for (start, stop), size, step in zip(
                region, logical_shape, self._steps(logical_shape), strict=True
            )
        )

    def region_bytes(self, logical_shape: tuple[int, ...], region: Region) -> int:
        num_scales = 1
        for (start, stop), step in zip(region, self._steps(logical_shape), strict=True):
            num_scales *= -(-(stop - start) // step)
        return volume(region) + 4 * num_scales

    def _steps(self, shape: tuple[int, ...]) -> tuple[int, int]:
        return self.block[0] or max(shape[0], 1), self.block[1] or max(shape[1], 1)


class FaultyEncoder:
    """Another encoder that, while it is `broken`, spoils its region and raises."""

    __slots__ = ("_inner", "broken")

    def __init__(self, inner: Encoder, *, broken: bool = False) -> None:
        self._inner = inner
        self.broken = broken

    def encode_into(
        self, out: Mapping[str, torch.Tensor], source: torch.Tensor, region: Region
    ) -> None:
        if self.broken:
            self._inner.encode_into(out, torch.full_like(source, 77), region)
            raise RuntimeError("the encoder failed half way")
        self._inner.encode_into(out, source, region)

    def region_is_encodable(self, logical_shape: tuple[int, ...], region: Region) -> bool:
        return self._inner.region_is_encodable(logical_shape, region)

    def region_bytes(self, logical_shape: tuple[int, ...], region: Region) -> int:
        return self._inner.region_bytes(logical_shape, region)


class StandIn(Encoder, Protocol):
    """An encoder that can also make the storage it writes."""

    def storage(self, shape: tuple[int, ...]) -> dict[str, torch.Tensor]: ...


def make_slot(
    name: str,
    shape: tuple[int, ...],
    encoder: StandIn,
    sources: tuple[SlotSource, ...] = (),
    derived: tuple[DerivedTensor, ...] = (),
) -> WeightSlot:
    return WeightSlot(
        name=name,
        logical_shape=shape,
        encoder=encoder,
        storage=encoder.storage(shape),
        sources=sources,
        derived=derived,
    )


def counting(shape: tuple[int, ...], first: int = 1) -> torch.Tensor:
    """float32 values that are all different, so that one in a wrong place shows."""
    num = math.prod(shape)
    return torch.arange(first, first + num, dtype=torch.float32).reshape(shape)


def cold_bytes(slot: WeightSlot, values: torch.Tensor) -> dict[str, bytes]:
    """What a first load of these logical values stores, in fresh storage of the same kind."""
    out = {key: torch.zeros_like(tensor) for key, tensor in slot.storage.items()}
    slot.encoder.encode_into(out, values, whole_region(slot.logical_shape))
    return {key: _bytes(tensor) for key, tensor in out.items()}


def stored_bytes(slot: WeightSlot) -> dict[str, bytes]:
    return {key: _bytes(tensor) for key, tensor in slot.storage.items()}


def _bytes(tensor: torch.Tensor) -> bytes:
    flat = as_bytes(tensor).cpu()
    return ctypes.string_at(flat.data_ptr(), flat.numel()) if flat.numel() else b""


Snapshot = dict[tuple[str, str], bytes]


def snapshot(slots: Iterable[WeightSlot]) -> Snapshot:
    """(slot, stored tensor) -> its bytes now."""
    return {
        (slot.name, key): content for slot in slots for key, content in stored_bytes(slot).items()
    }


def all_cells(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """The index of every element of a tensor of this shape, row by row."""
    return itertools.product(*map(range, shape))


def addresses(slots: Iterable[WeightSlot]) -> dict[tuple[str, str], int]:
    """(slot, stored tensor) -> where it lies."""
    return {
        (slot.name, key): tensor.data_ptr()
        for slot in slots
        for key, tensor in slot.storage.items()
    }


class RecordingGuard:
    """A guard that notes its calls and, at each, the bytes of the slots it watches.

    That a guard was asked proves nothing; that the bytes were old when it was asked does.
    `refuse` is raised by `acquire` while it is set.
    """

    __slots__ = ("_watched", "calls", "held", "reasons", "refuse", "seen")

    def __init__(self, watched: Iterable[WeightSlot] = ()) -> None:
        self._watched = tuple(watched)
        self.calls: list[str] = []
        self.seen: list[Snapshot] = []
        self.reasons: list[str] = []
        self.held = False
        self.refuse: Exception | None = None

    def acquire(self, reason: str) -> None:
        if self.refuse is not None:
            raise self.refuse
        if self.held:
            raise RuntimeError("the guard is held already")
        self.held = True
        self.reasons.append(reason)
        self._note("acquire")

    def first_write(self) -> None:
        self._note("first_write")

    def release(self) -> None:
        if not self.held:
            raise RuntimeError("the guard is not held")
        self.held = False
        self._note("release")

    def _note(self, call: str) -> None:
        self.calls.append(call)
        self.seen.append(snapshot(self._watched))


def ticking_clock(step_s: float = 1.0) -> Callable[[], float]:
    """A clock that advances by one step at each reading."""
    ticks = itertools.count()
    return lambda: next(ticks) * step_s
