"""What the prefix index can serve, told to the outside as it changes: stored, removed, cleared.

    a router's set of keys  ==  the blocks that a match can reach, after every event

A block whose parent left the index can never be hit again, so it is reported removed with it: a
router may look up each block by its key alone. Knows nothing of transports, or of who listens.
Source: KVEvents of vLLM v1 (BlockStored, BlockRemoved, AllBlocksCleared). Differs: orphans are
removed, and a key has no process-private part.
"""

from dataclasses import dataclass
from typing import TypeAlias

from syncline.kv_cache.prefix_index import PrefixEntry, unpack_tokens
from syncline.kv_cache.stable_keys import StableKey, stable_key, stable_root_key
from syncline.kv_cache.types import CacheRoot


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksStored:
    """A run of full blocks can be hit from now on, each behind the one before it.

    parent_key   the block before the first one, None at the start of a prompt
    token_ids    of all of them, `block_size` each
    """

    keys: tuple[StableKey, ...]
    parent_key: StableKey | None
    token_ids: tuple[int, ...]
    block_size: int
    salt: str = ""
    adapter_id: str = ""
    kv_format: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksRemoved:
    """These blocks can be hit no more."""

    keys: tuple[StableKey, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AllBlocksCleared:
    """Nothing stored before this event can be hit any more."""


KVEvent: TypeAlias = BlocksStored | BlocksRemoved | AllBlocksCleared


class _Listed:
    """One reported entry: its key, where its chain starts, and the reported entries behind it."""

    __slots__ = ("children", "key", "root")

    def __init__(self, key: StableKey, root: CacheRoot) -> None:
        self.key = key
        self.root = root
        self.children: dict[PrefixEntry, None] = {}


class KVEventLog:
    """Give one to a `KVCacheManager`, and take its events often: it keeps every one until then."""

    __slots__ = ("_events", "_listed")

    def __init__(self) -> None:
        self._listed: dict[PrefixEntry, _Listed] = {}
        self._events: list[KVEvent] = []

    def take_events(self) -> list[KVEvent]:
        """Everything since the last call, in order; runs of a kind are one event."""
        events, self._events = self._events, []
        return _merged(events)

    def listed(self, entry: PrefixEntry) -> None:
        """The index lists this entry from now on."""
        parent = entry.parent
        if isinstance(parent, PrefixEntry):
            before = self._listed.get(parent)
            if before is None:
                return  # Its parent left the index: no match can reach it.
            before.children[entry] = None
            root, parent_key, chain_key = before.root, before.key, before.key
        else:
            assert parent is not None  # Only an entry that is listed no longer has no parent.
            root, parent_key = parent, None
            chain_key = stable_root_key(
                salt=root.salt, adapter_id=root.adapter_id, kv_format=root.kv_format
            )
        token_ids = unpack_tokens(entry.chunk)
        key = stable_key(chain_key, token_ids)
        self._listed[entry] = _Listed(key, root)
        self._events.append(
            BlocksStored(
                keys=(key,),
                parent_key=parent_key,
                token_ids=token_ids,
                block_size=len(token_ids),
                salt=root.salt,
                adapter_id=root.adapter_id,
                kv_format=root.kv_format,
            )
        )

    def unlisting(self, entry: PrefixEntry) -> None:
        """The index is about to forget this entry; what is behind it goes with it."""
        if entry not in self._listed:
            return
        before = self._listed.get(entry.parent) if isinstance(entry.parent, PrefixEntry) else None
        if before is not None:
            del before.children[entry]
        keys: list[StableKey] = []
        gone = [entry]
        while gone:
            listed = self._listed.pop(gone.pop())
            keys.append(listed.key)
            gone.extend(listed.children)
        self._events.append(BlocksRemoved(keys=tuple(keys)))

    def cleared(self) -> None:
        """The index lists nothing."""
        self._listed.clear()
        self._events.append(AllBlocksCleared())


def _merged(events: list[KVEvent]) -> list[KVEvent]:
    """Runs of one chain, and runs of removals, as one event each."""
    merged: list[KVEvent] = []
    i = 0
    while i < len(events):
        first = events[i]
        stop = i + 1
        while stop < len(events) and _continues(events[stop - 1], events[stop]):
            stop += 1
        merged.append(_as_one(first, events[i:stop]))
        i = stop
    return merged


def _continues(event: KVEvent, later: KVEvent) -> bool:
    if isinstance(event, BlocksStored):
        return isinstance(later, BlocksStored) and later.parent_key == event.keys[-1]
    return isinstance(event, BlocksRemoved) and isinstance(later, BlocksRemoved)


def _as_one(first: KVEvent, run: list[KVEvent]) -> KVEvent:
    if isinstance(first, AllBlocksCleared):
        return first
    keys = tuple([key for e in run if not isinstance(e, AllBlocksCleared) for key in e.keys])
    if isinstance(first, BlocksRemoved):
        return BlocksRemoved(keys=keys)
    return BlocksStored(
        keys=keys,
        parent_key=first.parent_key,
        token_ids=tuple([t for e in run if isinstance(e, BlocksStored) for t in e.token_ids]),
        block_size=first.block_size,
        salt=first.salt,
        adapter_id=first.adapter_id,
        kv_format=first.kv_format,
    )
