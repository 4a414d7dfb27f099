"""A sequence's columns grow and shrink together, and its three lengths answer one question."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.scheduler_core import Sequence
from syncline.scheduler_core.testing import make_request, make_result, make_scheduler


def make_sequence() -> Sequence:
    scheduler = make_scheduler()
    scheduler.add(make_request(prompt=[4, 5, 6]))
    (sequence,) = scheduler.sequences
    return sequence


def test_a_token_without_a_logprob_is_refused_and_nothing_grows() -> None:
    sequence = make_sequence()
    with pytest.raises(ValueError, match=r"logprobs must be one per token \(2\), got 1"):
        sequence.append([1, 2], [-0.1], 0)
    assert sequence.num_output_tokens == 0 and sequence.logprobs == []


@given(
    rows=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 2)), max_size=8),
    kept=st.integers(0, 40),
)
def test_columns_stay_aligned_through_growth_and_truncation(
    rows: list[tuple[int, int]], kept: int
) -> None:
    sequence = make_sequence()
    versions: list[int] = []
    for count, version in rows:
        first = sequence.num_output_tokens
        sequence.append(
            list(range(first, first + count)),
            [-float(i) for i in range(first, first + count)],
            version,
        )
        versions += [version] * count
        assert list(sequence.token_ids) == [4, 5, 6, *sequence.output_token_ids]
    kept = min(kept, sequence.num_output_tokens)
    sequence.truncate(kept)
    assert sequence.output_token_ids == list(range(kept))
    assert sequence.logprobs == [-float(i) for i in range(kept)]
    assert [v for v, count in sequence.version_runs for _ in range(count)] == versions[:kept]
    assert list(sequence.token_ids) == [4, 5, 6, *range(kept)]
    assert sequence.num_tokens == 3 + kept


def test_runs_of_one_version_are_one_run() -> None:
    sequence = make_sequence()
    sequence.append([1], [-1.0], 5)
    sequence.append([2, 3], [-1.0, -1.0], 5)
    sequence.start_version(6)
    sequence.start_version(7)
    sequence.append([4], [-1.0], 7)
    assert sequence.version_runs == [(5, 3), (7, 1)]


def test_a_column_keeps_its_first_value_and_no_position_beyond_the_tokens() -> None:
    sequence = make_sequence()
    sequence.keep_column("x", 0, ["a", None])
    sequence.keep_column("x", 1, ["b", "c", "beyond"])
    assert sequence.columns == {"x": {0: "a", 1: None, 2: "c"}}


def test_the_three_lengths_of_a_chunked_prompt() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request(prompt=80, max_tokens=3))
    (sequence,) = scheduler.sequences

    def lengths() -> tuple[int, int, int]:
        return sequence.num_computed_tokens, sequence.num_issued_tokens, sequence.target_len

    assert lengths() == (0, 0, 80)
    first = scheduler.plan()
    assert first is not None and lengths() == (0, 64, 80)
    scheduler.apply(make_result(first))
    assert lengths() == (64, 64, 80)
    second = scheduler.plan()
    assert second is not None and lengths() == (64, 80, 81)  # The sampled token is in flight.
    scheduler.apply(make_result(second))
    assert lengths() == (80, 80, 81)
    third = scheduler.plan()
    assert third is not None and lengths() == (80, 81, 82)
    scheduler.apply(make_result(third))
    assert lengths() == (81, 81, 82)
