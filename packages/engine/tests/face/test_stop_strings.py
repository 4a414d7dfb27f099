"""Stop strings: found at the token that completes them, wherever the pieces fall."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import decoders, models

from syncline.engine.stop_strings import StopStringMatcher, find_stop_string, text_until_stop
from syncline.engine.testing.checkpoints import build_tokenizer
from syncline.engine.tokenizer import Tokenizer
from syncline.scheduler_core import StopMatch

TINY = Tokenizer(build_tokenizer(), "tiny")


def word_tokenizer(words: list[str]) -> Tokenizer:
    """Ids are positions in `words`; decoding joins them without spaces."""
    hf = HFTokenizer(models.WordLevel({word: i for i, word in enumerate(words)}))
    hf.decoder = decoders.Fuse()
    return Tokenizer(hf, "words")


def first_stop(
    tokenizer: Tokenizer, ids: list[int], stops: tuple[str, ...], rows: list[int]
) -> StopMatch | None:
    """Feed `ids` in rows of the given sizes, as the scheduler does, up to the first stop."""
    matcher = StopStringMatcher(tokenizer, stops)
    fed = 0
    for size in rows:
        fed += size
        found = matcher.find(ids[:fed], size)
        if found is not None:
            return found
    return None


def test_a_string_over_three_tokens_stops_at_its_last() -> None:
    ids = list(TINY.encode("xabcd"))
    assert first_stop(TINY, ids, ("abc",), [1] * 5) == StopMatch(
        num_output_tokens=4, stop_reason="abc"
    )


def test_the_earliest_completed_string_wins_not_the_first_listed() -> None:
    ids = list(TINY.encode("xaby"))
    found = first_stop(TINY, ids, ("y", "ab"), [4])
    assert found == StopMatch(num_output_tokens=3, stop_reason="ab")


def test_of_strings_completed_together_the_longer_is_reported() -> None:
    ids = list(TINY.encode("xab"))
    found = first_stop(TINY, ids, ("b", "ab"), [3])
    assert found == StopMatch(num_output_tokens=3, stop_reason="ab")


def test_a_token_that_holds_the_string_and_more_is_kept_and_its_text_is_cut() -> None:
    tokenizer = word_tokenizer(["one", " sto", "pping stop", "end"])
    ids = [0, 1, 2]
    assert first_stop(tokenizer, ids, ("stop",), [1, 1, 1]) == StopMatch(
        num_output_tokens=3, stop_reason="stop"
    )
    assert text_until_stop(tokenizer, ids, "stop", include=False) == "one "
    assert text_until_stop(tokenizer, ids, "stop", include=True) == "one stop"


def test_the_text_before_the_last_token_is_not_searched_for_the_cut() -> None:
    # An earlier occurrence was passed over because of min_tokens; the cut is at the last one.
    ids = list(TINY.encode("ab,ab"))
    assert text_until_stop(TINY, ids, "ab", include=False) == "ab,"


def test_a_string_before_min_tokens_is_passed_over_for_good() -> None:
    ids = list(TINY.encode("ab1ab"))
    matcher = StopStringMatcher(TINY, ("ab",), min_tokens=3)
    assert [matcher.find(ids[: i + 1], 1) for i in range(4)] == [None] * 4
    assert matcher.find(ids, 1) == StopMatch(num_output_tokens=5, stop_reason="ab")


def test_a_string_that_ends_at_min_tokens_counts() -> None:
    ids = list(TINY.encode("ab"))
    matcher = StopStringMatcher(TINY, ("ab",), min_tokens=2)
    assert matcher.find(ids, 2) == StopMatch(num_output_tokens=2, stop_reason="ab")


def test_a_matcher_without_strings_is_refused() -> None:
    with pytest.raises(ValueError, match="stop_strings"):
        StopStringMatcher(TINY, ())


def test_text_that_does_not_end_in_its_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="does not complete"):
        text_until_stop(TINY, list(TINY.encode("abc")), "ab", include=False)


TEXTS = st.text(alphabet="ab", max_size=12)


@given(
    text=TEXTS,
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3),
    data=st.data(),
)
def test_the_matcher_agrees_with_a_search_of_every_prefix(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    ids = list(TINY.encode(text))
    rows: list[int] = []
    while sum(rows) < len(ids):
        rows.append(data.draw(st.integers(1, len(ids) - sum(rows))))
    expected = None
    for length in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:length].endswith(stop)]
        if ending:
            expected = StopMatch(num_output_tokens=length, stop_reason=max(ending, key=len))
            break
    assert first_stop(TINY, ids, tuple(stops), rows) == expected


def test_find_stop_string_takes_only_matches_that_pass_a_point() -> None:
    assert find_stop_string("abab", ("ab",)) == (0, "ab")
    assert find_stop_string("abab", ("ab",), must_pass=2) == (2, "ab")
    assert find_stop_string("abab", ("ab",), must_pass=4) is None
