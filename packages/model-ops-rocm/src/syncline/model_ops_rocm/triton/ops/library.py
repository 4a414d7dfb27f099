"""Products by the vendor's library, through PyTorch, where the tables say that it is faster.

Unit: one product of 16-bit matrices. PyTorch's switches for sums in less than float32 are off while
a product is asked for: what a contract says of its sums does not depend on who set them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

from syncline.model_ops_rocm.triton.geometry import Matrix

_SWITCHES: Final = (
    "allow_bf16_reduced_precision_reduction",
    "allow_fp16_reduced_precision_reduction",
)


@contextmanager
def sums_in_float32() -> Iterator[None]:
    """Inside, parts of a sum stay float32, and so do fp16's sums themselves."""
    flags = torch.backends.cuda.matmul
    accumulates = flags.allow_fp16_accumulation
    earlier = {
        name: (getattr(flags, name), getattr(flags, f"{name}_split_k")) for name in _SWITCHES
    }
    try:
        flags.allow_fp16_accumulation = False
        for name in _SWITCHES:
            setattr(flags, name, False)
        yield
    finally:
        flags.allow_fp16_accumulation = accumulates
        for name, value in earlier.items():
            setattr(flags, name, value)


def reads(*matrices: Matrix) -> bool:
    """Whether the library takes them where they lie, without a copy."""
    return all(one.last_stride == 1 for one in matrices)


def multiply(
    x_TK: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    """out = x @ weight^T + bias; the leading dimensions of x and of out are one."""
    x, written = x_TK.view(-1, x_TK.shape[-1]), out.view(-1, out.shape[-1])
    with sums_in_float32():
        if bias is None:
            torch.mm(x, weight.T, out=written)
        else:
            torch.addmm(bias, x, weight.T, out=written)
