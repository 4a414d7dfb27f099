"""The demo, in miniature on the shipped novice: healthy, and with faults that must fail it.

The full run and its verdict are the `demo` session's; here every mechanism runs for two steps.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from rich.console import Console

from syncline.engine.build import build_parts
from syncline.engine.cli.demo import COLUMNS, _cells, _line
from syncline.engine.config import EngineConfig
from syncline.engine.engine import EngineParts, LLMEngine
from syncline.engine.llm import LLM
from syncline.engine.rl.demo import DemoOptions, MakeLLM, make_llm, run_demo
from syncline.engine.rl.trainer import Rollouts, Trainer, TrainerConfig, clipped_loss
from syncline.engine.rl.verdict import judge
from syncline.engine.shipped import shipped_checkpoint
from syncline.engine.testing.stand_ins import WakesAsIfValid, WeightsWrittenInFlight, scale_weights
from syncline.engine.updates import NamedTensors
from syncline.graph_lifecycle import ResidencyError
from syncline.weight_sync import Mode, SyncReport

NOVICE = shipped_checkpoint("novice")
SMALL = DemoOptions(
    model=NOVICE, num_steps=2, num_prompts=4, group_size=4, num_kv_blocks=40, max_num_seqs=16
)


def with_parts(change: Callable[[EngineParts], EngineParts]) -> MakeLLM:
    """An engine with one part replaced."""

    def make(model: str, config: Mapping[str, Any]) -> LLM:
        settings = EngineConfig.from_kwargs(model=model, **config)
        return LLM.from_engine(LLMEngine(settings, change(build_parts(settings))))

    return make


def test_a_healthy_run_agrees_with_the_trainer_covers_every_byte_and_preempts() -> None:
    steps = list(run_demo(SMALL))
    assert [step.step for step in steps] == [0, 1]
    for step in steps:
        assert 0.0 <= step.mean_reward <= 1.0
        assert step.num_missing == 0
        assert step.coverage == 1.0
        assert step.sync_bytes > 2_000_000
        assert step.slept_bytes > step.sync_bytes
        assert 0.0 <= step.k3_kl < 1e-9
        assert abs(step.chi2_token) < 1e-4
        assert step.tokens_per_s > 0
    assert sum(step.num_preemptions for step in steps) > 0
    failures = judge(steps, SMALL.num_steps).failures
    assert all("reward" in failure for failure in failures)  # Two steps teach nothing.
    assert next(run_demo(SMALL)).mean_reward == steps[0].mean_reward


def test_weights_written_under_a_step_in_flight_show_in_k3_kl() -> None:
    def change(parts: EngineParts) -> EngineParts:
        slots = parts.name_table.slots.values()
        runner = WeightsWrittenInFlight(parts.runner, 20, lambda: scale_weights(slots, 1.02))
        return replace(parts, runner=runner)

    steps = list(run_demo(SMALL, make=with_parts(change)))
    assert steps[0].k3_kl > 1e-6
    assert steps[1].k3_kl < 1e-9  # The update that follows repairs everything.
    assert any("step 0: k3_kl" in failure for failure in judge(steps, 2).failures)


class ForgetsUpdates(LLM):
    """Fault: the engine wakes and goes on without the new weights."""

    __slots__ = ()

    def update_weights(
        self,
        named_tensors: NamedTensors,
        version: int,
        *,
        mode: Mode = "direct",
    ) -> SyncReport:
        num_bytes = sum(tensor.nbytes for tensor in dict(named_tensors).values())
        return SyncReport(
            version=version,
            mode=mode,
            num_tensors=0,
            num_slots=0,
            bytes_written=num_bytes,
            bytes_total=num_bytes,
            coverage=1.0,
            max_buffered_bytes=0,
            seconds={},
            aliases=(),
            ignored=(),
            derived=(),
            checksum=None,
        )


def test_waking_without_new_weights_is_refused_by_the_engine() -> None:
    def make(model: str, config: Mapping[str, Any]) -> LLM:
        return ForgetsUpdates(model, **config)

    run = run_demo(SMALL, make=make)
    next(run)
    with pytest.raises(ResidencyError, match="weights are not valid"):
        next(run)


def test_waking_without_new_weights_and_without_the_refusal_loses_every_row() -> None:
    def make(model: str, config: Mapping[str, Any]) -> LLM:
        settings = EngineConfig.from_kwargs(model=model, **config)
        parts = build_parts(settings)
        parts = replace(parts, residency=WakesAsIfValid(parts.residency))
        return ForgetsUpdates.from_engine(LLMEngine(settings, parts))

    steps = list(run_demo(SMALL, make=make))
    assert len(steps) == 2
    assert steps[1].num_missing == 16
    assert math.isnan(steps[1].k3_kl)
    failures = judge(steps, 2).failures
    assert any("16 rows are missing" in failure for failure in failures)


class KeepsOldWeights(LLM):
    """Fault: every update writes the weights of the update before."""

    __slots__ = ("_previous",)

    def __init__(self, model: str, config: Mapping[str, Any]) -> None:
        super().__init__(model, **config)
        trainer = Trainer(model, self.true_vocab_size, TrainerConfig())
        self._previous = dict(trainer.named_tensors())

    def update_weights(
        self,
        named_tensors: NamedTensors,
        version: int,
        *,
        mode: Mode = "direct",
    ) -> SyncReport:
        newest = {name: tensor.clone() for name, tensor in dict(named_tensors).items()}
        report = self.engine.update_weights(self._previous.items(), version, mode=mode)
        self._previous = newest
        return report


def test_stale_weights_show_in_k3_kl() -> None:
    steps = list(run_demo(SMALL, make=KeepsOldWeights))
    assert steps[0].k3_kl < 1e-9
    assert steps[1].k3_kl > 1e-6
    assert any("step 1: k3_kl" in failure for failure in judge(steps, 2).failures)


def test_the_table_fits_a_terminal_and_shows_every_number(
    capsys: pytest.CaptureFixture[str],
) -> None:
    step = next(run_demo(SMALL))
    console = Console(width=80)
    console.print(_line([title for title, _ in COLUMNS], header=True))
    console.print(_line(_cells(11, step)))
    header, row = capsys.readouterr().out.splitlines()
    assert len(header.split()) == 13  # Three titles are two words.
    cells = row.split()
    assert len(cells) == len(COLUMNS)
    assert cells[0] == "11"
    assert cells[6] == f"{step.sync_bytes:,}"
    assert cells[7] == f"{step.slept_bytes:,}"


def test_the_trainer_scores_as_the_engine_does_and_learns_what_is_rewarded() -> None:
    with make_llm(NOVICE, SMALL.engine_config()) as llm:
        true_vocab_size = llm.true_vocab_size
        prompt = llm.engine.parts.tokenizer.encode("00000001,00000002,")
        scores = llm.score([*prompt, 3, 1, 4])
    trainer = Trainer(NOVICE, true_vocab_size, TrainerConfig(lr=1e-3))
    token_ids = torch.tensor([[*prompt, 3, 1, 4], [*prompt, 0, 0, 0]])
    old = trainer.score(token_ids, len(prompt))
    assert old[0].tolist() == pytest.approx(scores[-3:], abs=1e-4)
    report = trainer.train(
        Rollouts(
            token_ids=token_ids,
            num_prompt_tokens=len(prompt),
            logprobs=old.double(),
            advantages=torch.tensor([1.0, -1.0]),
        )
    )
    assert report.num_trained == 2
    assert report.mismatch.k3_kl == 0.0
    new = trainer.score(token_ids, len(prompt))
    assert float(new[0].sum()) > float(old[0].sum())
    assert float(new[1].sum()) < float(old[1].sum())


def test_groups_without_an_advantage_teach_nothing() -> None:
    trainer = Trainer(NOVICE, 14, TrainerConfig())
    before = {name: tensor.clone() for name, tensor in trainer.named_tensors()}
    token_ids = torch.tensor([[1, 2, 3, 4]] * 2)
    old = trainer.score(token_ids, 2).double()
    rollouts = Rollouts(
        token_ids=token_ids, num_prompt_tokens=2, logprobs=old, advantages=torch.zeros(2)
    )
    assert trainer.train(rollouts).num_trained == 0
    assert all(torch.equal(before[name], tensor) for name, tensor in trainer.named_tensors())


def test_the_loss_is_clipped_pessimistically() -> None:
    old = torch.zeros(1, 1)
    for ratio, advantage, expected in (
        (1.5, 1.0, -1.28),
        (1.1, 1.0, -1.1),
        (0.5, -1.0, 0.8),
        (0.5, 1.0, -0.5),
        (1.5, -1.0, 1.5),
    ):
        new = torch.tensor([[math.log(ratio)]])
        loss = clipped_loss(new, old, torch.tensor([advantage]))
        assert float(loss) == pytest.approx(expected, rel=1e-5)
