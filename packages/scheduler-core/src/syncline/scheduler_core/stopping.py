"""Where a sequence ends: the earliest position over every criterion, in one pass.

Knows rules, ids and lengths, not text: stop strings are a matcher's, asked in the same pass. A
position is a number of output tokens kept. At one position a stop id comes before a stop sequence,
that before a stop string, and any of them before a length.
"""

from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass

from syncline.scheduler_core.errors import StopMatcherError
from syncline.scheduler_core.request import Request, StopMatch, StopMatcher, StopRules
from syncline.scheduler_core.sequence import Sequence
from syncline.scheduler_core.types import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """The sequence ends with `num_output_tokens` tokens kept."""

    num_output_tokens: int
    reason: FinishReason
    detail: str
    stop_reason: int | str | None = None


def stop_candidates(request: Request) -> frozenset[int] | None:
    """Ids that may end a sample of this request, as its last token: a superset, quick to ask.

    None: a matcher must be asked after every token.
    """
    if request.make_stop_matcher is not None:
        return None
    last_ids = {sequence[-1] for sequence in request.stop.stop_sequences}
    return request.stop.ending_token_ids | last_ids


def earliest_stop(sequence: Sequence, num_new: int) -> Stop | None:
    """The first stop among the last `num_new` output tokens, or None.

    A matcher is asked once: call this once for the same new tokens. Raises StopMatcherError if it
    fails or answers with a position that was not asked about.
    """
    rules = sequence.request.stop
    outputs = sequence.output_token_ids
    # Kept counts [first, last]: what lies under min_tokens cannot end the sample.
    first = max(len(outputs) - num_new + 1, rules.min_tokens)
    max_output = sequence.max_total_tokens - sequence.num_prompt_tokens
    last = min(len(outputs), max_output)
    stop = _earliest_by_ids(rules, outputs, first, last)
    if sequence.stop_matcher is not None and first <= len(outputs):
        match = _ask(sequence.stop_matcher, outputs, first)
        if match is not None:
            kept = match.num_output_tokens
            if kept <= last and (stop is None or kept < stop.num_output_tokens):
                stop = Stop(
                    num_output_tokens=kept,
                    reason=FinishReason.STOP,
                    detail=f"stop string {match.stop_reason!r}",
                    stop_reason=match.stop_reason,
                )
    if stop is None and len(outputs) >= max_output:
        return Stop(
            num_output_tokens=max_output,
            reason=FinishReason.LENGTH,
            detail=sequence.length_detail,
        )
    return stop


def _ask(matcher: StopMatcher, outputs: SequenceABC[int], first: int) -> StopMatch | None:
    """The matcher's answer for kept counts [first, len(outputs)]."""
    asked = f"a stop matcher, asked to keep between {first} and {len(outputs)} tokens"
    try:
        match = matcher.find(outputs, len(outputs) - first + 1)
    except Exception as error:  # The caller's code: whatever it is, it concerns one sequence.
        raise StopMatcherError(f"{asked}, raised {type(error).__name__}: {error}") from error
    if match is not None and not first <= match.num_output_tokens <= len(outputs):
        raise StopMatcherError(f"{asked}, answered {match.num_output_tokens}")
    return match


def _earliest_by_ids(
    rules: StopRules, outputs: SequenceABC[int], first: int, last: int
) -> Stop | None:
    ending = rules.ending_token_ids
    for kept in range(first, last + 1):
        token_id = outputs[kept - 1]
        if token_id in ending:
            is_stop_id = token_id in rules.stop_token_ids
            return Stop(
                num_output_tokens=kept,
                reason=FinishReason.STOP,
                detail=f"{'stop token' if is_stop_id else 'end of sequence token'} {token_id}",
                stop_reason=token_id if is_stop_id else None,
            )
        for run in rules.stop_sequences:
            if kept >= len(run) and outputs[kept - len(run) : kept] == list(run):
                return Stop(
                    num_output_tokens=kept,
                    reason=FinishReason.STOP,
                    detail=f"stop sequence {run}",
                )
    return None
