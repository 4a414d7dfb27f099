"""Model directories: what is read, what is refused, and by which name."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3Config

from syncline.engine.errors import CheckpointError, UnsupportedModelError
from syncline.engine.models.config import (
    SUPPORTED_ARCHITECTURES,
    read_eos_token_ids,
    read_model_config,
)
from syncline.engine.models.registry import MODELS
from syncline.engine.testing.checkpoints import TinyModel


def write(directory: Path, **changes: Any) -> Path:  # Any: config.json holds any JSON value
    """A tiny model's config.json with some keys changed; None removes a key."""
    config = TinyModel().config() | changes
    kept = {key: value for key, value in config.items() if value is not None}
    (directory / "config.json").write_text(json.dumps(kept), encoding="utf-8")
    return directory


def test_a_config_is_read_as_it_stands(tmp_path: Path) -> None:
    config = read_model_config(write(tmp_path, rope_theta=5e5, rms_norm_eps=1e-5))
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 16)
    assert (config.q_size, config.kv_size) == (64, 32)
    assert (config.rope_theta, config.rms_norm_eps) == (5e5, 1e-5)
    assert config.has_tied_embeddings and not config.has_attention_bias


def test_what_transformers_saves_is_read_with_transformers_values(tmp_path: Path) -> None:
    theirs = Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        num_hidden_layers=3,
        rope_parameters={"rope_type": "default", "rope_theta": 123.0},
        dtype="bfloat16",
    )
    theirs.save_pretrained(tmp_path)
    ours = read_model_config(tmp_path)
    assert ours.rope_theta == 123.0
    assert ours.dtype_name == "bfloat16"
    assert ours.head_dim == theirs.head_dim
    assert ours.has_tied_embeddings == theirs.tie_word_embeddings
    assert ours.max_position_embeddings == theirs.max_position_embeddings


def test_the_published_spelling_of_qwen3_is_read(tmp_path: Path) -> None:
    config = read_model_config(
        write(
            tmp_path,
            rope_scaling=None,
            sliding_window=4096,
            use_sliding_window=False,
            max_window_layers=1,
            torch_dtype="bfloat16",
        )
    )
    assert config.dtype_name == "bfloat16"


ROPE = {"rope_type": "default", "rope_theta": 5e5}


@pytest.mark.parametrize(
    ("scaling", "named"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "rope_theta": 5e5}, "'yarn' (rope_scaling)"),
        ({"type": "linear", "factor": 4.0}, "'linear' (rope_scaling)"),
        ({"rope_type": "default", "rope_theta": 1e6}, "rope_scaling beside rope_parameters"),
        # In transformers it replaces rope_parameters, whose base is then lost.
        ({"rope_type": "default"}, "rope_scaling beside rope_parameters"),
    ],
)
def test_rope_scaling_is_not_read_past_where_rope_parameters_stand(
    tmp_path: Path, scaling: dict[str, Any], named: str
) -> None:
    write(tmp_path, rope_parameters=ROPE, rope_scaling=scaling, rope_theta=None)
    theirs = Qwen3Config.from_pretrained(tmp_path).rope_parameters
    assert theirs is not None
    assert theirs["rope_type"] != "default" or theirs["rope_theta"] != 5e5
    with pytest.raises(UnsupportedModelError) as caught:
        read_model_config(tmp_path)
    assert named in str(caught.value)


@pytest.mark.parametrize("scaling", [None, ROPE, {"type": "default", "rope_theta": 5e5}])
def test_rope_scaling_may_say_again_what_rope_parameters_say(tmp_path: Path, scaling: Any) -> None:
    write(tmp_path, rope_parameters=ROPE, rope_scaling=scaling)
    assert read_model_config(tmp_path).rope_theta == 5e5


def test_attention_bias_is_honoured_not_read_past(tmp_path: Path) -> None:
    assert read_model_config(write(tmp_path, attention_bias=True)).has_attention_bias


def test_an_unknown_architecture_is_named_with_what_there_is(tmp_path: Path) -> None:
    write(tmp_path, architectures=["LlamaForCausalLM"])
    with pytest.raises(UnsupportedModelError, match=r"LlamaForCausalLM.*Qwen3ForCausalLM"):
        read_model_config(tmp_path)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        (
            {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
            "use_sliding_window",
        ),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "linear"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "llama3"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor",
        ),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "full_attention"),
        ({"rope_scaling": {"rope_theta": 1e4, "factor": 4.0}}, "factor in rope_scaling"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"use_sliding_window": True, "max_window_layers": 1}, "use_sliding_window"),
        (
            {"use_sliding_window": True, "sliding_window": 64, "num_hidden_layers": 29},
            "use_sliding_window",
        ),
        ({"is_causal": False}, "is_causal"),
        ({"per_layer_config": {"0": {"head_dim": 8}}}, "per_layer_config"),
        ({"model_type": "llama"}, "model_type 'llama'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
    ],
)
def test_a_feature_that_is_not_built_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    write(tmp_path, **changes)
    with pytest.raises(UnsupportedModelError, match="is not supported") as caught:
        read_model_config(tmp_path)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer, got 0"),
        ({"vocab_size": "48"}, "vocab_size must be a positive integer, got '48'"),
        ({"head_dim": 15}, "head_dim must be even, got 15"),
        ({"num_key_value_heads": 3}, "no multiple of num_key_value_heads 3"),
        ({"rms_norm_eps": -1}, "rms_norm_eps must be a positive number"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"architectures": None}, "architectures must name one class"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps must be a positive number, got nan"),
        ({"rms_norm_eps": math.inf}, "rms_norm_eps must be a positive number, got inf"),
        ({"rope_theta": math.nan}, "rope_theta must be a positive number, got nan"),
        ({"layer_types": "sliding_attention"}, "layer_types must be a list"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for 2 layers"),
    ],
)
def test_a_bad_value_is_named(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    write(tmp_path, **changes)
    with pytest.raises(CheckpointError) as caught:
        read_model_config(tmp_path)
    assert named in str(caught.value)
    assert caught.value.path == str(tmp_path)


def test_a_wrong_path_a_file_and_a_broken_file_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such directory"):
        read_model_config(tmp_path / "absent")
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"config\.json is not JSON"):
        read_model_config(tmp_path)
    with pytest.raises(CheckpointError, match="a file, not a directory"):
        read_model_config(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("generation", "model", "expected"),
    [({"eos_token_id": [3, 5]}, 7, {3, 5}), ({}, 7, {7}), (None, 7, {7}), (None, None, set())],
)
def test_eos_ids_come_from_the_generation_config_first(
    tmp_path: Path, generation: Any, model: int | None, expected: set[int]
) -> None:
    write(tmp_path, eos_token_id=model)
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    assert read_eos_token_ids(tmp_path) == expected


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_an_eos_id_beyond_the_vocabulary_is_refused_in_either_file(
    tmp_path: Path, name: str
) -> None:
    eos = {"config.json": 5, "generation_config.json": 3} | {name: 999}
    write(tmp_path, eos_token_id=eos["config.json"])
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [3, eos["generation_config.json"]]}), encoding="utf-8"
    )
    named = rf"{name}: eos_token_id names 999; the tokenizer's ids end at 13"
    with pytest.raises(CheckpointError, match=named):
        read_eos_token_ids(tmp_path, 14)
    assert 3 in read_eos_token_ids(tmp_path, 1000)


def test_an_eos_id_that_is_no_id_is_refused(tmp_path: Path) -> None:
    write(tmp_path, eos_token_id=["</s>"])
    with pytest.raises(CheckpointError, match="eos_token_id must be token ids"):
        read_eos_token_ids(tmp_path)


def test_every_supported_architecture_can_be_built() -> None:
    assert tuple(MODELS) == SUPPORTED_ARCHITECTURES
