"""Which bytes tensors have, told from addresses, shapes and strides; knows no op.

Nothing here asks for a tensor's `data_ptr`, which a step that is recorded refuses. What has no
memory of its own to speak of (a meta tensor, one that is traced) shares none.
"""

from collections.abc import Mapping
from functools import lru_cache
from itertools import pairwise
from operator import itemgetter
from typing import Final, NamedTuple

import torch

_PLAIN: Final = torch.Tensor.__torch_dispatch__


class Strided(NamedTuple):
    """Where elements lie, in bytes from the first: runs without a gap, in levels of rows.

    `levels` are (how many, how far apart), from the widest step on; each step is above zero.
    """

    levels: tuple[tuple[int, int], ...]
    width: int  # of a run

    @property
    def reach(self) -> int:
        """From the first byte to the one after the last."""
        return self.width + sum((size - 1) * step for size, step in self.levels)

    @property
    def row(self) -> "Strided":
        """One of the outermost level."""
        return Strided(self.levels[1:], self.width)


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
    return address_of(one) == address_of(other) != 0 and all(
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
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    if not tensor.numel():
        return True
    if any(size > 1 and step == 0 for size, step in sizes):
        return False
    return _has_own_places(_strided(tensor))


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


def _strided(tensor: torch.Tensor) -> Strided:
    """Where its elements lie; what is repeated in one place lies there once."""
    width = tensor.itemsize
    steps = sorted(
        (step * width, size)
        for size, step in zip(tensor.shape, tensor.stride(), strict=True)
        if size != 1 and step != 0
    )
    while steps and steps[0][0] == width:
        width *= steps.pop(0)[1]
    merged: list[tuple[int, int]] = []
    for step, size in steps:
        # Two dimensions that count the same rows, one after the other, are one.
        if merged and step == merged[-1][0] * merged[-1][1]:
            merged[-1] = (merged[-1][0] * size, merged[-1][1])
        else:
            merged.append((size, step))
    return Strided(tuple(reversed(merged)), width)


def _has_own_places(one: Strided) -> bool:
    steps = [step for _, step in one.levels]
    if min(steps, default=one.width) < one.width or len(set(steps)) < len(steps):
        return False  # the second run begins in the first, or in the second of another level
    reach = one.width
    for size, step in reversed(one.levels):
        if step < reach:
            return all(after - before >= one.width for before, after in pairwise(_starts(one)))
        reach += (size - 1) * step
    return True


@lru_cache(maxsize=4096)
def _overlap(one: Strided, other: Strided, ahead: int) -> bool:
    """Whether they share a byte; the other begins `ahead` bytes after the one, or before it."""
    if ahead >= one.reach or -ahead >= other.reach:
        return False
    if not one.levels and not other.levels:
        return True
    if not one.levels:
        return _overlap(other, one, -ahead)
    step, row = one.levels[0][1], one.row
    if other.levels and other.levels[0][1] > step:
        return _overlap(other, one, -ahead)
    if row.reach <= step:
        if not other.levels:
            return _reaches(one, other, ahead)
        if other.reach <= step:
            return _meets_a_row(one, 1, other, ahead)
        (count, own), other_row = other.levels[0], other.row
        if own == step and other_row.reach <= step:
            return _meets_a_row(one, count, other_row, ahead)
        parts = None if own == step else _split(other, step)
        if parts is not None:
            return any(_overlap(one, part, ahead + at) for part, at in parts)
    return _meet(_starts(one), one.width, [ahead + start for start in _starts(other)], other.width)


def _meets_a_row(one: Strided, count: int, row: Strided, ahead: int) -> bool:
    """Whether `count` rows as far apart as those of `one`, and no longer, reach into those."""
    (size, step), own = one.levels[0], one.row
    # Each begins in the row that is `first` rows on, and ends in it or in the next.
    first, place = divmod(ahead, step)
    return any(
        1 - count <= rows < size and _overlap(own, row, at)
        for rows, at in ((first, place), (first + 1, place - step))
    )


def _split(one: Strided, step: int) -> list[tuple[Strided, int]] | None:
    """Its outermost level as two, of which one steps by `step`, and what is left of it."""
    (size, own), rest = one.levels[0], one.levels[1:]
    inner = step // own
    if step % own or size < inner:
        return None
    whole, left = divmod(size, inner)
    parts = [(Strided(((whole, step), (inner, own), *rest), one.width), 0)]
    if left:
        parts.append((Strided(((left, own), *rest), one.width), whole * step))
    return parts


def _reaches(one: Strided, run: Strided, ahead: int) -> bool:
    """Whether a run reaches into rows that do not reach into one another."""
    (size, step), row = one.levels[0], one.row
    first = max(-(-(ahead - row.reach + 1) // step), 0)
    last = min((ahead + run.width - 1) // step, size - 1)
    # Rows between the first and the last begin and end in the run.
    return last - first >= 2 or any(
        _overlap(row, run, ahead - index * step) for index in range(first, last + 1)
    )


def _meet(ours: list[int], width: int, theirs: list[int], other_width: int) -> bool:
    at = 0
    for start in ours:
        while at < len(theirs) and theirs[at] + other_width <= start:
            at += 1
        if at < len(theirs) and theirs[at] < start + width:
            return True
    return False


def _starts(one: Strided) -> list[int]:
    """Where each run begins, in order: for what lies as no tensor of a model does."""
    starts = [0]
    for size, step in one.levels:
        starts = [start + index * step for start in starts for index in range(size)]
    return sorted(starts)
