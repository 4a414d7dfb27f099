"""Hash chain -> computed block. Knows contents and keys, not who holds a block or why.

A key covers a block's tokens and, through its parent, everything before them back to the
`CacheRoot`. Keys are 64-bit, contents are not, so every hit compares the block's tokens and
requires its parent to be the very entry verified one step before: a collision is a miss.
Source: automatic prefix caching, vLLM v1 (hash chain per full block). Differs: content is compared
on every hit, and the first block published for a content stays canonical (no entry is taken over).
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceABC
from struct import error as struct_error
from struct import pack, unpack
from typing import Final, Protocol

from syncline.kv_cache.types import BlockId, BlockKey, CacheRoot

Chunk = bytes
"""The token ids of one full block, packed by `pack_tokens`: compact, and quick to cut and hash."""

TOKEN_BYTES: Final = 4


def pack_tokens(token_ids: SequenceABC[int]) -> bytes:
    """TOKEN_BYTES for each id. Raises ValueError for an id outside [0, 2**32)."""
    try:
        return pack(f"{len(token_ids)}I", *token_ids)  # Half as long again with array().
    except struct_error:
        raise ValueError(
            f"token_ids must be integers between 0 and 2**32 - 1, got {min(token_ids)} to "
            f"{max(token_ids)}"
        ) from None


def unpack_tokens(packed: bytes) -> tuple[int, ...]:
    return unpack(f"{len(packed) // TOKEN_BYTES}I", packed)


def chain_key(parent: BlockKey, chunk: Chunk) -> BlockKey:
    """The key of a block from its parent's key and its tokens: fast, and collidable.

    Equal contents have equal keys in one process; the next process has others.
    """
    # A call of BlockKey would cost as much as the hash.
    return hash((parent, chunk))  # type: ignore[return-value]  # a new name for int, no more


class PrefixEntry:
    """One published block. `parent` is the entry before it, or the root of the chain."""

    __slots__ = ("block_id", "chunk", "key", "parent")

    def __init__(
        self,
        key: BlockKey,
        chunk: Chunk,
        parent: "PrefixEntry | CacheRoot | None",
        block_id: BlockId,
    ) -> None:
        self.key = key
        self.chunk = chunk
        self.parent = parent  # None once the entry is forgotten, so that no dead chain is kept.
        self.block_id = block_id

    @property
    def is_listed(self) -> bool:
        return self.parent is not None


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
        self._by_key: dict[BlockKey, PrefixEntry] = {}
        self._by_block: dict[BlockId, PrefixEntry] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    @property
    def block_ids(self) -> set[BlockId]:
        return set(self._by_block)

    def lists(self, entry: PrefixEntry) -> bool:
        """Whether this very entry can be hit here."""
        return self._by_block.get(entry.block_id) is entry

    def find(
        self, key: BlockKey, chunk: Chunk, parent: PrefixEntry | CacheRoot
    ) -> PrefixEntry | None:
        """The entry with this content behind this verified parent, or None."""
        entry = self._by_key.get(key)
        if entry is None or entry.chunk != chunk or entry.parent != parent:
            return None
        return entry

    def publish(
        self, key: BlockKey, chunk: Chunk, parent: PrefixEntry | CacheRoot, block_id: BlockId
    ) -> tuple[PrefixEntry | None, BlockId | None]:
        """List a computed block; returns (the canonical entry, a block that lost its listing).

        The canonical entry is another block's if that content is listed already, and None if a
        different content owns the key (a collision: the newcomer stays unlisted). An entry whose
        parent has left the index can never be hit again and gives way.
        """
        displaced: BlockId | None = None
        present = self._by_key.get(key)
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
        keys: Iterable[BlockKey],
        chunks: Iterable[Chunk],
        parent: PrefixEntry | CacheRoot,
        block_ids: Iterable[BlockId],
    ) -> tuple[PrefixEntry | CacheRoot | None, list[BlockId], list[BlockId]]:
        """`publish` of blocks that follow one another, up to a collision.

        Returns (the last canonical entry, None after a collision; the blocks that were listed;
        those that lost their listing, which may be among the former).
        """
        last: PrefixEntry | CacheRoot | None = parent
        listed: list[BlockId] = []
        displaced: list[BlockId] = []
        by_key, by_block, listener = self._by_key, self._by_block, self.listener
        for key, chunk, block_id in zip(keys, chunks, block_ids, strict=False):
            if last is None:
                break
            if key in by_key:
                last, gone = self.publish(key, chunk, last, block_id)
                if gone is not None:
                    displaced.append(gone)
                if last is not None and last.block_id == block_id:
                    listed.append(block_id)
                continue
            last = entry = PrefixEntry(key, chunk, last, block_id)
            by_key[key] = entry
            by_block[block_id] = entry
            listed.append(block_id)
            if listener is not None:
                listener.listed(entry)
        return last, listed, displaced

    def forget(self, block_id: BlockId) -> None:
        """Unlist a block, because it is being reused; no effect if it is not listed."""
        if self.listener is not None and block_id in self._by_block:
            self.listener.unlisting(self._by_block[block_id])
        self._drop(block_id)

    def clear(self) -> set[BlockId]:
        """Unlist everything; returns the blocks that were listed."""
        block_ids = self.block_ids
        for block_id in block_ids:
            self._drop(block_id)
        if self.listener is not None:
            self.listener.cleared()
        return block_ids

    def _drop(self, block_id: BlockId) -> None:
        entry = self._by_block.pop(block_id, None)
        if entry is not None:
            del self._by_key[entry.key]
            entry.parent = None
