"""An `AsyncLLMEngine` around an engine, for one scenario in an event loop of its own."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final

from syncline.engine.async_llm import AsyncLLMEngine
from syncline.engine.llm import LLM
from syncline.engine.outputs import RequestOutput
from syncline.engine.sampling_params import SamplingParams

GREEDY: Final = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@asynccontextmanager
async def serving(llm: LLM) -> AsyncIterator[AsyncLLMEngine]:
    engine = AsyncLLMEngine(llm.engine)
    try:
        yield engine
    finally:
        await engine.close()


def run(llm: LLM, scenario: Callable[[AsyncLLMEngine], Awaitable[None]]) -> None:
    async def main() -> None:
        async with serving(llm) as engine:
            await asyncio.wait_for(scenario(engine), timeout=60)

    asyncio.run(main())


async def collect(
    engine: AsyncLLMEngine, prompt: str, params: SamplingParams = GREEDY
) -> list[RequestOutput]:
    return [output async for output in engine.generate(prompt, params)]
