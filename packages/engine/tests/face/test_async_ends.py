"""AsyncLLMEngine at its ends: closed, failed, stuck in a pause; nobody waits for ever."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from syncline.engine.async_llm import AsyncLLMEngine
from syncline.engine.engine import LLMEngine
from syncline.engine.errors import (
    EngineClosedError,
    EngineError,
    EngineFailedError,
    NotReadyError,
)
from syncline.engine.llm import LLM
from syncline.engine.runner.protocol import Runner
from syncline.engine.sampling_params import SamplingParams
from syncline.engine.testing.checkpoints import TinyModel
from syncline.engine.testing.engines import MakeLLM
from syncline.engine.testing.serving import collect, run
from syncline.engine.testing.stand_ins import RunnerStandIn
from syncline.graph_lifecycle import ResidencyError
from syncline.scheduler_core import StepResult

LONG = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
LONG_SEEDED = SamplingParams(seed=1, max_tokens=400, ignore_eos=True)


def test_close_ends_consumers_and_refuses_new_ones(make_llm: MakeLLM) -> None:
    async def main() -> None:
        engine = AsyncLLMEngine(make_llm(num_kv_blocks=256).engine)
        task = asyncio.create_task(collect(engine, "abc", LONG))
        await asyncio.sleep(0.05)
        await engine.close()
        with pytest.raises(EngineClosedError):
            await task
        with pytest.raises(EngineClosedError):
            await collect(engine, "abc")
        await engine.close()

    asyncio.run(main())


@pytest.mark.parametrize("num_turns", [0, 1, 2, 3])
def test_a_request_whose_add_is_under_way_is_ended_by_close(
    make_llm: MakeLLM, num_turns: int
) -> None:
    async def main() -> None:
        engine = AsyncLLMEngine(make_llm(num_kv_blocks=256).engine)
        tasks = [asyncio.create_task(collect(engine, "abc", LONG)) for _ in range(8)]
        for _ in range(num_turns):
            await asyncio.sleep(0)
        await engine.close()
        for task in tasks:
            with pytest.raises(EngineClosedError):
                await asyncio.wait_for(task, timeout=5)
        assert engine.num_consumers == 0

    asyncio.run(main())


def test_a_close_that_is_cancelled_ends_consumers_all_the_same(make_llm: MakeLLM) -> None:
    async def main() -> None:
        engine = AsyncLLMEngine(make_llm(num_kv_blocks=256).engine)
        task = asyncio.create_task(collect(engine, "abc", LONG))
        await asyncio.sleep(0.02)
        closing = asyncio.create_task(engine.close())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        with pytest.raises(EngineClosedError):
            await asyncio.wait_for(task, timeout=5)
        await engine.close()

    asyncio.run(main())


async def fall_asleep(engine: AsyncLLMEngine) -> None:
    await engine.sleep(1)


async def open_update(engine: AsyncLLMEngine) -> None:
    await engine.begin_update(1)
    name, tensor = next(iter(TinyModel(seed=1).tensors().items()))
    await engine.put_weight(name, tensor)


Hinder = Callable[[AsyncLLMEngine], Awaitable[None]]
HINDRANCES = [(fall_asleep, ResidencyError), (open_update, NotReadyError)]


@pytest.mark.parametrize(("hinder", "error"), HINDRANCES)
@pytest.mark.parametrize("is_waiting_already", [False, True])
def test_pause_wait_raises_when_what_runs_cannot_end(
    make_llm: MakeLLM, hinder: Hinder, error: type[Exception], is_waiting_already: bool
) -> None:
    async def scenario(engine: AsyncLLMEngine) -> None:
        stream = engine.generate("abc", LONG)
        await anext(stream)
        if is_waiting_already:
            waiting = asyncio.create_task(engine.pause("wait"))
            while not llm.engine.is_paused:
                await asyncio.sleep(0)
            await hinder(engine)
        else:
            await hinder(engine)
            waiting = asyncio.create_task(engine.pause("wait"))
        with pytest.raises(error):
            await asyncio.wait_for(waiting, timeout=5)
        assert llm.engine.is_paused == is_waiting_already
        await stream.aclose()

    llm = make_llm(num_kv_blocks=256)
    run(llm, scenario)


class BreakingRunner(RunnerStandIn):
    """Fails at its third step."""

    __slots__ = ("_num_collected",)

    def __init__(self, inner: Runner) -> None:
        super().__init__(inner)
        self._num_collected = 0

    def collect(self) -> StepResult:
        self._num_collected += 1
        if self._num_collected == 3:
            raise RuntimeError("the device fell off the bus")
        return self.inner.collect()


def test_a_failed_step_reaches_every_consumer_and_later_callers(make_llm: MakeLLM) -> None:
    healthy = make_llm().engine
    parts = healthy.parts
    broken = LLMEngine(healthy.config, replace(parts, runner=BreakingRunner(parts.runner)))

    async def scenario(engine: AsyncLLMEngine) -> None:
        tasks = [asyncio.create_task(collect(engine, prompt)) for prompt in ("abc", "xyz")]
        for task in tasks:
            with pytest.raises(EngineError, match="fell off the bus"):
                await task
        with pytest.raises(EngineFailedError, match="fell off the bus"):
            await collect(engine, "abc")

    run(LLM.from_engine(broken), scenario)


def test_pause_wait_ends_with_the_step_that_failed_under_it(make_llm: MakeLLM) -> None:
    healthy = make_llm().engine
    parts = healthy.parts
    broken = LLMEngine(healthy.config, replace(parts, runner=BreakingRunner(parts.runner)))

    async def scenario(engine: AsyncLLMEngine) -> None:
        stream = engine.generate("abc", LONG)
        await anext(stream)
        with pytest.raises(EngineFailedError, match="fell off the bus"):
            await asyncio.wait_for(engine.pause("wait"), timeout=5)
        with pytest.raises(EngineError, match="fell off the bus"):
            await collect(engine, "abc")
        await stream.aclose()

    run(LLM.from_engine(broken), scenario)


def test_a_refused_request_changes_no_later_answer(make_llm: MakeLLM) -> None:
    free = SamplingParams(max_tokens=12, ignore_eos=True)
    (expected,) = make_llm().generate("abc", free)

    async def scenario(engine: AsyncLLMEngine) -> None:
        stream = engine.generate("abc", LONG_SEEDED, request_id="mine")
        await anext(stream)
        with pytest.raises(ValueError, match="mine"):
            await anext(engine.generate("abc", free, request_id="mine"))
        await stream.aclose()
        last = (await collect(engine, "abc", free))[-1]
        assert last.outputs[0].token_ids == expected.outputs[0].token_ids

    run(make_llm(num_kv_blocks=256), scenario)
