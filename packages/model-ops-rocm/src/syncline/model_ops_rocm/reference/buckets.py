"""Which decode rows attend together: rows of similar length, so that padding stays cheap.

Unit: KV blocks per row. Pure Python, knows no tensor.
"""

from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass

# Padding a bucket's rows to its widest costs one block's reads per wasted block; another bucket
# costs a handful of kernel launches, about as much as 32 blocks of a small model.
_FREE_WASTE_BLOCKS = 32
_WASTE_SHARE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBucket:
    """Rows that are padded to `num_blocks`, the blocks of the widest."""

    rows: tuple[int, ...]
    num_blocks: int


def bucket_rows(num_blocks: SequenceABC[int]) -> tuple[RowBucket, ...]:
    """Buckets of the rows that have blocks, widest first; row order is kept if one bucket does.

    A bucket's padding is at most 1/8 of its blocks, or 32 blocks if that is more. Rows without a
    block are in no bucket.
    """
    order = sorted(
        (row for row, count in enumerate(num_blocks) if count), key=lambda row: -num_blocks[row]
    )
    buckets: list[RowBucket] = []
    open_rows: list[int] = []
    used = 0
    for row in order:
        widest = num_blocks[open_rows[0]] if open_rows else num_blocks[row]
        needed = used + num_blocks[row]
        waste = widest * (len(open_rows) + 1) - needed
        if waste > max(_FREE_WASTE_BLOCKS, needed // _WASTE_SHARE):
            buckets.append(RowBucket(rows=tuple(open_rows), num_blocks=widest))
            open_rows, needed = [], num_blocks[row]
        open_rows.append(row)
        used = needed
    if open_rows:
        widest = num_blocks[open_rows[0]]
        rows = tuple(open_rows) if buckets else tuple(sorted(open_rows))
        buckets.append(RowBucket(rows=rows, num_blocks=widest))
    return tuple(buckets)
