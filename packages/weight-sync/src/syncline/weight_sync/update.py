"""One weight update as a transaction: begin, put, commit or abort.

Decides what may be written and counts what was; the encoders write, the guard says when, the
table says where. Knows no transport, no scheduler and no rank but its own: whoever owns several
ranks prepares them all before it commits one. Not thread-safe; one thread drives an update.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, Self

import torch

from syncline.weight_sync.checksums import combined_checksum, stored_checksums
from syncline.weight_sync.coverage import Coverage
from syncline.weight_sync.delivery import SlotState, deliveries
from syncline.weight_sync.errors import (
    DtypeMismatchError,
    DuplicateTensorError,
    IncompleteUpdateError,
    NonFiniteWeightError,
    NotInManifestError,
    ShapeMismatchError,
    StaleVersionError,
    UpdateStateError,
)
from syncline.weight_sync.guard import LiveGate, WriteGuard
from syncline.weight_sync.manifest import Manifest, require_complete
from syncline.weight_sync.names import Alias, Ignored, NameTable, Target
from syncline.weight_sync.parts import Transport
from syncline.weight_sync.regions import Region, extents, require_within, whole_region
from syncline.weight_sync.report import AbortReport, Stopwatch, SyncReport
from syncline.weight_sync.tensors import (
    non_finite_in,
    require_dtype,
    require_usable,
    wait_for_devices,
)

Mode = Literal["direct", "staged"]


class UpdateState(StrEnum):
    OPEN = "open"
    COMMITTED = "committed"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateOptions:
    """`current_version` is what is loaded now; None: nothing is, so every version is new."""

    current_version: int | None = None
    allow_equal_version: bool = False
    check_finite: bool = True
    with_checksum: bool = False
    clock: Callable[[], float] = time.perf_counter


DEFAULT_OPTIONS = UpdateOptions()


class Update:
    """Open from `begin` until `commit` or `abort`; a refused put changes nothing and may be mended.

    A direct update writes live storage as parts come and holds the guard from its first live byte
    to its end. A staged one writes shadows and holds the guard for the swap inside `commit`.
    """

    __slots__ = (
        "_bytes_written", "_gate", "_ignored", "_manifest", "_max_buffered_bytes", "_mode",
        "_num_buffered_bytes", "_options", "_received", "_slots", "_state", "_stopwatch",
        "_stored_at", "_table", "_version",
    )  # fmt: skip

    def __init__(
        self,
        table: NameTable,
        version: int,
        *,
        guard: WriteGuard,
        manifest: Manifest | None,
        mode: Mode,
        options: UpdateOptions,
    ) -> None:
        _require_version(version, options)
        if mode not in ("direct", "staged"):
            raise ValueError(f"mode must be 'direct' or 'staged', got {mode!r}")
        if manifest is not None:
            require_complete(manifest, table)
        self._table = table
        self._version = version
        self._gate = LiveGate(guard)
        self._manifest = manifest
        self._mode = mode
        self._options = options
        self._stopwatch = Stopwatch(options.clock)
        self._slots = {
            name: SlotState(slot, staged=mode == "staged") for name, slot in table.slots.items()
        }
        self._stored_at = table.stored_at()
        self._received: dict[str, Coverage] = {}
        self._ignored: set[str] = set()
        self._state = UpdateState.OPEN
        self._bytes_written = 0
        self._num_buffered_bytes = 0
        self._max_buffered_bytes = 0

    @classmethod
    def begin(
        cls,
        table: NameTable,
        version: int,
        *,
        guard: WriteGuard,
        manifest: Manifest | None = None,
        mode: Mode = "direct",
        options: UpdateOptions = DEFAULT_OPTIONS,
    ) -> Self:
        """Start an update that covers every slot of `table`; nothing is written and no guard held.

        Raises StaleVersionError, ManifestError with every offender at once, or StorageError when
        the stored tensors hold no memory.
        """
        return cls(table, version, guard=guard, manifest=manifest, mode=mode, options=options)

    @property
    def version(self) -> int:
        return self._version

    @property
    def mode(self) -> Mode:
        return self._mode

    @property
    def state(self) -> UpdateState:
        return self._state

    @property
    def live_bytes_written(self) -> bool:
        """True from just before the first encoder or derived tensor touches live storage."""
        return self._gate.bytes_written

    @property
    def guard_held(self) -> bool:
        return self._gate.held

    @property
    def bytes_written(self) -> int:
        """Stored bytes that blocks counted so far own, live or in shadows."""
        return self._bytes_written

    @property
    def bytes_total(self) -> int:
        return sum(slot.num_bytes for slot in self._table.slots.values())

    @property
    def num_buffered_bytes(self) -> int:
        """Bytes of parts that wait for the rest of a scale's domain."""
        return self._num_buffered_bytes

    def put(self, name: str, tensor: torch.Tensor, part: Region | None = None) -> None:
        """Take a tensor, or the rectangle `part` of the sender's full shape, in any order.

        Raises a TensorRefusedError, with nothing written and nothing counted. After an error of
        an encoder the part does not count either, but its live bytes are undefined. On the CPU
        the sender may overwrite `tensor` at once; on a device, in stream order.
        """
        self._require_open("put")
        found = self._table.resolve(name)
        if isinstance(found, Ignored):
            self._ignored.add(name)
            return
        target = found.target if isinstance(found, Alias) else found
        region = whole_region(target.full_shape) if part is None else part
        require_within(region, target.full_shape, f"part of {name}")
        self._require_acceptable(name, target, tensor, region)
        with self._stopwatch.phase("check"):
            if self._options.check_finite:
                self._require_finite(name, target, tensor, region)
            planned = deliveries(self._slots, target, name, tensor.detach(), region)
        if self._mode == "direct" and any(each.fresh for each in planned):
            self._open_live_storage()
        with self._stopwatch.phase("encode"):
            for each in planned:
                each.write()
        self._received.setdefault(name, Coverage(target.full_shape)).add(region)
        for each in planned:
            self._bytes_written += each.num_bytes
            self._num_buffered_bytes += each.accept()
        self._max_buffered_bytes = max(self._max_buffered_bytes, self._num_buffered_bytes)

    def put_all(self, parts: Transport) -> None:
        """Put what a transport yields; stops at the first error, leaving the update open."""
        for each in parts:
            self.put(each.name, each.tensor, each.part)

    def prepare(self) -> None:
        """Return when this rank can commit: every byte has come and its writes have run.

        Raises IncompleteUpdateError with everything that is missing; the update stays open.
        """
        self._require_open("prepare")
        missing = [each for state in self._slots.values() for each in state.missing(self._table)]
        absent = tuple(
            name
            for name in self._manifest or ()
            if name not in self._received and not isinstance(self._table.find(name), Ignored)
        )
        if missing or absent:
            raise IncompleteUpdateError(tuple(missing), absent)
        for state in self._slots.values():
            state.writer.require_in_place()
            state.writer.require_every_byte()
        wait_for_devices(self._table.devices())

    def commit(self) -> SyncReport:
        """Make the update the served weights, all of it, and give the guard back.

        An error leaves the update open; commit may be repeated, or the update aborted.
        """
        self._require_open("commit")
        self.prepare()
        if self._mode == "staged" and self.bytes_total:
            self._open_live_storage()
            with self._stopwatch.phase("swap"):
                for state in self._slots.values():
                    state.writer.swap()
        self._derive()
        wait_for_devices(self._table.devices())
        for state in self._slots.values():
            state.writer.require_in_place()
        report = self._report()
        self._close(UpdateState.COMMITTED)
        return report

    def abort(self, reason: str) -> AbortReport:
        """End the update without a commit; what came of it is forgotten, the guard given back."""
        self._require_open("abort")
        wait_for_devices(self._table.devices())
        self._close(UpdateState.ABORTED)
        return AbortReport(
            version=self._version,
            reason=reason,
            live_bytes_written=self.live_bytes_written,
            num_tensors=len(self._received),
            bytes_written=self._bytes_written,
            bytes_total=self.bytes_total,
        )

    def _require_open(self, action: str) -> None:
        if self._state is not UpdateState.OPEN:
            raise UpdateStateError(action, self._state.value, self._version)

    def _require_finite(
        self, name: str, target: Target, tensor: torch.Tensor, region: Region
    ) -> None:
        """Finite as sent, and in every dtype of 16 bits or more that a slot stores by itself."""
        stored = {
            each.dtype
            for landing in target.landings
            if len(landing.slot.storage) == 1  # With scales beside it, the codes never overflow.
            for each in landing.slot.storage.values()
            if each.dtype.is_floating_point and each.dtype.itemsize >= 2
        }
        dtype = non_finite_in(tensor, stored)
        if dtype is not None:
            raise NonFiniteWeightError(name, region, dtype)

    def _require_acceptable(
        self, name: str, target: Target, tensor: torch.Tensor, region: Region
    ) -> None:
        """All that can be said about a tensor without reading an element of it."""
        announced = None if self._manifest is None else self._manifest.get(name)
        if self._manifest is not None and announced is None:
            raise NotInManifestError(name)
        if tuple(tensor.shape) != extents(region):
            raise ShapeMismatchError(name, extents(region), tuple(tensor.shape))
        if announced is not None and tensor.dtype != announced[1]:
            raise DtypeMismatchError(name, f"{announced[1]} as announced", tensor.dtype)
        for landing in target.landings:
            require_dtype(name, tensor.dtype, landing.slot)
        require_usable(name, tensor, self._stored_at)
        coverage = self._received.get(name)
        if coverage is None:
            return
        if 0 in target.full_shape:
            raise DuplicateTensorError(name, region, "a tensor without elements")
        for again in coverage.overlaps(region):
            raise DuplicateTensorError(name, again, "in the sender's tensor")

    def _open_live_storage(self) -> None:
        with self._stopwatch.phase("wait"):
            self._gate.open(f"weight update to version {self._version}")

    def _derive(self) -> None:
        for derived in self._table.derived:
            self._open_live_storage()
            with self._stopwatch.phase("derive"), torch.no_grad():
                inputs = {name: self._table.slots[name].storage for name in derived.inputs}
                derived.recompute(derived.storage, inputs)

    def _report(self) -> SyncReport:
        slots, total = self._table.slots.values(), self.bytes_total
        wanted = self._options.with_checksum
        return SyncReport(
            version=self._version,
            mode=self._mode,
            num_tensors=len(self._received),
            num_slots=len(slots),
            bytes_written=self._bytes_written,
            bytes_total=total,
            coverage=self._bytes_written / total if total else 1.0,
            max_buffered_bytes=self._max_buffered_bytes,
            seconds=self._stopwatch.seconds(),
            aliases=tuple(sorted(set(self._received) & set(self._table.aliases))),
            ignored=tuple(sorted(self._ignored)),
            derived=tuple(derived.name for derived in self._table.derived),
            checksum=combined_checksum(stored_checksums(slots)) if wanted else None,
        )

    def _close(self, state: UpdateState) -> None:
        """Release first: if the guard raises, the update stays open and may be ended again."""
        self._gate.release()
        self._state = state
        self._slots = {}  # Shadows and waiting parts end here, whoever still holds the update.
        self._num_buffered_bytes = 0


def _require_version(version: int, options: UpdateOptions) -> None:
    if isinstance(version, bool) or not isinstance(version, int) or version < 0:
        raise ValueError(f"version must be an int >= 0, got {version!r}")
    current = options.current_version
    if current is None or version > current:
        return
    if version < current or not options.allow_equal_version:
        raise StaleVersionError(version, current)
