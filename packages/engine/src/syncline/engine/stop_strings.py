"""Where a stop string ends a sequence, token by token; the scheduler asks, the text is ours.

One matcher per sequence. Token ids keep the token that completed the string; the text is cut in
front of the string, or behind it when the caller asked to include it.
"""

from collections.abc import Sequence as SequenceABC

from syncline.engine.tokenizer import IncrementalDetokenizer, Tokenizer
from syncline.scheduler_core import StopMatch


class StopStringMatcher:
    """Implements scheduler_core's `StopMatcher` for the stop strings of one request.

    A string completed before `min_tokens` tokens exist is passed over for good.
    """

    __slots__ = ("_detokenizer", "_min_tokens", "_stop_strings")

    def __init__(
        self, tokenizer: Tokenizer, stop_strings: tuple[str, ...], min_tokens: int = 0
    ) -> None:
        if not stop_strings:
            raise ValueError("stop_strings must not be empty: no matcher is needed without one")
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._stop_strings = stop_strings
        self._min_tokens = min_tokens

    def find(self, output_token_ids: SequenceABC[int], num_new: int) -> StopMatch | None:
        """The first token among the last `num_new` whose text completes a stop string."""
        first_new = max(len(output_token_ids) - num_new, self._min_tokens - 1)
        for position in range(self._detokenizer.num_tokens, len(output_token_ids)):
            old_len = len(self._detokenizer.text)
            if not self._detokenizer.append(output_token_ids[position]):
                continue
            # A string that ended in the older text was seen then, or was too early to count.
            found = find_stop_string(self._detokenizer.text, self._stop_strings, must_pass=old_len)
            if found is not None and position >= first_new:
                return StopMatch(num_output_tokens=position + 1, stop_reason=found[1])
        return None


def find_stop_string(
    text: str, stop_strings: tuple[str, ...], *, must_pass: int = 0
) -> tuple[int, str] | None:
    """(offset, string) of the match that ends first behind `must_pass`; None when there is none.

    Of two that end together the longer wins, so that nothing of it is left in the text.
    """
    best: tuple[int, int, str] | None = None
    for string in stop_strings:
        offset = text.find(string, max(must_pass - len(string) + 1, 0))
        if offset >= 0 and (best is None or (offset + len(string), offset) < best[:2]):
            best = (offset + len(string), offset, string)
    return None if best is None else (best[1], best[2])


def text_until_stop(
    tokenizer: Tokenizer, token_ids: SequenceABC[int], stop_string: str, *, include: bool
) -> str:
    """The text of ids whose last one completed `stop_string`, cut there.

    Built the way the matcher built it: what the tokenizer writes for the whole list at once may
    differ, and the last token may hold the string twice.
    """
    detokenizer = IncrementalDetokenizer(tokenizer)
    for token_id in token_ids[:-1]:
        detokenizer.append(token_id)
    old_len = len(detokenizer.text)
    detokenizer.append(token_ids[-1])
    found = find_stop_string(detokenizer.text, (stop_string,), must_pass=old_len)
    if found is None:
        raise ValueError(f"the last token does not complete the stop string {stop_string!r}")
    return detokenizer.text[: found[0] + (len(stop_string) if include else 0)]
