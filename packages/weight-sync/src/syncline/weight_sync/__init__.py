"""Weight updates as transactions: every byte arrives, or the update fails by name."""

from syncline.weight_sync.checksums import (
    combined_checksum,
    logical_checksums,
    stored_checksums,
    tensors_checksum,
)
from syncline.weight_sync.errors import (
    AliasMismatchError,
    DtypeMismatchError,
    DuplicateTensorError,
    EncoderContractError,
    IncompleteUpdateError,
    ManifestError,
    MissingRegion,
    NonFiniteWeightError,
    NotInManifestError,
    ShapeMismatchError,
    StaleVersionError,
    StorageError,
    TensorRefusedError,
    TransportError,
    UnknownNameError,
    UnusableTensorError,
    UpdateStateError,
    WeightSyncError,
)
from syncline.weight_sync.guard import WriteGuard
from syncline.weight_sync.manifest import Manifest, manifest_of
from syncline.weight_sync.names import Alias, Ignored, Landing, NameTable, Target
from syncline.weight_sync.parts import Transport, WeightPart
from syncline.weight_sync.regions import Region, whole_region
from syncline.weight_sync.report import AbortReport, SyncReport
from syncline.weight_sync.slots import DerivedTensor, Encoder, SlotSource, WeightSlot
from syncline.weight_sync.transports.named import NamedTensors
from syncline.weight_sync.update import Mode, Update, UpdateOptions, UpdateState

__all__ = [
    "AbortReport",
    "Alias",
    "AliasMismatchError",
    "DerivedTensor",
    "DtypeMismatchError",
    "DuplicateTensorError",
    "Encoder",
    "EncoderContractError",
    "Ignored",
    "IncompleteUpdateError",
    "Landing",
    "Manifest",
    "ManifestError",
    "MissingRegion",
    "Mode",
    "NameTable",
    "NamedTensors",
    "NonFiniteWeightError",
    "NotInManifestError",
    "Region",
    "ShapeMismatchError",
    "SlotSource",
    "StaleVersionError",
    "StorageError",
    "SyncReport",
    "Target",
    "TensorRefusedError",
    "Transport",
    "TransportError",
    "UnknownNameError",
    "UnusableTensorError",
    "Update",
    "UpdateOptions",
    "UpdateState",
    "UpdateStateError",
    "WeightPart",
    "WeightSlot",
    "WeightSyncError",
    "WriteGuard",
    "combined_checksum",
    "logical_checksums",
    "manifest_of",
    "stored_checksums",
    "tensors_checksum",
    "whole_region",
]
