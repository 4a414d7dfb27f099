"""Calls with the wrong thing in them: one clear error by name, and not a trace of them left."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from syncline.engine.config import EngineConfig
from syncline.engine.errors import NotReadyError, PromptError
from syncline.engine.llm import LLM
from syncline.engine.sampling_params import SamplingParams
from syncline.engine.testing.checkpoints import TinyModel
from syncline.engine.testing.engines import MakeLLM
from syncline.graph_lifecycle import ResidencyError

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
FREE = SamplingParams(max_tokens=12, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=12, seed=1, ignore_eos=True)

# Wrong prompts, as one of several or alone, and what their refusal names.
WRONG_PROMPTS = [
    ("ab!", "ab!.*Missing"),
    ("\ud800", "ud800"),
    ({"prompt_token_ids": [1, 2]}, "got dict .*take the text or the list"),
    (b"abc", "got bytes"),
    ({1, 2}, "got set"),
    (torch.tensor([1, 2, 3]), r"got Tensor .*tolist\(\)"),
]
WRONG_WHOLES = [
    (None, "prompts must be a text.*got NoneType"),
    (5, "got int.*5"),
    ([1.5], r"must be integers, got 1\.5 \(float\) at position 0"),
    ([1, None], "got None"),
    ([np.bool_(True)], "must be integers"),
    ([[np.array([3])]], "must be integers"),
    ([torch.tensor(1), torch.tensor(2)], "got Tensor"),
]


@pytest.mark.parametrize(
    ("prompts", "text"),
    [*WRONG_PROMPTS, *WRONG_WHOLES, *(([prompt], text) for prompt, text in WRONG_PROMPTS)],
)
def test_what_is_no_prompt_is_a_prompt_error_that_names_it(
    llm: LLM, prompts: Any, text: str
) -> None:
    with pytest.raises(PromptError, match=text):
        llm.generate(prompts, GREEDY)
    assert not llm.engine.has_work


def test_a_long_text_is_shown_by_its_beginning(llm: LLM) -> None:
    with pytest.raises(PromptError) as caught:
        llm.generate("a" * 200 + "!", GREEDY)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize(
    "prompts", [np.array([1, 2, 3]), list(np.array([1, 2, 3])), [np.array([1, 2, 3])]]
)
def test_integers_of_numpy_are_token_ids(llm: LLM, prompts: Any) -> None:
    (output,) = llm.generate(prompts, GREEDY)
    assert output.prompt_token_ids == (1, 2, 3)
    assert {type(token_id) for token_id in output.prompt_token_ids} == {int}


@pytest.mark.parametrize("params", [{"n": 2}, 3, "abc", [{"n": 2}], [None]])
def test_what_is_no_sampling_params_is_refused_by_name(llm: LLM, params: Any) -> None:
    prompts = ["a"] * (len(params) if isinstance(params, str) else 1)
    with pytest.raises(ValueError, match="sampling_params must be SamplingParams"):
        llm.generate(prompts, params)


@pytest.mark.parametrize("token_ids", [None, 5, [1.5, 2.5], "abc"])
def test_score_takes_token_ids_alone(llm: LLM, token_ids: Any) -> None:
    with pytest.raises(PromptError):
        llm.score(token_ids)


def test_a_model_may_be_a_path_object(tiny_model: str) -> None:
    config = EngineConfig.from_kwargs(model=Path(tiny_model), tokenizer=Path(tiny_model))
    assert config == EngineConfig(model=tiny_model, tokenizer=tiny_model)


def refuse_prompt(llm: LLM) -> None:
    with pytest.raises(PromptError):
        llm.generate(["abc", "xyz", ""], FREE)


def refuse_submit(llm: LLM) -> None:
    with pytest.raises(PromptError):
        llm.submit(["abc", ""], FREE)


def refuse_duplicate(llm: LLM) -> None:
    llm.engine.add_request("mine", "abc", SEEDED)
    with pytest.raises(ValueError, match="mine"):
        llm.engine.add_request("mine", "abc", FREE)
    llm.abort("mine")


def refuse_second_of_a_batch(llm: LLM) -> None:
    llm.engine.add_request("llm-1", "abc", SEEDED)
    with pytest.raises(ValueError, match="llm-1"):
        llm.submit(["abc", "xyz"], FREE)
    assert llm.engine.num_requests == 1
    llm.abort("llm-1")
    assert llm.poll() == []


@pytest.mark.parametrize(
    "refuse",
    [refuse_prompt, refuse_submit, refuse_duplicate, refuse_second_of_a_batch],
)
def test_a_refused_call_changes_no_later_answer(
    make_llm: MakeLLM, refuse: Callable[[LLM], None]
) -> None:
    refused, fresh = make_llm(), make_llm()
    refuse(refused)
    (got,), (expected,) = refused.generate("abc", FREE), fresh.generate("abc", FREE)
    assert got.request_id == expected.request_id == "llm-0"
    assert got.outputs[0].token_ids == expected.outputs[0].token_ids


def pairs_of_names() -> list[Any]:
    return list(TinyModel(seed=1).tensors())


def last_is_a_list() -> list[Any]:
    tensors = list(TinyModel(seed=1).tensors().items())
    return [*tensors[:-1], (tensors[-1][0], [1.0, 2.0])]


def last_is_a_list_in_a_dict() -> dict[str, Any]:
    return dict(last_is_a_list())


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (pairs_of_names, "item 0 is str"),
        (last_is_a_list, r"is \(str, list\)"),
        (last_is_a_list_in_a_dict, r"is \(str, list\)"),
        (lambda: last_is_a_list_in_a_dict().items(), r"is \(str, list\)"),
        (lambda: iter(pairs_of_names()), "item 0 is str"),
        (lambda: None, "got NoneType"),
        (lambda: torch.ones(2, 2), "got Tensor"),
    ],
)
def test_an_update_of_something_else_is_refused_before_a_byte_is_written(
    llm: LLM, make: Callable[[], Any], text: str
) -> None:
    (before,) = llm.generate("abc", GREEDY)
    with pytest.raises(ValueError, match=text):
        llm.update_weights(make(), 1)
    (after,) = llm.generate("abc", GREEDY)
    assert after.outputs[0].token_ids == before.outputs[0].token_ids
    assert llm.weight_version == 0


def test_an_iterator_that_goes_wrong_on_the_way_leaves_no_update_open(llm: LLM) -> None:
    def going_wrong() -> Iterator[Any]:
        yield from list(TinyModel(seed=1).tensors().items())[:1]
        yield "model.norm.weight"

    with pytest.raises(ValueError, match="item 1 is str"):
        llm.update_weights(going_wrong(), 1)
    assert not llm.engine.updates.is_open


def test_a_state_dict_is_an_update(llm: LLM) -> None:
    assert llm.update_weights(TinyModel(seed=1).tensors(), 1).coverage == 1.0


@pytest.mark.parametrize("level", [True, False, 1.0, 0, 3, "1", [1]])
def test_a_sleep_level_is_1_or_2_and_nothing_equal_to_it(llm: LLM, level: Any) -> None:
    with pytest.raises(ValueError, match="level must be 1 or 2"):
        llm.sleep(level)
    assert llm.engine.is_ready


def fall_asleep(llm: LLM) -> None:
    llm.sleep(1)


def open_update(llm: LLM) -> None:
    llm.begin_update(1)
    name, tensor = next(iter(TinyModel(seed=1).tensors().items()))
    llm.put_weight(name, tensor)


@pytest.mark.parametrize(
    ("hinder", "error"), [(fall_asleep, ResidencyError), (open_update, NotReadyError)]
)
def test_pause_wait_is_refused_when_what_runs_cannot_end(
    llm: LLM, hinder: Callable[[LLM], None], error: type[Exception]
) -> None:
    llm.submit(["abc"] * 3, FREE)
    llm.poll(0.0)
    hinder(llm)
    with pytest.raises(error):
        llm.pause("wait")
    assert not llm.engine.is_paused
    llm.pause("keep")
    llm.resume()


def test_pause_wait_while_asleep_is_at_once_when_all_has_ended(make_llm: MakeLLM) -> None:
    llm = make_llm(num_kv_blocks=3)
    (request_id,) = llm.submit([[1] * 20], GREEDY)  # Can never fit: it has ended by now.
    llm.sleep(1)
    llm.pause("wait")
    assert llm.engine.is_paused
    assert [sample.request_id for sample in llm.poll()] == [request_id]
