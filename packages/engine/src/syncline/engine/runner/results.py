"""A launched step's outcome, on the device until it is collected, and its way to a StepResult.

Reading it is the only place where the host waits. Knows the protocol's columns, no model.
"""

import math
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass

from syncline.engine.runner.inputs import Membership, PromptSpan
from syncline.engine.runner.protocol import (
    PROMPT_LOGPROBS_COLUMN,
    TOP_LOGPROBS_COLUMN,
    PromptLogprob,
    TopLogprobs,
)
from syncline.engine.sampling.pipeline import SampledTokens
from syncline.engine.sampling.scoring import Scores
from syncline.scheduler_core import ColumnSpan, RowError, StepResult


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PendingStep:
    """What a step left behind: tensors, and who they belong to."""

    step_id: int
    members: Membership
    sampled: SampledTokens | None  # None: no row yields
    prompt_spans: tuple[PromptSpan, ...]
    scores: Scores | None
    positions: SequenceABC[int]  # of the sampled tokens; empty unless a column needs them


def to_result(step: PendingStep) -> StepResult:
    """Plain Python values; waits for the device."""
    columns, errors = _prompt_columns(step)
    if step.sampled is None:
        return StepResult(
            step_id=step.step_id, token_ids=[], logprobs=[], columns=columns, errors=errors
        )
    token_ids: list[int] = step.sampled.token_ids_R.tolist()
    logprobs: list[float] = step.sampled.logprobs_R.tolist()
    columns += _top_columns(step, step.sampled)
    failed = {error.row for error in errors}
    if not failed and math.isfinite(sum(logprobs)):
        return StepResult(
            step_id=step.step_id, token_ids=token_ids, logprobs=logprobs, columns=columns
        )
    errors += tuple(
        RowError(row=row, message=f"request {request_id}: the logits are not numbers")
        for row, request_id, logprob in zip(
            step.members.rows, step.members.request_ids, logprobs, strict=True
        )
        if not math.isfinite(logprob) and row not in failed
    )
    failed |= {error.row for error in errors}
    kept = [index for index, row in enumerate(step.members.rows) if row not in failed]
    return StepResult(
        step_id=step.step_id,
        token_ids=[token_ids[index] for index in kept],
        logprobs=[logprobs[index] for index in kept],
        counts=tuple(int(row not in failed) for row in step.members.rows),
        columns=tuple(column for column in columns if column.row not in failed),
        errors=errors,
    )


def _top_columns(step: PendingStep, sampled: SampledTokens) -> tuple[ColumnSpan, ...]:
    asked = step.members.sampling.top_logprobs
    if asked is None or sampled.top_token_ids_LK is None or sampled.top_logprobs_LK is None:
        return ()
    ids: list[list[int]] = sampled.top_token_ids_LK.tolist()
    values: list[list[float]] = sampled.top_logprobs_LK.tolist()
    return tuple(
        ColumnSpan(
            row=step.members.rows[index],
            name=TOP_LOGPROBS_COLUMN,
            start=step.positions[index],
            values=[_pairs(ids[line][:count], values[line][:count])],
        )
        for line, (index, count) in enumerate(zip(asked.rows, asked.counts, strict=True))
    )


def _prompt_columns(
    step: PendingStep,
) -> tuple[tuple[ColumnSpan, ...], tuple[RowError, ...]]:
    if step.scores is None:
        return (), ()
    logprobs: list[float] = step.scores.logprobs_Q.tolist()
    ids: list[list[int]] = step.scores.top_token_ids_QK.tolist()
    values: list[list[float]] = step.scores.top_logprobs_QK.tolist()
    columns: list[ColumnSpan] = []
    errors: list[RowError] = []
    done = 0
    for span in step.prompt_spans:
        part = slice(done, done + span.stop - span.start)
        done = part.stop
        if not math.isfinite(sum(logprobs[part])):
            errors.append(
                RowError(
                    row=span.row,
                    message=f"request {span.request_id}: the logits of its prompt are not numbers",
                )
            )
            continue
        scored: list[object] = [
            PromptLogprob(logprob, _pairs(top_ids[: span.num_top], top[: span.num_top]))
            for logprob, top_ids, top in zip(logprobs[part], ids[part], values[part], strict=True)
        ]
        columns.append(
            ColumnSpan(
                row=span.row,
                name=PROMPT_LOGPROBS_COLUMN,
                start=0 if span.is_head else span.start,
                values=[None, *scored] if span.is_head else scored,
            )
        )
    return tuple(columns), tuple(errors)


def _pairs(ids: list[int], logprobs: list[float]) -> TopLogprobs:
    return tuple(
        (token_id, logprob)
        for token_id, logprob in zip(ids, logprobs, strict=True)
        if logprob > -math.inf
    )
