"""The module tree of the stand-in, to be put into `sys.modules` by a fixture."""

import functools
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Final

from syncline.model_ops_rocm.testing.fake_aiter.dense import FakeDense
from syncline.model_ops_rocm.testing.fake_aiter.enums import enumeration

# Functions that live in a module of their own, not in `aiter` itself.
_PLACES: Final = {"tgemm.mm": "aiter.tuned_gemm"}


class FakeAiter:
    """One AITER on one architecture; `calls` are the names of the functions that were called."""

    __slots__ = ("arch", "calls", "modules")

    def __init__(self, arch: str = "gfx942") -> None:
        self.arch = arch
        self.calls: list[str] = []
        self.modules: dict[str, ModuleType] = {"aiter": ModuleType("aiter")}
        root = vars(self.modules["aiter"])
        root["__path__"] = []
        root["QuantType"] = enumeration(
            *("No", "per_Tensor", "per_Token", "per_1x32", "per_1x128", "per_128x128")
        )
        root["ActivationType"] = enumeration("No", "Silu", "Gelu", "Swiglu", first=-1)
        for name, function in FakeDense(arch).functions().items():
            self._put(name, function)

    def module(self, name: str) -> dict[str, object]:
        """The names of one of its modules, to change."""
        return vars(self.modules[name])

    def _put(self, path: str, function: Callable[..., object]) -> None:
        place = _PLACES.get(path, "aiter")
        if place not in self.modules:
            self.modules[place] = ModuleType(place)
            vars(self.modules["aiter"])[place.rpartition(".")[2]] = self.modules[place]
        owner, _, name = path.rpartition(".")
        names = vars(self.modules[place])
        if owner:
            names = vars(names.setdefault(owner, SimpleNamespace()))
        names[name] = self._counted(path, function)

    def _counted(self, path: str, function: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(function)
        def counted(*args: object, **kwargs: object) -> object:
            self.calls.append(path)
            return function(*args, **kwargs)

        return counted
