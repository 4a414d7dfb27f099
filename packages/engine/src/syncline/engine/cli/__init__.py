"""The command line: `syncline`, and `python -m syncline.engine`."""

import sys

EXIT_INTERRUPTED = 130


def main() -> None:
    """The console script; ends the process with the command's exit code."""
    try:
        # Here: it loads PyTorch, for seconds in which Ctrl-C must end as cleanly as later on.
        from syncline.engine.cli.app import app
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)
    app()


__all__ = ["main"]
