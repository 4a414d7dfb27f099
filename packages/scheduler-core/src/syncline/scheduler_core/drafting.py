"""How many drafts each decode row of a plan gets: what is wanted, as far as nobody pays for it.

Cut by the length limit, then by the token budget, then by blocks. Drafts cause no preemption: what
is reserved for them leaves the row its own tokens of every plan that may come before their result
(windows of one length), and a block is taken for them only if every running sequence could then
still take as many.
"""

from syncline.kv_cache import BlockId
from syncline.scheduler_core.lifecycle import Lifecycle
from syncline.scheduler_core.sequence import Sequence
from syncline.scheduler_core.speculation import DraftCounts, share_budget
from syncline.scheduler_core.types import RowId


class DraftPlanner:
    """Asked once per plan that wants drafts, after every decode row has its own positions."""

    __slots__ = ("_life", "_max_steps_in_flight")

    def __init__(self, life: Lifecycle, max_steps_in_flight: int) -> None:
        self._life = life
        self._max_steps_in_flight = max_steps_in_flight

    def max_draft_tokens(self, num_tokens_left: int) -> int:
        """How much of the budget that the rows' own tokens leave may go to drafts.

        Half while somebody is prefilling or waiting, so that no prompt starves behind drafts.
        """
        life = self._life
        return num_tokens_left // 2 if life.prefilling or len(life.waiting) else num_tokens_left

    def grant(
        self, wanted: DraftCounts, window: int, budget: int
    ) -> tuple[tuple[int, ...] | None, list[tuple[RowId, int, tuple[BlockId, ...]]]]:
        """Drafts per decode row (None: no row has any), and the new blocks that they need.

        Positions for every granted draft are reserved.
        """
        decoding = self._life.decoding
        batch = decoding.batch
        # A window was cut to the length limits before, so none of these is negative.
        grants = [
            min(num_drafts, num_tokens_left // window - 1)
            for num_drafts, num_tokens_left in zip(
                _per_row(wanted, batch.sequences), decoding.tokens_left(), strict=True
            )
        ]
        grants = share_budget(grants, budget)
        # Until this step's result tells how many drafts were right, the row's next tokens are
        # planned behind all of them: that must not take a block sooner than without drafts.
        num_own = window * self._max_steps_in_flight
        new_blocks: list[tuple[RowId, int, tuple[BlockId, ...]]] = []
        for i, num_reserved in enumerate(decoding.positions_left()):
            num_short = num_own + window * grants[i] - num_reserved
            if num_short <= 0 or not grants[i]:
                continue
            sequence = batch.sequences[i]
            first_new = len(sequence.table.block_ids)
            num_positions = num_reserved + self._take_blocks(sequence, num_short)
            grants[i] = min(grants[i], max(0, num_positions - num_own) // window)
            block_ids = tuple(sequence.table.block_ids[first_new:])
            if block_ids:
                new_blocks.append((batch.rows[i], first_new, block_ids))
        return (tuple(grants) if any(grants) else None), new_blocks

    def _take_blocks(self, sequence: Sequence, num_positions: int) -> int:
        """Reserve so many more positions, or as many as may be; returns how many more there are."""
        kv = self._life.kv
        max_new_blocks = kv.num_free_blocks // (1 + len(self._life.running))
        num_new_blocks = min(-(-num_positions // kv.block_size), max_new_blocks)
        if not num_new_blocks:
            return 0
        num_new = num_new_blocks * kv.block_size
        reservation = kv.reserve(sequence.table, sequence.table.num_tokens_capacity + num_new)
        assert reservation is not None  # Only free blocks were counted.
        self._life.decoding.get_positions(sequence, num_new)
        return num_new


def _per_row(wanted: DraftCounts, sequences: list[Sequence]) -> list[int]:
    if isinstance(wanted, int):
        return [wanted] * len(sequences)
    return [wanted.get(sequence.seq_id, 0) for sequence in sequences]
