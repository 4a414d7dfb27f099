"""Every input of a scheduler as an ordered, frozen record, so that a run can be repeated.

A scheduler's plans follow from its construction and the order of its inputs alone, so schedulers
that are built alike and fed the same records make plans with the same digests, in any process.

An input is recorded once it has been accepted. One that was refused (it raised) changed nothing and
is no record; a `plan` that had nothing to launch is one, because it may have preempted. Reading
(`take_finished`, `metrics`, `check_integrity`) is no input: a replica takes its own ends. So does
it ask its own connector, whose answers must follow from what it was asked and told alone.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from syncline.kv_cache import KVCacheManager
from syncline.scheduler_core.config import SchedulerConfig
from syncline.scheduler_core.connectors.protocols import OffloadConnector
from syncline.scheduler_core.connectors.values import TransferId
from syncline.scheduler_core.plan import StepPlan, StepResult
from syncline.scheduler_core.request import Request
from syncline.scheduler_core.scheduler import Scheduler
from syncline.scheduler_core.speculation import DraftCounts
from syncline.scheduler_core.types import FlushReport, PauseMode, SequenceId, UnfinishedPolicy


class Record(Protocol):
    """One input. Fields are the arguments of the call."""

    def feed(self, scheduler: Scheduler) -> StepPlan | None:
        """Make the call; the plan, if it made one."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AddRequest:
    """`request.make_stop_matcher` must make matchers that depend on what they are asked alone."""

    request: Request

    def feed(self, scheduler: Scheduler) -> StepPlan | None:
        scheduler.add(self.request)
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanStep:
    """num_draft_tokens: for all rows, or (sequence, drafts) by sequence id."""

    window: int
    num_draft_tokens: int | tuple[tuple[SequenceId, int], ...]
    now_s: float | None

    def feed(self, scheduler: Scheduler) -> StepPlan | None:
        drafts = self.num_draft_tokens
        return scheduler.plan(
            window=self.window,
            num_draft_tokens=drafts if isinstance(drafts, int) else dict(drafts),
            now_s=self.now_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyResult:
    """Ids and logprobs are tuples of their own: a runner may use its buffers again."""

    result: StepResult
    now_s: float | None

    def feed(self, scheduler: Scheduler) -> StepPlan | None:
        scheduler.apply(self.result, now_s=self.now_s)
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishLoad:
    transfer_id: TransferId
    num_tokens: int

    def feed(self, scheduler: Scheduler) -> StepPlan | None:
        scheduler.finish_load(self.transfer_id, self.num_tokens)
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishStore:
    transfer_id: TransferId
    num_tokens: int

    def feed(self, scheduler: Scheduler) -> StepPlan | None:
        scheduler.finish_store(self.transfer_id, self.num_tokens)
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishSend:
    transfer_id: TransferId

    def feed(self, scheduler: Scheduler) -> StepPlan | None:
        scheduler.finish_send(self.transfer_id)
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortRequest:
    request_id: str
    now_s: float | None

    def feed(self, scheduler: Scheduler) -> StepPlan | None:
        scheduler.abort(self.request_id, now_s=self.now_s)
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortAll:
    now_s: float | None

    def feed(self, scheduler: Scheduler) -> StepPlan | None:
        scheduler.abort_all(now_s=self.now_s)
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    mode: PauseMode
    now_s: float | None

    def feed(self, scheduler: Scheduler) -> StepPlan | None:
        scheduler.pause(self.mode, now_s=self.now_s)
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    def feed(self, scheduler: Scheduler) -> StepPlan | None:
        scheduler.resume()
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptOne:
    def feed(self, scheduler: Scheduler) -> StepPlan | None:
        scheduler.preempt_one()
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptAll:
    def feed(self, scheduler: Scheduler) -> StepPlan | None:
        scheduler.preempt_all()
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class BumpKVEpoch:
    def feed(self, scheduler: Scheduler) -> StepPlan | None:
        scheduler.bump_kv_epoch()
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class SetWeightVersion:
    version: int
    policy: UnfinishedPolicy
    now_s: float | None

    def feed(self, scheduler: Scheduler) -> StepPlan | None:
        scheduler.set_weight_version(self.version, policy=self.policy, now_s=self.now_s)
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResizePool:
    num_blocks: int
    now_s: float | None

    def feed(self, scheduler: Scheduler) -> StepPlan | None:
        scheduler.resize_pool(self.num_blocks, now_s=self.now_s)
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushPrefixCache:
    def feed(self, scheduler: Scheduler) -> StepPlan | None:
        scheduler.flush_prefix_cache()
        return None


def replay(scheduler: Scheduler, records: Iterable[Record]) -> list[StepPlan]:
    """Feed the records in order; returns the plans made. Raises what an input raises."""
    plans = [record.feed(scheduler) for record in records]
    return [plan for plan in plans if plan is not None]


class RecordingScheduler(Scheduler):
    """A scheduler that hands each accepted input to `on_record`, in order, after it took effect.

    A plain `Scheduler` pays nothing for what this one does.
    """

    __slots__ = ("_on_record",)

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        *,
        weight_version: int = 0,
        offload: OffloadConnector | None = None,
        on_record: Callable[[Record], None],
    ) -> None:
        super().__init__(config, kv, weight_version=weight_version, offload=offload)
        self._on_record = on_record

    def add(self, request: Request) -> tuple[SequenceId, ...]:
        seq_ids = super().add(request)
        self._on_record(AddRequest(request=request))
        return seq_ids

    def plan(
        self, *, window: int = 1, num_draft_tokens: DraftCounts = 0, now_s: float | None = None
    ) -> StepPlan | None:
        plan = super().plan(window=window, num_draft_tokens=num_draft_tokens, now_s=now_s)
        drafts = num_draft_tokens
        self._on_record(
            PlanStep(
                window=window,
                num_draft_tokens=(
                    tuple(sorted(drafts.items())) if isinstance(drafts, Mapping) else drafts
                ),
                now_s=now_s,
            )
        )
        return plan

    def apply(self, result: StepResult, *, now_s: float | None = None) -> None:
        super().apply(result, now_s=now_s)
        own = replace(result, token_ids=tuple(result.token_ids), logprobs=tuple(result.logprobs))
        self._on_record(ApplyResult(result=own, now_s=now_s))

    def finish_load(self, transfer_id: TransferId, num_tokens: int) -> None:
        super().finish_load(transfer_id, num_tokens)
        self._on_record(FinishLoad(transfer_id=transfer_id, num_tokens=num_tokens))

    def finish_store(self, transfer_id: TransferId, num_tokens: int) -> None:
        super().finish_store(transfer_id, num_tokens)
        self._on_record(FinishStore(transfer_id=transfer_id, num_tokens=num_tokens))

    def finish_send(self, transfer_id: TransferId) -> None:
        super().finish_send(transfer_id)
        self._on_record(FinishSend(transfer_id=transfer_id))

    def abort(self, request_id: str, *, now_s: float | None = None) -> int:
        num_aborted = super().abort(request_id, now_s=now_s)
        self._on_record(AbortRequest(request_id=request_id, now_s=now_s))
        return num_aborted

    def abort_all(self, *, now_s: float | None = None) -> int:
        num_aborted = super().abort_all(now_s=now_s)
        self._on_record(AbortAll(now_s=now_s))
        return num_aborted

    def pause(self, mode: PauseMode, *, now_s: float | None = None) -> None:
        super().pause(mode, now_s=now_s)
        self._on_record(Pause(mode=mode, now_s=now_s))

    def resume(self) -> None:
        super().resume()
        self._on_record(Resume())

    def preempt_one(self) -> SequenceId | None:
        seq_id = super().preempt_one()
        self._on_record(PreemptOne())
        return seq_id

    def preempt_all(self) -> int:
        num_preempted = super().preempt_all()
        self._on_record(PreemptAll())
        return num_preempted

    def bump_kv_epoch(self) -> int:
        kv_epoch = super().bump_kv_epoch()
        self._on_record(BumpKVEpoch())
        return kv_epoch

    def set_weight_version(
        self, version: int, *, policy: UnfinishedPolicy, now_s: float | None = None
    ) -> None:
        super().set_weight_version(version, policy=policy, now_s=now_s)
        self._on_record(SetWeightVersion(version=version, policy=policy, now_s=now_s))

    def resize_pool(self, num_blocks: int, *, now_s: float | None = None) -> None:
        super().resize_pool(num_blocks, now_s=now_s)
        self._on_record(ResizePool(num_blocks=num_blocks, now_s=now_s))

    def flush_prefix_cache(self) -> FlushReport:
        report = super().flush_prefix_cache()
        self._on_record(FlushPrefixCache())
        return report
