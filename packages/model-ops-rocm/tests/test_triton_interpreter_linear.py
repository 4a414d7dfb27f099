"""Products with a stored weight, interpreted on the CPU, beyond the calls that every op has."""

from collections.abc import Callable, Mapping
from typing import cast

import pytest
import torch

from syncline.model_ops_rocm import RowMajor, select
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


def test_parts_are_merged_to_the_bits_of_a_second_launch(kernels: Ops) -> None:
    torch.manual_seed(0)
    linear = cast(Callable[..., torch.Tensor], kernels["linear"])
    x, weight = torch.randn(3, 2_304).half(), torch.randn(70, 2_304).half()
    arguments = {"bias": torch.randn(70).half(), "layout": RowMajor()}
    in_two = linear(x, weight, **arguments)
    size = kernels["linear"].counters_size(weight, 3)  # type: ignore[attr-defined]  # the contract's
    assert size == 3
    counters = torch.zeros(size, dtype=torch.int32)
    for _ in range(2):
        workspace = torch.full((2 * 3 * 70 * 4,), 255, dtype=torch.uint8)
        merged = linear(x, weight, **arguments, workspace=workspace, counters=counters)
        assert torch.equal(merged, in_two)
        assert not counters.any()


@pytest.mark.parametrize("astray", [2, -2, 2**31 - 1])
def test_counters_that_were_not_zero_show(kernels: Ops, astray: int) -> None:
    linear = cast(Callable[..., torch.Tensor], kernels["linear"])
    x, weight = torch.ones(3, 2_304).half(), torch.ones(70, 2_304).half()
    counters = torch.tensor([0, astray, 0], dtype=torch.int32)
    got = linear(x, weight, layout=RowMajor(), counters=counters)
    assert got[:, 32:64].isnan().all()
    assert not got[:, :32].isnan().any()
    assert not got[:, 64:].isnan().any()


def test_counters_are_refused_that_are_too_few_or_of_another_kind(kernels: Ops) -> None:
    x, weight = torch.ones(3, 2_304).half(), torch.ones(70, 2_304).half()
    for counters in (
        torch.zeros(2, dtype=torch.int32),
        torch.zeros(3, dtype=torch.int64),
        torch.zeros(6, dtype=torch.int32)[::2],
        torch.zeros(1, 3, dtype=torch.int32),
    ):
        with pytest.raises(ValueError, match="linear: counters must be contiguous int32 with at l"):
            kernels["linear"](x, weight, layout=RowMajor(), counters=counters)


@pytest.mark.parametrize("depth", [32, 64, 96])
@pytest.mark.parametrize("splits", [1, 2])
def test_columns_that_are_read_before_the_loop_are_in_the_sum(
    kernels: Ops, depth: int, splits: int
) -> None:
    # Only weights too large for the interpreter have such rows in the tables.
    from syncline.model_ops_rocm.triton.kernels.linear import linear_kernel

    torch.manual_seed(0)
    head = depth // splits // 16 * 16 if depth < 96 else 16
    x, weight = torch.randn(3, depth), torch.randn(64, depth)
    out, parts = torch.full((3, 64), float("nan")), torch.full((splits, 3, 64), float("nan"))
    counters = torch.zeros(2, dtype=torch.int32)
    linear_kernel[(2, splits)](
        *(x, weight, out, out, parts, counters, 3, 64, depth),
        *(depth, 1, depth, 1, 64, 1, 0),
        HAS_BIAS=False,
        CHUNK=0,
        EVEN_N=True,
        EVEN_K=True,
        SWAP=1,
        SPLITS=splits,
        MERGES=splits > 1,
        GROUP_M=1,
        PREFETCH=0,
        RELEASE=0,
        BLOCK_M=16,
        BLOCK_N=32,
        BLOCK_K=16,
        OVERLAP=False,
        HEAD=head,
    )
    torch.testing.assert_close(out, x @ weight.T)
