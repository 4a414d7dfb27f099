"""Every error of this package, as a tree; facts are attributes.

WeightSyncError
+-- TensorRefusedError             one tensor, refused before a byte of it is written
|   +-- UnknownNameError           a name outside the table
|   +-- NotInManifestError         a name that the manifest did not announce
|   +-- ShapeMismatchError
|   +-- DtypeMismatchError
|   +-- DuplicateTensorError       the same elements twice
|   +-- UnusableTensorError        meta, sparse, a subclass with its own storage, our own memory
|   +-- NonFiniteWeightError       NaN or infinity, as sent or as stored
|   +-- AliasMismatchError         two names of one tensor, two contents
+-- ManifestError                  everything wrong with a manifest at once
+-- IncompleteUpdateError          a commit with regions missing
+-- UpdateStateError               an operation on an update that has ended
+-- StaleVersionError              a version that is not newer than the current one
+-- StorageError                   stored tensors released or moved under an update
+-- EncoderContractError           an encoder that breaks its own contract
+-- TransportError                 a transport read twice, or broken
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from syncline.weight_sync.regions import Region, describe

MAX_LISTED = 20


def _listed(lines: Iterable[str]) -> str:
    """The first lines in full, the rest as a count: an attribute holds them all."""
    every = list(lines)
    shown = every[:MAX_LISTED]
    if len(every) > len(shown):
        shown.append(f"... and {len(every) - len(shown)} more")
    return "".join(f"\n  {line}" for line in shown)


class WeightSyncError(Exception):
    """Base of every error of this package."""


class TensorRefusedError(WeightSyncError):
    """One named tensor was refused; nothing of it was written."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"{name}: {why}")
        self.name = name


class UnknownNameError(TensorRefusedError):
    """`nearest` is None when nobody looked: a long list of unknown names gets hints at its head."""

    def __init__(self, name: str, nearest: tuple[str, ...] | None) -> None:
        hint = ""
        if nearest is not None:
            hint = f" (nearest: {', '.join(nearest)})" if nearest else " (no name is near)"
        super().__init__(name, f"is not in the name table{hint}")
        self.nearest = nearest


class NotInManifestError(TensorRefusedError):
    def __init__(self, name: str) -> None:
        super().__init__(name, "was not announced by the manifest of this update")


class ShapeMismatchError(TensorRefusedError):
    def __init__(
        self, name: str, expected: tuple[int, ...], got: tuple[int, ...], what: str = "full tensor"
    ) -> None:
        super().__init__(name, f"shape of the {what} must be {expected}, got {got}")
        self.expected = expected
        self.got = got


class DtypeMismatchError(TensorRefusedError):
    def __init__(self, name: str, expected: str, got: torch.dtype) -> None:
        super().__init__(name, f"dtype must be {expected}, got {got}")
        self.expected = expected
        self.got = got


class DuplicateTensorError(TensorRefusedError):
    """`region` counts in the tensor's own elements, or in the slot's when two names collide."""

    def __init__(self, name: str, region: Region, detail: str) -> None:
        super().__init__(name, f"{describe(region)} came twice ({detail})")
        self.region = region


class UnusableTensorError(TensorRefusedError):
    pass


class NonFiniteWeightError(TensorRefusedError):
    """NaN or infinity in `dtype`: the sender's, or the one it is stored in, when it overflows."""

    def __init__(self, name: str, part: Region, dtype: torch.dtype) -> None:
        super().__init__(name, f"{describe(part)} holds NaN or infinity as {dtype}")
        self.part = part
        self.dtype = dtype


class AliasMismatchError(TensorRefusedError):
    def __init__(self, name: str, others: tuple[str, ...], slot: str, region: Region) -> None:
        super().__init__(
            name,
            f"names the same tensor as {', '.join(others)}, which has come, "
            f"but differs in {describe(region)} of {slot}",
        )
        self.others = others
        self.slot = slot
        self.region = region


class ManifestError(WeightSyncError):
    """The manifest cannot make a complete update; nothing was begun and no byte was written."""

    def __init__(self, problems: tuple[WeightSyncError, ...]) -> None:
        super().__init__(
            f"the manifest has {len(problems)} problem(s):{_listed(str(each) for each in problems)}"
        )
        self.problems = problems


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingRegion:
    """Elements of a slot that have not come, and the external names that would bring them."""

    slot: str
    region: Region
    names: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.slot}{describe(self.region)} (from {' or '.join(self.names)})"


class IncompleteUpdateError(WeightSyncError):
    """Nothing was committed; the update stays open for what is missing, or for abort."""

    def __init__(self, missing: tuple[MissingRegion, ...], absent: tuple[str, ...] = ()) -> None:
        slots = {each.slot for each in missing}
        lines = [*map(str, missing), *(f"{name} was announced and has not come" for name in absent)]
        super().__init__(
            f"{len(missing)} region(s) of {len(slots)} slot(s) are missing:{_listed(lines)}"
        )
        self.missing = missing
        self.absent = absent


class UpdateStateError(WeightSyncError):
    def __init__(self, action: str, state: str, version: int) -> None:
        super().__init__(f"cannot {action}: the update to version {version} is {state}")
        self.action = action
        self.state = state


class StaleVersionError(WeightSyncError):
    def __init__(self, version: int, current: int) -> None:
        super().__init__(f"version must be greater than the current {current}, got {version}")
        self.version = version
        self.current = current


class StorageError(WeightSyncError):
    def __init__(self, slot: str, tensor: str, why: str) -> None:
        super().__init__(f"stored tensor {tensor!r} of {slot} {why}")
        self.slot = slot
        self.tensor = tensor


class EncoderContractError(WeightSyncError):
    def __init__(self, slot: str, detail: str) -> None:
        super().__init__(f"encoder of {slot}: {detail}")
        self.slot = slot


class TransportError(WeightSyncError):
    pass
