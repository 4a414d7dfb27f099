"""From a configuration to the parts of an engine: the one place that names all six packages.

Order matters for the errors a user sees: files are looked at before memory is taken.
"""

import logging
import os

import torch

from syncline.engine.config import EngineConfig
from syncline.engine.engine import EngineParts
from syncline.engine.env import read_environment
from syncline.engine.errors import EngineConfigError
from syncline.engine.intake import ModelLimits
from syncline.engine.load import Checkpoint, load_checkpoint
from syncline.engine.memory import check_kv_pool_fits, machine_memory
from syncline.engine.models.config import read_eos_token_ids, read_model_config
from syncline.engine.runner import ModelRunner, RunnerSettings
from syncline.engine.tokenizer import Tokenizer
from syncline.graph_lifecycle import (
    Arena,
    CaptureError,
    GraphRegistry,
    PlainArena,
    PoisonArena,
    Residency,
    StorageLedger,
)
from syncline.kv_cache import KVCacheManager
from syncline.scheduler_core import Scheduler, SchedulerConfig

FIRST_WEIGHT_VERSION = 0

logger = logging.getLogger(__name__)


def build_parts(config: EngineConfig) -> EngineParts:
    """Read the checkpoint, take the memory, load the weights; nothing is running yet.

    Raises CheckpointError for what is wrong with the files, EngineConfigError for what is wrong
    with the configuration.
    """
    environment = read_environment(os.environ)
    if environment.num_threads is not None:
        torch.set_num_threads(environment.num_threads)
    model = read_model_config(config.model)
    checkpoint = Checkpoint(config.model)
    tokenizer = Tokenizer.from_directory(config.tokenizer or config.model)
    true_vocab_size = resolve_true_vocab_size(config, tokenizer, model.vocab_size)
    eos_token_ids = read_eos_token_ids(config.model, true_vocab_size)
    settings = RunnerSettings.resolve(config, model, true_vocab_size=true_vocab_size)
    check_kv_pool_fits(config, model, settings.num_kv_blocks, settings.dtype, machine_memory())
    ledger = StorageLedger()
    arena = build_arena(config, ledger)
    registry = GraphRegistry(ledger)
    runner = ModelRunner(
        model, settings, arena, op_backend=environment.op_backend, registry=registry
    )
    residency = Residency(arena, registry, recapture=runner.recapture)
    load_checkpoint(checkpoint, runner.name_table, version=FIRST_WEIGHT_VERSION)
    residency.mark_weights_valid()
    capture_or_degrade(runner)
    return EngineParts(
        tokenizer=tokenizer,
        limits=ModelLimits(
            max_model_len=settings.max_model_len,
            true_vocab_size=settings.true_vocab_size,
            eos_token_ids=eos_token_ids,
        ),
        scheduler=Scheduler(
            scheduler_config(config, settings),
            KVCacheManager(
                settings.num_kv_blocks,
                settings.block_size,
                enable_prefix_caching=config.enable_prefix_caching,
                kv_format=runner.kv_format,
            ),
            weight_version=FIRST_WEIGHT_VERSION,
        ),
        runner=runner,
        residency=residency,
        registry=registry,
        name_table=runner.name_table,
        weight_version=FIRST_WEIGHT_VERSION,
    )


def capture_or_degrade(runner: ModelRunner) -> None:
    """Capture the decode graphs; if that fails, steps run eagerly and `degraded` says why.

    Right answers more slowly are better than none, and the next wake tries again.
    """
    try:
        runner.capture_graphs()
    except CaptureError:
        logger.exception("no graph was captured: steps run eagerly until a capture succeeds")


def scheduler_config(config: EngineConfig, settings: RunnerSettings) -> SchedulerConfig:
    return SchedulerConfig(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=settings.max_model_len,
        max_steps_in_flight=config.max_steps_in_flight,
        scheduling_policy=config.scheduling_policy,
        admission_policy=config.admission_policy,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        max_num_partial_prefills=config.max_num_partial_prefills,
    )


def build_arena(config: EngineConfig, ledger: StorageLedger) -> Arena:
    if config.arena == "plain":
        return PlainArena(ledger=ledger)
    return PoisonArena(config.arena_moves, ledger=ledger)


def resolve_true_vocab_size(config: EngineConfig, tokenizer: Tokenizer, num_rows: int) -> int:
    """The ids that may be sampled: exactly the tokenizer's. A configured number must be that one.

    Fewer would forbid real tokens, more would sample padding that stands for no text.
    """
    if tokenizer.num_ids > num_rows:
        raise EngineConfigError(
            f"the tokenizer in {tokenizer.path} has {tokenizer.num_ids} ids, "
            f"the model has embedding rows for {num_rows}: they do not belong together",
            field="tokenizer",
        )
    if config.true_vocab_size not in (None, tokenizer.num_ids):
        raise EngineConfigError(
            f"true_vocab_size must be {tokenizer.num_ids}, the ids of the tokenizer in "
            f"{tokenizer.path}, or left out; got {config.true_vocab_size}",
            field="true_vocab_size",
        )
    return tokenizer.num_ids
