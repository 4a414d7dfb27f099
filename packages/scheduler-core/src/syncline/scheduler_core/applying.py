"""What a result means: progress, tokens, ends. Checked whole before anything changes.

A decode step's tokens are one line of the token log, without work per row; only rows whose token
may end them, or that reach a length limit, are looked at one by one.
"""

import math
from array import array
from collections.abc import Sized
from dataclasses import replace
from operator import index

from syncline.scheduler_core.columns import MAX_TOKEN_ID, pack_ids, pack_logprobs
from syncline.scheduler_core.connectors.values import RemotePrefill
from syncline.scheduler_core.errors import ResultError, StopMatcherError
from syncline.scheduler_core.lifecycle import Lifecycle
from syncline.scheduler_core.pending import StepInFlight
from syncline.scheduler_core.plan import ColumnSpan, RowError, StepResult
from syncline.scheduler_core.sequence import Sequence
from syncline.scheduler_core.stopping import earliest_stop
from syncline.scheduler_core.types import FinishReason, RowId
from syncline.scheduler_core.verifying import check_window_counts, count_verified


def check_result(step: StepInFlight, result: StepResult) -> "tuple[array[int], array[float]]":
    """The result's ids and logprobs, packed. Raises ResultError unless the result has the shape
    that the step's plan asked for.
    """
    num_tokens = step.num_yielding_rows if result.counts is None else sum(result.counts)
    for name, values in (("token_ids", result.token_ids), ("logprobs", result.logprobs)):
        if not isinstance(values, Sized):  # pyright: ignore[reportUnnecessaryIsInstance]  a runner's data
            raise ResultError(step.step_id, f"{name} must be a list, got {values!r}")
        if len(values) != num_tokens:
            raise ResultError(
                step.step_id,
                f"{name} must have {num_tokens} entries for {step.num_yielding_rows} yielding "
                f"rows, got {len(values)}",
            )
    token_ids = _packed_ids(step, result)
    if result.errors or result.columns:
        _check_rows(step, result)
    if result.counts is not None or result.window_counts is not None or not step.is_plain:
        counts = _counts(step, result)
        _check_counts(step, result, counts)
        check_window_counts(step, result.window_counts, counts)
    try:
        logprobs = pack_logprobs(result.logprobs)
    except TypeError as error:
        raise ResultError(step.step_id, str(error)) from None
    if not math.isfinite(sum(result.logprobs)):
        _check_logprobs(step, result)
    return token_ids, logprobs


def _packed_ids(step: StepInFlight, result: StepResult) -> "array[int]":
    try:
        return pack_ids(result.token_ids)
    except TypeError as error:
        raise ResultError(step.step_id, f"token ids must be integers: {error}") from None
    except OverflowError:
        wrong = min(result.token_ids)
        if wrong < 0:
            raise ResultError(step.step_id, f"token id {wrong} is negative") from None
        wrong = max(result.token_ids)
        raise ResultError(step.step_id, f"token id {wrong} is above {MAX_TOKEN_ID}") from None


def _check_rows(step: StepInFlight, result: StepResult) -> None:
    for name, entries, kind in (
        ("errors", result.errors, RowError),
        ("columns", result.columns, ColumnSpan),
    ):
        for entry in entries:
            if not isinstance(entry, kind):  # pyright: ignore[reportUnnecessaryIsInstance]  a runner's data
                raise ResultError(
                    step.step_id, f"{name} must hold a {kind.__name__} each, got {entry!r}"
                )
    rows = step.sequences_by_row()
    for row in [*(error.row for error in result.errors), *(span.row for span in result.columns)]:
        if row not in rows:
            raise ResultError(step.step_id, f"row {row} is not part of the step")
    for span in result.columns:
        if not isinstance(span.start, int) or span.start < 0:  # pyright: ignore[reportUnnecessaryIsInstance]  a runner's data
            raise ResultError(
                step.step_id, f"column {span.name!r} of row {span.row} starts at {span.start}"
            )
        _require_column(step, span.name, span.values)


def _require_column(step: StepInFlight, name: object, values: object) -> None:
    try:
        hash(name)
        iter(values)  # type: ignore[call-overload]  # That is the question.
    except TypeError as error:
        raise ResultError(step.step_id, f"column {name!r}: {error}") from None


def with_plain_counts(step: StepInFlight, result: StepResult) -> StepResult:
    """The result with counts that are ints: those of a library may have a fixed width.

    Raises ResultError for anything that is no integer, or no tuple where there must be one.
    """
    for name, value in (("columns", result.columns), ("errors", result.errors)):
        if not isinstance(value, tuple | list):  # pyright: ignore[reportUnnecessaryIsInstance]  a runner's data
            raise ResultError(step.step_id, f"{name} must be a tuple, got {value!r}")
    if result.counts is None and result.window_counts is None:
        return result
    return replace(
        result,
        counts=_plain_ints(step, "counts", result.counts),
        window_counts=_plain_ints(step, "window_counts", result.window_counts),
    )


def _plain_ints(
    step: StepInFlight, name: str, values: tuple[int, ...] | None
) -> tuple[int, ...] | None:
    try:
        return None if values is None else tuple(map(index, values))
    except TypeError:
        raise ResultError(step.step_id, f"{name} must be integers, got {values!r}") from None


def _check_counts(step: StepInFlight, result: StepResult, counts: tuple[int, ...]) -> None:
    if len(counts) != step.num_yielding_rows:
        raise ResultError(
            step.step_id,
            f"counts must have {step.num_yielding_rows} entries, got {len(counts)}",
        )
    for i, (count, max_new) in enumerate(zip(counts, step.max_counts(), strict=True)):
        if 1 <= count <= max_new:
            continue
        sequence = step.yielding[i]
        may_be_none = sequence.is_finished or sequence in _failed_sequences(step, result)
        if count or not may_be_none:
            raise ResultError(
                step.step_id,
                f"yielding row {i} (request {sequence.request_id!r}) must have between "
                f"{0 if may_be_none else 1} and {max_new} tokens, got {count}",
            )


def _check_logprobs(step: StepInFlight, result: StepResult) -> None:
    """Some logprob is not finite: only a row that failed or has ended may have such a one."""
    failed = _failed_sequences(step, result)
    i = 0
    for sequence, count in zip(step.yielding, _counts(step, result), strict=True):
        if not sequence.is_finished and sequence not in failed:
            for logprob in result.logprobs[i : i + count]:
                if not math.isfinite(logprob):
                    raise ResultError(
                        step.step_id,
                        f"logprob {logprob} of request {sequence.request_id!r} is not finite",
                    )
        i += count


def _failed_sequences(step: StepInFlight, result: StepResult) -> set[Sequence]:
    if not result.errors:
        return set()
    rows = step.sequences_by_row()
    return {rows[error.row] for error in result.errors}


def _counts(step: StepInFlight, result: StepResult) -> tuple[int, ...]:
    return (1,) * step.num_yielding_rows if result.counts is None else result.counts


class Applier:
    """Applies results to the sequences of one scheduler."""

    __slots__ = ("_life",)

    def __init__(self, life: Lifecycle) -> None:
        self._life = life

    def apply(self, result: StepResult, now_s: float | None) -> None:
        """Raises StepOrderError or ResultError with nothing changed."""
        pending = self._life.pending
        step = pending.oldest(result.step_id)
        result = with_plain_counts(step, result)
        token_ids, logprobs = check_result(step, result)
        receivers = self._column_receivers(step, result)
        self._life.clock.enter(now_s)
        without_token = [] if now_s is None else step.without_token
        self._end_failed(step, result)
        if step.chunks:
            self._advance_prefills(step)
        pending.pop()
        if result.counts is None and step.is_plain:
            self._append_one_each(step, token_ids, logprobs)
        else:
            self._append_counted(step, result, token_ids, logprobs)
        for sequence in without_token:
            if sequence.output_token_ids:
                sequence.first_token_s = now_s
        for sequence in step.finals:
            if sequence.row is not None:
                sequence.note_first_sample()
        for sequence in step.capped:
            self._settle_capped(sequence)
        for span in result.columns:
            if span.row in receivers:
                receivers[span.row].keep_column(span.name, span.start, span.values)
        self._require_prompt_columns(step)

    def begin_with_remote(self, sequence: Sequence, remote: RemotePrefill, version: int) -> None:
        """Its output starts with the remote's token, which may end it.

        version: of the weights here, which sample what follows.
        """
        sequence.append([remote.first_token_id], [remote.first_logprob], remote.weight_version)
        sequence.start_version(version)
        sequence.first_token_s = sequence.request.arrival_s
        self._life.counters.num_accepted_tokens += 1
        self._settle(sequence, 1)

    def _column_receivers(self, step: StepInFlight, result: StepResult) -> dict[RowId, Sequence]:
        """Who takes column values: what had not ended before this result, and has not failed."""
        if not result.columns:
            return {}
        failed = {error.row for error in result.errors}
        return {
            row: sequence
            for row, sequence in step.sequences_by_row().items()
            if row not in failed and not sequence.is_finished
        }

    def _end_failed(self, step: StepInFlight, result: StepResult) -> None:
        if not result.errors:
            return
        rows = step.sequences_by_row()
        for error in result.errors:
            sequence = rows[error.row]
            if not sequence.is_finished:
                self._life.end(sequence, FinishReason.ERROR, error.message)

    def _advance_prefills(self, step: StepInFlight) -> None:
        """KV of the step's chunks exists. A sequence that has lost its row has lost that KV too."""
        kv = self._life.kv
        for sequence, chunk in step.chunks:
            if sequence.row is None:
                continue
            sequence.compute(chunk.stop)
            kv.publish(sequence.table, sequence.token_ids, chunk.stop, step.kv_epoch)
            if chunk.stop >= sequence.num_prompt_tokens:
                sequence.has_computed_prompt = True
                group = self._life.groups[sequence.request_id]
                self._life.siblings.note_prompt(sequence, group, step.kv_epoch)

    def _append_one_each(
        self, step: StepInFlight, token_ids: "array[int]", logprobs: "array[float]"
    ) -> None:
        counters = self._life.counters
        counters.num_surplus_tokens += step.num_ended
        counters.num_accepted_tokens += len(token_ids) - step.num_ended
        batch, finals = step.batch, step.finals
        candidates = batch.candidates(token_ids)
        num_rows = len(batch.rows)
        if finals:
            for i, sequence in enumerate(finals, start=num_rows):
                if not sequence.is_finished:
                    sequence.append(token_ids[i : i + 1], logprobs[i : i + 1], step.weight_version)
                    if sequence.may_end_with(token_ids[i]):
                        candidates.append(sequence)
            del token_ids[num_rows:]
            del logprobs[num_rows:]
        if num_rows:
            self._life.log.append(batch.outputs, token_ids, logprobs)
        for sequence in candidates:
            self._settle(sequence, 1)

    def _append_counted(
        self,
        step: StepInFlight,
        result: StepResult,
        token_ids: "array[int]",
        logprobs: "array[float]",
    ) -> None:
        counters = self._life.counters
        # Length limits are settled with `step.capped`: here only ids can end a row.
        is_quiet = step.is_quiet(token_ids)
        kept_counts: list[tuple[int, int]] = []
        start = num_surplus = 0
        for sequence, count in zip(step.yielding, _counts(step, result), strict=True):
            stop = start + count
            num_kept = 0
            if sequence.finish_reason is not None:
                num_surplus += count
            elif count:
                num_kept = count
                row_ids = token_ids[start:stop]
                sequence.outputs.extend(row_ids, logprobs[start:stop])
                if not is_quiet and sequence.may_end_with_any(row_ids):
                    num_kept = self._settle(sequence, count)
            kept_counts.append((count, num_kept))
            start = stop
        counters.num_surplus_tokens += num_surplus
        counters.num_accepted_tokens += start - num_surplus
        num_rows = len(step.batch.rows)
        del kept_counts[num_rows:]
        if step.num_draft_tokens is not None:
            count_verified(counters, step, result.window_counts, kept_counts)
        num_missing = [
            max_new - count
            for max_new, (count, _) in zip(step.max_counts()[:num_rows], kept_counts, strict=True)
        ]
        self._life.decoding.get_tokens_back(step.batch.sequences, num_missing)

    def _settle(self, sequence: Sequence, num_new: int) -> int:
        """End the sequence where its last `num_new` tokens say so; returns how many are kept.

        None is kept if the sequence's matcher fails: nobody knows then where it ends.
        """
        num_before = sequence.num_output_tokens - num_new
        try:
            stop = earliest_stop(sequence, num_new)
        except StopMatcherError as error:
            self._cut(sequence, num_before)
            self._life.end(sequence, FinishReason.ERROR, str(error))
            return 0
        if stop is None:
            return num_new
        self._cut(sequence, stop.num_output_tokens)
        self._life.end(sequence, stop.reason, stop.detail, stop_reason=stop.stop_reason)
        return stop.num_output_tokens - num_before

    def _cut(self, sequence: Sequence, num_output_tokens: int) -> None:
        """Tokens appended beyond so many turn out to be surplus."""
        num_surplus = sequence.num_output_tokens - num_output_tokens
        if num_surplus:
            sequence.truncate(num_output_tokens)
            self._life.counters.num_surplus_tokens += num_surplus
            self._life.counters.num_accepted_tokens -= num_surplus

    def _settle_capped(self, sequence: Sequence) -> None:
        """End a sequence that has reached its length limit; if fewer tokens came, it goes on."""
        if sequence.is_finished:
            return
        if sequence.num_tokens >= sequence.max_total_tokens:
            self._life.end(sequence, FinishReason.LENGTH, sequence.length_detail)
        else:
            self._life.resume_if_short(sequence)

    def _require_prompt_columns(self, step: StepInFlight) -> None:
        """A prompt that is through has the columns its request needs, or the sequence fails."""
        for sequence in step.finals:
            names = sequence.request.required_prompt_columns
            if not names or sequence.is_finished or not sequence.has_computed_prompt:
                continue
            for name in sorted(names):
                column = sequence.columns.get(name, {})
                # Nothing precedes position 0, so a column of predictions may leave it out.
                missing = [p for p in range(1, sequence.num_prompt_tokens) if p not in column]
                if missing:
                    self._life.end(
                        sequence,
                        FinishReason.ERROR,
                        f"column {name!r} has no value at {len(missing)} prompt positions, "
                        f"first at {missing[0]}",
                    )
                    break
