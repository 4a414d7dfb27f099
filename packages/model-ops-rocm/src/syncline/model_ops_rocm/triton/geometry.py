"""How a tensor of rows is addressed by a kernel: two leading indices and the last one.

Unit: one tensor. Contracts leave strides free, so kernels take them; what does not fit in three
strides is refused, never copied. What is said here depends on the number of dimensions and on the
sizes of the last two, never on how many tokens a step has: that number must not compile anything.
"""

from math import prod
from typing import NamedTuple

import torch

from syncline.model_ops_rocm.checks import refuse


class Rows(NamedTuple):
    """Row r is at (r // inner) * outer_stride + (r % inner) * inner_stride."""

    num_rows: int
    inner: int
    outer_stride: int
    inner_stride: int
    last_stride: int

    @property
    def strides(self) -> tuple[int, int, int]:
        return self.outer_stride, self.inner_stride, self.last_stride


def rows_of(op: str, argument: str, tensor: torch.Tensor) -> Rows:
    """The rows of `tensor`, its last dimension being one row.

    The last dimension but one is walked by its own stride; those before it by one. ValueError if
    they cannot be.
    """
    num_rows, last = prod(tensor.shape[:-1]), tensor.stride(-1)
    if tensor.ndim == 1:
        return Rows(num_rows, 1, 0, 0, last)
    if tensor.ndim == 2:
        return Rows(num_rows, 1, tensor.stride(0), 0, last)
    outer_stride = tensor.stride(-3)
    walked = outer_stride * tensor.shape[-3]
    for size, stride in zip(tensor.shape[-4::-1], tensor.stride()[-4::-1], strict=True):
        if size != 1 and num_rows != 0 and stride != walked:
            limit = "have leading dimensions that one stride can walk"
            refuse(op, argument, limit, f"shape {list(tensor.shape)}, strides {tensor.stride()}")
        walked *= size
    return Rows(num_rows, tensor.shape[-2], outer_stride, tensor.stride(-2), last)


def power_of_two(width: int) -> int:
    """The smallest power of two that is at least `width`."""
    return 1 << max(width - 1, 0).bit_length()


class Matrix(NamedTuple):
    """Row r is at r * stride, its elements `last_stride` apart."""

    num_rows: int
    stride: int
    last_stride: int


def matrix_of(op: str, argument: str, tensor: torch.Tensor) -> Matrix:
    """All leading dimensions as one. ValueError if no single stride walks them."""
    num_rows, last = prod(tensor.shape[:-1]), tensor.stride(-1)
    stride, walked = tensor.shape[-1] * last, None
    for size, step in zip(tensor.shape[-2::-1], tensor.stride()[-2::-1], strict=True):
        if walked is None:
            stride = walked = step
        elif size != 1 and num_rows != 0 and step != walked:
            limit = "have leading dimensions that one stride can walk"
            refuse(op, argument, limit, f"shape {list(tensor.shape)}, strides {tensor.stride()}")
        walked *= size
    return Matrix(num_rows, stride, last)
