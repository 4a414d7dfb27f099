"""Reading counting streams: breaks and foreign numbers are told apart, and nothing is missed."""

import pytest

from syncline.engine.probes.counting import (
    MAX_REQUESTS,
    PROMPT_NUMBERS,
    RANGE_STRIDE,
    count_text,
    range_owner,
    range_start,
    read_stream,
    sum_streams,
)


def right_text(request: int, num_numbers: int) -> str:
    return count_text(range_start(request) + PROMPT_NUMBERS, num_numbers)


def test_the_first_request_counts_from_310000() -> None:
    assert count_text(range_start(0), PROMPT_NUMBERS) == "00310000,00310001,00310002,"
    assert right_text(0, 1) == "00310003,"


def test_ranges_are_disjoint_and_bounded() -> None:
    assert range_start(1) - range_start(0) == RANGE_STRIDE
    for request in (-1, MAX_REQUESTS):
        with pytest.raises(ValueError, match="request index"):
            range_start(request)


@pytest.mark.parametrize("length", [0, 1, 8, 9, 10, 44])
def test_every_prefix_of_the_right_text_is_clean(length: int) -> None:
    stream = read_stream(5, right_text(5, 5)[:length], 64)
    assert stream.is_clean
    assert stream.num_breaks == 0
    assert stream.foreign == ()


def test_a_skipped_number_is_one_break_and_not_foreign() -> None:
    text = right_text(2, 3) + count_text(range_start(2) + PROMPT_NUMBERS + 4, 2)
    stream = read_stream(2, text, 64)
    assert (stream.num_breaks, stream.foreign, stream.is_clean) == (1, (), False)
    assert stream.first_break == "2310005 -> '02310007'"


def test_numbers_of_another_request_are_foreign_and_name_their_owner() -> None:
    text = right_text(2, 2) + right_text(7, 2)
    stream = read_stream(2, text, 64)
    assert stream.num_breaks == 1
    assert [owner for _, owner in stream.foreign] == [7, 7]


def test_a_number_nobody_was_counting_is_a_break_only() -> None:
    beyond = count_text(range_start(7) + RANGE_STRIDE // 2, 1)
    unused = count_text(range_start(70), 1)
    for text in (beyond, unused):
        stream = read_stream(2, right_text(2, 1) + text, 64)
        assert (stream.num_breaks, stream.foreign) == (1, ())


def test_a_range_ends_where_its_request_can_have_got_to() -> None:
    first = range_start(7)
    assert range_owner(first, 64, 5) == 7
    assert range_owner(first + 4, 64, 5) == 7
    assert range_owner(first + 5, 64, 5) is None
    assert range_owner(first - 1, 64, 5) is None
    assert range_owner(0, 64, 5) is None


def test_text_that_is_no_number_is_a_break() -> None:
    for text in ("0231<eos>,", ",", "023100031,", "2310003,"):
        stream = read_stream(2, text, 64)
        assert stream.num_breaks >= 1
        assert not stream.is_clean


def test_a_wrong_cut_off_last_number_is_a_break() -> None:
    stream = read_stream(2, right_text(2, 2) + "0239", 64)
    assert (stream.num_breaks, stream.is_clean) == (1, False)


def test_streams_add_up() -> None:
    clean = read_stream(0, right_text(0, 3), 3)
    broken = read_stream(1, right_text(1, 1) + "00000000,", 3)
    drifted = read_stream(2, right_text(0, 2), 3)
    counts = sum_streams([clean, broken, drifted])
    assert (counts.num_clean, counts.num_broken, counts.num_drifted) == (1, 1, 1)
    assert (counts.num_breaks, counts.num_foreign_numbers) == (2, 2)
