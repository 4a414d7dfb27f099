"""The engine's configuration: one frozen value, checked when it is made, never changed after.

Knows no model: what the checkpoint decides (`max_model_len`, the tokenizer's size) stays None here
and is resolved where the checkpoint is read.
"""

import difflib
import os
from dataclasses import dataclass, fields
from typing import Any, Final, Literal, Self, get_args

from syncline.engine.errors import EngineConfigError

DTypeName = Literal["auto", "float32", "bfloat16", "float16"]
LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]
WeightLayoutName = Literal["row_major", "shuffle_16x16"]
ArenaName = Literal["poison", "plain"]
UnfinishedPolicy = Literal["recompute", "abort", "keep_kv"]
SchedulingPolicy = Literal["fcfs", "priority"]
AdmissionPolicy = Literal["forecast", "greedy"]

_CHOICES: Final = {
    "dtype": get_args(DTypeName),
    "logprobs_mode": get_args(LogprobsMode),
    "weight_layout": get_args(WeightLayoutName),
    "arena": get_args(ArenaName),
    "unfinished_policy": get_args(UnfinishedPolicy),
    "scheduling_policy": get_args(SchedulingPolicy),
    "admission_policy": get_args(AdmissionPolicy),
}
# (field, smallest legal value); None is legal where the type says so.
_MINIMA: Final = (
    ("max_model_len", 2),
    ("block_size", 1),
    ("num_kv_blocks", 1),
    ("kv_cache_memory_bytes", 1),
    ("max_num_seqs", 1),
    ("max_num_batched_tokens", 1),
    ("max_steps_in_flight", 1),
    ("long_prefill_token_threshold", 0),
    ("max_num_partial_prefills", 1),
    ("seed", 0),
    ("true_vocab_size", 1),
)
_MAY_BE_NONE: Final = frozenset(
    {"max_model_len", "num_kv_blocks", "true_vocab_size", "max_num_partial_prefills"}
)
_FLAGS: Final = ("enable_prefix_caching", "enforce_eager", "arena_moves")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything a caller may choose about an engine.

    model, tokenizer     directories in Hugging Face format; tokenizer None = the model's.
    dtype                "auto" is float32 on the CPU.
    max_model_len        prompt + output tokens of one sequence; None = the checkpoint's limit.
    num_kv_blocks        size of the KV pool; None = what kv_cache_memory_bytes holds.
    max_steps_in_flight  1 is synchronous; 2 plans a step before the last one's tokens are known.
    logprobs_mode        raw: before bias, penalties, temperature; processed: sampled from.
    true_vocab_size      ids from here on are padding: the tokenizer's number, which None takes.
    arena_moves          the poison arena moves memory on wake, to show who keeps addresses.
    unfinished_policy    what a weight update does to sequences that have not ended.
    scheduling_policy    fcfs refuses a request with a priority; priority: the lowest number first.
    admission_policy     forecast: start a sample if the pool should do till later; greedy: now.
    long_prefill_token_threshold  tokens of one prompt per step at most; 0 = as many as fit.
    max_num_partial_prefills      prompts computed in part at a time; None = no bound.
    """

    model: str
    tokenizer: str | None = None
    dtype: DTypeName = "auto"
    max_model_len: int | None = None
    block_size: int = 16
    num_kv_blocks: int | None = None
    kv_cache_memory_bytes: int = 256 * 1024 * 1024
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    enable_prefix_caching: bool = True
    max_steps_in_flight: int = 1
    seed: int = 0
    logprobs_mode: LogprobsMode = "processed_logprobs"
    true_vocab_size: int | None = None
    weight_layout: WeightLayoutName = "row_major"
    enforce_eager: bool = True
    arena: ArenaName = "poison"
    arena_moves: bool = False
    unfinished_policy: UnfinishedPolicy = "recompute"
    scheduling_policy: SchedulingPolicy = "fcfs"
    admission_policy: AdmissionPolicy = "forecast"
    long_prefill_token_threshold: int = 0
    max_num_partial_prefills: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise EngineConfigError(
                f"model must be the path of a checkpoint directory, got {self.model!r}",
                field="model",
            )
        for field, choices in _CHOICES.items():
            value = object.__getattribute__(self, field)
            if value not in choices:
                raise EngineConfigError(
                    f"{field} must be one of {', '.join(choices)}, got {value!r}", field=field
                )
        for field, minimum in _MINIMA:
            self._require_int(field, minimum)
        for field in _FLAGS:
            value = object.__getattribute__(self, field)
            if not isinstance(value, bool):
                raise EngineConfigError(
                    f"{field} must be true or false, got {value!r}", field=field
                )
        self._check_combinations()

    def _require_int(self, field: str, minimum: int) -> None:
        value = object.__getattribute__(self, field)
        if value is None and field in _MAY_BE_NONE:
            return
        if isinstance(value, bool) or not isinstance(value, int):
            raise EngineConfigError(f"{field} must be an integer, got {value!r}", field=field)
        if value < minimum:
            raise EngineConfigError(f"{field} must be at least {minimum}, got {value}", field=field)

    def _check_combinations(self) -> None:
        if self.arena_moves and self.arena != "poison":
            raise EngineConfigError(
                f"arena_moves needs arena='poison', got arena={self.arena!r}", field="arena_moves"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise EngineConfigError(
                f"max_num_batched_tokens must be at least max_num_seqs={self.max_num_seqs}, so "
                "that every running sequence can decode in a step, "
                f"got {self.max_num_batched_tokens}",
                field="max_num_batched_tokens",
            )
        if self.seed >= 2**64:
            raise EngineConfigError(f"seed must be below 2**64, got {self.seed}", field="seed")

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> Self:  # Any: checked field by field in __post_init__
        """Build from keywords; an unknown key is an error that names the nearest known one.

        A path object becomes its text.
        """
        known = [field.name for field in fields(cls)]
        for key in kwargs:
            if key not in known:
                nearest = difflib.get_close_matches(key, known, n=1)
                hint = f"; did you mean {nearest[0]}?" if nearest else ""
                raise EngineConfigError(
                    f"unknown configuration key {key!r}{hint} (known: {', '.join(known)})",
                    field=key,
                )
        if "model" not in kwargs:
            raise EngineConfigError("model is required", field="model")
        return cls(
            **{k: os.fspath(v) if isinstance(v, os.PathLike) else v for k, v in kwargs.items()}
        )
