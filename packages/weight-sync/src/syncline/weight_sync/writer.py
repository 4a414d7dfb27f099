"""The stored bytes of one slot during one update: where they go and how much has been written.

The only module that calls an encoder. Writes into existing storage and rebinds nothing: whatever
holds the address of a stored tensor goes on reading the right place. Does not know who may write
when; the update asks the guard first.
"""

from collections.abc import Mapping

import torch

from syncline.weight_sync.assembly import Piece
from syncline.weight_sync.coverage import Coverage
from syncline.weight_sync.errors import EncoderContractError, StorageError
from syncline.weight_sync.regions import Region
from syncline.weight_sync.slots import WeightSlot
from syncline.weight_sync.tensors import copy_bytes, empty_twin, is_resident, same_bytes


def _twin(storage: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A copy, padding included: an encoder leaves what no region owns as it finds it."""
    twin = {key: empty_twin(tensor) for key, tensor in storage.items()}
    for key, tensor in storage.items():
        copy_bytes(twin[key], tensor)
    return twin


class SlotWriter:
    """Encodes into the live storage, or into a shadow that `swap` copies over it."""

    __slots__ = ("_addresses", "_bytes_written", "_shadow", "_slot", "_staged", "_written")

    def __init__(self, slot: WeightSlot, *, staged: bool) -> None:
        """Raises StorageError when the stored tensors hold no memory, e.g. while weights sleep."""
        self._slot = slot
        self._staged = staged
        self._shadow: dict[str, torch.Tensor] | None = None
        self._bytes_written = 0
        self._addresses = {key: tensor.data_ptr() for key, tensor in slot.storage.items()}
        self._written = Coverage(slot.logical_shape)
        self.require_in_place()

    @property
    def slot(self) -> WeightSlot:
        return self._slot

    @property
    def written(self) -> Coverage:
        return self._written

    def require_in_place(self) -> None:
        """Raise StorageError if a stored tensor was released or moved since the update began.

        What was written before then lies in the old place, so the update cannot go on.
        """
        for key, tensor in self._slot.storage.items():
            if not is_resident(tensor):
                raise StorageError(self._slot.name, key, "holds no memory")
            if tensor.data_ptr() != self._addresses[key]:
                raise StorageError(self._slot.name, key, "has moved since the update began")

    def write(self, piece: Piece) -> None:
        """Encode one whole block. If the encoder raises, its bytes are undefined; send it again."""
        self.require_in_place()
        if self._staged and self._shadow is None:
            self._shadow = _twin(self._slot.storage)
        with torch.no_grad():
            self._slot.encoder.encode_into(self._target, piece.tensor, piece.region)

    def accept(self, region: Region) -> None:
        """A block was written; count it."""
        self._written.add(region)
        self._bytes_written += self.owned_bytes(region)

    def owned_bytes(self, region: Region) -> int:
        return self._slot.encoder.region_bytes(self._slot.logical_shape, region)

    def holds(self, piece: Piece) -> bool:
        """Would encoding this piece change no byte? Takes a copy of the slot to find out."""
        self.require_in_place()
        trial = _twin(self._target)
        with torch.no_grad():
            self._slot.encoder.encode_into(trial, piece.tensor, piece.region)
        return all(same_bytes(trial[key], tensor) for key, tensor in self._target.items())

    def require_every_byte(self) -> None:
        """Raise EncoderContractError if the blocks of a complete slot do not add up to it."""
        if self._bytes_written != self._slot.num_bytes:
            raise EncoderContractError(
                self._slot.name,
                f"its blocks own {self._bytes_written} bytes, the slot {self._slot.num_bytes}",
            )

    def swap(self) -> None:
        """Copy the shadow over the live storage; repeating it changes nothing."""
        self.require_in_place()
        for key, tensor in (self._shadow or {}).items():
            copy_bytes(self._slot.storage[key], tensor)

    @property
    def _target(self) -> Mapping[str, torch.Tensor]:
        return self._slot.storage if self._shadow is None else self._shadow
