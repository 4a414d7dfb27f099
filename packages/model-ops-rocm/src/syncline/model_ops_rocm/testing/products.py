"""Products by Triton on a GPU: the op, operands inside of NaN, and what a result must be."""

from collections.abc import Callable
from typing import cast

import torch

from syncline.model_ops_rocm.arch import detect_arch
from syncline.model_ops_rocm.registry import select


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
