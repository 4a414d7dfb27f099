"""Work in flight: one object per launched step, from which everything pending is derived.

No sequence counts its own pending tokens, so no such count can be wrong: `max_new_tokens` asks the
steps that contain it.
"""

from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as SequenceABC

from syncline.scheduler_core.decoding import DecodeBatch
from syncline.scheduler_core.errors import StepOrderError
from syncline.scheduler_core.plan import PrefillChunk
from syncline.scheduler_core.sequence import Sequence
from syncline.scheduler_core.speculation import new_token_interval
from syncline.scheduler_core.types import RowId, SequenceId


class StepInFlight:
    """A launched step whose result has not been applied.

    batch       the decode rows, shared with other steps while membership is unchanged
    chunks      prefill chunks in plan order
    drafts      decode rows with drafts: how many each has, by sequence
    capped      sequences that reach a length limit if the step yields all it may
    num_ended   yielding rows whose sequences have ended since the step was planned: surplus
    """

    __slots__ = (
        "batch",
        "capped",
        "chunks",
        "drafts",
        "finals",
        "kv_epoch",
        "num_draft_tokens",
        "num_ended",
        "step_id",
        "weight_version",
        "window",
    )

    def __init__(
        self,
        step_id: int,
        *,
        stamps: tuple[int, int],
        window: int,
        batch: DecodeBatch,
        chunks: list[tuple[Sequence, PrefillChunk]],
        num_draft_tokens: tuple[int, ...] | None = None,
    ) -> None:
        self.step_id = step_id
        self.kv_epoch, self.weight_version = stamps
        self.window = window
        self.batch = batch
        self.num_draft_tokens = num_draft_tokens
        self.drafts: dict[SequenceId, int] = {}
        if num_draft_tokens is not None:
            for sequence, num_drafts in zip(batch.sequences, num_draft_tokens, strict=True):
                if num_drafts:
                    self.drafts[sequence.seq_id] = num_drafts
        self.chunks = chunks
        self.finals = [sequence for sequence, chunk in chunks if chunk.is_final]
        self.capped: list[Sequence] = []
        self.num_ended = 0

    @property
    def is_plain(self) -> bool:
        """Every row yields exactly one token, unless its result says why not."""
        return self.window == 1 and not self.drafts

    def num_draft_tokens_of(self, i: int) -> int:
        """Drafts in each step of decode row `i`."""
        return 0 if self.num_draft_tokens is None else self.num_draft_tokens[i]

    def max_decode_tokens(self, sequence: Sequence) -> int:
        """Of the sequence's decode row."""
        if not self.drafts:
            return self.window
        return new_token_interval(self.window, self.drafts.get(sequence.seq_id, 0))[1]

    def max_counts(self) -> list[int]:
        """The most tokens that each yielding row may have, in the order of the result."""
        window, num_rows = self.window, len(self.batch.rows)
        if self.num_draft_tokens is None:
            counts = [window] * num_rows
        else:
            counts = [window * (1 + num_drafts) for num_drafts in self.num_draft_tokens]
        return counts + [1] * len(self.finals)

    def is_quiet(self, token_ids: SequenceABC[int]) -> bool:
        """No token of the step's rows can end its sequence, but for a length limit."""
        batch = self.batch
        return not self.finals and not batch.is_watched and batch.ending.isdisjoint(token_ids)

    @property
    def num_yielding_rows(self) -> int:
        return len(self.batch.rows) + len(self.finals)

    @property
    def yielding(self) -> list[Sequence]:
        """The sequences of the yielding rows, in the order of the result."""
        return [*self.batch.sequences, *self.finals] if self.finals else self.batch.sequences

    @property
    def without_token(self) -> list[Sequence]:
        """Sequences whose first token may be in this step: it always comes from a final chunk."""
        return [sequence for sequence in self.finals if not sequence.output_token_ids]

    def max_new_tokens(self, sequence: Sequence) -> int:
        """Of this sequence, by its own notes; 0 if the step has no yielding row of it."""
        if self.step_id == sequence.final_step:
            return 1
        if sequence.decode_from <= self.step_id <= sequence.decode_to:
            return self.max_decode_tokens(sequence)
        return 0

    def sequences_by_row(self) -> dict[RowId, Sequence]:
        by_row = dict(zip(self.batch.rows, self.batch.sequences, strict=True))
        for sequence, chunk in self.chunks:
            by_row[chunk.row] = sequence
        return by_row


class PendingSteps:
    """The launched steps, oldest first. Satisfies `sequence.PendingTokens`."""

    __slots__ = ("_steps", "next_id")

    def __init__(self) -> None:
        self._steps: deque[StepInFlight] = deque()
        self.next_id = 0

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[StepInFlight]:
        return iter(self._steps)

    @property
    def last_id(self) -> int:
        """Id of the newest planned step, -1 before the first."""
        return self.next_id - 1

    @property
    def last_applied_id(self) -> int:
        """Id of the newest applied step, -1 before the first."""
        return self.next_id - 1 - len(self._steps)

    def push(self, step: StepInFlight) -> None:
        self._steps.append(step)
        self.next_id += 1

    def oldest(self, step_id: int) -> StepInFlight:
        """The step whose result is due. Raises StepOrderError unless it is `step_id`."""
        if not self._steps or self._steps[0].step_id != step_id:
            raise StepOrderError(self._steps[0].step_id if self._steps else None, step_id)
        return self._steps[0]

    def pop(self) -> None:
        self._steps.popleft()

    def note_end(self, sequence: Sequence) -> None:
        """The sequence has just ended: its rows in flight, if any, have become surplus."""
        for step in self._steps:
            if step.max_new_tokens(sequence):
                step.num_ended += 1

    def max_new_tokens(self, sequence: Sequence) -> int:
        total = 0
        for step in self._steps:
            total += step.max_new_tokens(sequence)
        return total
