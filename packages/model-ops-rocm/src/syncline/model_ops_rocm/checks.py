"""Refusals of bad op arguments, one wording for all; knows no op.

Cheap on purpose: a few attribute reads per call, no look at a tensor's values.
"""

import math
from collections.abc import Mapping
from typing import NoReturn, TypeGuard

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


def require_apart(
    op: str,
    results: Mapping[str, torch.Tensor | None],
    inputs: Mapping[str, torch.Tensor | None],
) -> None:
    """No result has a byte of an input, nor of another result: both would be read after a write.

    Views that take turns in the rows of one buffer are apart, as q, k and v of one product are.
    """
    written = [(name, _extent(tensor), tensor) for name, tensor in results.items() if _has(tensor)]
    if not written:
        return
    others = [(name, _extent(tensor), tensor) for name, tensor in inputs.items() if _has(tensor)]
    for index, (name, (start, end), tensor) in enumerate(written):
        for other_name, (other_start, other_end), other in (*written[:index], *others):
            if start < other_end and other_start < end and not _take_turns(tensor, other):
                refuse(op, name, f"be apart from {other_name}", "tensors that share bytes")


def _has(tensor: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    return tensor is not None and not tensor.is_meta and tensor.numel() != 0


def _address(tensor: torch.Tensor) -> int:
    # Not the tensor's `data_ptr`: a step that is recorded refuses whoever asks for that.
    return tensor.untyped_storage().data_ptr() + int(tensor.storage_offset()) * tensor.itemsize


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The address of the first byte and the one after the last."""
    start = _address(tensor)
    if tensor.is_contiguous():
        return start, start + tensor.numel() * tensor.itemsize
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.itemsize


def _take_turns(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both have rows at the same distance, and bytes of a row that the other has not."""
    rows, other_rows = _rows(one), _rows(other)
    if rows is None or other_rows is None or rows[1] != other_rows[1]:
        return False
    width, distance = rows
    other_width, _ = other_rows
    ahead = (_address(other) - _address(one)) % distance
    return width <= ahead and ahead + other_width <= distance


def _rows(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Bytes of a row, and from one row to the next; None if it does not consist of such rows."""
    width = 1
    for dim in reversed(range(tensor.ndim)):
        size, step = tensor.shape[dim], tensor.stride(dim)
        if size == 1 or step == width:
            width *= size
            continue
        # Whatever is before counts rows, one after the other.
        if step <= 0:
            return None
        distance = step
        for outer in reversed(range(dim + 1)):
            if tensor.shape[outer] != 1 and tensor.stride(outer) != step:
                return None
            step *= tensor.shape[outer]
        return width * tensor.itemsize, distance * tensor.itemsize
    return None


def is_same_view(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both are the same elements of the same memory, of one dtype, in the same order."""
    shapes = (one.dtype, one.shape, one.stride()), (other.dtype, other.shape, other.stride())
    return shapes[0] == shapes[1] and _address(one) == _address(other)
