"""Settings: the configuration against the model, with every conflict named."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from syncline.engine.config import EngineConfig
from syncline.engine.errors import EngineConfigError
from syncline.engine.memory import (
    allocate_kv_pool,
    check_kv_pool_fits,
    kv_bytes_per_block,
    machine_memory,
)
from syncline.engine.models.config import ModelConfig
from syncline.engine.runner import RunnerSettings
from syncline.graph_lifecycle import PoisonArena, Tag

MODEL = ModelConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=48,
    hidden_size=32,
    intermediate_size=48,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position_embeddings=100,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    has_attention_bias=False,
    has_tied_embeddings=True,
    dtype_name="bfloat16",
)


def resolve(true_vocab_size: int = 41, device: str = "cpu", **fields: Any) -> RunnerSettings:
    config = EngineConfig(model="somewhere", **fields)  # Any: EngineConfig checks its own fields
    return RunnerSettings.resolve(config, MODEL, true_vocab_size=true_vocab_size, device=device)


def test_what_the_configuration_leaves_open_comes_from_the_model() -> None:
    settings = resolve()
    assert settings.max_model_len == 100
    assert settings.max_blocks_per_seq == 7
    assert settings.dtype is torch.float32
    assert resolve(device="meta").dtype is torch.bfloat16
    assert resolve(dtype="float16").dtype is torch.float16


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_model_len": 101}, "max_model_len must be at most 100"),
        ({"true_vocab_size": 49}, r"true_vocab_size must be in \[1, 48\].*got 49"),
        ({"true_vocab_size": 0}, r"true_vocab_size must be in \[1, 48\].*got 0"),
        ({"kv_cache_memory_bytes": 20_000}, "must hold at least 2 blocks of 12288 bytes"),
    ],
)
def test_conflicts_are_named(fields: dict[str, Any], message: str) -> None:
    vocab = fields.pop("true_vocab_size", 41)
    with pytest.raises(EngineConfigError, match=message):
        resolve(true_vocab_size=vocab, **fields)


def test_the_pool_holds_exactly_what_the_memory_allows_reserved_block_included() -> None:
    num_bytes = kv_bytes_per_block(MODEL, 16, torch.float32)
    assert num_bytes == 2 * 3 * 2 * 16 * 16 * 4
    settings = resolve(kv_cache_memory_bytes=10 * num_bytes + 5)
    assert settings.num_kv_blocks == 9
    assert settings.reserved_block == 9
    arena = PoisonArena()
    caches = allocate_kv_pool(arena, MODEL, num_blocks=9, block_size=16, dtype=torch.float32)
    assert [tuple(cache.k_BKCD.shape) for cache in caches] == [(10, 2, 16, 16)] * 3
    assert arena.resident_bytes(Tag.KV_CACHE) == 10 * num_bytes


def test_a_given_number_of_blocks_is_taken_as_it_is() -> None:
    assert resolve(num_kv_blocks=7).num_kv_blocks == 7
    assert replace(resolve(num_kv_blocks=7), max_num_seqs=3).reserved_row == 3


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"num_kv_blocks": 10**9}, "num_kv_blocks=1000000000"),
        ({"num_kv_blocks": 10**30}, "num_kv_blocks=1" + "0" * 30),
        ({"kv_cache_memory_bytes": 10**16}, "kv_cache_memory_bytes=1" + "0" * 16),
    ],
)
def test_a_pool_larger_than_the_machine_is_refused_with_both_numbers(
    fields: dict[str, Any], field: str
) -> None:
    config = EngineConfig(model="somewhere", **fields)
    settings = resolve(**fields)
    memory = 1 << 33
    text = rf"{field} asks for a KV pool of \d+ bytes, this machine has {memory} bytes"
    with pytest.raises(EngineConfigError, match=text) as caught:
        check_kv_pool_fits(config, MODEL, settings.num_kv_blocks, settings.dtype, memory)
    assert caught.value.field == field.split("=")[0]


def test_a_pool_may_fill_the_machine_to_the_last_byte() -> None:
    config = EngineConfig(model="somewhere", num_kv_blocks=9)
    exact = 10 * kv_bytes_per_block(MODEL, 16, torch.float32)
    check_kv_pool_fits(config, MODEL, 9, torch.float32, exact)
    with pytest.raises(EngineConfigError, match=f"{exact} bytes, .* has {exact - 1} bytes"):
        check_kv_pool_fits(config, MODEL, 9, torch.float32, exact - 1)
    assert machine_memory() > 1 << 28
