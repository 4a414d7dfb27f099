"""Hash chain -> computed block. Knows contents and keys, not who holds a block or why.

A key covers a block's tokens and, through its parent, everything before them back to the
`CacheRoot`. Keys are 64-bit, contents are not, so every hit compares the block's tokens and
requires its parent to be the very entry verified one step before: a collision is a miss.
Blocks published together get their entries when the first of them is asked for (`UnopenedRun`).
Source: automatic prefix caching, vLLM v1 (hash chain per full block). Differs: content is compared
on every hit, and the first block published for a content stays canonical (no entry is taken over).
"""

from collections.abc import Callable
from collections.abc import Sequence as SequenceABC
from functools import lru_cache
from struct import Struct, unpack
from struct import error as struct_error
from typing import Final, Protocol

from syncline.kv_cache.types import BlockId, BlockKey, CacheRoot

Chunk = bytes
"""The token ids of one full block, packed by `pack_tokens`: compact, and quick to cut and hash."""

TOKEN_BYTES: Final = 4


def pack_tokens(token_ids: SequenceABC[int]) -> bytes:
    """TOKEN_BYTES for each id. Raises ValueError for an id outside [0, 2**32)."""
    try:
        return _packer(len(token_ids)).pack(*token_ids)  # Half as long again with array().
    except struct_error:
        raise ValueError(
            f"token_ids must be integers between 0 and 2**32 - 1, got {min(token_ids)} to "
            f"{max(token_ids)}"
        ) from None


@lru_cache(maxsize=256)
def _packer(num_tokens: int) -> Struct:
    return Struct(f"{num_tokens}I")


def unpack_tokens(packed: bytes) -> tuple[int, ...]:
    return unpack(f"{len(packed) // TOKEN_BYTES}I", packed)


def chain_key(parent: BlockKey, chunk: Chunk) -> BlockKey:
    """The key of a block from its parent's key and its tokens: fast, and collidable.

    Equal contents have equal keys in one process; the next process has others.
    """
    # A call of BlockKey would cost as much as the hash.
    return hash((parent, chunk))  # type: ignore[return-value]  # a new name for int, no more


class PrefixEntry:
    """One published block. `parent` is the entry before it, or the root of the chain.

    None once the entry is forgotten, so that no dead chain is kept. `link` is the parent as well,
    but of an unopened run's last entry the run.
    """

    __slots__ = ("block_id", "chunk", "key", "link")

    def __init__(
        self,
        key: BlockKey,
        chunk: Chunk,
        parent: "PrefixEntry | CacheRoot | UnopenedRun | None",
        block_id: BlockId,
    ) -> None:
        self.key = key
        self.chunk = chunk
        self.link = parent
        self.block_id = block_id

    @property
    def parent(self) -> "PrefixEntry | CacheRoot | None":
        if isinstance(self.link, UnopenedRun):
            self.link.open()
        assert not isinstance(self.link, UnopenedRun)
        return self.link

    @property
    def is_listed(self) -> bool:
        return self.link is not None

    def hang_from(self, parent: "PrefixEntry | None") -> None:
        """Its run has been opened, or, with None, it is not listed any more."""
        self.link = parent


class UnopenedRun:
    """At least two blocks published one behind the other, of which nobody has asked for any.

    Most never are: their entries are made when the first of them is asked for. `last` alone is made
    at once, because what follows hangs from it.
    """

    __slots__ = ("_chunks", "_index", "_parent", "block_ids", "keys", "last")

    def __init__(
        self,
        index: "PrefixIndex",
        keys: SequenceABC[BlockKey],
        chunks: SequenceABC[Chunk],
        parent: PrefixEntry | CacheRoot,
        block_ids: SequenceABC[BlockId],
    ) -> None:
        self._index = index
        self.keys = keys
        self._chunks = chunks
        self._parent = parent
        self.block_ids = block_ids
        self.last = PrefixEntry(keys[-1], chunks[-1], self, block_ids[-1])

    def open(self) -> None:
        """Put an entry in the place of each block."""
        entries: list[PrefixEntry] = []
        parent = self._parent
        for key, chunk, block_id in zip(self.keys, self._chunks, self.block_ids, strict=True):
            parent = PrefixEntry(key, chunk, parent, block_id)
            entries.append(parent)
        entries[-1] = self.last
        self.last.hang_from(entries[-2])
        self._index.replace(self, entries)


class IndexListener(Protocol):
    """Told of every change of an index, in order. `events.KVEventLog` is one."""

    def listed(self, entry: PrefixEntry) -> None:
        """This entry has entered the index."""
        ...

    def unlisting(self, entry: PrefixEntry) -> None:
        """This entry is about to leave it; its parent is still known."""
        ...

    def cleared(self) -> None:
        """Every entry has left it."""
        ...


class PrefixIndex:
    """The published blocks, at most one per content and one per block.

    `key_of(parent_key, chunk)` may be replaced to force collisions in a test. `listener`: whoever
    wants to know of changes, or None.
    """

    __slots__ = ("_by_block", "_by_key", "key_of", "listener")

    def __init__(self, key_of: Callable[[BlockKey, Chunk], BlockKey] = chain_key) -> None:
        self.key_of = key_of
        self.listener: IndexListener | None = None
        self._by_key: dict[BlockKey, PrefixEntry | UnopenedRun] = {}
        self._by_block: dict[BlockId, PrefixEntry | UnopenedRun] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    @property
    def block_ids(self) -> set[BlockId]:
        return set(self._by_block)

    def lists(self, entry: PrefixEntry) -> bool:
        """Whether this very entry can be hit here."""
        listed = self._by_block.get(entry.block_id)
        return entry is (listed.last if isinstance(listed, UnopenedRun) else listed)

    def replace(self, run: UnopenedRun, entries: list[PrefixEntry]) -> None:
        """A run has been opened: these are its blocks' entries."""
        self._by_key.update(zip(run.keys, entries, strict=True))
        self._by_block.update(zip(run.block_ids, entries, strict=True))

    def find_run(
        self,
        keys: SequenceABC[BlockKey],
        chunks: SequenceABC[Chunk],
        parent: PrefixEntry | CacheRoot,
    ) -> list[PrefixEntry]:
        """The entries with these contents, one behind the other from `parent` on, up to a miss.

        chunks: one for each key at least.
        """
        found: list[PrefixEntry] = []
        for key, chunk in zip(keys, chunks, strict=False):
            entry = self._by_key.get(key)
            if isinstance(entry, UnopenedRun):
                entry = self._entry_of(key)
            # By its link: what the index gives out has been opened.
            if entry is None or entry.chunk != chunk or entry.link != parent:
                break
            parent = entry
            found.append(entry)
        return found

    def publish(
        self, key: BlockKey, chunk: Chunk, parent: PrefixEntry | CacheRoot, block_id: BlockId
    ) -> tuple[PrefixEntry | None, BlockId | None]:
        """List a computed block; returns (the canonical entry, a block that lost its listing).

        The canonical entry is another block's if that content is listed already, and None if a
        different content owns the key (a collision: the newcomer stays unlisted). An entry whose
        parent has left the index can never be hit again and gives way.
        """
        displaced: BlockId | None = None
        present = self._entry_of(key)
        if present is not None:
            if present.chunk == chunk and present.parent == parent:
                return present, None
            if not isinstance(present.parent, PrefixEntry) or present.parent.is_listed:
                return None, None
            displaced = present.block_id
            self.forget(displaced)
        entry = PrefixEntry(key, chunk, parent, block_id)
        self._by_key[key] = entry
        self._by_block[block_id] = entry
        if self.listener is not None:
            self.listener.listed(entry)
        return entry, displaced

    def publish_run(
        self,
        keys: SequenceABC[BlockKey],
        chunks: SequenceABC[Chunk],
        parent: PrefixEntry | CacheRoot,
        block_ids: SequenceABC[BlockId],
    ) -> tuple[PrefixEntry | CacheRoot | None, SequenceABC[BlockId], SequenceABC[BlockId]]:
        """`publish` of blocks that follow one another, up to a collision; one of each per block.

        Returns (the last canonical entry, None after a collision; the blocks that were listed;
        those that lost their listing, which may be among the former).
        """
        if self.listener is None and len(keys) > 1:
            run = UnopenedRun(self, keys, chunks, parent, block_ids)
            fresh = dict.fromkeys(keys, run)
            if len(fresh) == len(keys) and self._by_key.keys().isdisjoint(fresh):
                self._by_key.update(fresh)
                self._by_block.update(dict.fromkeys(block_ids, run))
                return run.last, block_ids, []
        last: PrefixEntry | CacheRoot | None = parent
        listed: list[BlockId] = []
        displaced: list[BlockId] = []
        for key, chunk, block_id in zip(keys, chunks, block_ids, strict=True):
            if last is None:
                break
            last, gone = self.publish(key, chunk, last, block_id)
            if gone is not None:
                displaced.append(gone)
            if last is not None and last.block_id == block_id:
                listed.append(block_id)
        return last, listed, displaced

    def forget(self, block_id: BlockId) -> None:
        """Unlist a block, because it is being reused; no effect if it is not listed."""
        entry = self._by_block.get(block_id)
        if isinstance(entry, UnopenedRun):
            entry.open()
            entry = self._by_block[block_id]
        if entry is None:
            return
        assert isinstance(entry, PrefixEntry)  # The run has been opened.
        if self.listener is not None:
            self.listener.unlisting(entry)
        del self._by_block[block_id]
        del self._by_key[entry.key]
        entry.hang_from(None)

    def clear(self) -> set[BlockId]:
        """Unlist everything; returns the blocks that were listed."""
        block_ids = self.block_ids
        for entry in self._by_block.values():
            (entry.last if isinstance(entry, UnopenedRun) else entry).hang_from(None)
        self._by_key.clear()
        self._by_block.clear()
        if self.listener is not None:
            self.listener.cleared()
        return block_ids

    def _entry_of(self, key: BlockKey) -> PrefixEntry | None:
        entry = self._by_key.get(key)
        if isinstance(entry, UnopenedRun):
            entry.open()
            entry = self._by_key[key]
        assert not isinstance(entry, UnopenedRun)
        return entry
