"""A colocated run: sample groups, sleep, train, wake, sync, again; the engine and a real trainer.

Everything is seeded; the same options give the same rewards. What must hold is in `rl.verdict`.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from syncline.engine.llm import LLM
from syncline.engine.outputs import CompletionOutput, RequestOutput
from syncline.engine.rl.task import (
    ANSWER_TOKENS,
    draw_starts,
    group_advantages,
    prompt_text,
    reward,
)
from syncline.engine.rl.trainer import Rollouts, Trainer, TrainerConfig
from syncline.engine.rl.verdict import DemoStep
from syncline.engine.sampling_params import SamplingParams
from syncline.engine.shipped import resolve_model
from syncline.graph_lifecycle import Tag

MakeLLM = Callable[[str, Mapping[str, Any]], LLM]  # Any: configuration values, checked there


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """The recipe; the KV pool is too small for the sequences that run together."""

    model: str = "novice"
    seed: int = 0
    num_steps: int = 8
    num_prompts: int = 64
    group_size: int = 8
    num_kv_blocks: int = 480
    max_num_seqs: int = 256
    max_steps_in_flight: int = 2
    trainer: TrainerConfig = field(default_factory=TrainerConfig)

    def engine_config(self) -> dict[str, Any]:  # Any: configuration values, checked there
        return {
            "dtype": "float32",
            "max_model_len": 64,
            "num_kv_blocks": self.num_kv_blocks,
            "max_num_seqs": self.max_num_seqs,
            "max_steps_in_flight": self.max_steps_in_flight,
            "seed": self.seed,
        }


def make_llm(model: str, config: Mapping[str, Any]) -> LLM:  # Any: as above
    return LLM(model, **config)


def run_demo(options: DemoOptions, *, make: MakeLLM = make_llm) -> Iterator[DemoStep]:
    """One row per step, as soon as it is done; stops after a step with missing rows."""
    model = resolve_model(options.model)
    with make(model, options.engine_config()) as llm:
        trainer = Trainer(model, llm.true_vocab_size, replace(options.trainer, seed=options.seed))
        for step in range(options.num_steps):
            row = _run_step(llm, trainer, options, step)
            yield row
            if row.num_missing:
                return


@dataclass(frozen=True, slots=True, kw_only=True)
class _Generated:
    starts: list[int]
    outputs: list[RequestOutput]
    seconds: float
    num_preemptions: int

    @property
    def completions(self) -> list[CompletionOutput]:
        """Group-major, in sample order."""
        return [completion for output in self.outputs for completion in output.outputs]


def _run_step(llm: LLM, trainer: Trainer, options: DemoOptions, step: int) -> DemoStep:
    generated = _generate(llm, options, step)
    num_missing = options.num_prompts * options.group_size - sum(
        len(completion.token_ids) == ANSWER_TOKENS and completion.finish_reason == "length"
        for completion in generated.completions
    )
    if num_missing:
        return _incomplete(generated, step, num_missing)
    rewards = [
        reward(start, completion.text)
        for start, output in zip(generated.starts, generated.outputs, strict=True)
        for completion in output.outputs
    ]
    slept = llm.sleep(level=2)
    trained = trainer.train(_rollouts(generated, rewards, options.group_size))
    llm.wake_up([Tag.WEIGHTS])
    began = time.perf_counter()
    synced = llm.update_weights(trainer.named_tensors(), version=step + 1)
    sync_s = time.perf_counter() - began
    llm.wake_up([Tag.KV_CACHE])
    return DemoStep(
        step=step,
        mean_reward=sum(rewards) / len(rewards),
        tokens_per_s=len(rewards) * ANSWER_TOKENS / generated.seconds,
        num_preemptions=generated.num_preemptions,
        num_missing=0,
        sync_s=sync_s,
        sync_bytes=synced.bytes_written,
        coverage=synced.coverage,
        slept_bytes=sum(slept.num_bytes.values()),
        k3_kl=trained.mismatch.k3_kl,
        chi2_token=trained.mismatch.chi2_token,
    )


def _generate(llm: LLM, options: DemoOptions, step: int) -> _Generated:
    starts = draw_starts(options.num_prompts, options.seed, step)
    params = [
        SamplingParams(
            n=options.group_size,
            max_tokens=ANSWER_TOKENS,
            temperature=1.0,
            ignore_eos=True,
            seed=(options.seed << 32) + step * options.num_prompts + i,
        )
        for i in range(options.num_prompts)
    ]
    num_before = llm.stats.num_preemptions
    began = time.perf_counter()
    outputs = llm.generate([prompt_text(start) for start in starts], params, use_tqdm=False)
    return _Generated(
        starts=starts,
        outputs=outputs,
        seconds=time.perf_counter() - began,
        num_preemptions=llm.stats.num_preemptions - num_before,
    )


def _rollouts(generated: _Generated, rewards: list[float], group_size: int) -> Rollouts:
    rows = [
        output.prompt_token_ids + completion.token_ids
        for output in generated.outputs
        for completion in output.outputs
    ]
    return Rollouts(
        token_ids=torch.tensor(rows),
        num_prompt_tokens=len(generated.outputs[0].prompt_token_ids),
        logprobs=torch.tensor(
            [completion.logprobs for completion in generated.completions], dtype=torch.float64
        ),
        advantages=torch.tensor(group_advantages(rewards, group_size)),
    )


def _incomplete(generated: _Generated, step: int, num_missing: int) -> DemoStep:
    return DemoStep(
        step=step,
        mean_reward=math.nan,
        tokens_per_s=0.0,
        num_preemptions=generated.num_preemptions,
        num_missing=num_missing,
        sync_s=0.0,
        sync_bytes=0,
        coverage=1.0,
        slept_bytes=0,
        k3_kl=math.nan,
        chi2_token=math.nan,
    )
