"""Checksums of stored tensors: of the bytes as they lie, and of the numbers they mean.

Unit: one hexadecimal string of 128 bits per slot. Knows no names; for finding a lost or misplaced
write, not for security. A bit that differs changes it, so 0.0 and -0.0 differ.
"""

import ctypes
import hashlib
from collections.abc import Mapping

import torch

from syncline.model_ops_rocm.formats.storage_format import StorageFormat
from syncline.model_ops_rocm.layouts.base import as_bits


def checksum_stored(stored: Mapping[str, torch.Tensor]) -> str:
    """Of every stored tensor: name, dtype, shape and bytes in storage order.

    Equal on two engines if and only if a kernel reads the same bytes on both.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(stored):
        digest.update(name.encode())
        _update(digest, stored[name])
    return digest.hexdigest()


def checksum_logical(storage_format: StorageFormat, stored: Mapping[str, torch.Tensor]) -> str:
    """Of the decoded tensor, so that two layouts of the same numbers agree.

    For an unquantised format it equals `checksum_tensor(source.to(dtype))`.
    """
    return checksum_tensor(storage_format.decode(stored))


def checksum_tensor(tensor: torch.Tensor) -> str:
    """Of one tensor's dtype, shape and elements in row-major order."""
    digest = hashlib.blake2b(digest_size=16)
    _update(digest, tensor)
    return digest.hexdigest()


def _update(digest: "hashlib.blake2b", tensor: torch.Tensor) -> None:
    if tensor.is_meta:
        raise ValueError("checksum: tensor must have storage, got a meta tensor")
    digest.update(f"{tensor.dtype}{list(tensor.shape)}".encode())
    flat = as_bits(tensor.detach()).cpu().contiguous()
    num_bytes = flat.numel() * flat.itemsize
    if num_bytes:
        # The bytes in place, without a copy and without NumPy, which this package does not need.
        digest.update((ctypes.c_char * num_bytes).from_address(flat.data_ptr()))
