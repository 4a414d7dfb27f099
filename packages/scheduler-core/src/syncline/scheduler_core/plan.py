"""What a step computes and what came of it: frozen, columnar, nothing per token or decode row.

A plan states no position of a row whose previous token is not known yet: only the runner, which
executes plans in order, knows it. Rows that yield tokens, in this order: `decode_rows`, then the
final prefill chunks in plan order.
"""

from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass

from syncline.kv_cache import BlockId
from syncline.scheduler_core.connectors.values import KVLoad, KVStore
from syncline.scheduler_core.digest import digest
from syncline.scheduler_core.types import RowId, SequenceId


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillChunk:
    """Compute positions [start, stop) of a row; a final chunk also samples the next token.

    `is_final` was decided when the chunk was planned; nobody derives it again from lengths.
    """

    row: RowId
    start: int
    stop: int
    is_final: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RowJoin:
    """A sequence takes a row: every known token, and its whole block table.

    KV of [0, num_computed_tokens) exists once the plan's block copies are done.
    """

    row: RowId
    seq_id: SequenceId
    request_id: str
    sample_index: int
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step. Apply `left`, then `joined` and `new_blocks`; read what `kv_stores` names; make
    `block_copies`; compute. `kv_loads` start once everything planned before, the stores and the
    copies are through (a load may overwrite what a copy reads); nothing in the step waits for them.
    A plan may have transfers and nothing to compute.

    kv_epoch, weight_version   the stamps of everything the step computes
    window                     decode steps launched at once; each decode row yields up to this many
    decode_rows                the same tuple object while membership is unchanged
    num_draft_tokens           per decode row, verified in each step of the window; None: no drafts
    left                       rows given up since the previous plan; may be joined again at once
    new_blocks                 (row, index in the row's block table of the first new id, new ids)
    block_copies               (source, destination), before the step writes anything
    """

    step_id: int
    kv_epoch: int
    weight_version: int
    window: int = 1
    decode_rows: tuple[RowId, ...] = ()
    num_draft_tokens: tuple[int, ...] | None = None
    left: tuple[RowId, ...] = ()
    joined: tuple[RowJoin, ...] = ()
    new_blocks: tuple[tuple[RowId, int, tuple[BlockId, ...]], ...] = ()
    block_copies: tuple[tuple[BlockId, BlockId], ...] = ()
    prefill_chunks: tuple[PrefillChunk, ...] = ()
    kv_stores: tuple[KVStore, ...] = ()
    kv_loads: tuple[KVLoad, ...] = ()

    def digest(self) -> str:
        """sha256 over every field, as hex: equal plans, and only they, have equal ones.

        `syncline.scheduler_core.digest` has the encoding. Linear in the plan: not for every step.
        """
        return digest(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnSpan:
    """Values of the column `name` at positions [start, start + len(values)) of a row.

    The first value of a position is kept for good: none may be sent for a rejected draft.
    """

    row: RowId
    name: str
    start: int
    values: SequenceABC[object]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowError:
    """The row could not be computed; its sequence ends with this message, which says why."""

    row: RowId
    message: str

    def __post_init__(self) -> None:
        if not self.message:
            raise ValueError(f"message of row {self.row} must say what failed, got ''")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What step `step_id` sampled, flat over the yielding rows.

    counts: tokens per yielding row, at most its maximum, at least 1 unless its sequence has ended
    or the row is in `errors`. None: exactly one each.
    window_counts: needed for a window of several steps with drafts: `window` entries per decode
    row, the tokens of each of its steps, whose sum is the row's count. A step yields 1 to 1 + its
    drafts: the accepted ones, then one token more, also where the sequence ends before that.
    Only the last steps of a row may be 0: not run.
    """

    step_id: int
    token_ids: SequenceABC[int]
    logprobs: SequenceABC[float]
    counts: tuple[int, ...] | None = None
    window_counts: tuple[int, ...] | None = None
    columns: tuple[ColumnSpan, ...] = ()
    errors: tuple[RowError, ...] = ()
