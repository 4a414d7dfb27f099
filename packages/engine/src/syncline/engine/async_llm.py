"""The asynchronous face: many consumers, one engine, one thread that alone touches it.

Every call on the engine runs in a single-thread executor, so calls and steps come one after
another whatever the event loop does, and the loop never waits for a step. A consumer that goes away
(cancelled, closed, broken out of its loop) ends its request: the abort is queued behind whatever is
running.
"""

import asyncio
import functools
import itertools
import os
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self, TypeVar

from torch import Tensor

from syncline.engine.build import build_parts
from syncline.engine.config import EngineConfig
from syncline.engine.engine import LLMEngine
from syncline.engine.errors import EngineClosedError, EngineError
from syncline.engine.intake import PreparedRequest, Prompt
from syncline.engine.outputs import RequestOutput, Sample
from syncline.engine.sampling_params import SamplingParams
from syncline.engine.streams import RequestStream
from syncline.engine.updates import NamedTensors
from syncline.graph_lifecycle import SleepReport, Tag, WakeReport
from syncline.scheduler_core import PauseMode
from syncline.weight_sync import AbortReport, Manifest, Mode, Region, SyncReport

T = TypeVar("T")

# What a consumer is offered: an output, or the error that ends its request.
StreamItem = RequestOutput | BaseException


class _Consumer:
    """One `generate` call: its stream (engine thread) and its newest output (event loop).

    A slow consumer misses outputs in between, never a token: outputs are cumulative.
    """

    __slots__ = ("_newest", "_offered", "stream")

    def __init__(self) -> None:
        self.stream: RequestStream | None = None  # Set once the request is in the engine.
        self._newest: StreamItem | None = None
        self._offered = asyncio.Event()

    @property
    def is_served(self) -> bool:
        return self.stream is not None and self.stream.is_finished

    def offer(self, item: StreamItem) -> None:
        if not isinstance(self._newest, BaseException):
            self._newest = item
        self._offered.set()

    async def take(self) -> RequestOutput:
        """The newest output that has not been taken; raises what ended the request instead."""
        await self._offered.wait()
        self._offered.clear()
        if isinstance(self._newest, BaseException):
            raise self._newest
        assert self._newest is not None
        return self._newest


class AsyncLLMEngine:
    """`async for output in engine.generate(...)`; create it inside a running event loop.

    Outputs are cumulative: each holds all tokens so far, the last one is finished.
    """

    __slots__ = (
        "_closing",
        "_consumers",
        "_engine",
        "_executor",
        "_loop",
        "_request_numbers",
        "_task",
        "_wakeup",
    )

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="syncline-engine")
        self._consumers: dict[str, _Consumer] = {}
        self._request_numbers = itertools.count()
        self._wakeup = asyncio.Event()
        self._closing: asyncio.Task[None] | None = None
        self._task = self._loop.create_task(self._run())

    @classmethod
    def from_kwargs(
        cls,
        model: str | os.PathLike[str],
        **config: Any,  # EngineConfig checks each field
    ) -> Self:
        settings = EngineConfig.from_kwargs(model=model, **config)
        return cls(LLMEngine(settings, build_parts(settings)))

    @property
    def num_consumers(self) -> int:
        """`generate` calls whose requests are under way."""
        return len(self._consumers)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Cumulative outputs until every sample has ended.

        Leaving the loop early, cancelling the task or closing the iterator aborts the request.
        """
        chosen = f"async-{next(self._request_numbers)}" if request_id is None else request_id
        params = SamplingParams() if sampling_params is None else sampling_params
        consumer = _Consumer()
        try:
            prepare = functools.partial(
                self._engine.prepare, chosen, prompt, params, priority=priority
            )
            await self._call(self._add, consumer, prepare)
            while True:
                output = await consumer.take()
                yield output
                if output.finished:
                    return
        finally:
            # Not awaited: a cancelled task could not. The executor runs it after the add, even
            # when the cancellation came while the add was still queued.
            self._abandon(consumer)

    async def abort(self, request_id: str) -> None:
        """End a request; its consumer gets the partial output with finish_reason abort."""
        await self._call(self._abort, request_id)

    async def pause(self, mode: PauseMode = "wait") -> None:
        """wait returns once every request that has begun has ended.

        It is refused while the engine cannot step, and raises when that happens on the way.
        """
        await self._call(self._engine.pause, mode)
        while mode == "wait" and await self._call(self._is_settling):
            await asyncio.sleep(0)

    async def resume(self) -> None:
        await self._call(self._engine.resume)

    async def sleep(
        self, level: int | None = None, *, tags: Iterable[Tag | str] | None = None
    ) -> SleepReport:
        """See `LLMEngine.sleep`; requests under way wait for the wake."""
        return await self._call(lambda: self._engine.sleep(level, tags=tags))

    async def wake_up(self, tags: Iterable[Tag | str] | None = None) -> WakeReport:
        return await self._call(lambda: self._engine.wake_up(tags))

    async def update_weights(
        self,
        named_tensors: NamedTensors,
        version: int,
        *,
        mode: Mode = "direct",
    ) -> SyncReport:
        """See `LLMEngine.update_weights`; requests under way go on under the new version."""
        return await self._call(
            lambda: self._engine.update_weights(named_tensors, version, mode=mode)
        )

    async def begin_update(
        self, version: int, *, manifest: Manifest | None = None, mode: Mode = "direct"
    ) -> None:
        await self._call(lambda: self._engine.updates.begin(version, manifest=manifest, mode=mode))

    async def put_weight(self, name: str, tensor: Tensor, part: Region | None = None) -> None:
        await self._call(self._engine.updates.put, name, tensor, part)

    async def commit_update(self) -> SyncReport:
        return await self._call(self._engine.updates.commit)

    async def abort_update(self, reason: str) -> AbortReport:
        return await self._call(self._engine.updates.abort, reason)

    async def close(self) -> None:
        """Stop after the step that is running; consumers get EngineClosedError. Idempotent."""
        if self._closing is None:
            self._closing = self._loop.create_task(self._close())
        # Shielded: a caller that is cancelled must not leave consumers waiting.
        await asyncio.shield(self._closing)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # On the event loop

    @property
    def _closed(self) -> bool:
        return self._closing is not None

    async def _close(self) -> None:
        self._wakeup.set()
        await self._task
        # Queued behind every add that was accepted before, so that no consumer comes after it.
        await self._loop.run_in_executor(self._executor, self._end)
        self._executor.shutdown()

    async def _call(self, function: Callable[..., T], *arguments: object) -> T:
        """Run in the engine's thread; afterwards there may be something to do."""
        if self._closed:
            raise EngineClosedError("use the engine")
        try:
            return await self._loop.run_in_executor(
                self._executor, functools.partial(self._do, function, *arguments)
            )
        finally:
            self._wakeup.set()

    async def _run(self) -> None:
        while not self._closed:
            self._wakeup.clear()
            moved = await self._loop.run_in_executor(self._executor, self._step)
            if not moved:
                await self._wakeup.wait()

    def _abandon(self, consumer: _Consumer) -> None:
        if not self._closed and not consumer.is_served:
            self._executor.submit(self._drop, consumer)
            self._wakeup.set()

    # In the engine's thread

    def _do(self, function: Callable[..., T], *arguments: object) -> T:
        try:
            return function(*arguments)
        finally:
            # What ended on the way (a drain, an abort by policy) must not wait for a step.
            self._deliver(self._engine.take_ended())

    def _add(self, consumer: _Consumer, prepare: Callable[[], PreparedRequest]) -> None:
        self._engine.require_ready()
        with self._engine.all_or_nothing():
            prepared = prepare()
            self._engine.add(prepared)
        consumer.stream = RequestStream(prepared, self._engine.parts.tokenizer)
        self._consumers[prepared.request.request_id] = consumer

    def _abort(self, request_id: str) -> None:
        self._deliver(self._engine.abort(request_id))

    def _drop(self, consumer: _Consumer) -> None:
        if consumer.stream is None:
            return  # The add was refused; another call may hold the id.
        request_id = consumer.stream.request_id
        if self._consumers.get(request_id) is consumer:
            del self._consumers[request_id]
            self._engine.abort(request_id)

    def _is_settling(self) -> bool:
        if not self._engine.is_settling:
            return False
        self._engine.require_ready("pause")  # No step would come: raises why.
        return True

    def _end(self) -> None:
        self._end_consumers(lambda: EngineClosedError("generate"))
        self._engine.close()

    def _step(self) -> bool:
        """One step if one can be made; whether another may follow at once."""
        if not self._engine.has_work or not self._engine.is_ready:
            return False
        try:
            self._deliver(self._engine.step())
            self._stream()
        except Exception as error:  # noqa: BLE001 reason: a boundary, waiting consumers must hear
            self._fail(error)
            return False
        return self._engine.stalled() is None

    def _deliver(self, samples: list[Sample]) -> None:
        touched: dict[str, _Consumer] = {}
        for sample in samples:
            consumer = self._consumers.get(sample.request_id)
            if consumer is not None and consumer.stream is not None:
                consumer.stream.finish(sample)
                touched[sample.request_id] = consumer
        for request_id, consumer in touched.items():
            if consumer.is_served:
                del self._consumers[request_id]
        self._offer_all(touched)

    def _stream(self) -> None:
        grown: dict[str, _Consumer] = {}
        for sequence in self._engine.unfinished_sequences:
            consumer = self._consumers.get(sequence.request_id)
            if consumer is None or consumer.stream is None:
                continue
            if consumer.stream.grow(sequence):
                grown[sequence.request_id] = consumer
        self._offer_all(grown)

    def _offer_all(self, consumers: Mapping[str, _Consumer]) -> None:
        for consumer in consumers.values():
            if consumer.stream is not None:
                self._offer(consumer, consumer.stream.output())

    def _fail(self, error: Exception) -> None:
        def failure() -> EngineError:
            raised = EngineError(f"the engine failed: {error}")
            raised.__cause__ = error
            return raised

        self._end_consumers(failure)

    def _end_consumers(self, make_error: Callable[[], EngineError]) -> None:
        """An error of its own to each: raising one changes it."""
        for consumer in self._consumers.values():
            self._offer(consumer, make_error())
        self._consumers.clear()

    def _offer(self, consumer: _Consumer, item: StreamItem) -> None:
        self._loop.call_soon_threadsafe(consumer.offer, item)
