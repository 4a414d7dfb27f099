"""What the registry needs to know of a backend before it may import anything of it.

Unit: one `Backend` per kernel source. Looks packages up by the name of their *distribution*, never
by importing: PyPI has another project that is imported as `aiter`, and `import aiter` of the right
one raises RuntimeError without ROCm. Knows no op.
"""

import importlib.metadata
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class OpEntry:
    """That a backend has an op, and where."""

    op: str
    archs: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]

    def fits(self, op: str, arch: str, dtype: torch.dtype) -> bool:
        return self.op == op and arch in self.archs and dtype in self.dtypes

    def describe(self) -> str:
        dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in self.dtypes)
        return f"{', '.join(self.archs)} ({dtypes})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """Stands where an implementation would be, if the imported library lacks what it calls."""

    why: str


def _never_absent(op: str) -> str | None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """A source of kernels.

    `why_not(arch)` is None if the backend can be tried on `arch`, else one line; it imports nothing
    of the backend. `load()` imports the library and maps each op in `entries` to an implementation
    of its contract, or to what is `Missing`; it raises BackendUnavailableError if the import fails.
    `prepare(implementation, examples)` compiles what calls with those arguments need.
    `why_absent(op)` is None, or why the backend has the op nowhere, whatever is installed.
    """

    name: str
    package: str  # distribution to install
    version: str  # what this package was written against
    entries: tuple[OpEntry, ...]
    why_not: Callable[[str], str | None]
    load: Callable[[], Mapping[str, object]]
    prepare: Callable[[object, Iterable[Mapping[str, object]]], None]
    why_absent: Callable[[str], str | None] = _never_absent


def why_not_installed(package: str) -> str | None:
    """None if a distribution of that name is installed, else the reason in one line."""
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return f"distribution {package} is not installed"
    return None


def why_not_arch(arch: str, supported: tuple[str, ...]) -> str | None:
    """None if `arch` is among `supported`, else the reason in one line."""
    if arch in supported:
        return None
    return f"it runs on {', '.join(supported)}, not on {arch}"
