"""One token stream: the tokens that exist, how far their KV is, and where the sequence stands.

Only tokens that exist are stored: nothing stands in for a token that is being sampled. What steps
in flight may still yield is derived from them (`PendingTokens`). The output columns are packed, and
decode steps reach them by way of a log (`columns`); runs of weight version are kept here.

    0 <= num_computed_tokens <= num_issued_tokens <= target_len
    [0, num_computed_tokens)                   KV exists; moved by results
    [num_computed_tokens, num_issued_tokens)   a step in flight writes it; moved by plans
"""

from collections.abc import Sequence as SequenceABC
from typing import Final, Protocol

from syncline.kv_cache import BlockTable
from syncline.scheduler_core.columns import Column, OutputColumns
from syncline.scheduler_core.request import Request, StopMatcher
from syncline.scheduler_core.timings import RequestTimings, SequenceSummary
from syncline.scheduler_core.types import FinishReason, RowId, SequenceId

NEVER: Final = 1 << 62
"""A step id that no step reaches."""


class PendingTokens(Protocol):
    """The steps in flight, as far as a sequence needs them."""

    def max_new_tokens(self, sequence: "Sequence") -> int:
        """How many tokens the steps in flight may still yield for this sequence."""
        ...


class Sequence:
    """One sample of a request. Readers may read anything; only this package changes it.

    row             the state row held, None while waiting or finished
    table           the sequence's blocks; empty while it holds no row, unless KV is being loaded
    num_cached_tokens   prefix hits of the latest admission; `summary` tells those of the first
    outputs         the packed output columns; read them as `output_token_ids` and `logprobs`
    stop_candidates ids that may end it as its last token; None: every token must be looked at
    columns         name -> position -> the first value that came for it
    final_step      the step of the final prefill chunk since the last admission, NEVER before
    decode_from/to  ids of the steps, in this admission, whose decode rows contain the sequence
    resume_after    not admitted again before this step has been applied
    """

    __slots__ = (
        "_final_chunk_applied",
        "_num_computed",
        "_num_issued",
        "_pending",
        "_version_starts",
        "columns",
        "decode_from",
        "decode_to",
        "final_step",
        "finish_detail",
        "finish_reason",
        "finished_s",
        "first_scheduled_s",
        "first_token_s",
        "has_computed_prompt",
        "length_detail",
        "max_computed_tokens",
        "max_total_tokens",
        "num_cached_prompt_tokens",
        "num_cached_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_recomputed_tokens",
        "order_key",
        "outputs",
        "prompt_token_ids",
        "request",
        "request_id",
        "resume_after",
        "row",
        "sample_index",
        "seq_id",
        "stop_candidates",
        "stop_matcher",
        "stop_reason",
        "table",
    )

    def __init__(
        self,
        seq_id: SequenceId,
        request: Request,
        sample_index: int,
        *,
        pending: PendingTokens,
        table: BlockTable,
        stop_candidates: frozenset[int] | None,
    ) -> None:
        self.seq_id = seq_id
        self.request = request
        self.request_id = request.request_id
        self.sample_index = sample_index
        self.order_key = (request.priority, seq_id)
        self.prompt_token_ids = request.prompt_token_ids
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.outputs = OutputColumns()
        self.columns: dict[str, dict[int, object]] = {}
        self._version_starts: list[tuple[int, int]] = []  # (version, index of its first output)
        self._pending = pending
        self.stop_candidates = stop_candidates
        make_matcher = request.make_stop_matcher
        self.stop_matcher: StopMatcher | None = None if make_matcher is None else make_matcher()
        self.max_total_tokens = self.num_prompt_tokens + request.stop.max_tokens
        self.length_detail = ""
        self.table = table
        self.row: RowId | None = None
        self._num_computed = 0
        self._num_issued = 0
        self._final_chunk_applied = False
        self.final_step = NEVER
        self.decode_from = NEVER
        self.decode_to = NEVER
        self.resume_after = -1
        self.max_computed_tokens = 0
        self.has_computed_prompt = False
        self.num_cached_tokens = 0
        self.num_cached_prompt_tokens = 0
        self.num_preemptions = 0
        self.num_recomputed_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.finish_detail = ""
        self.first_scheduled_s: float | None = None
        self.first_token_s: float | None = None
        self.finished_s: float | None = None

    def __repr__(self) -> str:
        return (
            f"Sequence({self.seq_id}, {self.request_id!r}[{self.sample_index}], "
            f"{self.num_prompt_tokens}+{self.num_output_tokens} tokens, "
            f"{self.num_computed_tokens} computed, row {self.row}, {self.finish_reason})"
        )

    @property
    def output_token_ids(self) -> Column[int]:
        return Column(self.outputs, self.outputs.ids)

    @property
    def logprobs(self) -> Column[float]:
        """Of each output token, as it came."""
        return Column(self.outputs, self.outputs.logprobs)

    @property
    def num_output_tokens(self) -> int:
        return len(self.outputs)

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + len(self.outputs)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Prompt and output ids. Linear in the length once there is output: not for every step."""
        if not len(self.outputs):
            return self.prompt_token_ids
        self.outputs.settle()
        return (*self.prompt_token_ids, *self.outputs.ids)

    @property
    def version_runs(self) -> list[tuple[int, int]]:
        """(weight version, number of output tokens sampled under it), in output order."""
        starts = [start for _, start in self._version_starts]
        stops = [*starts[1:], self.num_output_tokens]
        runs = zip(self._version_starts, stops, strict=True)
        return [(version, stop - start) for (version, start), stop in runs if stop > start]

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def timings(self) -> RequestTimings:
        return RequestTimings(
            arrival_s=self.request.arrival_s,
            first_scheduled_s=self.first_scheduled_s,
            first_token_s=self.first_token_s,
            finished_s=self.finished_s,
        )

    @property
    def summary(self) -> SequenceSummary:
        """All that is worth telling besides the tokens."""
        return SequenceSummary(
            seq_id=self.seq_id,
            request_id=self.request_id,
            sample_index=self.sample_index,
            finish_reason=self.finish_reason,
            finish_detail=self.finish_detail,
            stop_reason=self.stop_reason,
            num_prompt_tokens=self.num_prompt_tokens,
            num_output_tokens=self.num_output_tokens,
            num_cached_tokens=self.num_cached_prompt_tokens,
            num_preemptions=self.num_preemptions,
            num_recomputed_tokens=self.num_recomputed_tokens,
            version_runs=tuple(self.version_runs),
            timings=self.timings,
        )

    @property
    def num_computed_tokens(self) -> int:
        # After the final chunk every token but the last has KV: that one is the next step's input.
        return self.num_tokens - 1 if self._final_chunk_applied else self._num_computed

    @property
    def num_issued_tokens(self) -> int:
        if self.row is None or self.final_step == NEVER:
            return self._num_issued
        return self.target_len - 1

    @property
    def target_len(self) -> int:
        """Tokens whose KV must exist before the next token can be sampled.

        With tokens still in flight this is the upper end: each may or may not come.
        """
        num_tokens = self.num_prompt_tokens + len(self.outputs)
        return num_tokens + self._pending.max_new_tokens(self)

    def append(
        self, token_ids: SequenceABC[int], logprobs: SequenceABC[float], version: int
    ) -> None:
        """Grow every output column. Raises ValueError, with nothing changed, for a token without a
        logprob or an id that cannot be kept.
        """
        num_before = len(self.outputs)
        self.outputs.append(token_ids, logprobs)
        self._start_version_at(num_before, version)

    def may_end_with(self, token_id: int) -> bool:
        """Whether it is worth asking if the sequence ends at this token, its last."""
        return self.stop_candidates is None or token_id in self.stop_candidates

    def may_end_with_any(self, token_ids: SequenceABC[int]) -> bool:
        """Whether it is worth asking if the sequence ends at one of these tokens, its last."""
        return self.stop_candidates is None or not self.stop_candidates.isdisjoint(token_ids)

    def start_version(self, version: int) -> None:
        """Output tokens from here on were sampled under this weight version."""
        self._start_version_at(len(self.outputs), version)

    def _start_version_at(self, start: int, version: int) -> None:
        runs = self._version_starts
        if runs and runs[-1][0] != version and runs[-1][1] == start:
            runs.pop()
        if not runs or runs[-1][0] != version:
            runs.append((version, start))

    def truncate(self, num_output_tokens: int) -> None:
        """Drop output tokens beyond `num_output_tokens`, in every column."""
        self.outputs.truncate(num_output_tokens)
        while self._version_starts and self._version_starts[-1][1] > num_output_tokens:
            self._version_starts.pop()

    def keep_column(self, name: str, start: int, values: SequenceABC[object]) -> None:
        """Record values from position `start` on; a position keeps its first, for good.

        Positions that hold no token (beyond a stop) are left out.
        """
        column = self.columns.setdefault(name, {})
        for position, value in zip(range(start, self.num_tokens), values, strict=False):
            column.setdefault(position, value)

    def note_first_admission(self, num_cached_tokens: int, now_s: float | None) -> None:
        """It has never held a row before."""
        self.num_cached_prompt_tokens = num_cached_tokens
        self.first_scheduled_s = now_s

    def take_prompt_columns(self, source: "Sequence") -> None:
        """Record what `source` has at the positions of the same prompt, where its request asks."""
        for name in sorted(self.request.required_prompt_columns):
            mine = self.columns.setdefault(name, {})
            for position, value in source.columns.get(name, {}).items():
                if position < self.num_prompt_tokens:
                    mine.setdefault(position, value)

    def begin_prefill(self, row: RowId, num_cached_tokens: int) -> None:
        """Admitted with the KV that it holds, of which so many tokens are prefix hits."""
        self.row = row
        self.final_step = NEVER
        self.num_cached_tokens = num_cached_tokens

    def hold(self, num_computed_tokens: int) -> None:
        """Its blocks hold KV of the first `num_computed_tokens`; it has no row yet."""
        self._num_computed = num_computed_tokens
        self._num_issued = num_computed_tokens

    def issue(self, stop: int) -> None:
        """A planned chunk writes KV up to `stop`."""
        self._num_issued = stop

    def compute(self, stop: int) -> None:
        """The step that wrote KV up to `stop` has been applied."""
        self._num_computed = stop

    def note_first_sample(self) -> None:
        """The token of the final chunk has been appended: from now on only the last lacks KV."""
        self._final_chunk_applied = True

    def begin_decoding(self, final_step: int) -> None:
        """The final chunk is planned in `final_step`; later steps may decode."""
        self.final_step = final_step
        self.decode_from = final_step + 1
        self.decode_to = NEVER

    def decode_at_once(self, next_step: int) -> None:
        """Every token but the last has KV: steps from `next_step` on decode, without a chunk."""
        self.final_step = -1
        self.decode_from = next_step
        self.decode_to = NEVER
        self._final_chunk_applied = True
        self.has_computed_prompt = True

    def pause_decoding(self, last_step: int) -> None:
        """No step after `last_step` decodes this sequence, until told otherwise."""
        self.decode_to = min(self.decode_to, last_step)

    def resume_decoding(self, next_step: int) -> None:
        """Nothing is in flight for it; steps from `next_step` on decode it again."""
        self.decode_from = next_step
        self.decode_to = NEVER

    def leave_row(self, last_step: int) -> None:
        """No KV is left. Steps up to `last_step` may still yield tokens for this sequence."""
        self.max_computed_tokens = max(self.max_computed_tokens, self.num_computed_tokens)
        self.row = None
        self._num_computed = 0
        self._num_issued = 0
        self._final_chunk_applied = False
        self.pause_decoding(last_step)
        self.resume_after = last_step


def order_of(sequence: Sequence) -> tuple[int, int]:
    """Sorts by priority, then arrival: the first is admitted first, the last preempted first."""
    return sequence.order_key
