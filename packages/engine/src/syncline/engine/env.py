"""The engine's environment variables: read once, by name, and never half understood.

What an engine does is chosen in `EngineConfig`; here is only what belongs to the machine.

    SYNCLINE_OP_BACKEND    which implementation of the ops: torch (default), triton, aiter
    SYNCLINE_NUM_THREADS   threads of torch's CPU kernels; unset leaves torch's own choice
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from syncline.engine.errors import EngineConfigError

PREFIX: Final = "SYNCLINE_"
OP_BACKEND: Final = "SYNCLINE_OP_BACKEND"
NUM_THREADS: Final = "SYNCLINE_NUM_THREADS"
GOLDEN_DIR: Final = "SYNCLINE_GOLDEN_DIR"  # Of the tests; known here only so as not to be refused.

_BACKENDS: Final = ("torch", "triton", "aiter")


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The variables above, checked."""

    op_backend: str = "torch"
    num_threads: int | None = None


def read_environment(variables: Mapping[str, str]) -> Environment:
    """Raises EngineConfigError for a value that is malformed, or a name that only looks like ours.

    A misspelt variable would otherwise do nothing, which nobody notices.
    """
    known = (OP_BACKEND, NUM_THREADS, GOLDEN_DIR)
    for name in variables:
        if name.startswith(PREFIX) and name not in known:
            nearest = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {nearest[0]}?" if nearest else ""
            raise EngineConfigError(
                f"unknown environment variable {name}{hint} (known: {', '.join(known)})", field=name
            )
    backend = variables.get(OP_BACKEND, "torch")
    if backend not in _BACKENDS:
        raise EngineConfigError(
            f"{OP_BACKEND} must be one of {', '.join(_BACKENDS)}, got {backend!r}", field=OP_BACKEND
        )
    return Environment(op_backend=backend, num_threads=_num_threads(variables.get(NUM_THREADS)))


def _num_threads(text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise EngineConfigError(
            f"{NUM_THREADS} must be a positive integer, got {text!r}", field=NUM_THREADS
        )
    return int(text)
