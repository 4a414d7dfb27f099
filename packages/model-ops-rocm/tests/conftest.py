"""An AITER that is not one, installed for a test and gone after it."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from syncline.model_ops_rocm import registry
from syncline.model_ops_rocm.testing.fake_aiter import FakeAiter, write_distribution

InstallAiter = Callable[..., FakeAiter]


@pytest.fixture
def install_aiter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[InstallAiter]:
    """A function that installs the stand-in for an architecture, under a version."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def install(arch: str = "gfx942", version: str = "0.1.22+rocm7.2") -> FakeAiter:
        fake = FakeAiter(arch)
        write_distribution(tmp_path, "amd-aiter", version)
        for name, module in fake.modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        return fake

    registry.LOADED.pop("aiter", None)
    yield install
    registry.LOADED.pop("aiter", None)
