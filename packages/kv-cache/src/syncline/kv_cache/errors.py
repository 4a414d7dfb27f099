"""Everything this package raises for a broken contract; bad arguments are plain ValueError.

    KVCacheError
    |-- BlockNotHeldError   a block that nobody holds was shared, freed, published or leased
    |-- BlocksInUseError    an operation that needs an idle pool found blocks held
    |-- StaleMatchError     a prefix match was used after the index had changed
    |-- LeaseError          a lease was released twice
    `-- IntegrityError      the books do not balance: a bug in this package or its caller

Scarcity is not an error: `BlockPool.allocate` and `KVCacheManager.reserve` return None.
"""


class KVCacheError(Exception):
    """Base of every error of this package."""


class BlockNotHeldError(KVCacheError):
    """`block_id` has no holder (or is outside the pool), so it cannot be shared or freed."""

    def __init__(self, block_id: int) -> None:
        super().__init__(f"block {block_id} is not held by anyone")
        self.block_id = block_id


class BlocksInUseError(KVCacheError):
    """`action` needs every block free, but `num_held_blocks` are held."""

    def __init__(self, action: str, num_held_blocks: int) -> None:
        super().__init__(f"cannot {action}: {num_held_blocks} blocks are held")
        self.action = action
        self.num_held_blocks = num_held_blocks


class StaleMatchError(KVCacheError):
    """Block `block_id` of a prefix match is no longer what the match said it was."""

    def __init__(self, block_id: int) -> None:
        super().__init__(
            f"block {block_id} of this prefix match has left the index; match again before reserve"
        )
        self.block_id = block_id


class LeaseError(KVCacheError):
    """A lease was released a second time."""


class IntegrityError(KVCacheError):
    """The block accounting contradicts itself; `detail` says where."""

    def __init__(self, detail: str) -> None:
        super().__init__(detail)
        self.detail = detail
