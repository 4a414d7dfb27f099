"""The command line: `syncline`, and `python -m syncline.engine`."""

from syncline.engine.cli.app import main

__all__ = ["main"]
