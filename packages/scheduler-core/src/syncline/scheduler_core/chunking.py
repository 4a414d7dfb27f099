"""The one answer to how many positions of a sequence come next, for every kind of admission.

A first prefill, a recompute after preemption and a prompt with cached prefix are the same thing:
positions from `num_issued_tokens` to `target_len`, cut by the budget.
"""

from syncline.scheduler_core.plan import PrefillChunk
from syncline.scheduler_core.types import RowId


def next_chunk(row: RowId, start: int, target_len: int, budget: int) -> PrefillChunk:
    """Positions [start, ...) of a prefilling sequence, at most `budget` (at least 1).

    start: its `num_issued_tokens`. Final if and only if the chunk ends at `target_len` now; a
    prefilling sequence has no token in flight.
    """
    stop = min(target_len, start + budget)
    return PrefillChunk(row=row, start=start, stop=stop, is_final=stop == target_len)
