"""The `aiter` backend as the registry sees it: which ops it has, where, and why not here.

Knows the distribution, `amd-aiter`, and the architectures. AITER is imported by `load` alone, and
only where there is an AMD GPU: the import builds a C++ module and raises RuntimeError without ROCm.
None of this has run on an AMD GPU.
"""

from collections.abc import Iterable, Mapping
from typing import Final

import torch

from syncline.model_ops_rocm.aiter.distribution import (
    PACKAGE,
    VERSION,
    installed_version,
    why_not_installed,
)
from syncline.model_ops_rocm.aiter.interface import OP_FUNCTIONS, why_absent
from syncline.model_ops_rocm.arch import detect_arch
from syncline.model_ops_rocm.backends import Backend, OpEntry, why_not_arch

_ARCHS: Final = ("gfx942", "gfx950")
_DTYPES: Final = (torch.bfloat16, torch.float16)


def _why_not(arch: str) -> str | None:
    return why_not_arch(arch, _ARCHS) or why_not_installed()


def _load() -> Mapping[str, object]:
    from syncline.model_ops_rocm.aiter.detect import detect
    from syncline.model_ops_rocm.aiter.ops.families import implementations

    found = detect(installed_version() or "", device_type="cuda", arch=detect_arch)
    return implementations(found)


def _prepare(op: object, examples: Iterable[Mapping[str, object]]) -> None:
    from syncline.model_ops_rocm.aiter.ops.common import AiterOp
    from syncline.model_ops_rocm.aiter.warm import scratch_call

    assert isinstance(op, AiterOp)
    assert callable(op)
    device = torch.device(op.aiter.device_type)
    for example in examples:
        op(**scratch_call(example, device))


BACKEND: Final = Backend(
    name="aiter",
    package=PACKAGE,
    version=VERSION,
    entries=tuple(OpEntry(op=op, archs=_ARCHS, dtypes=_DTYPES) for op in OP_FUNCTIONS),
    why_not=_why_not,
    load=_load,
    prepare=_prepare,
    why_absent=why_absent,
)
