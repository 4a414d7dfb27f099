"""Products with a stored weight, interpreted on the CPU, beyond the calls that every op has."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from typing import cast

import pytest
import torch

from syncline.model_ops_rocm import select
from syncline.model_ops_rocm.quant import CodeType
from syncline.model_ops_rocm.testing.cases import tolerance_of
from syncline.model_ops_rocm.testing.cases.linear import MX_CASES, native_cases
from syncline.model_ops_rocm.testing.parity import Case, assert_parity
from syncline.model_ops_rocm.triton import BACKEND

Ops = Mapping[str, Callable[..., object]]
CODES = (*native_cases(CodeType.E4M3FN), *native_cases(CodeType.E4M3FNUZ)[2::3], *MX_CASES)


@pytest.fixture(scope="module")
def ops() -> Iterator[Ops]:
    if os.environ.get("TRITON_INTERPRET") != "1":
        if find_spec("triton") is None:
            pytest.skip("Triton is not installed")
        if "triton" in sys.modules:
            pytest.skip("Triton was imported to compile: run with TRITON_INTERPRET=1")
    with pytest.MonkeyPatch.context() as patch:
        # Triton reads it when it is imported, for its own library's functions too.
        patch.setenv("TRITON_INTERPRET", "1")
        yield cast(Ops, BACKEND.load())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("case", CODES, ids=str)
def test_codes_times_codes_are_what_the_reference_says(
    ops: Ops, case: Case, dtype: torch.dtype
) -> None:
    reference = cast(Callable[..., object], select(case.op, dtype=dtype))
    tolerance = tolerance_of(case.op, dtype)
    assert_parity(case, dtype, ops[case.op], reference, tolerance=tolerance)
