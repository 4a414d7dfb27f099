"""SHA-256 over weights: of the stored bytes, or of the logical values whatever their layout.

Equal digests mean equal names, dtypes, shapes and bytes. Digests are per slot, so that two sides
that differ can say where; the combined one does not depend on the order of the slots. Bytes are
read where they lie; a tensor on a device, or a strided one, is copied first, one at a time.
"""

import ctypes
import hashlib
from collections.abc import Callable, Iterable, Mapping

import torch

from syncline.weight_sync.slots import WeightSlot
from syncline.weight_sync.tensors import as_bytes


def stored_checksums(slots: Iterable[WeightSlot]) -> dict[str, str]:
    """Slot name -> digest of its stored tensors: what a kernel reads, padding included."""
    return {slot.name: tensors_checksum(slot.storage) for slot in slots}


def logical_checksums(
    slots: Iterable[WeightSlot], decode: Callable[[WeightSlot], torch.Tensor]
) -> dict[str, str]:
    """Slot name -> digest of its logical values, which `decode` reads back from the storage.

    Two engines with different layouts agree; two with different quantisation do not.
    """
    return {slot.name: tensors_checksum({"": decode(slot)}) for slot in slots}


def tensors_checksum(tensors: Mapping[str, torch.Tensor]) -> str:
    """Digest of named tensors; the order of the mapping does not matter."""
    digest = hashlib.sha256()
    for key in sorted(tensors):
        tensor = tensors[key]
        header = f"{key}\0{tensor.dtype}\0{tuple(tensor.shape)}\0"
        digest.update(header.encode())
        _update(digest.update, tensor)
    return digest.hexdigest()


def combined_checksum(digests: Mapping[str, str]) -> str:
    """One digest for all slots."""
    digest = hashlib.sha256()
    for name in sorted(digests):
        digest.update(f"{name}\0{digests[name]}\0".encode())
    return digest.hexdigest()


def _update(update: Callable[[memoryview], None], tensor: torch.Tensor) -> None:
    flat = as_bytes(tensor).cpu()
    if flat.numel():
        buffer = (ctypes.c_ubyte * flat.numel()).from_address(flat.data_ptr())
        update(memoryview(buffer))
