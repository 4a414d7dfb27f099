"""One tiny random checkpoint for the whole run, and engines on it."""

from collections.abc import Iterator
from typing import Any

import pytest

from syncline.engine.llm import LLM
from syncline.engine.testing.checkpoints import write_tiny_checkpoint
from syncline.engine.testing.engines import SMALL, MakeLLM


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def make_llm(tiny_model: str) -> Iterator[MakeLLM]:
    """Engines on the tiny model, small unless told otherwise, closed at the end."""
    made: list[LLM] = []

    def make(**config: Any) -> LLM:
        made.append(LLM(**{"model": tiny_model, **SMALL, **config}))
        return made[-1]

    yield make
    for llm in made:
        llm.close()


@pytest.fixture
def llm(make_llm: MakeLLM) -> LLM:
    return make_llm()
