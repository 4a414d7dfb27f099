"""Parts that pass everything on, to be given one fault by a subclass; and the faults worth seeing.

Each stands behind the Protocol of the part it replaces and brings back one known fault of engines
of this kind. What must notice it is in the tests.
"""

from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceABC
from dataclasses import replace
from typing import Literal

import torch

from syncline.engine.protocols import ResidencyLike, SchedulerLike
from syncline.engine.runner.protocol import Runner
from syncline.engine.sampling.resolved import ResolvedSampling
from syncline.graph_lifecycle import SleepReport, Tag, WakeReport
from syncline.kv_cache import BlockId
from syncline.scheduler_core import (
    IdleCause,
    PauseMode,
    PrefillChunk,
    Request,
    SchedulerStats,
    Sequence,
    SequenceId,
    StepPlan,
    StepResult,
    UnfinishedPolicy,
)
from syncline.weight_sync import WeightSlot


class SchedulerStandIn:
    """A scheduler that is another one."""

    __slots__ = ("inner",)

    def __init__(self, inner: SchedulerLike) -> None:
        self.inner = inner

    @property
    def steps_in_flight(self) -> int:
        return self.inner.steps_in_flight

    @property
    def has_unfinished(self) -> bool:
        return self.inner.has_unfinished

    @property
    def is_paused(self) -> bool:
        return self.inner.is_paused

    @property
    def idle_cause(self) -> IdleCause | None:
        return self.inner.idle_cause

    @property
    def num_running(self) -> int:
        return self.inner.num_running

    @property
    def num_waiting(self) -> int:
        return self.inner.num_waiting

    @property
    def sequences(self) -> SequenceABC[Sequence]:
        return self.inner.sequences

    @property
    def stats(self) -> SchedulerStats:
        return self.inner.stats

    def add(self, request: Request) -> tuple[SequenceId, ...]:
        return self.inner.add(request)

    def plan(self, *, window: int = 1) -> StepPlan | None:
        return self.inner.plan(window=window)

    def apply(self, result: StepResult) -> None:
        self.inner.apply(result)

    def take_finished(self) -> list[Sequence]:
        return self.inner.take_finished()

    def abort(self, request_id: str) -> int:
        return self.inner.abort(request_id)

    def pause(self, mode: PauseMode) -> None:
        self.inner.pause(mode)

    def resume(self) -> None:
        self.inner.resume()

    def preempt_one(self) -> SequenceId | None:
        return self.inner.preempt_one()

    def preempt_all(self) -> int:
        return self.inner.preempt_all()

    def bump_kv_epoch(self) -> int:
        return self.inner.bump_kv_epoch()

    def set_weight_version(self, version: int, *, policy: UnfinishedPolicy) -> None:
        self.inner.set_weight_version(version, policy=policy)

    def check_integrity(self) -> None:
        self.inner.check_integrity()


class RunnerStandIn:
    """A runner that is another one."""

    __slots__ = ("inner",)

    def __init__(self, inner: Runner) -> None:
        self.inner = inner

    @property
    def num_in_flight(self) -> int:
        return self.inner.num_in_flight

    def register(self, request_id: str, sampling: ResolvedSampling) -> None:
        self.inner.register(request_id, sampling)

    def forget(self, request_id: str) -> None:
        self.inner.forget(request_id)

    def launch(self, plan: StepPlan) -> None:
        self.inner.launch(plan)

    def collect(self) -> StepResult:
        return self.inner.collect()


class LateRunner(RunnerStandIn):
    """Executes a plan when its result is collected: as late as a device might."""

    __slots__ = ("_plans",)

    def __init__(self, inner: Runner) -> None:
        super().__init__(inner)
        self._plans: deque[StepPlan] = deque()

    @property
    def num_in_flight(self) -> int:
        return len(self._plans)

    def launch(self, plan: StepPlan) -> None:
        self._plans.append(plan)

    def collect(self) -> StepResult:
        self.inner.launch(self._plans.popleft())
        return self.inner.collect()


class StopTokenLeftAtPreemption(SchedulerStandIn):
    """Fault: a preempted sequence keeps a stop token that nobody sampled, as if it were real."""

    __slots__ = ("_eos_token_id", "_num_preemptions")

    def __init__(self, inner: SchedulerLike, eos_token_id: int) -> None:
        super().__init__(inner)
        self._eos_token_id = eos_token_id
        self._num_preemptions: dict[SequenceId, int] = {}

    def plan(self, *, window: int = 1) -> StepPlan | None:
        self._contaminate()  # Of what was preempted since the last plan.
        plan = self.inner.plan(window=window)
        self._contaminate()  # Of what this plan preempted.
        return plan

    def _contaminate(self) -> None:
        for sequence in self.inner.sequences:
            seen = self._num_preemptions.get(sequence.seq_id, 0)
            if sequence.num_preemptions > seen and sequence.row is None:
                self._num_preemptions[sequence.seq_id] = sequence.num_preemptions
                sequence.append([self._eos_token_id], [0.0], 0)


class FinalAtPromptBoundary(RunnerStandIn):
    """Fault: a recompute counts as done at the prompt's end, the KV behind it is never written.

    Positions from the end of the chunk that reaches the prompt's last token on keep whatever the
    blocks held before, but for the very last one.
    """

    __slots__ = ("_num_prompt_tokens", "num_skipped")

    def __init__(self, inner: Runner) -> None:
        super().__init__(inner)
        self._num_prompt_tokens: dict[int, int] = {}
        self.num_skipped = 0

    def launch(self, plan: StepPlan) -> None:
        for join in plan.joined:
            self._num_prompt_tokens[join.row] = join.num_prompt_tokens
        chunks = tuple(self._cut(chunk) for chunk in plan.prefill_chunks)
        self.inner.launch(replace(plan, prefill_chunks=chunks))

    def _cut(self, chunk: PrefillChunk) -> PrefillChunk:
        # A chunk that begins behind the prompt follows one that was "final" already.
        if chunk.start < self._num_prompt_tokens[chunk.row]:
            return chunk
        self.num_skipped += chunk.stop - 1 - chunk.start
        return replace(chunk, start=chunk.stop - 1)


class BlockFreedInUse(RunnerStandIn):
    """Fault: a block that a running sequence holds was freed and is given to another one.

    From the `after`-th step on, every block that a row gets while it runs is one that the row
    which got a block before it still holds.
    """

    __slots__ = ("_after", "_last", "_num_steps", "num_shared")

    def __init__(self, inner: Runner, after: int) -> None:
        super().__init__(inner)
        self._after = after
        self._num_steps = 0
        self._last: tuple[int, BlockId] | None = None
        self.num_shared = 0

    def launch(self, plan: StepPlan) -> None:
        self._num_steps += 1
        if self._last is not None and self._last[0] in plan.left:
            self._last = None
        if self._num_steps >= self._after and plan.new_blocks:
            plan = replace(plan, new_blocks=tuple(self._share(*entry) for entry in plan.new_blocks))
        self.inner.launch(plan)

    def _share(
        self, row: int, first: int, block_ids: tuple[BlockId, ...]
    ) -> tuple[int, int, tuple[BlockId, ...]]:
        held = self._last
        if held is None or held[0] == row:
            self._last = (row, block_ids[-1])
            return (row, first, block_ids)
        self.num_shared += 1
        return (row, first, (*block_ids[:-1], held[1]))


class WeightsWrittenInFlight(RunnerStandIn):
    """Fault: the weights change under a step in flight: `write` runs at the n-th launch."""

    __slots__ = ("_num_launches", "_write", "_write_at")

    def __init__(self, inner: Runner, write_at: int, write: Callable[[], None]) -> None:
        super().__init__(inner)
        self._num_launches = 0
        self._write_at = write_at
        self._write = write

    def launch(self, plan: StepPlan) -> None:
        self._num_launches += 1
        if self._num_launches == self._write_at:
            self._write()
        self.inner.launch(plan)


class ResidencyStandIn:
    """A residency machine that is another one."""

    __slots__ = ("inner",)

    def __init__(self, inner: ResidencyLike) -> None:
        self.inner = inner

    @property
    def weights_valid(self) -> bool:
        return self.inner.weights_valid

    def sleep(self, tags: Iterable[Tag] | None = None) -> SleepReport:
        return self.inner.sleep(tags)

    def wake_up(self, tags: Iterable[Tag] | None = None) -> WakeReport:
        return self.inner.wake_up(tags)

    def mark_weights_valid(self) -> None:
        self.inner.mark_weights_valid()

    def mark_weights_invalid(self, reason: str) -> None:
        self.inner.mark_weights_invalid(reason)

    def require(self, action: Literal["generate", "update_weights"]) -> None:
        self.inner.require(action)


class WakesAsIfValid(ResidencyStandIn):
    """Fault: weights that woke without content count as valid."""

    __slots__ = ()

    def wake_up(self, tags: Iterable[Tag] | None = None) -> WakeReport:
        report = self.inner.wake_up(tags)
        self.inner.mark_weights_valid()
        return report


class UnfencedGuard:
    """Fault: a write guard that waits for nobody and stops nobody."""

    __slots__ = ()

    def acquire(self, reason: str) -> None:
        """Granted at once, whatever is in flight."""

    def first_write(self) -> None:
        """KV of the old weights goes on counting as good."""

    def release(self) -> None:
        """Nothing was held."""


def scale_weights(slots: Iterable[WeightSlot], factor: float) -> None:
    """Write every stored weight in place, past every guard."""
    with torch.no_grad():
        for slot in slots:
            for stored in slot.storage.values():
                stored.mul_(factor)
