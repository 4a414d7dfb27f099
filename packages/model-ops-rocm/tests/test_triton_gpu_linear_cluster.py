"""Products of 64 rows whose tiles two programs of a cluster share, on a GPU that has clusters."""

from collections.abc import Callable
from functools import partial

import pytest
import torch

from syncline.model_ops_rocm import RowMajor, detect_arch, prepare
from syncline.model_ops_rocm.testing.launches import launched_by
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
        reason="only sm_90 has products that programs of a cluster share",
    ),
]

KERNEL = "cluster_linear_kernel"
NUM_ROWS = 64
# Of the weight. Both programs have whole tiles of K; the second has only a part of its last one, or
# none of it and the first a part or all.
SHAPES = (
    (4_096, 8_192),
    (4_096, 12_288),
    (4_030, 8_376),
    (3_842, 8_200),
    (6_144, 4_096),
    (6_146, 4_104),
    (8_192, 4_160),
    (7_166, 4_216),
)


def is_shared(call: Callable[[], object]) -> bool:
    """Whether the call is the kernel's whose programs share tiles, and nothing else."""
    return launched_by(call) == [KERNEL]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shared_tiles_agree_with_a_product_in_float64(
    shape: tuple[int, int], has_bias: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(shape[0])
    x, weight = poisoned(NUM_ROWS, shape[1], dtype), poisoned(*shape, dtype)
    bias = torch.randn(shape[0], dtype=dtype, device="cuda") if has_bias else None
    target = torch.full((NUM_ROWS + 2, shape[0] + 6), 7.0, dtype=dtype, device="cuda")
    out = target[1:-1, 2:-4]
    linear = linear_of(dtype)
    assert is_shared(lambda: linear(x, weight, bias, layout=RowMajor(), out=out))
    for _ in range(3):
        out.fill_(float("nan"))
        linear(x, weight, bias, layout=RowMajor(), out=out)
        assert_is_product(out, x, weight, bias)
        assert torch.equal(linear(x, weight, bias, layout=RowMajor()), out)
    out.fill_(7.0)
    assert (target == 7.0).all()


@pytest.mark.parametrize("shape", [(4_096, 8_192), (6_144, 4_096)], ids=str)
def test_each_half_of_a_tile_is_its_own_columns(shape: tuple[int, int]) -> None:
    """Small whole numbers, of which every sum is exact."""
    torch.manual_seed(0)
    x = torch.randint(-1, 2, (NUM_ROWS, shape[1]), device="cuda").to(torch.float16)
    weight = torch.randint(-1, 2, shape, device="cuda").to(torch.float16)
    linear = linear_of(torch.float16)
    assert is_shared(lambda: linear(x, weight, layout=RowMajor()))
    exact = (x.double() @ weight.double().T).half()
    assert torch.equal(linear(x, weight, layout=RowMajor()), exact)


def test_rows_may_be_of_any_shape_that_a_stride_walks() -> None:
    torch.manual_seed(0)
    linear = linear_of(torch.bfloat16)
    weight = torch.randn(4_096, 8_192, device="cuda").bfloat16()
    bias = torch.randn(1, device="cuda").bfloat16().expand(4_096)
    x = torch.randn(4, 16, 8_192, device="cuda").bfloat16()
    assert is_shared(lambda: linear(x, weight, bias, layout=RowMajor()))
    got = linear(x, weight, bias, layout=RowMajor())
    assert got.shape == (4, 16, 4_096)
    assert_is_product(got, x, weight, bias)


@pytest.mark.parametrize("shape", [(4_096, 8_192), (6_144, 4_096)], ids=str)
def test_results_that_are_not_stored_in_pairs_are_multiplied_otherwise(
    shape: tuple[int, int],
) -> None:
    torch.manual_seed(0)
    linear = linear_of(torch.bfloat16)
    columns = shape[0]
    x, weight = poisoned(NUM_ROWS, shape[1], torch.bfloat16), poisoned(*shape, torch.bfloat16)
    target = torch.full((NUM_ROWS, 2 * columns), 7.0, dtype=torch.bfloat16, device="cuda")
    odd = torch.full((NUM_ROWS, columns + 1), 7.0, dtype=torch.bfloat16, device="cuda")
    for out in (target[:, ::2], target[:, 1 : columns + 1], odd[:, :columns]):
        out.fill_(float("nan"))
        call = partial(linear, x, weight, layout=RowMajor(), out=out)
        assert not is_shared(call)
        call()
        assert_is_product(out, x, weight)
        out.fill_(7.0)
        assert (target == 7.0).all()
        assert (odd == 7.0).all()
    fewer = weight[:-1]
    assert_is_product(linear(x, fewer, layout=RowMajor()), x, fewer)


@pytest.mark.parametrize("shape", [(4_096, 8_192), (6_144, 4_096)], ids=str)
def test_a_recorded_product_reads_what_its_operands_hold_then(shape: tuple[int, int]) -> None:
    assert_replays(NUM_ROWS, shape, KERNEL)


@pytest.mark.parametrize(
    ("shapes", "kernels"),
    [
        # Both kinds by turns.
        ([(8_192, 4_096), (4_096, 8_192)], (KERNEL,)),
        ([(6_144, 4_096), (4_096, 6_144)], (KERNEL, "specialised_linear_kernel")),
    ],
    ids=str,
)
def test_each_product_is_read_after_the_kernel_that_writes_it(
    shapes: list[tuple[int, int]], kernels: tuple[str, ...]
) -> None:
    assert_each_waits(NUM_ROWS, shapes, kernels)


@pytest.mark.parametrize("shape", [(4_032, 8_704), (6_272, 4_352)], ids=str)
def test_what_is_prepared_serves_fewer_rows_and_rows_that_are_not_shared(
    shape: tuple[int, int],
) -> None:
    columns, depth = shape
    weight = torch.randn(shape, device="cuda").bfloat16()
    linear = linear_of(torch.bfloat16)
    example = {
        "x_TK": torch.empty(NUM_ROWS, depth, dtype=torch.bfloat16, device="meta"),
        "weight": torch.empty(shape, dtype=torch.bfloat16, device="meta"),
        "layout": RowMajor(),
    }
    apart = torch.empty(NUM_ROWS, 2 * columns, dtype=torch.bfloat16, device="meta")[:, ::2]
    examples = [example, example | {"out": apart}]
    prepare("linear", examples, backend="triton", arch=detect_arch(), dtype=torch.bfloat16)
    # Rows that are not fed may be so far apart as is compiled alike: multiples of 16.
    x = torch.randn(NUM_ROWS, depth + 16, device="cuda").bfloat16()
    target = torch.empty(NUM_ROWS, 2 * columns, dtype=torch.bfloat16, device="cuda")[:, ::2]
    with sealed():
        for rows in (x[:, :depth], x[:-1, 16:], x[:32, 16:], x[:17, :depth]):
            assert_is_product(linear(rows, weight, layout=RowMajor()), rows, weight)
        linear(x[:, :depth], weight, layout=RowMajor(), out=target)
        assert_is_product(target, x[:, :depth], weight)
