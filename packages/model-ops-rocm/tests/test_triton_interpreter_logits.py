"""Triton's kernels of the logits, interpreted on the CPU, where parity cases do not reach."""

import importlib
import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from types import ModuleType

import pytest
import torch

from syncline.model_ops_rocm.reference.philox import PURPOSE_ACCEPT, random_words, uniforms

KERNELS = "syncline.model_ops_rocm.triton.kernels"
# Unsigned words wrap, which is what they are for.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


@pytest.fixture(scope="module")
def philox() -> Iterator[ModuleType]:
    if os.environ.get("TRITON_INTERPRET") != "1":
        if find_spec("triton") is None:
            pytest.skip("Triton is not installed")
        if "triton" in sys.modules:
            pytest.skip("Triton was imported to compile: run with TRITON_INTERPRET=1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        yield importlib.import_module(f"{KERNELS}.philox")


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_the_words_of_a_counter_are_those_of_the_reference(
    philox: ModuleType, dtype: torch.dtype
) -> None:
    make = torch.Generator().manual_seed(0)
    seeds = torch.randint(-(2**63), 2**63 - 1, (256,), generator=make)
    samples = torch.randint(0, 2**31, (256,), generator=make).to(dtype)
    positions = torch.randint(0, 2**31, (256,), generator=make).to(dtype)
    words = torch.zeros(256, 4, dtype=torch.int64)
    drawn = torch.zeros(256, dtype=torch.float64)
    philox.draws_kernel[(4,)](seeds, samples, positions, words, drawn, PURPOSE_ACCEPT, 64)
    expected = random_words(seeds, samples, positions, PURPOSE_ACCEPT)
    assert torch.equal(words, torch.stack(expected, dim=1))
    assert torch.equal(drawn, uniforms(seeds, samples, positions, PURPOSE_ACCEPT))
