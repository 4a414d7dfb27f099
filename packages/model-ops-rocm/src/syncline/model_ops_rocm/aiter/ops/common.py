"""What all of AITER's calls need of their tensors; knows no op."""

import torch

from syncline.model_ops_rocm.aiter.detect import Aiter
from syncline.model_ops_rocm.checks import refuse

HALVES = (torch.bfloat16, torch.float16)


class AiterOp:
    """An op of one AITER; keeps no tensor."""

    __slots__ = ("aiter",)

    def __init__(self, aiter: Aiter) -> None:
        self.aiter = aiter


def require_halves(op: str, argument: str, tensor: torch.Tensor) -> None:
    if tensor.dtype not in HALVES:
        refuse(op, argument, "be bfloat16 or float16 for AITER", tensor.dtype)


def require_device(op: str, aiter: Aiter, **tensors: torch.Tensor | None) -> torch.device:
    """All on one device that AITER's kernels run on: they take a pointer for what it is not."""
    device: torch.device | None = None
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if tensor.device.type != aiter.device_type:
            refuse(op, name, f"be on {aiter.device_type} for AITER", tensor.device)
        if device is not None and tensor.device != device:
            refuse(op, name, f"be on {device} as the others are", tensor.device)
        device = tensor.device
    assert device is not None
    return device


def refuse_batch_invariant(op: str, batch_invariant: bool) -> None:
    if batch_invariant:
        refuse(op, "batch_invariant", "be False for AITER: its kernels vary with the batch", True)


def to_write(
    out: torch.Tensor | None, shape: tuple[int, ...] | torch.Size, like: torch.Tensor
) -> torch.Tensor:
    """Contiguous storage for a result: `out` if it is that, else new."""
    if out is not None and out.is_contiguous():
        return out
    return torch.empty(shape, dtype=like.dtype, device=like.device)


def written(out: torch.Tensor | None, result: torch.Tensor) -> torch.Tensor:
    """The result where the caller wants it."""
    if out is None or out is result:
        return result
    return out.copy_(result)


def as_tensor(value: object) -> torch.Tensor:
    assert isinstance(value, torch.Tensor)
    return value
