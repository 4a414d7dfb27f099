"""Products of few rows that warps of their own feed, on a GPU that has tensor memory copies."""

from collections.abc import Callable
from typing import cast

import pytest
import torch

from syncline.model_ops_rocm import (
    Quantised,
    RowMajor,
    StorageFormat,
    detect_arch,
    prepare,
    select,
)
from syncline.model_ops_rocm.quant import CodeType, Granularity
from syncline.model_ops_rocm.testing.launches import launched_by
from syncline.model_ops_rocm.testing.parity import recorded
from syncline.model_ops_rocm.testing.products import (
    assert_each_waits,
    assert_is_product,
    assert_replays,
    linear_of,
    poisoned,
)
from syncline.model_ops_rocm.triton import sealed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="only sm_90 has products that are fed by warps of their own",
    ),
]

KERNEL = "specialised_linear_kernel"
# Of the weight: whole tiles, and edges of rows and of K.
SHAPES = ((4_096, 4_096), (3_900, 4_104), (6_400, 4_096), (7_001, 4_352), (4_096, 12_288))
# Of the others' 64 rows programs of a cluster share the tiles, which has tests of its own.
CASES = [(shape, rows) for shape in SHAPES for rows in (2, 7, 16, 17, 31, 32)]
CASES += [(shape, 64) for shape in SHAPES[:2]]


def assert_is_fed(call: Callable[[], object]) -> None:
    """The call is the specialised kernel's, and nothing else."""
    assert launched_by(call) == [KERNEL]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("shape", "num_rows"), CASES, ids=str)
def test_few_rows_agree_with_a_product_in_float64(
    shape: tuple[int, int], num_rows: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(num_rows)
    x, weight = poisoned(num_rows, shape[1], dtype), poisoned(*shape, dtype)
    bias = torch.randn(shape[0], dtype=dtype, device="cuda")
    target = torch.full((num_rows, shape[0] + 5), 7.0, dtype=dtype, device="cuda")
    out = target[:, : shape[0]]
    linear = linear_of(dtype)
    assert_is_fed(lambda: linear(x, weight, bias, layout=RowMajor(), out=out))
    for _ in range(3):
        linear(x, weight, bias, layout=RowMajor(), out=out)
        assert_is_product(out, x, weight, bias)
        assert torch.equal(linear(x, weight, bias, layout=RowMajor()), out)
    assert (target[:, shape[0] :] == 7.0).all()


def test_results_and_rows_may_be_of_any_shape_that_a_stride_walks() -> None:
    torch.manual_seed(0)
    linear = linear_of(torch.bfloat16)
    weight = torch.randn(4_096, 4_096, device="cuda").bfloat16()
    bias = torch.randn(1, device="cuda").bfloat16().expand(4_096)
    x = torch.randn(3, 5, 4_096, device="cuda").bfloat16()
    target = torch.zeros(3, 5, 2 * 4_096, dtype=torch.bfloat16, device="cuda")
    out = target[..., ::2]
    assert_is_fed(lambda: linear(x, weight, bias, layout=RowMajor(), out=out))
    linear(x, weight, bias, layout=RowMajor(), out=out)
    assert_is_product(out, x, weight, bias)
    assert not target[..., 1::2].any()


@pytest.mark.parametrize("num_rows", [16, 64])
@pytest.mark.parametrize("shape", [(4_096, 4_096), (6_144, 12_288)], ids=str)
def test_rows_that_the_accelerator_cannot_read_are_multiplied_otherwise(
    shape: tuple[int, int], num_rows: int
) -> None:
    torch.manual_seed(0)
    linear = linear_of(torch.bfloat16)
    weight = poisoned(*shape, torch.bfloat16)
    wide = torch.randn(num_rows, shape[1] + 8, dtype=torch.bfloat16, device="cuda")
    backwards = torch.randn(shape[1], num_rows, dtype=torch.bfloat16, device="cuda").T
    uneven = torch.randn(num_rows, shape[1] + 1, dtype=torch.bfloat16, device="cuda")[:, :-1]
    one_for_all = torch.randn(1, shape[1], dtype=torch.bfloat16, device="cuda").expand(num_rows, -1)
    for x in (wide[:, 1:-7], backwards, uneven, one_for_all):
        assert_is_product(linear(x, weight, layout=RowMajor()), x, weight)


@pytest.mark.parametrize(
    ("shape", "num_rows"),
    [((4_096, 4_096), 5), ((6_400, 4_096), 5), ((6_400, 4_096), 30), ((4_096, 4_096), 64)],
    ids=str,
)
def test_a_recorded_product_reads_what_its_operands_hold_then(
    shape: tuple[int, int], num_rows: int
) -> None:
    assert_replays(num_rows, shape, KERNEL)


@pytest.mark.parametrize("num_rows", [16, 32, 64])
def test_each_product_is_read_after_the_kernel_that_writes_it(num_rows: int) -> None:
    assert_each_waits(num_rows, [(4_096, 4_096)] * 3, (KERNEL,))


@pytest.mark.parametrize(("num_rows", "fewest"), [(16, 1), (32, 17), (64, 17)])
def test_what_is_prepared_serves_fewer_rows(num_rows: int, fewest: int) -> None:
    depth = 8_704
    weight = torch.randn(4_032, depth, device="cuda").bfloat16()
    linear = linear_of(torch.bfloat16)
    example = {
        "x_TK": torch.empty(num_rows, depth, dtype=torch.bfloat16, device="meta"),
        "weight": torch.empty(4_032, depth, dtype=torch.bfloat16, device="meta"),
        "layout": RowMajor(),
    }
    prepare("linear", [example], backend="triton", arch=detect_arch(), dtype=torch.bfloat16)
    # Rows that are not fed may be so far apart as is compiled alike: multiples of 16.
    x = torch.randn(num_rows, depth + 16, device="cuda").bfloat16()
    with sealed():
        for rows in (x[:, :depth], x[:-1, 16:], x[: fewest + 2, 16:], x[:fewest, :depth]):
            assert_is_product(linear(rows, weight, layout=RowMajor()), rows, weight)


@pytest.mark.parametrize("num_rows", [16, 32])
def test_what_is_prepared_serves_rows_wherever_they_lie_if_all_are_fed(num_rows: int) -> None:
    depth = 4_104
    weight = torch.randn(4_096, depth + 24, device="cuda").bfloat16()[:, 8:-16]
    linear = linear_of(torch.bfloat16)
    example = {
        "x_TK": torch.empty(num_rows, depth, dtype=torch.bfloat16, device="meta"),
        "weight": torch.empty(4_096, depth, dtype=torch.bfloat16, device="meta"),
        "layout": RowMajor(),
    }
    prepare("linear", [example], backend="triton", arch=detect_arch(), dtype=torch.bfloat16)
    x = torch.randn(num_rows, depth + 8, device="cuda").bfloat16()
    with sealed():
        for rows in (x[:, :depth], x[:, 8:], x[:-5, 8:]):
            assert_is_product(linear(rows, weight, layout=RowMajor()), rows, weight)


def codes(
    rows: int, columns: int, granularity: Granularity
) -> tuple[torch.Tensor, torch.Tensor, Quantised]:
    """Random codes, which are in a larger storage that is NaN elsewhere, and scales of rows."""
    whole = torch.full((rows + 2, columns), float("nan"), device="cuda")
    whole[1:-1].normal_()
    one = granularity is Granularity.TENSOR
    scale = torch.rand(1 if one else rows, 1, device="cuda") + 0.5
    return (
        whole.to(torch.float8_e4m3fn)[1:-1],
        scale,
        Quantised(granularity=granularity, code=CodeType.E4M3FN),
    )


def product_of_codes(
    num_rows: int, shape: tuple[int, int], granularity: Granularity, dtype: torch.dtype
) -> tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]:
    """The call, which takes `out`, and what it reads: x, weight, both scales, and the bias."""
    x, x_scale, recipe = codes(num_rows, shape[1], granularity)
    weight, weight_scale, _ = codes(*shape, granularity)
    bias = torch.randn(shape[0], dtype=dtype, device="cuda")
    found = select("linear_quantised", backend="triton", arch=detect_arch(), dtype=dtype)
    op = cast(Callable[..., torch.Tensor], found)

    def call(out: torch.Tensor | None = None) -> torch.Tensor:
        return op(
            *(x, weight, weight_scale, bias),
            storage=StorageFormat(recipe=recipe),
            x_scale=x_scale,
            x_recipe=recipe,
            dtype=dtype,
            out=out,
        )

    return call, (x, weight, x_scale, weight_scale, bias)


def exact_of_codes(operands: tuple[torch.Tensor, ...]) -> torch.Tensor:
    x, weight, x_scale, weight_scale, bias = (one.double() for one in operands)
    return (x @ weight.T) * x_scale * weight_scale.T + bias


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("granularity", [Granularity.TOKEN, Granularity.TENSOR], ids=str)
@pytest.mark.parametrize("num_rows", [2, 16, 17, 32, 64])
@pytest.mark.parametrize("shape", [(4_096, 12_288), (3_901, 8_208)], ids=str)
def test_few_rows_of_codes_agree_with_a_product_in_float64(
    shape: tuple[int, int], num_rows: int, granularity: Granularity, dtype: torch.dtype
) -> None:
    torch.manual_seed(num_rows)
    call, operands = product_of_codes(num_rows, shape, granularity, dtype)
    target = torch.full((num_rows, shape[0] + 5), 7.0, dtype=dtype, device="cuda")
    out = target[:, : shape[0]]
    assert_is_fed(lambda: call(out))
    exact = exact_of_codes(operands)
    # Sums of 12,288 in a tensor core alone would be off by some 1e-3 of the norm in float32, too.
    limit = 2.5e-3 if dtype == torch.bfloat16 else 2e-4
    for _ in range(3):
        call(out)
        assert (out.double() - exact).norm() < limit * exact.norm()
        assert torch.equal(call(), out)
    assert (target[:, shape[0] :] == 7.0).all()


@pytest.mark.parametrize("num_rows", [16, 32, 64])
def test_a_recorded_product_of_codes_reads_what_its_operands_hold_then(num_rows: int) -> None:
    torch.manual_seed(0)
    shape = (4_096, 8_192)
    call, operands = product_of_codes(num_rows, shape, Granularity.TOKEN, torch.bfloat16)
    out = torch.empty(num_rows, shape[0], dtype=torch.bfloat16, device="cuda")
    assert_is_fed(lambda: call(out))
    graph, _ = recorded(lambda: call(out))
    for _ in range(3):
        for one in operands[:2]:
            one.copy_(torch.randn(one.shape, device="cuda").to(one.dtype))
        for one in operands[2:]:
            one.uniform_(0.5, 1.5)
        graph.replay()
        assert torch.equal(out, call())
        exact = exact_of_codes(operands)
        assert (out.double() - exact).norm() < 2.5e-3 * exact.norm()
