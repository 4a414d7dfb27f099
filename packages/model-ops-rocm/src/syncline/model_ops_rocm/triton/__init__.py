"""The `triton` backend: named, found and refused properly; it has no kernels in this version.

Knows the distribution and the architectures. Triton is imported by `load` alone.
"""

import importlib
from collections.abc import Mapping
from typing import Final

from syncline.model_ops_rocm.backends import (
    Backend,
    why_not_arch,
    why_not_installed,
)
from syncline.model_ops_rocm.errors import BackendUnavailableError

_PACKAGE: Final = "triton"
_VERSION: Final = "==3.7.0"
_ARCHS: Final = ("gfx942", "gfx950", "sm_90")


def _why_not(arch: str) -> str | None:
    return why_not_arch(arch, _ARCHS) or why_not_installed(_PACKAGE)


def _load() -> Mapping[str, object]:
    try:
        importlib.import_module("triton")
    except ImportError as error:
        raise BackendUnavailableError(
            backend="triton",
            package=_PACKAGE,
            version=_VERSION,
            why=f"import triton raised {type(error).__name__}: {error}",
        ) from error
    return {}


BACKEND: Final = Backend(
    name="triton",
    package=_PACKAGE,
    version=_VERSION,
    entries=(),
    why_not=_why_not,
    load=_load,
)
