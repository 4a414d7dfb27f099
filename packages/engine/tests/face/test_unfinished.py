"""Sequences that are unfinished when the weights change: recompute, abort or keep their KV."""

from collections.abc import Iterator

import pytest
from torch import Tensor

from syncline.engine.llm import LLM
from syncline.engine.outputs import Sample
from syncline.engine.sampling_params import SamplingParams
from syncline.engine.testing.checkpoints import TinyModel, write_tiny_checkpoint
from syncline.engine.testing.engines import MakeLLM

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
OTHER = TinyModel(seed=1)


def named(model: TinyModel) -> Iterator[tuple[str, Tensor]]:
    yield from model.tensors().items()


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("models") / "other", OTHER)


def greedy_ids(llm: LLM, prompt: str = "abc") -> tuple[int, ...]:
    return llm.generate(prompt, GREEDY)[0].outputs[0].token_ids


def drain(llm: LLM) -> list[Sample]:
    samples: list[Sample] = []
    while got := llm.poll():
        samples += got
    return samples


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("mode", ["direct", "staged"])
def test_unfinished_sequences_recompute_under_the_new_weights(
    make_llm: MakeLLM, other_model: str, depth: int, mode: str
) -> None:
    llm = make_llm(max_steps_in_flight=depth)
    llm.submit("abc", GREEDY)
    for _ in range(5):
        llm.engine.step()
    llm.update_weights(named(OTHER), 1, mode="staged" if mode == "staged" else "direct")
    (sample,) = drain(llm)
    runs = sample.output.weight_versions
    assert [version for version, _ in runs] == [0, 1]
    assert sum(count for _, count in runs) == 12
    # What follows the update is what the new weights say after the same tokens.
    num_old = runs[0][1]
    old_ids = list(sample.output.token_ids[:num_old])
    assert tuple(old_ids) == greedy_ids(make_llm())[:num_old]
    cold = make_llm(model=other_model)
    rest = SamplingParams(temperature=0.0, max_tokens=12 - num_old, ignore_eos=True)
    (expected,) = cold.generate([[*sample.prompt_token_ids, *old_ids]], rest)
    assert sample.output.token_ids[num_old:] == expected.outputs[0].token_ids
    assert sample.output.logprobs[num_old:] == pytest.approx(expected.outputs[0].logprobs, abs=1e-4)


def test_unfinished_sequences_may_be_aborted_by_an_update(make_llm: MakeLLM) -> None:
    llm = make_llm(unfinished_policy="abort")
    llm.submit("abc", GREEDY)
    for _ in range(4):
        llm.engine.step()
    llm.update_weights(named(OTHER), version=1)
    (sample,) = drain(llm)
    assert sample.output.finish_reason == "abort"
    assert "version 1" in sample.output.finish_detail
    assert 0 < len(sample.output.token_ids) < 12


def test_unfinished_sequences_may_keep_their_old_kv(make_llm: MakeLLM) -> None:
    llm = make_llm(unfinished_policy="keep_kv")
    llm.submit("abc", GREEDY)
    for _ in range(4):
        llm.engine.step()
    llm.update_weights(named(OTHER), version=1)
    (sample,) = drain(llm)
    assert sample.output.num_preemptions == 0
    assert [version for version, _ in sample.output.weight_versions] == [0, 1]


def test_kv_that_slept_is_not_kept_by_any_policy(make_llm: MakeLLM, other_model: str) -> None:
    llm = make_llm(unfinished_policy="keep_kv")
    llm.submit("abc", GREEDY)
    for _ in range(4):
        llm.engine.step()
    llm.sleep(level=2)
    llm.wake_up()
    llm.update_weights(named(OTHER), version=1)
    (sample,) = drain(llm)
    assert sample.output.finish_reason == "length"
    assert sample.output.num_preemptions == 1
