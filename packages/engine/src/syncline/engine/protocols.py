"""What the engine's faces need of the parts they drive, so that a stand-in can take a part's place.

The runner's Protocol is in `runner.protocol`. The scheduler and the residency machine of the
packages below satisfy these as they are.
"""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceABC
from typing import Literal, Protocol

from syncline.graph_lifecycle import SleepReport, Tag, WakeReport
from syncline.scheduler_core import (
    IdleCause,
    PauseMode,
    Request,
    SchedulerStats,
    Sequence,
    SequenceId,
    StepPlan,
    StepResult,
    UnfinishedPolicy,
)


class SchedulerLike(Protocol):
    """The part of `scheduler_core.Scheduler` that the engine calls."""

    @property
    def steps_in_flight(self) -> int: ...

    @property
    def has_unfinished(self) -> bool: ...

    @property
    def is_paused(self) -> bool: ...

    @property
    def idle_cause(self) -> IdleCause | None: ...

    @property
    def num_running(self) -> int: ...

    @property
    def num_waiting(self) -> int: ...

    @property
    def sequences(self) -> SequenceABC[Sequence]: ...

    @property
    def stats(self) -> SchedulerStats: ...

    def add(self, request: Request) -> tuple[SequenceId, ...]: ...

    def plan(self, *, window: int = 1) -> StepPlan | None: ...

    def apply(self, result: StepResult) -> None: ...

    def take_finished(self) -> list[Sequence]: ...

    def abort(self, request_id: str) -> int: ...

    def pause(self, mode: PauseMode) -> None: ...

    def resume(self) -> None: ...

    def preempt_one(self) -> SequenceId | None: ...

    def preempt_all(self) -> int: ...

    def bump_kv_epoch(self) -> int: ...

    def set_weight_version(self, version: int, *, policy: UnfinishedPolicy) -> None: ...

    def check_integrity(self) -> None: ...


class ResidencyLike(Protocol):
    """The part of `graph_lifecycle.Residency` that the engine calls."""

    @property
    def weights_valid(self) -> bool: ...

    def sleep(self, tags: Iterable[Tag] | None = None) -> SleepReport: ...

    def wake_up(self, tags: Iterable[Tag] | None = None) -> WakeReport: ...

    def mark_weights_valid(self) -> None: ...

    def mark_weights_invalid(self, reason: str) -> None: ...

    def require(self, action: Literal["generate", "update_weights"]) -> None: ...
