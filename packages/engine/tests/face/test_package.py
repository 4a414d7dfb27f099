"""The public names, and that the package is no heavier to import than it must be."""

import os
import subprocess
import sys

import syncline.engine

AGREED_NAMES = [
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


def test_public_names_are_the_agreed_ones() -> None:
    assert syncline.engine.__all__ == AGREED_NAMES
    for name in AGREED_NAMES:
        assert name in vars(syncline.engine)


def test_every_error_has_one_base() -> None:
    for name, value in vars(syncline.engine).items():
        if name.endswith("Error"):
            assert issubclass(value, syncline.engine.EngineError), name


def test_import_loads_neither_transformers_nor_a_device_compiler() -> None:
    code = (
        "import sys, syncline.engine, syncline.engine.cli; "
        "print([m for m in ('transformers', 'triton', 'aiter') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ
    )
    assert result.stdout.strip() == "[]"
