"""A rollout engine: it generates for a trainer, and takes new weights every step."""

from syncline.engine.async_llm import AsyncLLMEngine
from syncline.engine.build import build_parts
from syncline.engine.config import EngineConfig
from syncline.engine.engine import EngineParts, LLMEngine
from syncline.engine.errors import (
    CheckpointError,
    EngineClosedError,
    EngineConfigError,
    EngineError,
    EngineFailedError,
    MissingResultsError,
    NotReadyError,
    PromptError,
    PromptTooLongError,
    RunnerError,
    TokenIdError,
    UnsupportedModelError,
    UpdateOrderError,
)
from syncline.engine.llm import LLM
from syncline.engine.outputs import CompletionOutput, RequestOutput, Sample
from syncline.engine.sampling_params import SamplingParams
from syncline.engine.shipped import SHIPPED_CHECKPOINTS, shipped_checkpoint

__all__ = [
    "LLM",
    "SHIPPED_CHECKPOINTS",
    "AsyncLLMEngine",
    "CheckpointError",
    "CompletionOutput",
    "EngineClosedError",
    "EngineConfig",
    "EngineConfigError",
    "EngineError",
    "EngineFailedError",
    "EngineParts",
    "LLMEngine",
    "MissingResultsError",
    "NotReadyError",
    "PromptError",
    "PromptTooLongError",
    "RequestOutput",
    "RunnerError",
    "Sample",
    "SamplingParams",
    "TokenIdError",
    "UnsupportedModelError",
    "UpdateOrderError",
    "build_parts",
    "shipped_checkpoint",
]
