"""An arena that frees nothing and shows everything: what is asleep reads NaN.

It stands for a device on any machine. Memory is poison from its allocation until it is first
written, again from its release, and still after its restore, so nobody can believe that a
content survived. With `move_on_restore` the memory comes back somewhere else, and whoever
kept the old address, a captured graph above all, goes on reading NaN for ever.
"""

import torch

from syncline.graph_lifecycle.arena import memory
from syncline.graph_lifecycle.arena.base import Allocation, BaseArena
from syncline.graph_lifecycle.ledger import StorageLedger


class PoisonArena(BaseArena):
    """CPU memory that is poisoned instead of freed, and may move when it comes back."""

    __slots__ = ("_move_on_restore",)

    def __init__(
        self, move_on_restore: bool = False, *, ledger: StorageLedger | None = None
    ) -> None:
        super().__init__(ledger=ledger, device=torch.device("cpu"))
        self._move_on_restore = move_on_restore

    @property
    def keeps_addresses(self) -> bool:
        return not self._move_on_restore

    def _new_storage(self, num_bytes: int, dtype: torch.dtype) -> torch.UntypedStorage:
        storage = memory.new_storage(num_bytes, self._device)
        memory.fill_poison(storage, dtype)
        return storage

    def _give_back(self, allocation: Allocation) -> None:
        memory.fill_poison(allocation.storage, allocation.dtype)
