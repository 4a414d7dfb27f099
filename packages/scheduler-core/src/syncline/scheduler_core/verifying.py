"""What a result says about drafts: checked against the plan, then counted.

A verify step of a row with k drafts yields 1 to 1 + k tokens: all but the last are accepted drafts,
the last is recovered (a draft was wrong) or bonus (none was). So no count can be negative, and
drafts are always accepted plus rejected.
"""

from syncline.scheduler_core.errors import ResultError
from syncline.scheduler_core.pending import StepInFlight
from syncline.scheduler_core.types import Counters


def check_window_counts(
    step: StepInFlight, window_counts: tuple[int, ...] | None, counts: tuple[int, ...]
) -> None:
    """Raise ResultError unless `window_counts` splits the decode rows' `counts` into steps.

    Not needed where one number says it all: in a window of one step, or without drafts.
    """
    if window_counts is None:
        if step.window > 1 and step.drafts:
            raise ResultError(
                step.step_id, f"window_counts must be given for {step.window} steps with drafts"
            )
        return
    num_rows = len(step.batch.rows)
    if len(window_counts) != step.window * num_rows:
        raise ResultError(
            step.step_id,
            f"window_counts must have {step.window * num_rows} entries, got {len(window_counts)}",
        )
    for i in range(num_rows):
        split = window_counts[i * step.window : (i + 1) * step.window]
        detail = _wrong_with(split, counts[i], 1 + step.num_draft_tokens_of(i))
        if detail is not None:
            raise ResultError(step.step_id, f"window_counts of decode row {i}: {detail}")


def _wrong_with(split: tuple[int, ...], count: int, max_tokens: int) -> str | None:
    has_stopped = False
    for num_tokens in split:
        if not 0 <= num_tokens <= max_tokens:
            return f"a step yields between 0 and {max_tokens} tokens, got {num_tokens}"
        if num_tokens and has_stopped:
            return f"a step ran after one that did not: {split}"
        has_stopped = not num_tokens
    if sum(split) != count:
        return f"the sum of {split} must be the row's count {count}"
    return None


def count_verified(
    counters: Counters,
    step: StepInFlight,
    window_counts: tuple[int, ...] | None,
    kept_counts: list[tuple[int, int]],
) -> None:
    """Count the verify steps that began before their sequence's end, each of them whole.

    kept_counts: of each decode row, the tokens that came and how many of them its sequence keeps.
    """
    assert step.num_draft_tokens is not None
    window = step.window
    num_steps = num_drafts = num_accepted = num_bonus = 0
    for i, (k, (count, num_kept)) in enumerate(
        zip(step.num_draft_tokens, kept_counts, strict=True)
    ):
        if not k or not num_kept:
            continue
        split = (count,) if window_counts is None else window_counts[i * window : (i + 1) * window]
        start = 0
        for num_tokens in split:
            if start >= num_kept:
                break  # It began after the end, or it did not run.
            start += num_tokens
            num_steps += 1
            num_drafts += k
            num_accepted += num_tokens - 1
            num_bonus += num_tokens > k
    counters.num_draft_tokens += num_drafts
    counters.num_accepted_draft_tokens += num_accepted
    counters.num_rejected_draft_tokens += num_drafts - num_accepted
    counters.num_recovered_tokens += num_steps - num_bonus
    counters.num_bonus_tokens += num_bonus
