"""Which bytes tensors have, told from addresses, shapes and strides; knows no op.

Nothing here asks for a tensor's `data_ptr`, which a step that is recorded refuses. What has no
memory of its own to speak of (a meta tensor, one that is traced) shares none.
"""

from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import pairwise
from operator import itemgetter
from typing import Final, NamedTuple

import torch

_PLAIN: Final = torch.Tensor.__torch_dispatch__


class Strided(NamedTuple):
    """Where elements lie, in bytes from the first; sizes and steps from the widest step on."""

    sizes: tuple[int, ...]
    steps: tuple[int, ...]
    width: int  # of the run that one entry of `sizes` is: elements without a gap


def address_of(tensor: torch.Tensor) -> int:
    """Of the first element; 0 if it has no memory."""
    if tensor.is_meta or type(tensor).__torch_dispatch__ is not _PLAIN:
        return 0
    try:
        start = tensor.untyped_storage().data_ptr()
    except RuntimeError:  # a tensor that stands for another one
        return 0
    return start and start + int(tensor.storage_offset()) * tensor.itemsize


def extent_of(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of the first byte and after the last; (0, 0) if there is none."""
    num_elements, start = tensor.numel(), address_of(tensor)
    if not num_elements or not start:
        return 0, 0
    if tensor.is_contiguous():
        return start, start + num_elements * tensor.itemsize
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.itemsize


def is_same_view(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both are the same elements of the same memory, of one dtype, in the same order."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    steps = zip(one.shape, one.stride(), other.stride(), strict=True)
    return address_of(one) == address_of(other) and all(
        size == 1 or step == other_step for size, step, other_step in steps
    )


def share_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Exact: views that take turns in one buffer, as q, k and v of one product do, share none."""
    (start, end), (other_start, other_end) = extent_of(one), extent_of(other)
    if start >= other_end or other_start >= end:
        return False
    return _overlap(_strided(one), _strided(other), other_start - start)


def has_own_places(tensor: torch.Tensor) -> bool:
    """Whether no two elements lie in one place. Exact."""
    if tensor.is_contiguous():
        return True
    sizes, steps, width = _strided(tensor)
    reach = width
    for size, step in zip(reversed(sizes), reversed(steps), strict=True):
        if step < reach:
            return _are_apart(sizes, steps, width)
        reach += (size - 1) * step
    return True


def first_shared(
    results: Mapping[str, torch.Tensor | None], inputs: Mapping[str, torch.Tensor | None]
) -> tuple[str, str] | None:
    """The names of a result and of an input or an earlier result that share bytes, if any do."""
    written = [(*extent_of(one), name, one) for name, one in results.items() if one is not None]
    if not written:
        return None
    read = [(*extent_of(one), name, one) for name, one in inputs.items() if one is not None]
    reach = 0
    for start, end, *_ in sorted((*written, *read), key=itemgetter(0)):
        if start < reach:
            break
        reach = max(reach, end)
    else:
        return None
    for index, (start, end, name, one) in enumerate(written):
        for other_start, other_end, other_name, other in (*written[:index], *read):
            if start < other_end and other_start < end and share_bytes(one, other):
                return name, other_name
    return None


@lru_cache(maxsize=256)
def _are_apart(sizes: tuple[int, ...], steps: tuple[int, ...], width: int) -> bool:
    starts = sorted(_starts(sizes, steps))
    return all(after - before >= width for before, after in pairwise(starts))


def _strided(tensor: torch.Tensor) -> Strided:
    width = tensor.itemsize
    steps = sorted(
        (step * width, size)
        for size, step in zip(tensor.shape, tensor.stride(), strict=True)
        if size != 1
    )
    while steps and steps[0][0] == width:
        width *= steps.pop(0)[1]
    merged: list[tuple[int, int]] = []
    for step, size in steps:
        # Two dimensions that count the same rows, one after the other, are one.
        if merged and step == merged[-1][0] * merged[-1][1]:
            merged[-1] = (merged[-1][0], merged[-1][1] * size)
        else:
            merged.append((step, size))
    merged.reverse()
    return Strided(tuple(size for _, size in merged), tuple(step for step, _ in merged), width)


@lru_cache(maxsize=1024)
def _overlap(one: Strided, other: Strided, ahead: int) -> bool:
    """Whether two tensors whose extents overlap do; the other begins `ahead` bytes later."""
    levels = len(one.sizes), len(other.sizes)
    if levels == (0, 0):
        return True
    if max(levels) == 1 and 0 not in (*one.steps, *other.steps):
        # Rows at one distance, or a single row, which is as good as rows at the other's.
        distances = {*one.steps, *other.steps}
        if len(distances) == 1:
            distance = distances.pop()
            ahead %= distance
            if one.width <= ahead and ahead + other.width <= distance:
                return False
    ours = sorted(_starts(one.sizes, one.steps))
    theirs = sorted(ahead + start for start in _starts(other.sizes, other.steps))
    at = 0
    for start in ours:
        while at < len(theirs) and theirs[at] + other.width <= start:
            at += 1
        if at < len(theirs) and theirs[at] < start + one.width:
            return True
    return False


def _starts(sizes: tuple[int, ...], steps: tuple[int, ...]) -> Iterator[int]:
    """Where each run begins."""
    if not sizes:
        yield 0
        return
    for index in range(sizes[0]):
        for rest in _starts(sizes[1:], steps[1:]):
            yield index * steps[0] + rest
