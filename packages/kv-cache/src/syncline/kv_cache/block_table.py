"""One sequence's blocks in order, and the hash chain of its full blocks; and leases on blocks.

Tables are data: only the `KVCacheManager` that made one changes it. Unit: token positions, blocks.

    [0, num_published * block_size)   listed in the prefix index, or known to it under another block
    [.., num_tokens_capacity)         reserved: the forward pass may touch these positions only
"""

from collections.abc import Callable
from collections.abc import Sequence as SequenceABC

from syncline.kv_cache.errors import LeaseError
from syncline.kv_cache.prefix_index import Chunk, PrefixEntry
from syncline.kv_cache.types import BlockId, BlockKey, CacheRoot


class BlockTable:
    """The blocks of one sequence. `keys[i]` describes its i-th full block."""

    __slots__ = (
        "block_ids",
        "block_size",
        "cacheable",
        "chunks",
        "first_chunk",
        "keys",
        "num_expected",
        "num_published",
        "parent",
        "root",
    )

    def __init__(self, root: CacheRoot, block_size: int, *, cacheable: bool) -> None:
        self.root = root
        self.block_size = block_size
        self.cacheable = cacheable
        self.block_ids: list[BlockId] = []
        self.keys: list[BlockKey] = []
        self.num_published = 0
        self.num_expected = 0  # Full blocks [num_published, num_expected) are being computed.
        # Tokens of full blocks from `first_chunk` on, kept until they are published.
        self.chunks: list[Chunk] = []
        self.first_chunk = 0
        self.parent: PrefixEntry | CacheRoot | None = root  # None: cut, nothing more is listed.

    @property
    def num_tokens_capacity(self) -> int:
        return len(self.block_ids) * self.block_size

    def slots(self, start: int, stop: int) -> list[int]:
        """Slot ids (`block_id * block_size + offset`) of positions [start, stop).

        Raises ValueError if a position is not reserved.
        """
        if not 0 <= start <= stop <= self.num_tokens_capacity:
            raise ValueError(
                f"positions must lie in [0, {self.num_tokens_capacity}), got [{start}, {stop})"
            )
        size = self.block_size
        return [self.block_ids[p // size] * size + p % size for p in range(start, stop)]


class Lease:
    """A holder outside step order (an offload, a remote transfer, a host read) until released."""

    __slots__ = ("_on_release", "block_ids", "is_released")

    def __init__(
        self, block_ids: SequenceABC[BlockId], on_release: Callable[["Lease"], None]
    ) -> None:
        self.block_ids = tuple(block_ids)
        self.is_released = False
        self._on_release = on_release

    def release(self) -> None:
        """The transfer is complete. Raises LeaseError the second time."""
        if self.is_released:
            raise LeaseError(f"the lease on blocks {self.block_ids} was released already")
        self.is_released = True
        self._on_release(self)
