"""An arena that really frees and allocates again: right on every driver, keeps no address.

Freeing empties the storage itself, so a view that somebody kept cannot hold the memory; such a
view must not be read any more (on a CPU that ends the process). The tensors handed out are
safe: while released they read poison, afterwards the new, uninitialised memory.
"""

import torch

from syncline.graph_lifecycle.arena import memory
from syncline.graph_lifecycle.arena.base import Allocation, BaseArena
from syncline.graph_lifecycle.ledger import StorageLedger


class PlainArena(BaseArena):
    """Memory of PyTorch's own allocator on one device."""

    __slots__ = ()

    def __init__(
        self, *, ledger: StorageLedger | None = None, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__(ledger=ledger, device=torch.device(device))

    @property
    def keeps_addresses(self) -> bool:
        return False

    def _new_storage(self, num_bytes: int, dtype: torch.dtype) -> torch.UntypedStorage:
        return memory.new_storage(num_bytes, self._device)

    def _give_back(self, allocation: Allocation) -> None:
        freed = allocation.storage
        allocation.storage = memory.bind_tombstone(allocation.tensor, allocation.shape)
        freed.resize_(0)
