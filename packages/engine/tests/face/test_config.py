"""EngineConfig: every field is checked, and an unknown one is never ignored."""

from typing import Any

import pytest

from syncline.engine.config import EngineConfig
from syncline.engine.errors import EngineConfigError, EngineError


def test_defaults_are_accepted() -> None:
    config = EngineConfig(model="somewhere")
    assert config.max_steps_in_flight == 1
    assert config.logprobs_mode == "processed_logprobs"
    assert config.unfinished_policy == "recompute"
    assert config.scheduling_policy == "fcfs"
    assert config.admission_policy == "forecast"
    assert (config.long_prefill_token_threshold, config.max_num_partial_prefills) == (0, None)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", ""),
        ("dtype", "float64"),
        ("logprobs_mode", "raw"),
        ("weight_layout", "column_major"),
        ("arena", "vmm"),
        ("unfinished_policy", "drop"),
        ("scheduling_policy", "lifo"),
        ("admission_policy", "eager"),
        ("long_prefill_token_threshold", -1),
        ("max_num_partial_prefills", 0),
        ("block_size", 0),
        ("max_model_len", 1),
        ("num_kv_blocks", 0),
        ("kv_cache_memory_bytes", 0),
        ("max_num_seqs", 0),
        ("max_num_seqs", True),
        ("max_num_seqs", 2.0),
        ("max_num_seqs", None),
        ("max_steps_in_flight", 0),
        ("seed", -1),
        ("seed", 2**64),
        ("true_vocab_size", 0),
        ("enforce_eager", 1),
        ("enable_prefix_caching", "yes"),
    ],
)
def test_a_value_out_of_range_is_refused_by_field(field: str, value: Any) -> None:
    kwargs = {"model": "somewhere"} | {field: value}
    with pytest.raises(EngineConfigError) as caught:
        EngineConfig.from_kwargs(**kwargs)
    assert caught.value.field == field
    assert field in str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, EngineError)


def test_an_unknown_key_names_the_nearest_known_one() -> None:
    with pytest.raises(EngineConfigError, match="did you mean max_num_seqs") as caught:
        EngineConfig.from_kwargs(model="somewhere", max_num_seq=3)
    assert caught.value.field == "max_num_seq"


def test_model_is_required() -> None:
    with pytest.raises(EngineConfigError, match="model is required"):
        EngineConfig.from_kwargs(seed=1)


def test_a_moving_arena_must_be_the_poison_arena() -> None:
    with pytest.raises(EngineConfigError, match="arena_moves"):
        EngineConfig(model="somewhere", arena="plain", arena_moves=True)


def test_a_budget_smaller_than_the_rows_that_decode_is_refused() -> None:
    with pytest.raises(EngineConfigError, match="max_num_batched_tokens"):
        EngineConfig(model="somewhere", max_num_seqs=64, max_num_batched_tokens=63)
