"""The engine proper: requests in, steps driven, finished samples out; synchronous, one thread.

Composes scheduler, runner, residency and updates, and decides only who may go when. Not
thread-safe: `AsyncLLMEngine` gives it a thread of its own.
"""

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceABC
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Self

from syncline.engine.assemble import LiveRequest, sample_of
from syncline.engine.config import EngineConfig
from syncline.engine.errors import EngineClosedError, EngineError, NotReadyError
from syncline.engine.intake import Intake, ModelLimits, PreparedRequest, Prompt
from syncline.engine.outputs import Sample
from syncline.engine.protocols import ResidencyLike, SchedulerLike
from syncline.engine.runner.protocol import Runner
from syncline.engine.sampling_params import SamplingParams
from syncline.engine.step_loop import StepLoop
from syncline.engine.tokenizer import Tokenizer
from syncline.engine.updates import EngineGuard, NamedTensors, WeightUpdates
from syncline.graph_lifecycle import (
    DegradedMode,
    GraphError,
    GraphRegistry,
    SleepReport,
    Tag,
    WakeReport,
)
from syncline.scheduler_core import PauseMode, SchedulerStats, Sequence, SequenceId
from syncline.weight_sync import Mode, NameTable, SyncReport, WriteGuard

SLEEP_LEVELS: Final = {1: (Tag.KV_CACHE,), 2: (Tag.KV_CACHE, Tag.WEIGHTS)}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """What an engine is composed of; tests replace one part by a stand-in.

    registry        of the captured graphs; None when the runner has none.
    weight_version  of the weights that the first load left.
    make_guard      (loop, what to do at the first byte) -> the guard of one update.
    """

    tokenizer: Tokenizer
    limits: ModelLimits
    scheduler: SchedulerLike
    runner: Runner
    residency: ResidencyLike
    name_table: NameTable
    registry: GraphRegistry | None = None
    weight_version: int = 0
    make_guard: Callable[[StepLoop, Callable[[], None]], WriteGuard] = EngineGuard


class LLMEngine:
    """`add_request`, then `step` until nothing is left; `abort`, sleep and updates in between.

    A step that raises leaves the state unknown: the engine has failed and says so from then on.
    Every other error leaves the engine as it was.
    """

    __slots__ = (
        "_closed",
        "_finished",
        "_intake",
        "_live",
        "_loop",
        "_scheduler",
        "config",
        "parts",
        "updates",
    )

    def __init__(self, config: EngineConfig, parts: EngineParts) -> None:
        self.config = config
        self.parts = parts
        self._scheduler = parts.scheduler
        self._loop = StepLoop(parts.scheduler, parts.runner, config.max_steps_in_flight)
        self._intake = Intake(parts.tokenizer, parts.limits, config.seed)
        self._live: dict[str, LiveRequest] = {}
        self._finished: list[Sample] = []
        self._closed = False
        self.updates = WeightUpdates(
            parts.name_table,
            make_guard=lambda: parts.make_guard(self._loop, self._weights_change),
            require=self._require_writable,
            weights_valid=lambda: parts.residency.weights_valid,
            on_commit=self._serve_version,
            weight_version=parts.weight_version,
        )

    # What it is

    @property
    def stats(self) -> SchedulerStats:
        return self._scheduler.stats

    @property
    def has_work(self) -> bool:
        """Unfinished requests, results still to be collected, or samples not handed out."""
        return self._loop.has_work or bool(self._finished)

    @property
    def num_requests(self) -> int:
        """Requests with an unfinished sample."""
        return len(self._live)

    @property
    def num_running(self) -> int:
        """Sequences that hold KV blocks."""
        return self._scheduler.num_running

    @property
    def is_paused(self) -> bool:
        return self._scheduler.is_paused

    @property
    def is_settling(self) -> bool:
        """While paused by wait: whether something that has begun may still be unfinished."""
        return self._loop.has_work and self._loop.stall is None

    @property
    def weight_version(self) -> int:
        return self.updates.weight_version

    @property
    def degraded(self) -> DegradedMode | None:
        """Which graphs could not be captured, so that their steps run eagerly; None if all is well.

        The configuration stays as it was given: the next successful capture ends this.
        """
        return None if self.parts.registry is None else self.parts.registry.degraded

    @property
    def unfinished_sequences(self) -> SequenceABC[Sequence]:
        """For callers that stream or look on; only the scheduler changes them."""
        return self._scheduler.sequences

    def require_open(self, action: str) -> None:
        if self._closed:
            raise EngineClosedError(action)
        self._loop.require_working()

    def require_ready(self, action: str = "generate") -> None:
        """Open, awake, with valid weights that nobody is writing; raises what is in the way."""
        self.require_open(action)
        self._loop.require_unfenced(action)
        self.parts.residency.require("generate")

    @property
    def is_ready(self) -> bool:
        """Whether `require_ready` would pass."""
        try:
            self.require_ready()
        except (EngineError, GraphError):
            return False
        return True

    # Requests

    def prepare(
        self, request_id: str, prompt: Prompt, params: SamplingParams, *, priority: int = 0
    ) -> PreparedRequest:
        """Everything that can be refused about a request, refused; nothing is added.

        Draws a seed when the parameters name none; see `all_or_nothing`.
        """
        return self._intake.prepare(request_id, prompt, params, priority=priority)

    def add_request(
        self, request_id: str, prompt: Prompt, params: SamplingParams, *, priority: int = 0
    ) -> tuple[SequenceId, ...]:
        """One sequence per sample, queued."""
        self.require_ready()
        with self.all_or_nothing():
            return self.add(self.prepare(request_id, prompt, params, priority=priority))

    def add(self, prepared: PreparedRequest) -> tuple[SequenceId, ...]:
        self.require_ready()
        request_id = prepared.request.request_id
        if request_id in self._live:
            raise ValueError(f"request_id {request_id!r} is in use by an unfinished request")
        self.parts.runner.register(request_id, prepared.sampling)
        try:
            sequence_ids = self._scheduler.add(prepared.request)
        except BaseException:
            self.parts.runner.forget(request_id)
            raise
        self._live[request_id] = LiveRequest(
            prepared=prepared, num_unfinished=prepared.request.num_samples
        )
        self._take_finished()  # A request that can never fit the pool has ended by now.
        return sequence_ids

    def add_all(self, batch: Iterable[PreparedRequest]) -> None:
        """All of them, or none when one is refused."""
        added: list[str] = []
        try:
            for prepared in batch:
                self.add(prepared)
                added.append(prepared.request.request_id)
        except BaseException:
            for request_id in added:
                self.abort(request_id)
            raise

    @contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """Give back the seeds drawn inside when the body raises: a refusal changes no answer."""
        num_derived_seeds = self._intake.num_derived_seeds
        try:
            yield
        except BaseException:
            self._intake.num_derived_seeds = num_derived_seeds
            raise

    def abort(self, request_id: str) -> list[Sample]:
        """End a request now; its samples not handed out yet, with the tokens they have.

        Idempotent: an id that is unknown or has ended gives an empty list.
        """
        self._scheduler.abort(request_id)
        self._take_finished()
        ended = [sample for sample in self._finished if sample.request_id == request_id]
        self._finished = [s for s in self._finished if s.request_id != request_id]
        return ended

    def prepared(self, request_id: str) -> PreparedRequest | None:
        """What an unfinished request was added as; None when it has ended."""
        live = self._live.get(request_id)
        return None if live is None else live.prepared

    # Steps

    def step(self) -> list[Sample]:
        """One step; the samples that have ended since the last call, in the order they ended.

        An empty list is no sign of the end: see `has_work`.
        """
        self.require_ready("step")
        self._loop.advance()
        return self.take_ended()

    def take_ended(self) -> list[Sample]:
        """The samples that have ended and were not handed out; runs nothing."""
        self._take_finished()
        ended, self._finished = self._finished, []
        return ended

    def drain_if_done(self) -> None:
        """When no request is unfinished, collect the surplus of steps launched ahead."""
        if not self._scheduler.has_unfinished:
            self._loop.drain()

    def stalled(self) -> str | None:
        """Why the last step found nothing to do although requests are unfinished, if so."""
        return self._loop.stall

    def preempt_one(self) -> SequenceId | None:
        """Preempt the victim that scarcity would pick; for tests that want preemptions."""
        self.require_ready("preempt")
        return self._scheduler.preempt_one()

    # Pause, sleep, wake

    def pause(self, mode: PauseMode = "wait") -> None:
        """abort ends all requests, wait lets running ones end, keep freezes them in place.

        wait is refused while requests are unfinished and no step can be made.
        """
        self.require_open("pause")
        if self.is_paused:
            raise NotReadyError("pause", "the engine is paused already")
        if mode == "wait" and self._loop.has_work:
            self.require_ready("pause")
        self._scheduler.pause(mode)
        self._loop.stall = None
        self._take_finished()

    def resume(self) -> None:
        self.require_open("resume")
        if not self.is_paused:
            raise NotReadyError("resume", "the engine is not paused")
        self._scheduler.resume()

    def sleep(
        self, level: int | None = None, *, tags: Iterable[Tag | str] | None = None
    ) -> SleepReport:
        """Give memory back: level 1 the KV cache, level 2 the weights too, or tags by name.

        Results in flight are collected first. Unfinished sequences stay, without their KV: they
        recompute after the wake.
        """
        self.require_open("sleep")
        chosen = _sleep_tags(level, tags)
        if self.updates.is_open and Tag.WEIGHTS in chosen:
            raise NotReadyError("sleep", "a weight update is open; commit or abort it first")
        self._loop.drain()
        self._take_finished()
        if Tag.KV_CACHE in chosen:
            self._scheduler.preempt_all()
            self._scheduler.bump_kv_epoch()
        return self.parts.residency.sleep(chosen)

    def wake_up(self, tags: Iterable[Tag | str] | None = None) -> WakeReport:
        """Take memory again, the same sizes; None wakes whatever sleeps.

        Weights come back without content: generating is refused until a complete update.
        """
        self.require_open("wake_up")
        return self.parts.residency.wake_up(None if tags is None else _as_tags(tags))

    # Weights

    def update_weights(
        self,
        named_tensors: NamedTensors,
        version: int,
        *,
        mode: Mode = "direct",
    ) -> SyncReport:
        """A whole update from (name, tensor) pairs or a mapping.

        Unfinished sequences follow `config.unfinished_policy`.
        """
        return self.updates.apply(named_tensors, version, mode=mode)

    def close(self) -> None:
        """Forget everything; idempotent. Samples not handed out are lost."""
        self._closed = True
        self._live.clear()
        self._finished.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take_finished(self) -> None:
        for sequence in self._scheduler.take_finished():
            live = self._live[sequence.request_id]
            self._finished.append(sample_of(sequence, live.prepared, self.parts.tokenizer))
            live.num_unfinished -= 1
            if live.num_unfinished == 0:
                del self._live[sequence.request_id]
                self.parts.runner.forget(sequence.request_id)

    def _require_writable(self) -> None:
        self.require_open("update_weights")
        self.parts.residency.require("update_weights")

    def _weights_change(self) -> None:
        """At the first byte of an update: no KV and no weight means what it did."""
        self._scheduler.bump_kv_epoch()
        self.parts.residency.mark_weights_invalid("a weight update has not been completed")

    def _serve_version(self, version: int) -> None:
        self._scheduler.set_weight_version(version, policy=self.config.unfinished_policy)
        self.parts.residency.mark_weights_valid()
        self._take_finished()  # The policy may have ended sequences.


def _as_tags(tags: Iterable[Tag | str]) -> tuple[Tag, ...]:
    try:
        return tuple(Tag(tag) for tag in tags)
    except ValueError as error:
        raise ValueError(f"{error}; tags are {', '.join(Tag)}") from None


def _sleep_tags(level: int | None, tags: Iterable[Tag | str] | None) -> tuple[Tag, ...]:
    if tags is not None:
        if level is not None:
            raise ValueError("sleep takes a level or tags, not both")
        return _as_tags(tags)
    if level is None:
        level = 1
    # Not by equality alone: True is 1 and 2.0 is 2 in Python.
    if type(level) is not int or level not in SLEEP_LEVELS:
        raise ValueError(f"level must be 1 or 2, got {level!r}")
    return SLEEP_LEVELS[level]
