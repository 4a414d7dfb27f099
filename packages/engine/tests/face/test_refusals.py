"""What a user gets wrong: one clear error each, the engine survives, the next right call works."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from syncline.engine.errors import (
    CheckpointError,
    EngineConfigError,
    PromptTooLongError,
    UnsupportedModelError,
)
from syncline.engine.llm import LLM
from syncline.engine.sampling_params import SamplingParams
from syncline.engine.testing.checkpoints import NUM_TOKEN_IDS, TinyModel, write_tiny_checkpoint
from syncline.engine.testing.engines import MakeLLM
from syncline.graph_lifecycle import ResidencyError
from syncline.weight_sync import (
    DtypeMismatchError,
    IncompleteUpdateError,
    ShapeMismatchError,
    UnknownNameError,
)

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
NORM = "model.norm.weight"


def edit_config(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps(config))


def truncate_weights(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


@pytest.mark.parametrize(
    ("damage", "error", "text"),
    [
        (shutil.rmtree, CheckpointError, "no such directory"),
        (lambda d: (d / "config.json").unlink(), CheckpointError, "config.json is missing"),
        (lambda d: (d / "model.safetensors").unlink(), CheckpointError, "model.safetensors"),
        (lambda d: (d / "tokenizer.json").unlink(), CheckpointError, "tokenizer.json"),
        (truncate_weights, CheckpointError, "truncated"),
        (lambda d: edit_config(d, num_hidden_layers=3), CheckpointError, r"layers\.2"),
        (lambda d: edit_config(d, hidden_size=64), CheckpointError, "shape"),
        (
            lambda d: edit_config(d, architectures=["GPT2LMHeadModel"]),
            UnsupportedModelError,
            "GPT2LMHeadModel",
        ),
        (lambda d: edit_config(d, vocab_size=8), EngineConfigError, "embedding rows for 8"),
    ],
)
def test_a_damaged_checkpoint_is_one_error_and_the_whole_one_loads_afterwards(
    tmp_path: Path,
    make_llm: MakeLLM,
    damage: Callable[[Path], object],
    error: type[Exception],
    text: str,
) -> None:
    directory = tmp_path / "model"
    write_tiny_checkpoint(directory)
    damage(directory)
    with pytest.raises(error, match=text):
        make_llm(model=str(directory))
    write_tiny_checkpoint(directory)
    assert make_llm(model=str(directory)).generate("abc", GREEDY)[0].finished


@pytest.mark.parametrize(
    ("value", "accepted"),
    [
        (NUM_TOKEN_IDS - 1, False),
        (NUM_TOKEN_IDS, True),
        (NUM_TOKEN_IDS + 1, False),
        (48, False),
        (49, False),
    ],
)
def test_the_true_vocabulary_is_the_tokenizers_and_no_other(
    make_llm: MakeLLM, value: int, accepted: bool
) -> None:
    if accepted:
        assert make_llm(true_vocab_size=value).true_vocab_size == value
        return
    text = rf"true_vocab_size must be {NUM_TOKEN_IDS}, .* got {value}"
    with pytest.raises(EngineConfigError, match=text) as caught:
        make_llm(true_vocab_size=value)
    assert caught.value.field == "true_vocab_size"


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"max_num_seq": 4}, "did you mean max_num_seqs"),
        ({"max_model_len": 513}, "max_model_len must be at most 512"),
        ({"num_kv_blocks": 10**9}, "num_kv_blocks=1000000000 asks for a KV pool of"),
        ({"kv_cache_memory_bytes": 10, "num_kv_blocks": None}, "kv_cache_memory_bytes"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused_by_field(
    make_llm: MakeLLM, config: dict[str, object], text: str
) -> None:
    with pytest.raises(EngineConfigError, match=text):
        make_llm(**config)


def drop(name: str) -> dict[str, Tensor]:
    tensors = TinyModel(seed=1).tensors()
    del tensors[name]
    return tensors


def misspell(name: str) -> dict[str, Tensor]:
    tensors = TinyModel(seed=1).tensors()
    tensors[name.replace("norm", "nrom")] = tensors.pop(name)
    return tensors


def reshape(name: str) -> dict[str, Tensor]:
    tensors = TinyModel(seed=1).tensors()
    return tensors | {name: tensors[name][:-1]}


def as_integers(name: str) -> dict[str, Tensor]:
    tensors = TinyModel(seed=1).tensors()
    return tensors | {name: tensors[name].int()}


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (drop, IncompleteUpdateError),
        (misspell, UnknownNameError),
        (reshape, ShapeMismatchError),
        (as_integers, DtypeMismatchError),
    ],
)
def test_a_spoilt_update_is_one_error_and_a_right_one_serves_afterwards(
    llm: LLM,
    make_llm: MakeLLM,
    tmp_path: Path,
    spoil: Callable[[str], dict[str, Tensor]],
    error: type[Exception],
) -> None:
    llm.generate("abc", GREEDY)
    with pytest.raises(error, match=r"model\.norm\.weight"):
        llm.update_weights(spoil(NORM).items(), version=1)
    # Everything before the refusal was written in place: nothing serves from a mixture.
    with pytest.raises(ResidencyError, match="has not been completed"):
        llm.generate("abc", GREEDY)
    right = TinyModel(seed=1)
    llm.update_weights(right.tensors().items(), version=1)
    cold = make_llm(model=write_tiny_checkpoint(tmp_path / "right", right))
    (got,), (expected,) = llm.generate("abc", GREEDY), cold.generate("abc", GREEDY)
    assert got.outputs[0].token_ids == expected.outputs[0].token_ids


@pytest.mark.parametrize("spoil", [drop, misspell, reshape, as_integers])
def test_a_spoilt_staged_update_leaves_the_old_weights_serving(
    llm: LLM, spoil: Callable[[str], dict[str, Tensor]]
) -> None:
    (before,) = llm.generate("abc", GREEDY)
    with pytest.raises(Exception, match=r"model\.norm\.weight"):
        llm.update_weights(spoil(NORM).items(), version=1, mode="staged")
    (after,) = llm.generate("abc", GREEDY)
    assert after.outputs[0].token_ids == before.outputs[0].token_ids
    assert after.outputs[0].weight_versions == ((0, 4),)


def test_a_prompt_longer_than_the_model_is_one_error_and_the_next_call_works(llm: LLM) -> None:
    with pytest.raises(PromptTooLongError, match="600 tokens; max_model_len=512") as caught:
        llm.generate("0" * 600, GREEDY)
    assert (caught.value.num_prompt_tokens, caught.value.max_model_len) == (600, 512)
    assert llm.generate("abc", GREEDY)[0].finished
