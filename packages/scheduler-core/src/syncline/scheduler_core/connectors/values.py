"""Transfers of KV as data: what a plan asks the runner to store or to load.

    store   read before the step writes anything, in stream order: its blocks need no holder
    load    written outside step order, after every earlier step: its blocks stay owned until
            `Scheduler.finish_load`

A transfer ends when it has been reported once, whatever became of it.
"""

from dataclasses import dataclass
from typing import NewType

from syncline.kv_cache import BlockId, StableKey
from syncline.scheduler_core.types import SequenceId

TransferId = NewType("TransferId", int)
"""A transfer, unique in a scheduler's life."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVStore:
    """Copy KV of positions [start, stop) to the slower tier: whole blocks, one key each."""

    transfer_id: TransferId
    seq_id: SequenceId
    start: int
    stop: int
    block_ids: tuple[BlockId, ...]
    keys: tuple[StableKey, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLoad:
    """Bring KV of positions [start, stop) into these blocks; nothing reads them until it is done.

    keys   of the blocks, if they come from the slower tier
    """

    transfer_id: TransferId
    seq_id: SequenceId
    request_id: str
    start: int
    stop: int
    block_ids: tuple[BlockId, ...]
    keys: tuple[StableKey, ...] = ()

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start
