"""Refusals of bad op arguments, one wording for all; knows no op.

Cheap on purpose: a few attribute reads per call, no look at a tensor's values.
"""

import math
from collections.abc import Mapping
from typing import NoReturn

import torch

from syncline.model_ops_rocm.memory import first_shared, has_own_places

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


def require_kind(op: str, argument: str, value: object, kind: type) -> None:
    """A value of that class: a name that stands for one, or the parts of one, is none."""
    if not isinstance(value, kind):
        refuse(op, argument, f"be of class {kind.__name__}", repr(value))


def require_tensors(op: str, argument: str, value: object, number: int = 2) -> None:
    """A tuple of so many tensors."""
    entries = value if isinstance(value, tuple) else ()
    if len(entries) != number or not all(isinstance(entry, torch.Tensor) for entry in entries):
        refuse(op, argument, f"be a tuple of {number} tensors", repr(value))


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


def workspace_of(
    op: str, workspace: torch.Tensor | None, num_bytes: int, device: torch.device
) -> torch.Tensor:
    """The workspace, which has at least `num_bytes`, or new memory."""
    if workspace is None:
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    limit = f"be contiguous uint8 with at least {num_bytes} entries"
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


def require_apart(
    op: str,
    results: Mapping[str, torch.Tensor | None],
    inputs: Mapping[str, torch.Tensor | None],
) -> None:
    """No result has a byte of an input, of another result, or of itself once more."""
    if torch.compiler.is_compiling():  # by PyTorch, which traces no address
        return
    for name, result in results.items():
        if result is not None and not has_own_places(result):
            limit = "have a place of its own for each element"
            refuse(op, name, limit, f"strides {result.stride()}")
    found = first_shared(results, inputs)
    if found is not None:
        refuse(op, found[0], f"be apart from {found[1]}", "tensors that share bytes")
