"""Products of few rows that a warp of their own feeds, on a GPU that has tensor memory copies."""

from collections.abc import Callable
from typing import cast

import pytest
import torch

from syncline.model_ops_rocm import RowMajor, detect_arch, prepare, select
from syncline.model_ops_rocm.testing.parity import recorded
from syncline.model_ops_rocm.triton import sealed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="only sm_90 has products that are fed by a warp of their own",
    ),
]

# Of the weight: whole tiles, and edges of rows and of K.
SHAPES = ((4_096, 4_096), (3_900, 4_104), (6_144, 4_096), (7_001, 4_352), (4_096, 12_288))


def linear_of(dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    found = select("linear", backend="triton", arch=detect_arch(), dtype=dtype)
    return cast(Callable[..., torch.Tensor], found)


def assert_is_fed(call: Callable[[], object]) -> None:
    """The call is the specialised kernel's, and nothing else."""
    from syncline.model_ops_rocm.triton.launch import LAUNCHER  # imports Triton

    with LAUNCHER.compiling(is_preparing=False) as compiled:
        call()
    assert [one.binary.metadata.name for one in compiled] == ["specialised_linear_kernel"]


def assert_is_product(
    got: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> None:
    exact = x.double() @ weight.double().T
    if bias is not None:
        exact += bias.double()
    assert (got.double() - exact).norm() < 2.5e-3 * exact.norm()


def poisoned(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Random, inside of a larger matrix that is NaN elsewhere."""
    whole = torch.full((rows + 3, columns + 24), float("nan"), dtype=dtype, device="cuda")
    inner = whole[:rows, 8 : columns + 8]
    inner.normal_()
    return inner


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("num_rows", [2, 7, 16, 64])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
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


@pytest.mark.parametrize("num_rows", [5, 64])
@pytest.mark.parametrize("shape", [(4_096, 4_096), (6_144, 4_096)], ids=str)
def test_a_recorded_product_reads_what_its_operands_hold_then(
    shape: tuple[int, int], num_rows: int
) -> None:
    torch.manual_seed(0)
    linear = linear_of(torch.bfloat16)
    weight = torch.randn(shape, device="cuda").bfloat16()
    x = torch.randn(num_rows, shape[1], device="cuda").bfloat16()
    out = torch.empty(num_rows, shape[0], dtype=torch.bfloat16, device="cuda")
    assert_is_fed(lambda: linear(x, weight, layout=RowMajor(), out=out))
    graph, _ = recorded(lambda: linear(x, weight, layout=RowMajor(), out=out))
    for _ in range(3):
        x.normal_()
        weight.normal_()
        graph.replay()
        assert torch.equal(out, linear(x, weight, layout=RowMajor()))


@pytest.mark.parametrize("num_rows", [16, 64])
def test_each_product_is_read_after_the_kernel_that_writes_it(num_rows: int) -> None:
    torch.manual_seed(0)
    linear = linear_of(torch.bfloat16)
    weights = [torch.randn(4_096, 4_096, device="cuda").bfloat16() / 64 for _ in range(3)]
    first = torch.randn(num_rows, 4_096, device="cuda").bfloat16()
    rows = [torch.empty_like(first) for _ in range(12)]

    def chain() -> torch.Tensor:
        x = first
        for index, out in enumerate(rows):
            x = linear(x, weights[index % 3], layout=RowMajor(), out=out)
        return x

    graph, captured = recorded(chain)
    for _ in range(20):
        first.normal_()
        graph.replay()
        got = captured.clone()
        x = first
        for index in range(len(rows)):
            x = linear(x, weights[index % 3], layout=RowMajor())
            torch.cuda.synchronize()
        assert torch.equal(got, x)


@pytest.mark.parametrize("num_rows", [16, 64])
def test_what_is_prepared_serves_fewer_rows_wherever_they_lie(num_rows: int) -> None:
    depth = 8_704
    weight = torch.randn(4_032, depth, device="cuda").bfloat16()
    linear = linear_of(torch.bfloat16)
    example = {
        "x_TK": torch.empty(num_rows, depth, dtype=torch.bfloat16, device="meta"),
        "weight": torch.empty(4_032, depth, dtype=torch.bfloat16, device="meta"),
        "layout": RowMajor(),
    }
    prepare("linear", [example], backend="triton", arch=detect_arch(), dtype=torch.bfloat16)
    x = torch.randn(num_rows, depth + 8, device="cuda").bfloat16()
    fewest = 1 if num_rows == 16 else 17
    with sealed():
        for rows in (x[:, :depth], x[: fewest + 2, 8:], x[:fewest, :depth]):
            assert_is_product(linear(rows, weight, layout=RowMajor()), rows, weight)
