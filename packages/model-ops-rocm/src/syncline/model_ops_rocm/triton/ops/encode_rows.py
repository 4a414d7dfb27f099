"""The rows of the table of many weights, written for all jobs at once; checks nothing.

Unit: one row. What the rows of jobs that are alike have in common is a `Row` of theirs; where each
job's tensors are is added to it, and tiles and maxima are counted on through all jobs.
"""

from array import array
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Final, NamedTuple

import torch

from syncline.model_ops_rocm.triton.encode_table import Entry, Numbers
from syncline.model_ops_rocm.triton.launch import Chosen, Kernel

# Of a job's addresses: its tensors, what is written first, and its maxima, from the first of all.
WEIGHT_AT, SCALE_AT, SOURCE_AT, SOURCE_SCALE_AT, GIVEN_AT, MAXIMA_AT = range(6)
NUM_TENSORS: Final = 5
NUM_ADDRESSES: Final = 6
MAXIMUM_BYTES: Final = 4
_FIRST_TILE: Final = Entry._fields.index("first_tile")
_ADDRESSES: Final = slice(Entry._fields.index("source"), Entry._fields.index("source_scale") + 1)


@dataclass(slots=True, kw_only=True, eq=False)
class Kind:
    """What one launch is compiled for, and how much it has to do."""

    stage: int
    kernel: Kernel
    chosen: Chosen
    constants: Mapping[str, object]
    samples: tuple[torch.Tensor, ...]  # of one of the jobs, for their types
    num_rows: int = 0
    num_tiles: int = 0


class Row(NamedTuple):
    """What the rows of jobs that are alike have in common."""

    kind: Kind
    numbers: Numbers
    num_tiles: int
    source: int = SOURCE_AT  # which of the job's addresses, and how many bytes from it on
    source_offset: int = 0
    weight: int = WEIGHT_AT
    read: int = GIVEN_AT
    read_offset: int = 0
    source_scale_offset: int = 0

    @property
    def addresses(self) -> tuple[int, int, int, int, int]:
        """Which of the job's addresses are those of an `Entry`."""
        return self.source, self.weight, SCALE_AT, self.read, SOURCE_SCALE_AT

    def entry(self, first_tile: int, maxima: int) -> tuple[int, ...]:
        """An `Entry` of a job whose addresses are all 0."""
        read = self.read_offset + (maxima if self.read == MAXIMA_AT else 0)
        return (first_tile, self.source_offset, 0, 0, read, self.source_scale_offset, *self.numbers)


class Need(NamedTuple):
    """What a job needs: rows of launches, and maxima to be made first."""

    rows: list[Row]
    num_maxima: int


def int64(numbers: Iterable[int]) -> torch.Tensor:
    """A vector on the host. Through an array: PyTorch looks at every number of a list."""
    held = array("q", numbers)
    return torch.frombuffer(held, dtype=torch.int64) if held else torch.empty(0, dtype=torch.int64)


def write_rows(
    table: torch.Tensor,
    kinds: SequenceABC[Kind],
    needs: SequenceABC[Need],
    jobs: tuple[torch.Tensor, torch.Tensor],
    maxima: int,
) -> None:
    """The rows of each kind, in the order of jobs: int64 [num_rows, fields] on the host.

    `jobs` are which of `needs` each one has, int64 [N], and its addresses, int64 [N,
    NUM_ADDRESSES]. The first maximum of all is at the address `maxima`.
    """
    (which, addresses), rows = jobs, [row for need in needs for row in need.rows]
    places = {kind: place for place, kind in enumerate(kinds)}
    first_tiles = list(accumulate((kind.num_tiles for kind in kinds), initial=0))
    # Whose each row is, and which of `rows` it has: job by job, then each kind for itself.
    num_rows_of = int64(len(need.rows) for need in needs)
    num_rows = num_rows_of.take(which)
    job = torch.arange(len(which)).repeat_interleave(num_rows)
    first = _before(num_rows_of).take(which) - _before(num_rows)
    row = torch.arange(len(job)) + first.take(job)
    if len(kinds) > 1:
        order = int64(places[each.kind] for each in rows).take(row).argsort(stable=True)
        job, row = job.take(order), row.take(order)
    # Tiles are counted through all kinds: of each the first one of its own is taken.
    entries = _table(each.entry(-first_tiles[places[each.kind]], maxima) for each in rows)
    torch.index_select(entries, 0, row, out=table)
    table[:, _FIRST_TILE] += _before(int64(each.num_tiles for each in rows).take(row))
    columns = _table(each.addresses for each in rows).index_select(0, row)
    table[:, _ADDRESSES] += addresses.take(columns + NUM_ADDRESSES * job.unsqueeze(1))


def _table(rows: Iterable[tuple[int, ...]]) -> torch.Tensor:
    """Of rows of one length, of which there is one."""
    listed = list(rows)
    return int64(chain.from_iterable(listed)).view(len(listed), -1)


def _before(sizes: torch.Tensor) -> torch.Tensor:
    """Of each, the sum of those before it."""
    return sizes.cumsum(0) - sizes
