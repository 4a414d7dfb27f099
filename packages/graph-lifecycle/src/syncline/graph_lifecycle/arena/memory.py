"""Raw memory for arenas: aligned carving, the poison pattern, tombstones; knows no tags.

Poison is a byte repeated over a whole storage, chosen so that every float type reads NaN.
What has no NaN reads something that no run produces by accident: -1 or the highest unsigned
value for integers (0xFF), True for bool (0x01), (-6, -6) for the packed float4 pairs (0xFF).
"""

from collections.abc import Sequence as SequenceABC
from contextlib import ExitStack

import torch
from torch import Tensor

ALIGNMENT = 256
"""Bytes; what kernels ask of a base address, and what every allocation is rounded up to."""

_CPU_ALIGNMENT = 64  # What PyTorch's CPU allocator gives by itself.

# The fnuz formats have one NaN, 0x80 (0xFF is their lowest finite number); bool has no 0xFF.
_POISON_BYTES = {
    torch.float8_e4m3fnuz: 0x80,
    torch.float8_e5m2fnuz: 0x80,
    torch.bool: 0x01,
}


def poison_byte(dtype: torch.dtype) -> int:
    return _POISON_BYTES.get(dtype, 0xFF)


def padded_bytes(num_bytes: int) -> int:
    """`num_bytes` rounded up to ALIGNMENT."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def outside_autograd() -> ExitStack:
    """No gradients and no inference mode: what is made here may be written in any mode."""
    stack = ExitStack()
    stack.enter_context(torch.inference_mode(False))
    stack.enter_context(torch.no_grad())
    return stack


def new_storage(num_bytes: int, device: torch.device) -> torch.UntypedStorage:
    """Uninitialised memory with room for `num_bytes` from an address aligned to ALIGNMENT."""
    slack = ALIGNMENT - _CPU_ALIGNMENT if device.type == "cpu" else 0
    return _raw(padded_bytes(num_bytes) + slack, device)


def unbound(dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor without memory, to be bound to some; outside autograd.

    In its deterministic mode PyTorch fills what it allocates, even nothing, and cannot fill packed
    fp4: what is asked for is bytes.
    """
    return torch.empty(0, dtype=torch.uint8, device=device).view(dtype)


def bind(
    tensor: Tensor, storage: torch.UntypedStorage, shape: SequenceABC[int], dtype: torch.dtype
) -> None:
    """Make `tensor` the contiguous tensor at the first aligned address of `storage`."""
    head = -storage.data_ptr() % ALIGNMENT
    tensor.set_(storage, head // dtype.itemsize, tuple(shape), _contiguous_strides(shape))


def bind_tombstone(tensor: Tensor, shape: SequenceABC[int]) -> torch.UntypedStorage:
    """Make every element of `tensor` the same poisoned one; returns those few bytes.

    It keeps its shape and dtype, reads poison, and holds no memory to speak of: safer than a
    tensor whose storage is gone, which would end the process at the first read.
    """
    storage = _raw(_CPU_ALIGNMENT, tensor.device)
    fill_poison(storage, tensor.dtype)
    tensor.set_(storage, 0, tuple(shape), (0,) * len(shape))
    return storage


def fill_poison(storage: torch.UntypedStorage, dtype: torch.dtype) -> None:
    _words(storage).fill_(_poison_word(dtype))


def is_poison(storage: torch.UntypedStorage, dtype: torch.dtype) -> bool:
    """Is every byte of `storage` poison."""
    word = _poison_word(dtype)
    words = _words(storage)
    step = 1 << 22  # Bounds the temporary of the comparison.
    starts = range(0, len(words), step)
    return all(bool((words[start : start + step] == word).all()) for start in starts)


def _raw(num_bytes: int, device: torch.device) -> torch.UntypedStorage:
    return torch.empty(num_bytes, dtype=torch.uint8, device=device).untyped_storage()


def _words(storage: torch.UntypedStorage) -> Tensor:
    words = unbound(torch.int64, storage.device)
    return words.set_(storage, 0, (storage.nbytes() // 8,), (1,))


def _poison_word(dtype: torch.dtype) -> int:
    return int.from_bytes(bytes([poison_byte(dtype)] * 8), "little", signed=True)


def _contiguous_strides(shape: SequenceABC[int]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
