"""What to store in a slower tier, and how much of a sequence could come back from it.

Blocks are named by what they hold, so nothing is stored twice. They are stored when their sequence
gives up its row (preempted or ended): the moment after which they may be overwritten. A block is
offered only once its store has been reported, and only in the KV epoch that computed it.
"""

from collections.abc import Iterator
from collections.abc import Sequence as SequenceABC
from itertools import pairwise

from syncline.kv_cache import KVCacheManager, StableChain, StableKey, stable_root_key
from syncline.scheduler_core.connectors.protocols import OffloadConnector
from syncline.scheduler_core.connectors.values import KVStore, TransferId
from syncline.scheduler_core.errors import TransferError
from syncline.scheduler_core.sequence import Sequence
from syncline.scheduler_core.types import SequenceId


class Offloader:
    """Asks and tells one connector. Knows nothing of loads under way."""

    __slots__ = (
        "_chains",
        "_connector",
        "_ids",
        "_kv",
        "_kv_epoch",
        "_outbox",
        "_stores",
        "_storing",
    )

    def __init__(self, kv: KVCacheManager, connector: OffloadConnector, ids: Iterator[int]) -> None:
        self._kv = kv
        self._connector = connector
        self._ids = ids
        self._kv_epoch = kv.kv_epoch
        self._chains: dict[SequenceId, StableChain] = {}
        self._outbox: list[KVStore] = []
        # Everything not reported yet, with the epoch of its content; the outbox included.
        self._stores: dict[TransferId, tuple[KVStore, int]] = {}
        self._storing: set[StableKey] = set()  # Their keys, of the current epoch.

    def held_keys(self, sequence: Sequence) -> tuple[StableKey, ...]:
        """The keys of the sequence's first full blocks that the tier could bring."""
        if not sequence.request.use_prefix_cache:
            return ()
        self._follow_epoch()
        keys = self._keys(sequence, sequence.num_tokens // self._kv.block_size)
        return keys[: self._connector.num_held_blocks(keys)] if keys else ()

    def collect(self, sequence: Sequence) -> None:
        """The sequence is about to lose its blocks: store what is computed and missing.

        Blocks whose content is of an older epoch are not worth anything any more.
        """
        num_full = sequence.num_computed_tokens // self._kv.block_size
        if not num_full or not sequence.request.use_prefix_cache:
            return
        if not self._kv.is_current(sequence.table):
            return
        self._follow_epoch()
        keys = self._keys(sequence, num_full)
        wanted = [i for i in self._connector.missing(keys) if keys[i] not in self._storing]
        for start, stop in _runs(wanted):
            self._put(sequence, start, keys[start:stop])

    def take_stores(self) -> tuple[KVStore, ...]:
        """What the plan being made has to store; its blocks are still whole."""
        if not self._outbox:
            return ()
        self._follow_epoch()
        stores = tuple(self._outbox)
        self._outbox.clear()
        return stores

    def drop_outbox(self) -> None:
        """The blocks are gone: what no plan has carried yet is never stored."""
        for store in self._outbox:
            del self._stores[store.transfer_id]
            self._storing.difference_update(store.keys)
        self._outbox.clear()

    def finish(self, transfer_id: TransferId, num_tokens: int) -> None:
        """Raises TransferError or ValueError with nothing changed."""
        if transfer_id not in self._stores or any(
            store.transfer_id == transfer_id for store in self._outbox
        ):
            raise TransferError("store", transfer_id)
        store, kv_epoch = self._stores[transfer_id]
        require_within(transfer_id, num_tokens, store.stop - store.start)
        self._follow_epoch()
        del self._stores[transfer_id]
        if kv_epoch != self._kv_epoch:
            return
        self._storing.difference_update(store.keys)
        num_stored = num_tokens // self._kv.block_size
        if num_stored:
            self._connector.stored(store.keys[:num_stored])

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended."""
        self._chains.pop(sequence.seq_id, None)

    def _put(self, sequence: Sequence, first: int, keys: tuple[StableKey, ...]) -> None:
        size = self._kv.block_size
        store = KVStore(
            transfer_id=TransferId(next(self._ids)),
            seq_id=sequence.seq_id,
            start=first * size,
            stop=(first + len(keys)) * size,
            block_ids=tuple(sequence.table.block_ids[first : first + len(keys)]),
            keys=keys,
        )
        self._stores[store.transfer_id] = (store, self._kv_epoch)
        self._storing.update(keys)
        self._outbox.append(store)

    def _keys(self, sequence: Sequence, num_blocks: int) -> tuple[StableKey, ...]:
        chain = self._chains.get(sequence.seq_id)
        if chain is None:
            root = sequence.table.root
            root_key = stable_root_key(
                salt=root.salt, adapter_id=root.adapter_id, kv_format=root.kv_format
            )
            chain = StableChain(root_key, self._kv.block_size)
            self._chains[sequence.seq_id] = chain
        return chain.keys(sequence.token_ids, num_blocks)

    def _follow_epoch(self) -> None:
        """Before anything is asked or told: what was stored in an older epoch is void."""
        if self._kv_epoch != self._kv.kv_epoch:
            self._kv_epoch = self._kv.kv_epoch
            self.drop_outbox()
            self._storing.clear()
            self._connector.clear()


def require_within(transfer_id: TransferId, num_tokens: int, num_asked: int) -> None:
    """Raise ValueError unless a transfer could have moved so many tokens."""
    if not 0 <= num_tokens <= num_asked:
        raise ValueError(
            f"num_tokens of transfer {transfer_id} must be between 0 and {num_asked}, "
            f"got {num_tokens}"
        )


def _runs(indices: SequenceABC[int]) -> Iterator[tuple[int, int]]:
    """Ascending indices as [start, stop) of consecutive ones."""
    if not indices:
        return
    start = indices[0]
    for index, later in pairwise(indices):
        if later != index + 1:
            yield start, index + 1
            start = later
    yield start, indices[-1] + 1
