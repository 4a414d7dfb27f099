"""A rollout engine: it generates for a trainer, and takes new weights every step.

A public name is imported when it is first used: what needs PyTorch costs seconds, and a command
must be able to start, and be stopped, before that.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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

_HOMES = {
    "AsyncLLMEngine": "async_llm",
    "build_parts": "build",
    "EngineConfig": "config",
    "EngineParts": "engine",
    "LLMEngine": "engine",
    "CheckpointError": "errors",
    "EngineClosedError": "errors",
    "EngineConfigError": "errors",
    "EngineError": "errors",
    "EngineFailedError": "errors",
    "MissingResultsError": "errors",
    "NotReadyError": "errors",
    "PromptError": "errors",
    "PromptTooLongError": "errors",
    "RunnerError": "errors",
    "TokenIdError": "errors",
    "UnsupportedModelError": "errors",
    "UpdateOrderError": "errors",
    "LLM": "llm",
    "CompletionOutput": "outputs",
    "RequestOutput": "outputs",
    "Sample": "outputs",
    "SamplingParams": "sampling_params",
    "SHIPPED_CHECKPOINTS": "shipped",
    "shipped_checkpoint": "shipped",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)
