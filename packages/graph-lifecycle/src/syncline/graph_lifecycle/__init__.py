"""One registry for captured graphs, and memory that sleeps and wakes without stale reads."""

from syncline.graph_lifecycle.arena import Arena, PlainArena, PoisonArena
from syncline.graph_lifecycle.errors import (
    ArenaError,
    CaptureError,
    GraphError,
    ReceiptError,
    ReleasedMemoryWrittenError,
    ReleaseError,
    ResidencyError,
    StaleGraphError,
    StorageInUseError,
    UncapturableOpError,
    UnknownGraphError,
    WakeError,
)
from syncline.graph_lifecycle.ledger import StorageLedger
from syncline.graph_lifecycle.registry import GraphRegistry
from syncline.graph_lifecycle.residency import Residency, SleepReport, WakeReport
from syncline.graph_lifecycle.stores import GraphStore, RecordedStore
from syncline.graph_lifecycle.types import (
    CaptureReport,
    CaptureRequest,
    DegradedMode,
    FaultKind,
    GraphKey,
    GraphReceipt,
    Recapture,
    ReleaseReceipt,
    RestoreReport,
    StepFunction,
    StorageFault,
    Tag,
    TagState,
)

__all__ = [
    "Arena",
    "ArenaError",
    "CaptureError",
    "CaptureReport",
    "CaptureRequest",
    "DegradedMode",
    "FaultKind",
    "GraphError",
    "GraphKey",
    "GraphReceipt",
    "GraphRegistry",
    "GraphStore",
    "PlainArena",
    "PoisonArena",
    "Recapture",
    "ReceiptError",
    "RecordedStore",
    "ReleaseError",
    "ReleaseReceipt",
    "ReleasedMemoryWrittenError",
    "Residency",
    "ResidencyError",
    "RestoreReport",
    "SleepReport",
    "StaleGraphError",
    "StepFunction",
    "StorageFault",
    "StorageInUseError",
    "StorageLedger",
    "Tag",
    "TagState",
    "UncapturableOpError",
    "UnknownGraphError",
    "WakeError",
    "WakeReport",
]
