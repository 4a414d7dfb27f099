"""The command line: `syncline`, and `python -m syncline.engine`."""

import os
import signal
import sys
from types import FrameType
from typing import Final

EXIT_INTERRUPTED: Final = 130


def main() -> None:
    """The console script; ends the process with the command's exit code."""
    # The import loads PyTorch, for seconds. An exception raised in the middle of that may be
    # swallowed by a library, so Ctrl-C ends the process then and there: nothing is open yet.
    before = signal.signal(signal.SIGINT, _end_at_once)
    from syncline.engine.cli.app import app

    signal.signal(signal.SIGINT, before)
    app()


def _end_at_once(signum: int, frame: FrameType | None) -> None:
    os.write(sys.stderr.fileno(), b"interrupted\n")
    os._exit(EXIT_INTERRUPTED)


__all__ = ["main"]
