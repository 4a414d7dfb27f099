"""The public names, and that the package is no heavier to import than it must be."""

import os
import subprocess
import sys

import pytest

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
        assert hasattr(syncline.engine, name)


def test_every_error_has_one_base() -> None:
    for name in AGREED_NAMES:
        value = getattr(syncline.engine, name)
        if name.endswith("Error"):
            assert issubclass(value, syncline.engine.EngineError), name


@pytest.mark.parametrize(
    ("statement", "libraries"),
    [
        ("import syncline.engine, syncline.engine.cli", ("torch",)),
        (
            "from syncline.engine import *; import syncline.engine.cli.app",
            ("transformers", "triton", "aiter"),
        ),
    ],
)
def test_import_loads_no_library_before_it_is_needed(
    statement: str, libraries: tuple[str, ...]
) -> None:
    code = f"import sys; {statement}; print([m for m in {libraries} if m in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ
    )
    assert result.stdout.strip() == "[]"
