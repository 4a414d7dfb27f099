"""What a sender's tensor must be, and byte-wise operations that every dtype has.

Answers about one tensor and one slot's dtypes; knows no update and no coverage. Copies and
comparisons go through bytes because not every storage dtype has its own on every device.
"""

from collections.abc import Iterable, Mapping

import torch

from syncline.weight_sync.errors import DtypeMismatchError, UnusableTensorError
from syncline.weight_sync.slots import WeightSlot

_FINITE_CHUNK = 1 << 20


def require_usable(name: str, tensor: torch.Tensor, stored_at: Mapping[int, torch.Tensor]) -> None:
    """Raise UnusableTensorError for a tensor whose bytes cannot be read as they are.

    `stored_at` has the stored tensors by the addresses where their storages began: a source inside
    one of them would be overwritten while it is read.
    """
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        kind = type(tensor).__name__
        raise UnusableTensorError(name, f"is a {kind}; send its full plain tensor")
    if tensor.is_meta:
        raise UnusableTensorError(name, "is a meta tensor and holds no bytes")
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise UnusableTensorError(name, f"must be dense, got {tensor.layout}")
    address = tensor.untyped_storage().data_ptr()
    stored = stored_at.get(address)
    # Where a storage was released meanwhile, the sender's memory may begin.
    is_own = stored is not None and stored.untyped_storage().data_ptr() == address
    if tensor.numel() and is_own:
        raise UnusableTensorError(name, "is the engine's own memory; send a copy")


def require_dtype(name: str, dtype: torch.dtype, slot: WeightSlot) -> None:
    """Raise DtypeMismatchError unless `slot` can be encoded from this dtype by value.

    Floats of 16 bits and more are converted by the encoder. A narrower float means nothing
    without a scale from elsewhere, so it is taken only as the very bytes a slot stores; so is an
    integer, and only by a slot of integers.
    """
    stored = {tensor.dtype for tensor in slot.storage.values()}
    if len(slot.storage) == 1 and dtype in stored:
        if dtype.is_floating_point == slot.is_floating:
            return
    elif slot.is_floating and dtype.is_floating_point and dtype.itemsize >= 2:
        return
    wanted = "a float of at least 16 bits" if slot.is_floating else str(next(iter(stored)))
    raise DtypeMismatchError(name, f"{wanted} for {slot.name}", dtype)


def non_finite_in(tensor: torch.Tensor, stored: Iterable[torch.dtype]) -> torch.dtype | None:
    """The dtype in which an element is NaN or infinite: the tensor's own, or one it is stored in.

    None if there is none: all is finite, or the tensor is of integers or has no elements.
    """
    dtype = tensor.dtype
    if not dtype.is_floating_point or tensor.numel() == 0 or dtype == torch.float4_e2m1fn_x2:
        return None
    if dtype.itemsize == 1:
        chunks = torch.split(tensor.detach().reshape(-1), _FINITE_CHUNK)
        return None if all(bool(chunk.float().isfinite().all()) for chunk in chunks) else dtype
    # Both extremes are NaN if any element is; one pass, where isfinite().all() makes three.
    extremes = torch.stack(torch.aminmax(tensor.detach()))
    for each in (dtype, *stored):
        if not bool(extremes.to(each).isfinite().all()):
            return each
    return None


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A 1-d uint8 tensor of the same bytes: a view of a contiguous tensor, else a copy."""
    return in_bytes(tensor.detach()).contiguous().reshape(-1).view(torch.uint8)


def empty_twin(tensor: torch.Tensor) -> torch.Tensor:
    """New storage for what `tensor` is: its shape, strides, dtype and device."""
    return torch.empty_like(in_bytes(tensor)).view(tensor.dtype)


def in_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """As uint8 where elements are bytes: for what not every dtype can, to copy and to clone.

    In its deterministic mode PyTorch fills what it allocates, and cannot fill packed fp4.
    """
    return tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor


def copy_bytes(out: torch.Tensor, source: torch.Tensor) -> None:
    """Make `out` byte for byte what `source`, of the same shape and dtype, is; in place."""
    if out.is_contiguous():
        as_bytes(out).copy_(as_bytes(source))
    else:
        out.detach().copy_(source)


def same_bytes(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Equal bytes: two equal NaNs are the same, 0.0 and -0.0 are not."""
    return torch.equal(as_bytes(first), as_bytes(second))


def is_resident(tensor: torch.Tensor) -> bool:
    """Does the storage hold all elements of `tensor`? Writing to one that does not can crash."""
    if tensor.numel() == 0:
        return True
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    end = (tensor.storage_offset() + last + 1) * tensor.element_size()
    return tensor.untyped_storage().nbytes() >= end


def wait_for_devices(devices: set[torch.device]) -> None:
    """Return when everything enqueued on these devices so far has run."""
    for device in devices:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
