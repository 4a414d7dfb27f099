"""Products with a stored weight, interpreted on the CPU, beyond the calls that every op has."""

from collections.abc import Callable, Mapping
from typing import cast

import pytest
import torch

from syncline.model_ops_rocm import select
from syncline.model_ops_rocm.quant import CodeType
from syncline.model_ops_rocm.testing.cases import tolerance_of
from syncline.model_ops_rocm.testing.cases.linear import MX_CASES, native_cases
from syncline.model_ops_rocm.testing.parity import Case, assert_parity

Ops = Mapping[str, Callable[..., object]]
CODES = (*native_cases(CodeType.E4M3FN), *native_cases(CodeType.E4M3FNUZ)[2::3], *MX_CASES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("case", CODES, ids=str)
def test_codes_times_codes_are_what_the_reference_says(
    kernels: Ops, case: Case, dtype: torch.dtype
) -> None:
    reference = cast(Callable[..., object], select(case.op, dtype=dtype))
    tolerance = tolerance_of(case.op, dtype)
    assert_parity(case, dtype, kernels[case.op], reference, tolerance=tolerance)
