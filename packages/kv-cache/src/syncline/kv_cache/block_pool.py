"""Ref-counted ownership of KV-cache blocks: who holds a block, never what is in it.

A block is free (no holder) or held. A free block may still be *cached*: the prefix index wants
its content, so it is given away last, least recently freed first, and `on_evict` is told.

    plain free  | cached free (evictable)  | held          disjoint; together every block

Source: sharing by ref count, PagedAttention (arXiv:2309.06180). Differs from vLLM v1: uncached
blocks are kept apart and used first, so a cached block is evicted only when nothing else is free.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from itertools import compress
from operator import not_
from typing import cast

from syncline.kv_cache.errors import BlockNotHeldError, IntegrityError
from syncline.kv_cache.types import BlockId


def _ignore_eviction(block_id: BlockId) -> None:
    """Nobody keeps an index over this pool."""


def require_positive(name: str, value: object) -> None:
    """Raise ValueError unless the value is an int above 0."""
    if not isinstance(value, int):
        raise ValueError(f"{name} must be an int, got {value!r}")
    if value <= 0:
        raise ValueError(f"{name} must be positive, got {value!r}")


class BlockPool:
    """A fixed set of blocks, each free or held by one or more holders.

    Raises ValueError unless num_blocks is positive.
    """

    __slots__ = ("_cached", "_evictable", "_first_fresh", "_free", "_on_evict", "_ref_counts")

    def __init__(
        self, num_blocks: int, on_evict: Callable[[BlockId], None] = _ignore_eviction
    ) -> None:
        require_positive("num_blocks", num_blocks)
        self._ref_counts = [0] * num_blocks
        self._cached = bytearray(num_blocks)
        self._first_fresh = (
            0  # From here on no block has ever been taken: free, and listed nowhere.
        )
        self._free: deque[BlockId] = deque()
        self._evictable: OrderedDict[BlockId, None] = OrderedDict()
        self._on_evict = on_evict

    @property
    def num_blocks(self) -> int:
        return len(self._ref_counts)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that `allocate` can give, cached free ones included."""
        num_fresh = len(self._ref_counts) - self._first_fresh
        return num_fresh + len(self._free) + len(self._evictable)

    @property
    def num_evictable_blocks(self) -> int:
        """Free blocks that are cached."""
        return len(self._evictable)

    def ref_count(self, block_id: BlockId) -> int:
        """Number of holders; 0 for a free block. Raises BlockNotHeldError outside the pool."""
        if not 0 <= block_id < len(self._ref_counts):
            raise BlockNotHeldError(block_id)
        return self._ref_counts[block_id]

    def is_private(self, block_id: BlockId) -> bool:
        """Whether it has one holder and no listing, so that its holder may write into it."""
        return self.ref_count(block_id) == 1 and not self._cached[block_id]

    def allocate(self, num_blocks: int) -> list[BlockId] | None:
        """Take `num_blocks` with one holder each; None, with nothing taken, if too few are free.

        Uncached blocks go first, in the order they were freed, those never taken before them; then
        cached ones, least recently freed first, each reported to `on_evict`.
        """
        if num_blocks < 0:
            raise ValueError(f"num_blocks must be non-negative, got {num_blocks}")
        if num_blocks > self.num_free_blocks:
            return None  # Expected under load: the caller preempts or waits.
        first, free, ref_counts = self._first_fresh, self._free, self._ref_counts
        self._first_fresh = min(first + num_blocks, len(ref_counts))
        # A new name for int: a call of BlockId for each would cost more than all the rest.
        block_ids = cast("list[BlockId]", list(range(first, self._first_fresh)))
        ref_counts[first : self._first_fresh] = [1] * len(block_ids)
        for _ in range(min(num_blocks - len(block_ids), len(free))):
            block_id = free.popleft()
            ref_counts[block_id] = 1
            block_ids.append(block_id)
        while len(block_ids) < num_blocks:
            block_id, _ = self._evictable.popitem(last=False)
            self._cached[block_id] = 0
            self._on_evict(block_id)
            ref_counts[block_id] = 1
            block_ids.append(block_id)
        return block_ids

    def share(self, block_ids: Iterable[BlockId]) -> None:
        """Add one holder to each block; a cached free block becomes held again.

        Raises BlockNotHeldError at the first block that is free and not cached; the blocks before
        it keep their new holder.
        """
        ref_counts, num_blocks = self._ref_counts, self.num_blocks
        for block_id in block_ids:
            if not 0 <= block_id < num_blocks:
                raise BlockNotHeldError(block_id)
            if not ref_counts[block_id]:
                if not self._cached[block_id]:
                    raise BlockNotHeldError(block_id)
                del self._evictable[block_id]
            ref_counts[block_id] += 1

    def free(self, block_ids: Iterable[BlockId]) -> None:
        """Drop one holder from each block; the last holder makes it free.

        Pass a block table in reverse: the tail is then reused before the prefix, which other
        sequences are likelier to hit. Raises BlockNotHeldError at the first block nobody holds;
        the blocks before it stay freed.
        """
        ref_counts, cached = self._ref_counts, self._cached
        for block_id in block_ids:
            self._require_held(block_id)
            ref_counts[block_id] -= 1
            if ref_counts[block_id] == 0:
                if cached[block_id]:
                    self._evictable[block_id] = None
                else:
                    self._free.append(block_id)

    def mark_cached(self, *block_ids: BlockId) -> None:
        """The prefix index lists these held blocks from now on.

        Raises BlockNotHeldError at the first block nobody holds; those before it stay marked.
        """
        ref_counts, cached, stop = self._ref_counts, self._cached, self.num_blocks
        first, num = block_ids[0] if block_ids else 0, len(block_ids)
        is_run = 0 <= first <= stop - num and block_ids == tuple(range(first, first + num))
        if is_run and all(ref_counts[first : first + num]):
            cached[first : first + num] = b"\x01" * num
            return
        for block_id in block_ids:
            if not 0 <= block_id < stop or not ref_counts[block_id]:
                raise BlockNotHeldError(block_id)
            cached[block_id] = 1

    def unmark_cached(self, block_id: BlockId) -> None:
        """The prefix index no longer lists this block; no effect if it did not."""
        if not 0 <= block_id < len(self._ref_counts):
            raise BlockNotHeldError(block_id)
        self._cached[block_id] = 0
        if block_id in self._evictable:
            del self._evictable[block_id]
            self._free.append(block_id)

    def touch(self, block_id: BlockId) -> None:
        """Make a cached free block the last to be evicted; no effect on any other block."""
        if block_id in self._evictable:
            self._evictable.move_to_end(block_id)

    def num_evictable_among(self, block_ids: Iterable[BlockId]) -> int:
        """How many of these distinct blocks are cached and free: they count in num_free_blocks."""
        return sum(map(self._evictable.__contains__, block_ids)) if self._evictable else 0

    def check(self, holders: list[int], cached: set[BlockId]) -> None:
        """Compare the books with the truth; raises IntegrityError at the first difference.

        holders: int[num_blocks], references that exist to each block. cached: the ids indexed.
        """
        if self._ref_counts != holders:
            for block_id, expected in enumerate(holders):
                if self._ref_counts[block_id] != expected:
                    raise IntegrityError(
                        f"block {block_id} counts {self._ref_counts[block_id]} holders, "
                        f"but {expected} references exist"
                    )
        block_ids = range(self.num_blocks)
        fresh = range(self._first_fresh, self.num_blocks)
        free = {*self._free, *fresh}
        evictable = set(self._evictable)
        if len(free) != len(self._free) + len(fresh) or free & evictable:
            raise IntegrityError("a block is in the free lists twice")
        unheld = set(compress(block_ids, map(not_, holders)))
        if free | evictable != unheld:
            raise IntegrityError(
                f"{len(unheld)} blocks have no holder, but {len(free | evictable)} are listed free"
            )
        marked = set(compress(block_ids, self._cached))
        if marked != cached or evictable != cached & unheld:
            raise IntegrityError(
                f"the pool marks {len(marked)} blocks as cached ({len(evictable)} evictable), "
                f"the index lists {len(cached)}"
            )

    def _require_held(self, block_id: BlockId) -> None:
        # The lower bound matters: -1 pads block tables and would alias the last block.
        if not 0 <= block_id < len(self._ref_counts) or self._ref_counts[block_id] == 0:
            raise BlockNotHeldError(block_id)
