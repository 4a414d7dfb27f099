"""The `aiter` backend: named, found and refused properly; it calls no kernels in this version.

Knows the distribution, `amd-aiter`, and the architectures. AITER is imported by `load` alone, and
only where there is an AMD GPU: the import builds a C++ module and raises RuntimeError without ROCm.
"""

import importlib
from collections.abc import Iterable, Mapping
from typing import Final

from syncline.model_ops_rocm.backends import (
    Backend,
    why_not_arch,
    why_not_installed,
)
from syncline.model_ops_rocm.errors import BackendUnavailableError

_PACKAGE: Final = "amd-aiter"
_VERSION: Final = ">=0.1.22 (ROCm/aiter e4048607a)"
_ARCHS: Final = ("gfx942", "gfx950")


def _why_not(arch: str) -> str | None:
    return why_not_arch(arch, _ARCHS) or why_not_installed(_PACKAGE)


def _load() -> Mapping[str, object]:
    try:
        importlib.import_module("aiter")
    except Exception as error:
        # RuntimeError without ROCm, ModuleNotFoundError of jax without a driver, and others.
        raise BackendUnavailableError(
            backend="aiter",
            package=_PACKAGE,
            version=_VERSION,
            why=f"import aiter raised {type(error).__name__}: {error}",
        ) from error
    return {}


def _prepare(op: object, examples: Iterable[Mapping[str, object]]) -> None:
    """There is no op to prepare."""


BACKEND: Final = Backend(
    name="aiter",
    package=_PACKAGE,
    version=_VERSION,
    entries=(),
    why_not=_why_not,
    load=_load,
    prepare=_prepare,
)
