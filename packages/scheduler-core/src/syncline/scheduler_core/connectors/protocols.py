"""The side of a slower KV tier that the scheduler talks to. Blocks are named by stable keys.

A key has no `kv_epoch`: it says what content a block ought to have, not which weights computed it.
`clear` is how a tier learns that everything it has lost its meaning; a tier that outlives this
process or serves other engines has to tell weights apart itself.
"""

from collections.abc import Sequence as SequenceABC
from typing import Protocol

from syncline.kv_cache import StableKey


class OffloadConnector(Protocol):
    """Knows which blocks a slower tier holds. Called by the scheduler, on its thread, never late.

    It may forget a block at any time: a load of it then brings fewer tokens, or none. Plans depend
    on its answers: replicas of a scheduler need connectors that give the same ones.
    """

    def num_held_blocks(self, keys: SequenceABC[StableKey]) -> int:
        """How many of the first of these blocks, a sequence's in order, a load should bring.

        Fewer, or 0, where loading is not worth it. More than were asked about counts as all.
        """
        ...

    def missing(self, keys: SequenceABC[StableKey]) -> SequenceABC[int]:
        """Indices, in ascending order, of the blocks that should be stored now."""
        ...

    def stored(self, keys: SequenceABC[StableKey]) -> None:
        """These blocks are in the tier, whole: they may be counted as held from now on."""
        ...

    def clear(self) -> None:
        """KV content has lost its meaning: nothing stored so far may be counted as held again."""
        ...
