"""How a command ends: 0, or one line on stderr and 1 (failed), 2 (asked wrongly), 130 (Ctrl-C)."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from syncline.engine.cli import EXIT_INTERRUPTED
from syncline.engine.errors import EngineError
from syncline.graph_lifecycle import GraphError
from syncline.kv_cache import KVCacheError
from syncline.model_ops_rocm import OpError
from syncline.scheduler_core import SchedulerError
from syncline.weight_sync import WeightSyncError

EXIT_FAILED = 1
EXIT_USAGE = 2

USER_ERRORS = (
    EngineError,
    GraphError,
    KVCacheError,
    OpError,
    OSError,
    SchedulerError,
    WeightSyncError,
)


@contextmanager
def clean_exit() -> Iterator[None]:
    """Turn the errors that a user can act on into one line; any other one is a bug and is shown."""
    try:
        yield
    except KeyboardInterrupt:
        _say("interrupted")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except ValueError as error:
        _say(f"error: {error}")
        raise typer.Exit(EXIT_USAGE) from None
    except USER_ERRORS as error:
        _say(f"error: {error}")
        raise typer.Exit(EXIT_FAILED) from None


def _say(text: str) -> None:
    print(" ".join(text.split()), file=sys.stderr)
