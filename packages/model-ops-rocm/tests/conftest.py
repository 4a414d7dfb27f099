"""Triton's interpreter, an AITER that is not one, and recorded vectors of AITER's functions.

The vectors are of all files in the folder that SYNCLINE_GOLDEN_DIR names; without it the tests that
read them skip.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast  # Any: what an op returns

import pytest
import torch

from syncline.model_ops_rocm import registry
from syncline.model_ops_rocm.testing.fake_aiter import FakeAiter, write_distribution
from syncline.model_ops_rocm.testing.goldens import (
    GoldenCase,
    RecordedFile,
    cases_of,
    kind_of,
)
from syncline.model_ops_rocm.triton import BACKEND as TRITON

InstallAiter = Callable[..., FakeAiter]

KEPT_BYTES = 2**30  # of the card, by each worker
CONTEXT_TRIALS = 10


@pytest.fixture(autouse=True)
def empty_memory_is_nan(request: pytest.FixtureRequest) -> Iterator[None]:
    """For kernels that are interpreted, what nobody wrote is NaN, or the largest integer.

    A result that holds any of it shows it; left as it was found, memory holds other numbers in
    every run. PyTorch does that in its deterministic mode, in which it also takes other ways.
    """
    if "interpreter" not in request.fixturenames:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture(scope="session")
def context() -> None:
    """A worker's context on the card, tried again: of many at once some were refused at first."""
    if not torch.cuda.is_available():
        return
    for _ in range(CONTEXT_TRIALS - 1):
        try:
            torch.zeros(1, device="cuda")
        except RuntimeError:
            time.sleep(1.0)
        else:
            return
    torch.zeros(1, device="cuda")


@pytest.fixture(autouse=True)
def memory_is_given_back(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a GPU test took, PyTorch keeps: beyond a little, other workers of the card miss it."""
    is_of_gpu = request.node.get_closest_marker("gpu") is not None
    if is_of_gpu:
        request.getfixturevalue("context")
    yield
    if is_of_gpu and torch.cuda.memory_reserved() > KEPT_BYTES:
        torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def interpreter() -> Iterator[None]:
    """Triton interprets its kernels on the CPU, or the test says why not."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        if find_spec("triton") is None:
            pytest.skip("Triton is not installed")
        if "triton" in sys.modules:
            pytest.skip("Triton was imported to compile: run with TRITON_INTERPRET=1")
    with pytest.MonkeyPatch.context() as patch:
        # Triton reads it when it is imported, for its own library's functions too.
        patch.setenv("TRITON_INTERPRET", "1")
        yield


@pytest.fixture(scope="module")
def kernels(interpreter: None) -> Mapping[str, Callable[..., Any]]:
    """The `triton` backend's implementations, interpreted."""
    return cast(Mapping[str, Callable[..., Any]], TRITON.load())


@pytest.fixture
def install_aiter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[InstallAiter]:
    """A function that installs the stand-in for an architecture, under a version; seeds PyTorch."""
    torch.manual_seed(0)
    monkeypatch.syspath_prepend(str(tmp_path))

    def install(
        arch: str = "gfx942", version: str = "0.1.22+rocm7.2", *, is_right: bool = False
    ) -> FakeAiter:
        fake = FakeAiter(arch, is_right=is_right)
        write_distribution(tmp_path, "amd-aiter", version)
        for name, module in fake.modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        return fake

    registry.LOADED.pop("aiter", None)
    yield install
    registry.LOADED.pop("aiter", None)


@pytest.fixture
def golden_files() -> Iterator[dict[str, RecordedFile]]:
    """Every recorded file by its name without the suffix."""
    folder = os.environ.get("SYNCLINE_GOLDEN_DIR")
    if folder is None:
        pytest.skip("SYNCLINE_GOLDEN_DIR is not set: no recorded vectors to compare with")
    safetensors = pytest.importorskip("safetensors", reason="reads the recorded vectors")
    paths = sorted(Path(folder).glob("*.safetensors"))
    assert paths, f"no recorded files in {folder}"
    with ExitStack() as stack:
        yield {
            path.stem: stack.enter_context(safetensors.safe_open(str(path), framework="pt"))
            for path in paths
        }


@pytest.fixture
def goldens(golden_files: dict[str, RecordedFile]) -> Callable[[str], list[GoldenCase]]:
    """The recorded cases of a kind, from all files that record it."""

    def read(kind: str) -> list[GoldenCase]:
        cases = [
            case
            for stem, file in golden_files.items()
            if kind_of(stem, file) == kind
            for case in cases_of(stem, file)
        ]
        if not cases:
            pytest.skip(f"no recording of {kind} among {', '.join(golden_files)}")
        return cases

    return read
