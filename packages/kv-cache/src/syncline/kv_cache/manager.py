"""Match, reserve, publish, release: the one place where pool, index and tables change together.

Knows nothing of requests, steps or devices: callers say which positions they will write, which
have been computed, and under which `kv_epoch`. Token lists must be append-only per table.
"""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceABC

from syncline.kv_cache.block_pool import BlockPool, require_positive
from syncline.kv_cache.block_table import BlockTable, Lease
from syncline.kv_cache.chains import chunks_of, describe, drop_chunks, renew_root
from syncline.kv_cache.errors import BlockNotHeldError, BlocksInUseError, KVCacheError
from syncline.kv_cache.expectations import Expectations
from syncline.kv_cache.matching import NO_MATCH, PrefixMatch, longest_match, verify
from syncline.kv_cache.prefix_index import IndexListener, PrefixIndex
from syncline.kv_cache.prompt_hold import PromptHolds
from syncline.kv_cache.types import (
    BlockId,
    BlockKey,
    CacheRoot,
    KVCacheStats,
    Reservation,
)


class KVCacheManager:
    """A pool of `num_blocks` blocks of `block_size` tokens with a prefix index over it.

    `kv_format` names the dtype and layout of the cache in every hash root. `index` may be replaced
    to force key collisions in a test. `event_log` (a `KVEventLog`) is told what can be hit.
    `prompt_holds` are shares of computed prompts, which count as holders of blocks.
    Raises ValueError unless both sizes are positive.
    """

    __slots__ = (
        "_expectations",
        "_index",
        "_kv_epoch",
        "_kv_format",
        "_leases",
        "_num_evicted",
        "_num_published",
        "_pool",
        "block_size",
        "enable_prefix_caching",
        "prompt_holds",
    )

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        kv_format: str = "",
        index: PrefixIndex | None = None,
        event_log: IndexListener | None = None,
    ) -> None:
        require_positive("block_size", block_size)
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._kv_format = kv_format
        self._kv_epoch = 0
        self._index = PrefixIndex() if index is None else index
        self._index.listener = event_log
        self._pool = BlockPool(num_blocks, self._forget_evicted)
        self._leases: set[Lease] = set()
        self.prompt_holds = PromptHolds(self._pool, self._kv_epoch)
        self._expectations = Expectations()
        self._num_evicted = 0
        self._num_published = 0

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be reserved, cached blocks that nobody holds included."""
        return self._pool.num_free_blocks

    @property
    def num_cached_blocks(self) -> int:
        return len(self._index)

    @property
    def num_evictable_blocks(self) -> int:
        """Cached blocks that nobody holds: they count as free."""
        return self._pool.num_evictable_blocks

    @property
    def kv_epoch(self) -> int:
        return self._kv_epoch

    @property
    def stats(self) -> KVCacheStats:
        return KVCacheStats(
            num_blocks=self.num_blocks,
            num_free_blocks=self.num_free_blocks,
            num_cached_blocks=self.num_cached_blocks,
            num_evicted_blocks=self._num_evicted,
            num_published_blocks=self._num_published,
        )

    def new_table(
        self, *, cache_salt: str = "", adapter_id: str = "", cacheable: bool = True
    ) -> BlockTable:
        """An empty table. A table that is not cacheable neither hits nor is published."""
        for name, value in (("cache_salt", cache_salt), ("adapter_id", adapter_id)):
            if not isinstance(value, str):  # pyright: ignore[reportUnnecessaryIsInstance]  a caller's data
                raise ValueError(f"{name} must be a str, got {value!r}")
        root = CacheRoot(
            salt=cache_salt,
            adapter_id=adapter_id,
            kv_format=self._kv_format,
            kv_epoch=self._kv_epoch,
        )
        return BlockTable(root, self.block_size, cacheable=cacheable)

    def is_current(self, table: BlockTable) -> bool:
        """Whether KV in this table's blocks still has its meaning: no epoch has begun since."""
        return table.root.kv_epoch == self._kv_epoch

    def fits(self, num_tokens: int) -> bool:
        """Whether the whole pool could hold this many tokens of one sequence."""
        return num_tokens <= self.num_blocks * self.block_size

    def match(self, table: BlockTable, token_ids: SequenceABC[int], max_tokens: int) -> PrefixMatch:
        """The longest verified cached prefix of `token_ids`, at most `max_tokens`; takes nothing.

        Full blocks only, with one exception: if the block that ends at `max_tokens + 1` is cached
        as well, it becomes `copy_source` and `num_tokens` is `max_tokens`. Raises KVCacheError if
        the table holds blocks already.
        """
        if not self.enable_prefix_caching or not table.cacheable:
            return NO_MATCH
        if table.block_ids:
            raise KVCacheError("match needs an empty table; this one holds blocks")
        if not 0 <= max_tokens <= len(token_ids):
            raise ValueError(f"max_tokens must be in [0, {len(token_ids)}], got {max_tokens}")
        renew_root(table, self._kv_epoch)
        # At most one block more than may be shared: the one that ends at max_tokens + 1.
        num_described = min(max_tokens + 1, len(token_ids)) // self.block_size
        chunks = chunks_of(table, token_ids, 0, num_described)
        describe(table, chunks, 0, num_described, self._index.key_of)
        return longest_match(
            self._index,
            self._expectations,
            table,
            chunks,
            num_described=num_described,
            max_tokens=max_tokens,
        )

    def num_blocks_taken(self, up_to_position: int, match: PrefixMatch) -> int:
        """Free blocks that `reserve` would take into an empty table with this match."""
        num_new = -(-up_to_position // self.block_size) - len(match.block_ids)
        return num_new + self._pool.num_evictable_among(match.block_ids)

    def reserve(
        self, table: BlockTable, up_to_position: int, match: PrefixMatch | None = None
    ) -> Reservation | None:
        """Own blocks for positions [0, up_to_position), or change nothing and return None.

        `match` (for an empty table) is shared into it first. Raises StaleMatchError if the index
        has changed since the match was made.
        """
        if up_to_position < 0:
            raise ValueError(f"up_to_position must be non-negative, got {up_to_position}")
        num_needed = -(-up_to_position // self.block_size)
        if match is None or not match.num_tokens:
            if not table.block_ids:
                renew_root(table, self._kv_epoch)
            new = self._pool.allocate(max(0, num_needed - len(table.block_ids)))
            if new is None:
                return None
            table.block_ids += new
            return Reservation(new_block_ids=tuple(new))
        return self._reserve_with_match(table, num_needed, match)

    def extend_each(self, tables: SequenceABC[BlockTable]) -> list[BlockId] | None:
        """One more block at the end of each table, or nothing changed and None."""
        block_ids = self._pool.allocate(len(tables))
        if block_ids is not None:
            for table, block_id in zip(tables, block_ids, strict=True):
                table.block_ids.append(block_id)
        return block_ids

    def expect(self, table: BlockTable, token_ids: SequenceABC[int], up_to_position: int) -> None:
        """Positions up to here will be computed: others may wait for their full blocks.

        Undone block by block by `publish`, and altogether by `release`.
        """
        if not self._is_publishable(table):
            return
        num_full = min(up_to_position, len(token_ids)) // self.block_size
        first = len(table.keys)
        if first < num_full:
            chunks = chunks_of(table, token_ids, first, num_full)
            describe(table, chunks, first, num_full, self._index.key_of)
        self._expectations.expect(table, num_full)

    def watch(self, key: BlockKey) -> None:
        """Have `take_settled` tell when nobody computes this key any more.

        Raises ValueError if nobody computes it now.
        """
        self._expectations.watch(key)

    def take_settled(self) -> list[BlockKey]:
        """The watched keys that have been published or given up since the last call.

        A new epoch settles every watched key. Each is told once, and may be watched anew.
        """
        return self._expectations.take_settled()

    def is_awaited(self, key: BlockKey) -> bool:
        """Whether a coming `take_settled` will tell of this key."""
        return self._expectations.is_awaited(key)

    def publish(
        self,
        table: BlockTable,
        token_ids: SequenceABC[int],
        num_computed_tokens: int,
        kv_epoch: int,
    ) -> int:
        """List the full blocks whose KV now exists, written by a step stamped `kv_epoch`.

        Returns how many entered the index. Nothing is listed under a stale stamp, from a table
        that began in an older epoch, or beyond a key collision; a content that is listed already
        keeps its first block.
        """
        num_full = num_computed_tokens // self.block_size
        if num_full > len(table.block_ids):
            raise ValueError(
                f"num_computed_tokens must be at most {table.num_tokens_capacity} (reserved), "
                f"got {num_computed_tokens}"
            )
        if not 0 <= num_computed_tokens <= len(token_ids):
            raise ValueError(
                f"num_computed_tokens must be in [0, {len(token_ids)}] (token_ids), "
                f"got {num_computed_tokens}"
            )
        if num_full <= table.num_published or kv_epoch != self._kv_epoch:
            return 0
        if not self._is_publishable(table):
            return 0
        first = table.num_published
        chunks = chunks_of(table, token_ids, first, num_full)
        describe(table, chunks, first, num_full, self._index.key_of)
        self._expectations.settle(table, first, num_full)
        listed: SequenceABC[BlockId] = ()
        if table.parent is not None:  # None: a collision has cut the chain.
            table.parent, listed, displaced = self._index.publish_run(
                table.keys[first:num_full],
                chunks[: num_full - first],
                table.parent,
                table.block_ids[first:num_full],
            )
            self._pool.mark_cached(*listed)
            for block_id in displaced:  # After the marks: it may have been listed just now.
                self._pool.unmark_cached(block_id)
        drop_chunks(table, num_full)
        table.num_published = num_full
        table.num_expected = max(table.num_expected, num_full)
        self._num_published += len(listed)
        return len(listed)

    def release(self, table: BlockTable) -> None:
        """Give up every block and expectation of the table; no effect on an empty one."""
        self._expectations.drop(table)
        self._pool.free(reversed(table.block_ids))
        table.block_ids.clear()
        table.chunks = []
        table.num_published = 0
        table.num_expected = 0
        table.parent = table.root

    def withdraw(self, table: BlockTable) -> None:
        """Keep the table's blocks; from here to its release nothing of it is published or awaited.

        What it has published already stays listed.
        """
        self._expectations.drop(table)
        table.parent = None

    def lease(self, block_ids: SequenceABC[BlockId]) -> Lease:
        """Hold blocks outside step order. Raises BlockNotHeldError, with nothing taken."""
        block_ids = tuple(block_ids)  # An iterator would be used up by the check.
        for block_id in block_ids:
            if self._pool.ref_count(block_id) == 0:
                raise BlockNotHeldError(block_id)  # A free block has no content to protect.
        self._pool.share(block_ids)
        lease = Lease(block_ids, self._end_lease)
        self._leases.add(lease)
        return lease

    def resize(self, num_blocks: int) -> None:
        """Replace the pool by one of another size; the index is emptied.

        Raises BlocksInUseError, with nothing changed, while a block is held.
        """
        num_held = self.num_blocks - self.num_free_blocks
        if num_held:
            raise BlocksInUseError("resize the pool", num_held)
        pool = BlockPool(num_blocks, self._forget_evicted)
        self._index.clear()
        self._pool = pool
        self.prompt_holds.renew(pool, self._kv_epoch)

    def clear_index(self) -> int:
        """Unlist every cached block; returns how many were listed. Held blocks stay held."""
        block_ids = self._index.clear()
        for block_id in block_ids:
            self._pool.unmark_cached(block_id)
        return len(block_ids)

    def bump_epoch(self) -> int:
        """KV content has lost its meaning: unlist everything and start a new epoch, returned.

        Tables that hold blocks keep them and are never published again; an empty table moves to
        the new epoch when it is next used.
        """
        self.clear_index()
        self._expectations.give_up_watches()
        self._kv_epoch += 1
        self.prompt_holds.renew(self._pool, self._kv_epoch)
        return self._kv_epoch

    def check_integrity(self, tables: Iterable[BlockTable]) -> None:
        """Raise IntegrityError unless blocks, references, index and expectations agree.

        tables: every table that holds blocks. Linear in the number of blocks.
        """
        tables = list(tables)
        holders = [0] * self.num_blocks
        for table in tables:
            for block_id in table.block_ids:
                holders[block_id] += 1
        for lease in self._leases:
            for block_id in lease.block_ids:
                holders[block_id] += 1
        for block_id in self.prompt_holds.block_ids:
            holders[block_id] += 1
        self._pool.check(holders, self._index.block_ids)
        self._expectations.check(tables)

    def _reserve_with_match(
        self, table: BlockTable, num_needed: int, match: PrefixMatch
    ) -> Reservation | None:
        if table.block_ids:
            raise KVCacheError("a prefix match can be reserved into an empty table only")
        if num_needed * self.block_size <= match.num_tokens:
            raise ValueError(
                f"up_to_position must exceed the match's {match.num_tokens} tokens: "
                f"at least one is computed anew"
            )
        last_entry = verify(self._index, table, match)
        pool = self._pool
        num_new = max(0, num_needed - len(match.block_ids))
        if match.copy_source is not None:
            pool.touch(match.copy_source)
        # Hits that nobody holds are counted free, yet are about to be taken: not twice.
        if num_new > pool.num_free_blocks - pool.num_evictable_among(match.block_ids):
            return None
        pool.share(match.block_ids)
        new = pool.allocate(num_new)
        assert new is not None
        table.block_ids += [*match.block_ids, *new]
        table.num_published = len(match.block_ids)
        table.num_expected = table.num_published
        table.parent = last_entry
        copies: tuple[tuple[BlockId, BlockId], ...] = ()
        # In a full pool the source itself may be the block given: then it is in place already.
        if match.copy_source is not None and match.copy_source != new[0]:
            copies = ((match.copy_source, new[0]),)
        return Reservation(new_block_ids=tuple(new), copies=copies)

    def _is_publishable(self, table: BlockTable) -> bool:
        return (
            self.enable_prefix_caching and table.cacheable and table.root.kv_epoch == self._kv_epoch
        )

    def _forget_evicted(self, block_id: BlockId) -> None:
        self._index.forget(block_id)
        self._num_evicted += 1

    def _end_lease(self, lease: Lease) -> None:
        self._leases.remove(lease)
        self._pool.free(lease.block_ids)
