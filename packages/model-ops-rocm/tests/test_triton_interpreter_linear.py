"""Products with a stored weight, interpreted on the CPU, beyond the calls that every op has."""

from collections.abc import Callable, Iterator, Mapping
from typing import cast

import pytest
import torch

from syncline.model_ops_rocm import Quantised, RowMajor, StorageFormat, select
from syncline.model_ops_rocm.quant import CodeType, Granularity
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


def row_of_codes(depth: int, *, is_blocked: bool) -> dict[str, object]:
    """One row by 136 columns; codes are small integers and scales are 1, so any sum is exact."""
    draw = torch.Generator().manual_seed(depth)
    ours, theirs = Granularity.TOKEN, Granularity.TOKEN
    if is_blocked:
        ours, theirs = Granularity.BLOCK_1X128, Granularity.BLOCK_128X128
    storage = StorageFormat(recipe=Quantised(granularity=theirs, code=CodeType.E4M3FN))
    x_recipe = Quantised(granularity=ours, code=CodeType.E4M3FN)
    call: dict[str, object] = {"storage": storage, "x_recipe": x_recipe, "dtype": torch.float32}
    for names, spec in (
        (("weight", "weight_scale"), storage.storage_spec((136, depth))),
        (("x_TK", "x_scale"), x_recipe.storage_spec((1, depth))),
    ):
        shape = spec["weight"].shape
        integers = torch.randint(-8, 9, tuple(shape), generator=draw)
        call[names[0]] = integers.float().to(torch.float8_e4m3fn)
        call[names[1]] = torch.ones(spec["weight_scale"].shape)
    return call


def tensors_of(call: Mapping[str, object], *names: str) -> Iterator[torch.Tensor]:
    yield from (cast(torch.Tensor, call[name]) for name in names)


@pytest.mark.parametrize("is_blocked", [False, True], ids=["rows", "blocks"])
@pytest.mark.parametrize("depth", [16, 400, 4_096, 4_112, 37])
def test_one_row_of_codes_is_multiplied_exactly(kernels: Ops, depth: int, is_blocked: bool) -> None:
    call = row_of_codes(depth, is_blocked=is_blocked)
    x, weight = tensors_of(call, "x_TK", "weight")
    bias = torch.arange(136) / 8
    expected = x.float() @ weight.float().T + bias
    got = kernels["linear_quantised"](**call, bias=bias)
    assert isinstance(got, torch.Tensor)
    assert torch.equal(got, expected)
    # Of every second place of a row and of a bias.
    wide, apart = torch.full((1, 272), -1.0), torch.zeros(272)
    apart[::2] = bias
    kernels["linear_quantised"](**call, bias=apart[::2], out=wide[:, ::2])
    assert torch.equal(wide[:, ::2], expected)
    assert (wide[:, 1::2] == -1.0).all()


@pytest.mark.parametrize("is_blocked", [False, True], ids=["rows", "blocks"])
def test_one_row_shows_a_scale_that_is_not_a_number(kernels: Ops, is_blocked: bool) -> None:
    for name, where, columns in (
        ("x_scale", (0, -1), slice(0, 136)),
        # Of a block of rows, or of one.
        ("weight_scale", (1, 0), slice(128, 136) if is_blocked else slice(1, 2)),
    ):
        call = row_of_codes(400, is_blocked=is_blocked)
        (scales,) = tensors_of(call, name)
        scales[where] = float("nan")
        got = kernels["linear_quantised"](**call)
        assert isinstance(got, torch.Tensor)
        expected = torch.zeros(1, 136, dtype=torch.bool)
        expected[:, columns] = True
        assert torch.equal(got.isnan(), expected)


def test_scales_of_one_row_multiply_one_after_another(kernels: Ops) -> None:
    # The product of both scales is infinite, or zero; that of sum and scales is neither.
    for x_scale, weight_scale, code in ((2.0**-9, 2.0**-141, 448.0), (2.0**70, 2.0**64, 2.0**-9)):
        call = row_of_codes(16, is_blocked=False)
        x, weight, x_scales, scales = tensors_of(call, "x_TK", "weight", "x_scale", "weight_scale")
        for codes, scale, value in ((x, x_scales, x_scale), (weight, scales, weight_scale)):
            codes.copy_(torch.full(codes.shape, code))
            scale.fill_(value)
        got = kernels["linear_quantised"](**call)
        assert isinstance(got, torch.Tensor)
        exact = torch.full((1, 136), 16 * code**2, dtype=torch.float64) * x_scale * weight_scale
        assert torch.equal(got, exact.float())


def test_what_a_row_of_codes_is_read_by(kernels: Ops) -> None:
    from syncline.model_ops_rocm.triton.launch import LAUNCHER
    from syncline.model_ops_rocm.triton.ops.linear_operand import Operand
    from syncline.model_ops_rocm.triton.ops.linear_vector_codes import takes

    def of_code(code: CodeType, columns: int = 64) -> Operand:
        recipe = Quantised(granularity=Granularity.TOKEN, code=code)
        spec = StorageFormat(recipe=recipe).storage_spec((8, columns))
        tensors = {name: torch.empty(one.shape, dtype=one.dtype) for name, one in spec.items()}
        return Operand(codes=tensors["weight"], scale=tensors["weight_scale"], recipe=recipe)

    weight = of_code(CodeType.E4M3FN)
    assert takes(weight, 8, 64)
    assert takes(weight, 5, 48)
    assert not takes(weight, 8, 50)
    assert not takes(of_code(CodeType.E4M3FN, 63), 8, 48)
    assert not takes(of_code(CodeType.E4M3FN, 65_536), 8, 65_536)
    assert not takes(of_code(CodeType.E4M3FNUZ), 8, 64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LAUNCHER, "interpreted_arch", "gfx950")
        assert not takes(weight, 8, 64)


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
