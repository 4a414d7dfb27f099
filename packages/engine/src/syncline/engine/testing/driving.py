"""A runner under the real scheduler, without the engine around them: requests in, sequences out."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from syncline.engine.config import EngineConfig
from syncline.engine.load import Checkpoint, load_checkpoint
from syncline.engine.models.config import read_model_config
from syncline.engine.runner import ModelRunner, RunnerSettings
from syncline.engine.runner.protocol import PROMPT_LOGPROBS_COLUMN, Runner
from syncline.engine.sampling.resolved import ResolvedSampling
from syncline.engine.sampling_params import SamplingParams
from syncline.graph_lifecycle import Arena, PoisonArena
from syncline.kv_cache import KVCacheManager
from syncline.scheduler_core import Request, Scheduler, SchedulerConfig, Sequence, StopRules


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request as a test writes it."""

    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int = 0
    eos: frozenset[int] = frozenset()


def load_runner(
    config: EngineConfig, *, true_vocab_size: int, arena: Arena | None = None
) -> ModelRunner:
    """A runner with the checkpoint's weights, its KV pool still poison."""
    model = read_model_config(config.model)
    settings = RunnerSettings.resolve(config, model, true_vocab_size=true_vocab_size)
    runner = ModelRunner(model, settings, PoisonArena() if arena is None else arena)
    load_checkpoint(Checkpoint(Path(config.model)), runner.name_table)
    return runner


def new_scheduler(config: EngineConfig, settings: RunnerSettings) -> Scheduler:
    return Scheduler(
        SchedulerConfig(
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=settings.max_model_len,
            max_steps_in_flight=config.max_steps_in_flight,
            scheduling_policy=config.scheduling_policy,
            admission_policy=config.admission_policy,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
            max_num_partial_prefills=config.max_num_partial_prefills,
        ),
        KVCacheManager(
            settings.num_kv_blocks,
            settings.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
        ),
    )


def add(
    scheduler: Scheduler, runner: Runner, request_id: str, ask: Ask, true_vocab_size: int
) -> None:
    params = ask.params
    runner.register(
        request_id,
        ResolvedSampling(
            params=params, seed=ask.seed, true_vocab_size=true_vocab_size, eos_token_ids=ask.eos
        ),
    )
    wants_prompt = params.prompt_logprobs is not None
    scheduler.add(
        Request(
            request_id=request_id,
            prompt_token_ids=ask.prompt,
            stop=StopRules(
                max_tokens=params.max_tokens,
                min_tokens=params.min_tokens,
                stop_token_ids=frozenset(params.stop_token_ids),
                eos_token_ids=ask.eos,
                ignore_eos=params.ignore_eos,
            ),
            num_samples=params.n,
            required_prompt_columns=frozenset({PROMPT_LOGPROBS_COLUMN} if wants_prompt else ()),
        )
    )


def run_to_end(
    scheduler: Scheduler, runner: Runner, *, preempt_every: int = 0
) -> dict[tuple[str, int], Sequence]:
    """Step until nothing is unfinished, at the scheduler's own depth; by (request, sample)."""
    finished: dict[tuple[str, int], Sequence] = {}
    num_steps = 0
    while scheduler.has_unfinished or scheduler.steps_in_flight:
        while (plan := scheduler.plan()) is not None:
            runner.launch(plan)
        scheduler.apply(runner.collect())
        num_steps += 1
        if preempt_every and num_steps % preempt_every == 0:
            scheduler.preempt_one()
        finished |= {(s.request_id, s.sample_index): s for s in scheduler.take_finished()}
    scheduler.check_integrity()
    return finished | {(s.request_id, s.sample_index): s for s in scheduler.take_finished()}


def run(
    runner: ModelRunner, config: EngineConfig, asks: Iterable[Ask], *, preempt_every: int = 0
) -> dict[tuple[str, int], Sequence]:
    """All requests at once under a fresh scheduler, once per runner; ids are "0", "1" and so on."""
    scheduler = new_scheduler(config, runner.settings)
    listed = list(asks)
    for index, ask in enumerate(listed):
        add(scheduler, runner, str(index), ask, runner.settings.true_vocab_size)
    finished = run_to_end(scheduler, runner, preempt_every=preempt_every)
    for index in range(len(listed)):
        runner.forget(str(index))
    return finished
