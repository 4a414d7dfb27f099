"""Where the checkpoints that ship with the package lie; knows their names and nothing else."""

from importlib import resources
from pathlib import Path
from typing import Final

SHIPPED_CHECKPOINTS: Final = ("counter", "novice")


def shipped_checkpoint(name: str) -> str:
    """The directory of a shipped checkpoint; ValueError for a name that is not shipped."""
    if name not in SHIPPED_CHECKPOINTS:
        raise ValueError(f"no shipped checkpoint {name!r}; there are {SHIPPED_CHECKPOINTS}")
    return str(Path(str(resources.files("syncline.engine"))) / "checkpoints" / name)


def resolve_model(model: str) -> str:
    """A shipped name becomes its directory unless a directory of that name is there; else as is."""
    if model in SHIPPED_CHECKPOINTS and not Path(model).exists():
        return shipped_checkpoint(model)
    return model
