"""Shares of the blocks of one computed prompt, so that n samples of it compute it once.

Knows blocks and the prompt's length, not who the samples are. Needs no prefix index.

    [0, table.num_tokens_capacity)   full blocks, which every sample shares as they are
    [.., num_tokens)                 in `tail`, which every sample copies and then writes into

The last position of the prompt is left for each sample to compute, so that each has a row of its
own from its first token on. The tail is *borrowed* as long as the table that computed it may go on
writing into it, behind the prompt: `settle` must come before the next step that does. Every method
but `num_freed_by` raises KVCacheError for a hold that has been dropped.
"""

from syncline.kv_cache.block_pool import BlockPool
from syncline.kv_cache.block_table import BlockTable
from syncline.kv_cache.chains import adopt_chain, renew_root
from syncline.kv_cache.errors import KVCacheError
from syncline.kv_cache.types import BlockId, Reservation


class PromptHold:
    """A holder of blocks, as a table is. Only the `PromptHolds` that made it changes it."""

    __slots__ = ("_num_positions", "is_tail_borrowed", "table", "tail")

    def __init__(
        self, table: BlockTable, tail: BlockId | None, num_positions: int, *, is_tail_borrowed: bool
    ) -> None:
        self.table = table
        self.tail = tail
        self._num_positions = num_positions
        self.is_tail_borrowed = is_tail_borrowed

    @property
    def num_tokens(self) -> int:
        """Positions whose KV a sample need not compute."""
        return self.table.num_tokens_capacity if self.tail is None else self._num_positions

    @property
    def block_ids(self) -> list[BlockId]:
        """Every block held, in the order of the prompt."""
        return self.table.block_ids if self.tail is None else [*self.table.block_ids, self.tail]


class PromptHolds:
    """The holds over one manager's pool: `KVCacheManager.prompt_holds`."""

    __slots__ = ("_holds", "_kv_epoch", "_pool")

    def __init__(self, pool: BlockPool, kv_epoch: int) -> None:
        self._pool = pool
        self._kv_epoch = kv_epoch
        self._holds: set[PromptHold] = set()

    @property
    def block_ids(self) -> list[BlockId]:
        """A block per reference that a hold has to it."""
        return [block_id for hold in self._holds for block_id in hold.block_ids]

    def take(self, source: BlockTable, num_prompt_tokens: int, kv_epoch: int) -> PromptHold | None:
        """Hold the KV of a prompt, computed in `source` by steps stamped `kv_epoch`, for others.

        None if the stamp is not current or the table began in an older epoch. Raises ValueError
        unless the table has blocks for the prompt, of at least one token.
        """
        if not 0 < num_prompt_tokens <= source.num_tokens_capacity:
            raise ValueError(
                f"num_prompt_tokens must be in [1, {source.num_tokens_capacity}] (reserved), "
                f"got {num_prompt_tokens}"
            )
        if not kv_epoch == source.root.kv_epoch == self._kv_epoch:
            return None
        size = source.block_size
        num_shared, num_in_tail = divmod(num_prompt_tokens - 1, size)
        table = BlockTable(source.root, size, cacheable=source.cacheable)
        table.block_ids = source.block_ids[:num_shared]
        adopt_chain(table, source, num_shared)
        # With the last position alone in its block, nothing in there is of use to a sample.
        tail = source.block_ids[num_shared] if num_in_tail else None
        is_tail_borrowed = tail is not None and num_in_tail + 1 < size
        hold = PromptHold(table, tail, num_prompt_tokens - 1, is_tail_borrowed=is_tail_borrowed)
        self._pool.share(hold.block_ids)
        self._holds.add(hold)
        return hold

    def reserve(
        self, table: BlockTable, up_to_position: int, hold: PromptHold, *, is_last: bool = False
    ) -> Reservation | None:
        """Own blocks for positions [0, up_to_position), with KV of the hold's `num_tokens` in them
        once the copies are made; or change nothing and return None.

        is_last: nobody else will need the hold's tail, so it is taken over where it is the hold's
        own. Raises KVCacheError if the table has blocks or the hold is of another root or epoch.
        """
        self._require(hold)
        if up_to_position <= hold.num_tokens:
            raise ValueError(
                f"up_to_position must exceed the hold's {hold.num_tokens} tokens: "
                f"at least one is computed anew"
            )
        if table.block_ids:
            raise KVCacheError("a prompt hold can be reserved into an empty table only")
        renew_root(table, self._kv_epoch)
        if table.root != hold.table.root:
            raise KVCacheError("this prompt hold is of another salt, adapter, format or epoch")
        shared, tail = hold.table.block_ids, hold.tail
        num_new = -(-up_to_position // table.block_size) - len(shared)
        taken = [tail] if is_last and tail is not None and self._pool.is_private(tail) else []
        new = self._pool.allocate(num_new - len(taken))
        if new is None:
            return None
        self._pool.share(shared)
        new = taken + new
        copies: tuple[tuple[BlockId, BlockId], ...] = ()
        if taken:
            hold.tail = None
            hold.is_tail_borrowed = False
        elif tail is not None:
            copies = ((tail, new[0]),)
        table.block_ids += [*shared, *new]
        adopt_chain(table, hold.table, len(shared))
        return Reservation(new_block_ids=tuple(new), copies=copies)

    def settle(self, hold: PromptHold) -> tuple[tuple[BlockId, BlockId], ...]:
        """End the borrowing: the hold's own block takes the tail's place, by the copy returned.

        Nothing to copy if whoever wrote into the tail is gone. Without a free block the tail is
        given up, and samples compute its part anew.
        """
        self._require(hold)
        tail = hold.tail
        if not hold.is_tail_borrowed:
            return ()
        assert tail is not None
        hold.is_tail_borrowed = False
        if self._pool.ref_count(tail) == 1:
            return ()
        new = self._pool.allocate(1)
        hold.tail = None if new is None else new[0]
        self._pool.free([tail])
        return () if new is None else ((tail, new[0]),)

    def drop_tail(self, hold: PromptHold) -> None:
        """Give the tail up, and keep the full blocks; no effect without a tail."""
        self._require(hold)
        if hold.tail is not None:
            self._pool.free([hold.tail])
            hold.tail = None
            hold.is_tail_borrowed = False

    def drop(self, hold: PromptHold) -> None:
        """Give up every block of the hold."""
        self._require(hold)
        self._pool.free(reversed(hold.block_ids))
        self._holds.remove(hold)

    def num_freed_by(self, hold: PromptHold) -> int:
        """How many blocks dropping the hold would free: those that nobody else holds."""
        return sum(self._pool.ref_count(block_id) == 1 for block_id in hold.block_ids)

    def renew(self, pool: BlockPool, kv_epoch: int) -> None:
        """The manager has a new pool or a new epoch; holds of an older epoch serve nobody."""
        self._pool = pool
        self._kv_epoch = kv_epoch

    def _require(self, hold: PromptHold) -> None:
        if hold not in self._holds:
            raise KVCacheError("this prompt hold has been dropped, or is not of this pool")
