"""Products by Triton on a GPU: the op, operands inside of NaN, and what holds of any of them."""

from collections.abc import Callable
from collections.abc import Sequence as SequenceABC
from typing import cast

import torch

from syncline.model_ops_rocm.arch import detect_arch
from syncline.model_ops_rocm.layouts import RowMajor
from syncline.model_ops_rocm.registry import select
from syncline.model_ops_rocm.testing.launches import launched_by
from syncline.model_ops_rocm.testing.parity import recorded


def linear_of(dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    """`linear` of the current device."""
    found = select("linear", backend="triton", arch=detect_arch(), dtype=dtype)
    return cast(Callable[..., torch.Tensor], found)


def poisoned(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Random, inside of a larger matrix that is NaN elsewhere."""
    whole = torch.full((rows + 3, columns + 24), float("nan"), dtype=dtype, device="cuda")
    inner = whole[:rows, 8 : columns + 8]
    inner.normal_()
    return inner


def assert_is_product(
    got: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> None:
    """`got` is x @ weight^T + bias, as near as 16 bits are."""
    exact = x.double() @ weight.double().T
    if bias is not None:
        exact += bias.double()
    assert (got.double() - exact).norm() < 2.5e-3 * exact.norm()


def assert_replays(num_rows: int, shape: tuple[int, int], kernel: str) -> None:
    """A recorded product, `kernel`'s alone, reads what x and a weight of `shape` hold then."""
    torch.manual_seed(0)
    linear = linear_of(torch.bfloat16)
    weight = torch.randn(shape, device="cuda").bfloat16()
    x = torch.randn(num_rows, shape[1], device="cuda").bfloat16()
    out = torch.empty(num_rows, shape[0], dtype=torch.bfloat16, device="cuda")

    def call() -> torch.Tensor:
        return linear(x, weight, layout=RowMajor(), out=out)

    assert launched_by(call) == [kernel]
    graph, _ = recorded(call)
    for _ in range(3):
        x.normal_()
        weight.normal_()
        out.fill_(float("nan"))
        graph.replay()
        assert_is_product(out, x, weight)
        assert torch.equal(out, linear(x, weight, layout=RowMajor()))


def assert_each_waits(
    num_rows: int, shapes: SequenceABC[tuple[int, int]], kernels: SequenceABC[str]
) -> None:
    """Of twelve products, each of the one before, none reads that too soon; by all of `kernels`."""
    torch.manual_seed(0)
    linear = linear_of(torch.bfloat16)
    shapes = [*shapes] * (12 // len(shapes))
    weights = [torch.randn(shape, device="cuda").bfloat16() / shape[1] ** 0.5 for shape in shapes]
    first = torch.randn(num_rows, shapes[0][1], device="cuda").bfloat16()
    rows = [
        torch.empty(num_rows, shape[0], dtype=torch.bfloat16, device="cuda") for shape in shapes
    ]

    def chain() -> torch.Tensor:
        x = first
        for weight, out in zip(weights, rows, strict=True):
            x = linear(x, weight, layout=RowMajor(), out=out)
        return x

    assert set(launched_by(chain)) == set(kernels)
    graph, captured = recorded(chain)
    for _ in range(20):
        first.normal_()
        graph.replay()
        got = captured.clone()
        x = first
        for weight in weights:
            wanted = linear(x, weight, layout=RowMajor())
            torch.cuda.synchronize()
            assert_is_product(wanted, x, weight)
            x = wanted
        assert torch.equal(got, x)
