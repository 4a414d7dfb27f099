"""What a runner is built with: the configuration and the model, resolved against each other.

A pure function of its inputs; touches no file and no device.
"""

from dataclasses import dataclass
from typing import Final

import torch

from syncline.engine.config import EngineConfig, LogprobsMode, WeightLayoutName
from syncline.engine.errors import EngineConfigError
from syncline.engine.memory import resolve_num_kv_blocks
from syncline.engine.models.config import ModelConfig

DTYPES: Final = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerSettings:
    """num_kv_blocks counts the scheduler's blocks; the pool has one more, the reserved one."""

    dtype: torch.dtype
    device: torch.device
    weight_layout: WeightLayoutName
    block_size: int
    num_kv_blocks: int
    max_num_seqs: int
    max_model_len: int
    true_vocab_size: int
    logprobs_mode: LogprobsMode
    enforce_eager: bool

    @property
    def max_blocks_per_seq(self) -> int:
        return -(-self.max_model_len // self.block_size)

    @property
    def reserved_block(self) -> int:
        return self.num_kv_blocks

    @property
    def reserved_row(self) -> int:
        return self.max_num_seqs

    @classmethod
    def resolve(
        cls,
        config: EngineConfig,
        model: ModelConfig,
        *,
        true_vocab_size: int,
        device: str = "cpu",
    ) -> "RunnerSettings":
        """EngineConfigError where the configuration asks for what the model does not have.

        true_vocab_size   ids the tokenizer has; what lies beyond, up to the rows, is padding.
        """
        if not 1 <= true_vocab_size <= model.vocab_size:
            raise EngineConfigError(
                f"true_vocab_size must be in [1, {model.vocab_size}], the embedding rows of the "
                f"model, got {true_vocab_size}",
                field="true_vocab_size",
            )
        max_model_len = config.max_model_len or model.max_position_embeddings
        if max_model_len > model.max_position_embeddings:
            raise EngineConfigError(
                f"max_model_len must be at most {model.max_position_embeddings}, the model's "
                f"max_position_embeddings, got {max_model_len}",
                field="max_model_len",
            )
        target = torch.device(device)
        dtype_name = config.dtype
        if dtype_name == "auto":
            dtype_name = "float32" if target.type == "cpu" else model.dtype_name
        dtype = DTYPES[dtype_name]
        return cls(
            dtype=dtype,
            device=target,
            weight_layout=config.weight_layout,
            block_size=config.block_size,
            num_kv_blocks=resolve_num_kv_blocks(config, model, dtype),
            max_num_seqs=config.max_num_seqs,
            max_model_len=max_model_len,
            true_vocab_size=true_vocab_size,
            logprobs_mode=config.logprobs_mode,
            enforce_eager=config.enforce_eager,
        )
