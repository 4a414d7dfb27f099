"""Products of up to 32 rows where programs of a cluster have three tiles, on a GPU that has any."""

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
        reason="only sm_90 has programs of a cluster that have tiles together",
    ),
]

KERNEL = "thirds_linear_kernel"
# Of the weight. The last three tiles are all there, or one, or two and a part of the third; K ends
# with tiles of both programs, or in one that the second has not.
SHAPES = ((6_144, 4_096), (5_761, 4_104), (6_335, 4_352), (5_822, 4_608), (6_144, 12_288))


def are_thirds(call: Callable[[], object]) -> bool:
    """Whether the call is the kernel's whose clusters have three tiles, and nothing else."""
    return launched_by(call) == [KERNEL]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("num_rows", [2, 7, 16, 17, 31, 32])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_three_tiles_agree_with_a_product_in_float64(
    shape: tuple[int, int], num_rows: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(num_rows)
    x, weight = poisoned(num_rows, shape[1], dtype), poisoned(*shape, dtype)
    bias = torch.randn(shape[0], dtype=dtype, device="cuda")
    target = torch.full((num_rows + 2, 2 * shape[0] + 5), 7.0, dtype=dtype, device="cuda")
    linear = linear_of(dtype)
    for out in (target[1:-1, 3 : shape[0] + 3], target[1:-1, 1 : 2 * shape[0] + 1 : 2]):
        for added in (None, bias):
            call = partial(linear, x, weight, added, layout=RowMajor(), out=out)
            assert are_thirds(call)
            for _ in range(2):
                out.fill_(float("nan"))
                call()
                assert_is_product(out, x, weight, added)
                assert torch.equal(linear(x, weight, added, layout=RowMajor()), out)
        out.fill_(7.0)
        assert (target == 7.0).all()


@pytest.mark.parametrize("num_rows", [16, 27])
def test_each_half_of_a_third_tile_is_its_own_rows(num_rows: int) -> None:
    """Small whole numbers, of which every sum is exact."""
    torch.manual_seed(0)
    x = torch.randint(-1, 2, (num_rows, 4_096), device="cuda").to(torch.float16)
    weight = torch.randint(-1, 2, (6_144, 4_096), device="cuda").to(torch.float16)
    linear = linear_of(torch.float16)
    assert are_thirds(lambda: linear(x, weight, layout=RowMajor()))
    exact = (x.double() @ weight.double().T).half()
    assert torch.equal(linear(x, weight, layout=RowMajor()), exact)


@pytest.mark.parametrize("num_rows", [5, 30])
def test_a_recorded_product_reads_what_its_operands_hold_then(num_rows: int) -> None:
    assert_replays(num_rows, (6_144, 4_096), KERNEL)


@pytest.mark.parametrize("num_rows", [16, 32])
@pytest.mark.parametrize(
    ("shapes", "kernels"),
    [
        ([(6_144, 6_144)], (KERNEL,)),
        # As in a layer, one after another of another kind.
        ([(6_144, 4_096), (4_096, 6_144)], (KERNEL, "specialised_linear_kernel")),
    ],
    ids=str,
)
def test_each_product_is_read_after_the_kernel_that_writes_it(
    shapes: list[tuple[int, int]], kernels: tuple[str, ...], num_rows: int
) -> None:
    assert_each_waits(num_rows, shapes, kernels)


@pytest.mark.parametrize(("num_rows", "fewest"), [(16, 2), (32, 17)])
def test_what_is_prepared_serves_fewer_rows(num_rows: int, fewest: int) -> None:
    shape = (6_208, 4_352)
    weight = torch.randn(shape, device="cuda").bfloat16()
    linear = linear_of(torch.bfloat16)
    example = {
        "x_TK": torch.empty(num_rows, shape[1], dtype=torch.bfloat16, device="meta"),
        "weight": torch.empty(shape, dtype=torch.bfloat16, device="meta"),
        "layout": RowMajor(),
    }
    prepare("linear", [example], backend="triton", arch=detect_arch(), dtype=torch.bfloat16)
    x = torch.randn(num_rows, shape[1] + 16, device="cuda").bfloat16()
    with sealed():
        for rows in (x[:, 16:], x[:-1, : shape[1]], x[:fewest, 16:]):
            assert_is_product(linear(rows, weight, layout=RowMajor()), rows, weight)
