"""Engines small enough for tests."""

from typing import Any, Final, Protocol

from syncline.engine.llm import LLM

SMALL: Final = {
    "num_kv_blocks": 64,
    "block_size": 4,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 64,
}


class MakeLLM(Protocol):
    """Makes an engine; what is not named is small."""

    def __call__(self, **config: Any) -> LLM: ...  # Any: EngineConfig checks each field
