"""Decode steps from graphs: the same tokens as eager ones, and never from memory that went away."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from syncline.engine.config import EngineConfig
from syncline.engine.errors import RunnerError
from syncline.engine.load import Checkpoint, load_checkpoint
from syncline.engine.models.config import read_model_config
from syncline.engine.runner import ModelRunner, RunnerSettings
from syncline.engine.runner.graphs import graph_sizes
from syncline.engine.sampling_params import SamplingParams
from syncline.engine.testing.checkpoints import NUM_TOKEN_IDS, TinyModel, write_tiny_checkpoint
from syncline.engine.testing.driving import Ask, load_runner, run
from syncline.graph_lifecycle import (
    GraphRegistry,
    PoisonArena,
    Residency,
    StaleGraphError,
    StorageLedger,
    Tag,
)
from syncline.scheduler_core import Sequence

VOCAB = NUM_TOKEN_IDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Rig:
    """A runner with graphs, and what owns its memory."""

    runner: ModelRunner
    registry: GraphRegistry
    residency: Residency


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), TinyModel(num_layers=1))


def configure(checkpoint: str, **fields: Any) -> EngineConfig:
    return EngineConfig(
        model=checkpoint, max_num_seqs=6, max_model_len=40, num_kv_blocks=60, block_size=4, **fields
    )  # Any: EngineConfig checks its own fields


def build(config: EngineConfig, *, moves: bool = False) -> Rig:
    model = read_model_config(config.model)
    ledger = StorageLedger()
    arena = PoisonArena(moves, ledger=ledger)
    registry = GraphRegistry(ledger)
    settings = RunnerSettings.resolve(config, model, true_vocab_size=VOCAB)
    runner = ModelRunner(model, settings, arena, registry=registry)
    residency = Residency(arena, registry, recapture=runner.recapture)
    load_checkpoint(Checkpoint(Path(config.model)), runner.name_table)
    residency.mark_weights_valid()
    runner.capture_graphs()
    return Rig(runner=runner, registry=registry, residency=residency)


def asks(count: int, seed: int = 0) -> list[Ask]:
    params = SamplingParams(temperature=1.0, max_tokens=9, ignore_eos=True)
    return [
        Ask(prompt=tuple(range(i + 1, 2 * i + 3)), params=params, seed=seed + i)
        for i in range(count)
    ]


def tokens(finished: dict[tuple[str, int], Sequence]) -> dict[tuple[str, int], list[int]]:
    return {key: list(sequence.output_token_ids) for key, sequence in finished.items()}


@pytest.mark.parametrize("count", [1, 3, 6])
def test_replayed_steps_say_what_eager_steps_say(checkpoint: str, count: int) -> None:
    eager = configure(checkpoint)
    expected = run(load_runner(eager, true_vocab_size=VOCAB), eager, asks(count))
    config = configure(checkpoint, enforce_eager=False)
    rig = build(config)
    got = run(rig.runner, config, asks(count))
    assert tokens(got) == tokens(expected)
    for key, sequence in got.items():
        assert sequence.logprobs == pytest.approx(expected[key].logprobs, abs=1e-4)


def test_padding_rows_write_only_into_the_reserved_block(checkpoint: str) -> None:
    rig = build(configure(checkpoint, enforce_eager=False))
    for cache in rig.runner.kv_caches:
        assert bool(cache.k_BKCD[:-1].isnan().all()), "a capture wrote into a block of the pool"
        assert bool(cache.k_BKCD[-1].isfinite().all())


@pytest.mark.parametrize("moves", [False, True])
def test_graphs_are_sound_after_sleep_wake_and_new_weights(checkpoint: str, moves: bool) -> None:
    config = configure(checkpoint, enforce_eager=False)
    expected = run(build(config).runner, config, asks(3))
    rig = build(config, moves=moves)
    rig.residency.sleep()
    rig.residency.wake_up()
    load_checkpoint(Checkpoint(Path(checkpoint)), rig.runner.name_table, version=1)
    assert tokens(run(rig.runner, config, asks(3))) == tokens(expected)
    assert len(rig.registry.keys) == len(graph_sizes(6, 4))


def test_a_step_on_memory_that_sleeps_is_refused(checkpoint: str) -> None:
    config = configure(checkpoint, enforce_eager=False)
    rig = build(config)
    rig.residency.sleep([Tag.KV_CACHE])
    with pytest.raises(StaleGraphError):
        run(rig.runner, config, asks(1))


def test_released_graphs_mean_eager_steps(checkpoint: str) -> None:
    config = configure(checkpoint, enforce_eager=False)
    expected = run(build(config).runner, config, asks(4))
    rig = build(config)
    rig.registry.release()
    assert tokens(run(rig.runner, config, asks(4))) == tokens(expected)


def test_graphs_without_a_registry_and_keys_of_nobody_are_refused(checkpoint: str) -> None:
    config = configure(checkpoint, enforce_eager=False)
    with pytest.raises(RunnerError, match="needs a graph registry"):
        load_runner(config, true_vocab_size=VOCAB)
    eager = load_runner(configure(checkpoint), true_vocab_size=VOCAB)
    eager.capture_graphs()
    with pytest.raises(RunnerError, match="has no graphs"):
        eager.recapture((("decode", 1),))


@pytest.mark.parametrize(
    ("max_num_seqs", "block_size", "expected"),
    [
        (1, 16, (1,)),
        (6, 4, (1, 2, 4, 6)),
        (256, 16, (1, 2, 4, 8, 16, 32, 48, 64)),
        (5, 1, (1, 2, 3, 4, 5)),
    ],
)
def test_sizes_double_then_grow_by_blocks(
    max_num_seqs: int, block_size: int, expected: tuple[int, ...]
) -> None:
    assert graph_sizes(max_num_seqs, block_size) == expected
