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


def multiply(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    splits: int,
    head: int = 0,
    counters: torch.Tensor | None = None,
) -> torch.Tensor:
    """By tiles of 16 x 32; only weights too large for the interpreter have such rows in tables."""
    from syncline.model_ops_rocm.triton.kernels.linear import linear_kernel, sum_splits_kernel

    (rows, depth), width = x.shape, weight.shape[0]
    out, bias = torch.full((rows, width), float("nan")), torch.arange(width) / 8
    parts = torch.full((splits, rows, width), float("nan"))
    is_in_two = splits > 1 and counters is None
    linear_kernel[(-(-width // 32), splits)](
        *(x, weight, bias, out, parts, parts if counters is None else counters, rows, width),
        *(depth, depth, 1, depth, 1, width, 1, 1),
        HAS_BIAS=not is_in_two,
        CHUNK=0,
        EVEN_N=width % 32 == 0,
        EVEN_K=depth % 16 == 0,
        SWAP=1,
        SPLITS=splits,
        MERGES=counters is not None,
        GROUP_M=1,
        PREFETCH=0,
        RELEASE=0,
        BLOCK_M=16,
        BLOCK_N=32,
        BLOCK_K=16,
        OVERLAP=False,
        HEAD=head,
    )
    if is_in_two:
        sum_splits_kernel[(rows, 1)](
            *(parts, bias, out, rows, width, width, 1, 1),
            HAS_BIAS=True,
            SPLITS=splits,
            BLOCK_N=128,
            OVERLAP=False,
        )
    return out


@pytest.mark.parametrize("depth", [32, 64, 96])
@pytest.mark.parametrize("splits", [1, 2])
def test_columns_that_are_read_before_the_loop_are_in_the_sum(
    kernels: Ops, depth: int, splits: int
) -> None:
    torch.manual_seed(0)
    head = depth // splits // 16 * 16 if depth < 96 else 16
    x, weight = torch.randn(3, depth), torch.randn(64, depth)
    got = multiply(x, weight, splits=splits, head=head)
    torch.testing.assert_close(got, x @ weight.T + torch.arange(64) / 8)


@pytest.mark.parametrize("splits", [2, 4, 7])
def test_parts_are_merged_to_the_bits_of_a_second_launch(kernels: Ops, splits: int) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(3, 90), torch.randn(70, 90)
    in_two = multiply(x, weight, splits=splits)
    torch.testing.assert_close(in_two, x @ weight.T + torch.arange(70) / 8)
    counters = torch.zeros(3, dtype=torch.int32)
    for _ in range(2):
        assert torch.equal(multiply(x, weight, splits=splits, counters=counters), in_two)
        assert not counters.any()


@pytest.mark.parametrize("astray", [2, -2, 2**31 - 1])
def test_counters_that_were_not_zero_show(kernels: Ops, astray: int) -> None:
    x, weight = torch.ones(3, 64), torch.ones(70, 64)
    counters = torch.tensor([0, astray, 0], dtype=torch.int32)
    got = multiply(x, weight, splits=2, counters=counters)
    assert got[:, 32:64].isnan().all()
    assert not got[:, :32].isnan().any()
    assert not got[:, 64:].isnan().any()


def test_counters_are_refused_that_are_too_few_or_of_another_kind(kernels: Ops) -> None:
    # No small weight, whose products are not merged.
    x, weight = torch.zeros(3, 98_560).half(), torch.zeros(129, 98_560).half()
    assert kernels["linear"].counters_size(weight, 3) == 3  # type: ignore[attr-defined]  # the contract's
    for counters in (
        torch.zeros(2, dtype=torch.int32),
        torch.zeros(3, dtype=torch.int64),
        torch.zeros(6, dtype=torch.int32)[::2],
        torch.zeros(1, 3, dtype=torch.int32),
    ):
        with pytest.raises(ValueError, match="linear: counters must be contiguous int32 with at l"):
            kernels["linear"](x, weight, layout=RowMajor(), counters=counters)
