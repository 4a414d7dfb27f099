"""Refusals of bad op arguments, one wording for all; knows no op.

Cheap on purpose: a few attribute reads per call, no look at a tensor's values.
"""

import math
from typing import NoReturn

import torch

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INDEX_DTYPES = (torch.int64, torch.int32)


def refuse(op: str, argument: str, limit: str, got: object) -> NoReturn:
    """Raise the ValueError every op raises: op, argument, limit, value."""
    raise ValueError(f"{op}: {argument} must {limit}, got {got}")


def require_positive(op: str, argument: str, value: object) -> None:
    """A number, not a tensor: a finite one above zero."""
    if isinstance(value, int | float) and not isinstance(value, bool) and 0.0 < value < math.inf:
        return
    refuse(op, argument, "be positive and finite", value)


def is_whole(value: object) -> bool:
    """A whole number, and neither a truth value nor a tensor."""
    return isinstance(value, int) and not isinstance(value, bool)


def require_float(op: str, argument: str, tensor: torch.Tensor) -> None:
    if tensor.dtype not in FLOAT_DTYPES:
        refuse(op, argument, "be float32, bfloat16 or float16", tensor.dtype)


def require_dtype(op: str, argument: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    if tensor.dtype is not dtype:
        refuse(op, argument, f"be {dtype}", tensor.dtype)


def require_index(op: str, argument: str, tensor: torch.Tensor, length: int | None) -> None:
    """A vector of int64 or int32, of `length` entries unless that is None."""
    if tensor.dtype not in INDEX_DTYPES:
        refuse(op, argument, "be int64 or int32", tensor.dtype)
    if tensor.ndim != 1 or (length is not None and tensor.shape[0] != length):
        wanted = "any length" if length is None else f"{length} entries"
        refuse(op, argument, f"be one-dimensional with {wanted}", list(tensor.shape))


def require_shape(
    op: str, argument: str, tensor: torch.Tensor, shape: tuple[int, ...] | torch.Size
) -> None:
    if tensor.shape != shape:
        refuse(op, argument, f"have shape {list(shape)}", list(tensor.shape))


def require_ndim(op: str, argument: str, tensor: torch.Tensor, ndim: int) -> None:
    if tensor.ndim != ndim:
        refuse(op, argument, f"have {ndim} dimensions", list(tensor.shape))


def require_contiguous(op: str, argument: str, tensor: torch.Tensor) -> None:
    if not tensor.is_contiguous():
        refuse(op, argument, "be contiguous", f"strides {tensor.stride()}")


def require_pairs(op: str, pairs: torch.Tensor) -> None:
    """(source, destination) rows on the device."""
    if pairs.dtype not in INDEX_DTYPES:
        refuse(op, "pairs", "be int64 or int32", pairs.dtype)
    if pairs.ndim != 2 or pairs.shape[1] != 2:
        refuse(op, "pairs", "have shape [C, 2]", list(pairs.shape))
    require_contiguous(op, "pairs", pairs)


def require_workspace(op: str, workspace: torch.Tensor | None, num_bytes: int) -> torch.Tensor:
    """The workspace, which has at least `num_bytes`."""
    limit = f"be contiguous uint8 with at least {num_bytes} entries"
    if workspace is None:
        refuse(op, "workspace", limit, None)
    if (
        workspace.dtype is not torch.uint8
        or workspace.ndim != 1
        or not workspace.is_contiguous()
        or workspace.shape[0] < num_bytes
    ):
        refuse(op, "workspace", limit, f"{workspace.dtype} {list(workspace.shape)}")
    return workspace


def require_counters(op: str, counters: torch.Tensor, size: int) -> torch.Tensor:
    """The counters of a merge within a launch, of which there are at least `size`."""
    limit = f"be contiguous int32 with at least {size} entries"
    if (
        counters.dtype is not torch.int32
        or counters.ndim != 1
        or not counters.is_contiguous()
        or counters.shape[0] < size
    ):
        refuse(op, "counters", limit, f"{counters.dtype} {list(counters.shape)}")
    return counters


def require_out(
    op: str, out: torch.Tensor, shape: tuple[int, ...] | torch.Size, dtype: torch.dtype
) -> None:
    require_shape(op, "out", out, shape)
    require_dtype(op, "out", out, dtype)
    if any(size > 1 and not step for size, step in zip(out.shape, out.stride(), strict=True)):
        refuse(op, "out", "have a place of its own for each element", f"strides {out.stride()}")
