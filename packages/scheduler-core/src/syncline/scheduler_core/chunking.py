"""The one answer to how many positions of a sequence come next, for every kind of admission.

A first prefill, a recompute after preemption and a prompt with cached prefix are the same thing:
positions from `num_issued_tokens` to `target_len`, cut by the budget.
"""

from syncline.scheduler_core.plan import PrefillChunk
from syncline.scheduler_core.sequence import Sequence
from syncline.scheduler_core.types import RowId


def next_chunk(sequence: Sequence, row: RowId, budget: int) -> PrefillChunk:
    """Positions [num_issued_tokens, ...) of a prefilling sequence, at most `budget` (at least 1).

    Final if and only if it ends at `target_len` now; a prefilling sequence has no token in flight.
    """
    start = sequence.num_issued_tokens
    target = sequence.target_len
    stop = min(target, start + budget)
    return PrefillChunk(row=row, start=start, stop=stop, is_final=stop == target)
