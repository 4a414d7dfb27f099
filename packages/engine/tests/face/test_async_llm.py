"""AsyncLLMEngine: streams, many consumers, consumers that go away, sleep and updates in between."""

import asyncio

import pytest

from syncline.engine.async_llm import AsyncLLMEngine
from syncline.engine.engine import LLMEngine
from syncline.engine.errors import (
    PromptError,
)
from syncline.engine.sampling_params import SamplingParams
from syncline.engine.testing.checkpoints import TinyModel
from syncline.engine.testing.engines import MakeLLM
from syncline.engine.testing.serving import GREEDY, collect, run
from syncline.graph_lifecycle import ResidencyError

LONG = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)


async def settled(engine: LLMEngine) -> None:
    """Until the engine holds no request; fails by the scenario's timeout otherwise."""
    while engine.num_requests or engine.has_work:
        await asyncio.sleep(0.001)


def test_a_stream_grows_to_what_generate_returns(make_llm: MakeLLM) -> None:
    (expected,) = make_llm().generate("abc", GREEDY)

    async def scenario(engine: AsyncLLMEngine) -> None:
        outputs = await collect(engine, "abc")
        assert outputs[-1].finished
        assert not any(output.finished for output in outputs[:-1])
        lengths = [len(output.outputs[0].token_ids) for output in outputs]
        assert lengths == sorted(set(lengths))
        assert outputs[-1].outputs[0].token_ids == expected.outputs[0].token_ids
        for output in outputs:
            completion = output.outputs[0]
            assert expected.outputs[0].text.startswith(completion.text)
            assert len(completion.logprobs) == len(completion.token_ids)

    run(make_llm(), scenario)


def test_many_consumers_get_their_own_answers(make_llm: MakeLLM) -> None:
    prompts = [f"{i},{i}ab" for i in range(12)]
    expected = make_llm().generate(prompts, GREEDY)

    async def scenario(engine: AsyncLLMEngine) -> None:
        streams = await asyncio.gather(*(collect(engine, prompt) for prompt in prompts))
        for stream, want in zip(streams, expected, strict=True):
            assert stream[-1].outputs[0].token_ids == want.outputs[0].token_ids

    run(make_llm(max_steps_in_flight=2, num_kv_blocks=24), scenario)


def test_every_sample_of_a_request_streams(make_llm: MakeLLM) -> None:
    params = SamplingParams(n=3, seed=2, max_tokens=6, ignore_eos=True)
    (expected,) = make_llm().generate("abc", params)

    async def scenario(engine: AsyncLLMEngine) -> None:
        last = (await collect(engine, "abc", params))[-1]
        assert [c.token_ids for c in last.outputs] == [c.token_ids for c in expected.outputs]

    run(make_llm(), scenario)


def test_text_that_may_be_a_stop_string_is_held_back(make_llm: MakeLLM) -> None:
    (free,) = make_llm().generate("abc", GREEDY)
    stop = free.outputs[0].text[6:9]
    params = SamplingParams(temperature=0.0, max_tokens=12, stop=stop)
    (expected,) = make_llm().generate("abc", params)

    async def scenario(engine: AsyncLLMEngine) -> None:
        outputs = await collect(engine, "abc", params)
        assert outputs[-1].outputs[0].text == expected.outputs[0].text
        assert outputs[-1].outputs[0].stop_reason == stop
        for output in outputs:
            assert expected.outputs[0].text.startswith(output.outputs[0].text)

    run(make_llm(), scenario)


@pytest.mark.parametrize("num_samples", [1, 2])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_consumer_that_leaves_its_loop_ends_its_request(
    make_llm: MakeLLM, num_samples: int, depth: int
) -> None:
    params = SamplingParams(n=num_samples, max_tokens=400, ignore_eos=True)

    async def scenario(engine: AsyncLLMEngine) -> None:
        other = asyncio.create_task(collect(engine, "xyz"))
        stream = engine.generate("abc", params)
        async for output in stream:
            assert not output.finished
            break
        await stream.aclose()
        assert (await other)[-1].finished
        await settled(llm.engine)
        llm.engine.parts.scheduler.check_integrity()
        assert llm.stats.num_accepted_tokens < 400

    llm = make_llm(max_steps_in_flight=depth, num_kv_blocks=256)
    run(llm, scenario)


def test_breaking_out_of_a_loop_is_enough(make_llm: MakeLLM) -> None:
    async def scenario(engine: AsyncLLMEngine) -> None:
        async for _ in engine.generate("abc", LONG):
            break
        await settled(llm.engine)
        assert llm.stats.num_accepted_tokens < 400

    llm = make_llm(num_kv_blocks=256)
    run(llm, scenario)


def test_a_cancelled_consumer_ends_its_request_even_before_it_was_added(make_llm: MakeLLM) -> None:
    async def scenario(engine: AsyncLLMEngine) -> None:
        running = asyncio.create_task(collect(engine, "abc", LONG))
        waiting = asyncio.create_task(collect(engine, "xyz", LONG))
        await asyncio.sleep(0.05)
        unborn = asyncio.create_task(collect(engine, "uvw", LONG))
        await asyncio.sleep(0)
        for task in (running, waiting, unborn):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await settled(llm.engine)
        assert (await collect(engine, "abc"))[-1].finished

    llm = make_llm(max_num_seqs=1, num_kv_blocks=256)
    run(llm, scenario)


def test_a_hundred_requests_leave_nothing_behind(make_llm: MakeLLM) -> None:
    short = SamplingParams(max_tokens=2, ignore_eos=True)

    async def scenario(engine: AsyncLLMEngine) -> None:
        await asyncio.gather(*(collect(engine, f"{i}", short) for i in range(100)))
        await settled(llm.engine)
        assert engine.num_consumers == 0

    llm = make_llm()
    run(llm, scenario)


def test_abort_gives_the_consumer_its_partial_output(make_llm: MakeLLM) -> None:
    async def scenario(engine: AsyncLLMEngine) -> None:
        outputs = []
        async for output in engine.generate("abc", LONG, request_id="mine"):
            outputs.append(output)
            if len(outputs) == 2:
                await engine.abort("mine")
        assert outputs[-1].outputs[0].finish_reason == "abort"
        assert 0 < len(outputs[-1].outputs[0].token_ids) < 400
        await engine.abort("mine")

    run(make_llm(num_kv_blocks=256), scenario)


def test_bad_requests_are_refused_alone(make_llm: MakeLLM) -> None:
    async def scenario(engine: AsyncLLMEngine) -> None:
        stream = engine.generate("abc", LONG, request_id="mine")
        await anext(stream)
        with pytest.raises(PromptError, match="empty"):
            await collect(engine, "")
        with pytest.raises(ValueError, match="mine"):
            async for _ in engine.generate("xyz", GREEDY, request_id="mine"):
                pass
        lengths = [len((await anext(stream)).outputs[0].token_ids) for _ in range(5)]
        assert lengths == sorted(set(lengths))
        await stream.aclose()

    run(make_llm(num_kv_blocks=256), scenario)


def test_a_stream_lives_through_sleep_wake_and_an_update(make_llm: MakeLLM) -> None:
    async def scenario(engine: AsyncLLMEngine) -> None:
        stream = engine.generate("abc", SamplingParams(max_tokens=200, ignore_eos=True))
        await anext(stream)
        await engine.sleep(level=2)
        with pytest.raises(ResidencyError, match="asleep"):
            await collect(engine, "xyz")
        await engine.wake_up(["weights"])
        await engine.update_weights(TinyModel(seed=1).tensors().items(), version=5)
        await engine.wake_up()
        outputs = [output async for output in stream]
        completion = outputs[-1].outputs[0]
        assert [version for version, _ in completion.weight_versions] == [0, 5]
        assert len(completion.token_ids) == 200

    run(make_llm(max_steps_in_flight=2), scenario)


def test_a_stream_that_an_update_aborts_ends_while_the_kv_cache_sleeps(make_llm: MakeLLM) -> None:
    async def scenario(engine: AsyncLLMEngine) -> None:
        stream = engine.generate("abc", SamplingParams(max_tokens=200, ignore_eos=True))
        await anext(stream)
        await engine.sleep(level=2)
        await engine.wake_up(["weights"])
        await engine.update_weights(TinyModel(seed=1).tensors().items(), version=1)
        last = [output async for output in stream][-1]
        assert last.outputs[0].finish_reason == "abort"
        assert not llm.engine.is_ready

    llm = make_llm(unfinished_policy="abort")
    run(llm, scenario)


def test_an_update_in_pieces_holds_streams_and_lets_them_go_on(make_llm: MakeLLM) -> None:
    async def scenario(engine: AsyncLLMEngine) -> None:
        stream = engine.generate("abc", SamplingParams(max_tokens=150, ignore_eos=True))
        await anext(stream)
        await engine.begin_update(1)
        for name, tensor in TinyModel(seed=1).tensors().items():
            await engine.put_weight(name, tensor)
        report = await engine.commit_update()
        assert report.coverage == 1.0
        last = [output async for output in stream][-1]
        assert [version for version, _ in last.outputs[0].weight_versions] == [0, 1]
        await engine.begin_update(2)
        assert not (await engine.abort_update("no")).live_bytes_written

    run(make_llm(), scenario)


def test_pause_and_resume(make_llm: MakeLLM) -> None:
    async def scenario(engine: AsyncLLMEngine) -> None:
        stream = engine.generate("abc", LONG)
        await anext(stream)
        await engine.pause("keep")
        before = llm.stats.num_accepted_tokens
        later = asyncio.create_task(collect(engine, "xyz"))
        await asyncio.sleep(0.05)
        assert llm.stats.num_accepted_tokens <= before + 2
        await engine.resume()
        assert (await later)[-1].finished
        await stream.aclose()
        await settled(llm.engine)
        short = asyncio.create_task(collect(engine, "xyz"))
        await asyncio.sleep(0.01)
        await engine.pause("wait")
        assert llm.engine.num_running == 0
        await engine.resume()
        assert (await short)[-1].finished

    llm = make_llm(num_kv_blocks=256)
    run(llm, scenario)
