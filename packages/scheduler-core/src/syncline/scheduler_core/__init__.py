"""Sequences, step plans, preemption and accounting of a continuous-batching scheduler."""

from syncline.scheduler_core.columns import Column
from syncline.scheduler_core.config import SchedulerConfig
from syncline.scheduler_core.connectors import KVLoad, KVStore, OffloadConnector, TransferId
from syncline.scheduler_core.errors import (
    ResultError,
    SchedulerError,
    StateError,
    StepOrderError,
    StepsInFlightError,
    TransferError,
    TransfersInFlightError,
)
from syncline.scheduler_core.metrics import SchedulerMetrics
from syncline.scheduler_core.plan import (
    ColumnSpan,
    PrefillChunk,
    RowError,
    RowJoin,
    StepPlan,
    StepResult,
)
from syncline.scheduler_core.request import Request, StopMatch, StopMatcher, StopRules
from syncline.scheduler_core.scheduler import Scheduler
from syncline.scheduler_core.sequence import Sequence
from syncline.scheduler_core.timings import RequestTimings, SequenceSummary
from syncline.scheduler_core.types import (
    FinishReason,
    IdleCause,
    PauseMode,
    RowId,
    SchedulerStats,
    SchedulingPolicy,
    SequenceId,
    UnfinishedPolicy,
)

__all__ = [
    "Column",
    "ColumnSpan",
    "FinishReason",
    "IdleCause",
    "KVLoad",
    "KVStore",
    "OffloadConnector",
    "PauseMode",
    "PrefillChunk",
    "Request",
    "RequestTimings",
    "ResultError",
    "RowError",
    "RowId",
    "RowJoin",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerError",
    "SchedulerMetrics",
    "SchedulerStats",
    "SchedulingPolicy",
    "Sequence",
    "SequenceId",
    "SequenceSummary",
    "StateError",
    "StepOrderError",
    "StepPlan",
    "StepResult",
    "StepsInFlightError",
    "StopMatch",
    "StopMatcher",
    "StopRules",
    "TransferError",
    "TransferId",
    "TransfersInFlightError",
    "UnfinishedPolicy",
]
