"""The module tree of the stand-in, to be put into `sys.modules` by a fixture."""

import functools
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Final

from syncline.model_ops_rocm.testing.fake_aiter import dense, kv
from syncline.model_ops_rocm.testing.fake_aiter.attention import FakeAttention
from syncline.model_ops_rocm.testing.fake_aiter.enums import enumeration
from syncline.model_ops_rocm.testing.fake_aiter.gemm import FakeGemm
from syncline.model_ops_rocm.testing.fake_aiter.moe import FakeMoe
from syncline.model_ops_rocm.testing.fake_aiter.quantise import FakeQuantisers

# Functions that live in a module of their own, not in `aiter` itself.
_PLACES: Final = {"tgemm.mm": "aiter.tuned_gemm", "fused_moe": "aiter.fused_moe"}


class FakeAiter:
    """One AITER on one architecture; `calls` are the names of the functions that were called.

    `is_right`: a version without the faults on record.
    """

    __slots__ = ("arch", "calls", "modules")

    def __init__(self, arch: str = "gfx942", *, is_right: bool = False) -> None:
        self.arch = arch
        self.calls: list[str] = []
        self.modules: dict[str, ModuleType] = {"aiter": ModuleType("aiter")}
        root = vars(self.modules["aiter"])
        root["__path__"] = []
        quants = enumeration(
            *("No", "per_Tensor", "per_Token", "per_1x32", "per_1x128", "per_128x128")
        )
        activations = enumeration("No", "Silu", "Gelu", "Swiglu", first=-1)
        root["QuantType"], root["ActivationType"] = quants, activations
        families = (
            dense.functions(),
            FakeGemm(arch).functions(),
            FakeQuantisers(arch, quants).functions(),
            kv.functions(),
            FakeAttention(is_right=is_right).functions(),
            FakeMoe(activations, quants).functions(),
        )
        for functions in families:
            for name, function in functions.items():
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
