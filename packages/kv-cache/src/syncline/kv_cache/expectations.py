"""Which blocks are being computed now, by key: others with the same content may wait for them.

A table expects its full blocks [num_published, num_expected), one count per block and table.
Whoever waits for a key watches it, and is told once when nobody computes it any more.
"""

from collections import Counter
from collections.abc import Iterable
from itertools import repeat, takewhile

from syncline.kv_cache.block_table import BlockTable
from syncline.kv_cache.errors import IntegrityError
from syncline.kv_cache.types import BlockKey


class Expectations:
    """The keys being computed, each with the number of tables that compute it."""

    __slots__ = ("_num_tables", "_settled", "_watched")

    def __init__(self) -> None:
        self._num_tables: Counter[BlockKey] = Counter()
        self._watched: set[BlockKey] = set()
        self._settled: list[BlockKey] = []  # Watched once, and told by the next `take_settled`.

    def last_of_run(self, keys: Iterable[BlockKey]) -> BlockKey | None:
        """The last of those keys at the beginning of `keys` that are computed now."""
        run = list(takewhile(self._num_tables.__contains__, keys))
        return run[-1] if run else None

    def expect(self, table: BlockTable, num_full: int) -> None:
        """A step computes the table's full blocks up to here, which have keys already."""
        keys = table.keys[max(table.num_expected, table.num_published) : num_full]
        self._num_tables.update(keys)  # One more for each.
        table.num_expected = max(table.num_expected, table.num_published, num_full)

    def settle(self, table: BlockTable, start: int, stop: int) -> None:
        """The table no longer computes its blocks [start, stop), as far as it was expected to."""
        num_tables, watched = self._num_tables, self._watched
        keys = table.keys[start : min(stop, table.num_expected)]
        counts = list(map(num_tables.pop, keys, repeat(0)))  # 0: the same key again.
        if counts == [1] * len(keys) and (not watched or watched.isdisjoint(keys)):
            return  # One table for each, and nobody asked.
        for key, count in zip(keys, counts, strict=True):
            if count:
                num_tables[key] = count
        for key in keys:
            num_others = num_tables.pop(key) - 1
            if num_others:
                num_tables[key] = num_others
            elif key in watched:
                watched.remove(key)
                self._settled.append(key)

    def drop(self, table: BlockTable) -> None:
        """The table computes nothing any more."""
        self.settle(table, table.num_published, table.num_expected)
        table.num_expected = table.num_published

    def watch(self, key: BlockKey) -> None:
        """Tell when nobody computes this key any more. Raises ValueError if nobody does now."""
        if key not in self._num_tables:
            raise ValueError(f"key must be one that is being computed, got {key}")
        self._watched.add(key)

    def give_up_watches(self) -> None:
        """Tell of every watched key now: what it meant is no longer of use to anybody."""
        self._settled.extend(self._watched)
        self._watched.clear()

    def take_settled(self) -> list[BlockKey]:
        """The watched keys that nobody computes any more, each told once."""
        if not self._settled:
            return []
        settled = self._settled
        self._settled = []
        return settled

    def is_awaited(self, key: BlockKey) -> bool:
        """Whether the key is watched, or will be told by the next `take_settled`."""
        return key in self._watched or key in self._settled

    def check(self, tables: Iterable[BlockTable]) -> None:
        """Raise IntegrityError unless the counts are those of these tables, all there are."""
        expected: dict[BlockKey, int] = {}
        for table in tables:
            for key in table.keys[table.num_published : table.num_expected]:
                expected[key] = expected.get(key, 0) + 1
        if expected != self._num_tables:
            raise IntegrityError(
                f"{len(self._num_tables)} keys are marked as being computed, but tables expect "
                f"{len(expected)}"
            )
        if not self._watched <= expected.keys():
            raise IntegrityError("a key is watched that nobody computes")
