"""From a scheduler's sequence to the values a caller gets; only here are its columns read."""

from dataclasses import dataclass, field
from typing import cast

from syncline.engine.intake import PreparedRequest
from syncline.engine.outputs import CompletionOutput, RequestOutput, Sample
from syncline.engine.outputs import TopLogprobs as TopLogprobsById
from syncline.engine.runner.protocol import (
    PROMPT_LOGPROBS_COLUMN,
    TOP_LOGPROBS_COLUMN,
    PromptLogprob,
    TopLogprobs,
)
from syncline.engine.stop_strings import text_until_stop
from syncline.engine.tokenizer import Tokenizer
from syncline.scheduler_core import FinishReason, Sequence


@dataclass(slots=True, kw_only=True)
class LiveRequest:
    """A request between its adding and the end of its last sample."""

    prepared: PreparedRequest
    num_unfinished: int
    completions: dict[int, CompletionOutput] = field(default_factory=dict)


def completion_of(sequence: Sequence, prepared: PreparedRequest, text: str) -> CompletionOutput:
    """The sample as it stands, finished or not, with the text that its tokens make."""
    params = prepared.params
    top_logprobs = None
    if params.logprobs:
        column = sequence.columns.get(TOP_LOGPROBS_COLUMN, {})
        first = sequence.num_prompt_tokens
        top_logprobs = tuple(
            # cast: columns carry `object`; the runner's protocol says what this one holds.
            dict(cast(TopLogprobs, column[first + i]))
            for i in range(sequence.num_output_tokens)
        )
    reason = sequence.finish_reason
    return CompletionOutput(
        index=sequence.sample_index,
        text=text,
        token_ids=tuple(sequence.output_token_ids),
        logprobs=tuple(sequence.logprobs),
        top_logprobs=top_logprobs,
        finish_reason=None if reason is None else str(reason),
        stop_reason=sequence.stop_reason,
        finish_detail=sequence.finish_detail,
        weight_versions=tuple((version, count) for version, count in sequence.version_runs),
        num_cached_tokens=sequence.num_cached_tokens,
        num_preemptions=sequence.num_preemptions,
        num_recomputed_tokens=sequence.num_recomputed_tokens,
    )


def final_text(sequence: Sequence, prepared: PreparedRequest, tokenizer: Tokenizer) -> str:
    token_ids = sequence.output_token_ids
    stop_string = sequence.stop_reason
    if sequence.finish_reason is FinishReason.STOP and isinstance(stop_string, str):
        include = prepared.params.include_stop_str_in_output
        return text_until_stop(tokenizer, token_ids, stop_string, include=include)
    return tokenizer.decode(token_ids)


def prompt_logprobs_of(
    sequence: Sequence, prepared: PreparedRequest
) -> tuple[TopLogprobsById | None, ...] | None:
    """One entry per prompt position, None at position 0; None when not asked for or not computed.

    A sequence that was aborted or refused before its prompt was through has no such column.
    """
    if prepared.params.prompt_logprobs is None:
        return None
    column = sequence.columns.get(PROMPT_LOGPROBS_COLUMN, {})
    token_ids = sequence.prompt_token_ids
    if any(position not in column for position in range(1, len(token_ids))):
        return None
    entries: list[TopLogprobsById | None] = [None]
    for position in range(1, len(token_ids)):
        # cast: columns carry `object`; the runner's protocol says what this one holds.
        value = cast(PromptLogprob, column[position])
        entries.append({token_ids[position]: value.logprob} | dict(value.top))
    return tuple(entries)


def sample_of(sequence: Sequence, prepared: PreparedRequest, tokenizer: Tokenizer) -> Sample:
    return Sample(
        request_id=sequence.request_id,
        prompt=prepared.prompt,
        prompt_token_ids=sequence.prompt_token_ids,
        prompt_logprobs=prompt_logprobs_of(sequence, prepared),
        output=completion_of(sequence, prepared, final_text(sequence, prepared, tokenizer)),
    )


def request_output_of(samples: list[Sample]) -> RequestOutput:
    """Samples of one request, any order, as one value in index order."""
    first = min(samples, key=lambda sample: sample.output.index)
    outputs = tuple(sorted((sample.output for sample in samples), key=lambda out: out.index))
    return RequestOutput(
        request_id=first.request_id,
        prompt=first.prompt,
        prompt_token_ids=first.prompt_token_ids,
        prompt_logprobs=first.prompt_logprobs,
        outputs=outputs,
        num_cached_tokens=outputs[0].num_cached_tokens,
        finished=all(output.finish_reason is not None for output in outputs),
    )
