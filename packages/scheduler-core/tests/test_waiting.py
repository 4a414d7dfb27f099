"""The waiting line keeps the order of admission, however sequences come into it and leave it."""

import itertools

import pytest

from syncline.scheduler_core import IdleCause, Sequence
from syncline.scheduler_core.testing import make_request, make_scheduler, step
from syncline.scheduler_core.waiting import WaitingLine


def five() -> tuple[Sequence, ...]:
    scheduler = make_scheduler()
    for name in "abcde":
        scheduler.add(make_request(name))
    return scheduler.sequences


def test_whoever_comes_takes_the_place_that_arrival_gives() -> None:
    sequences = five()
    for order in itertools.permutations(sequences):
        line = WaitingLine()
        for sequence in order:
            line.put(sequence)
        assert (len(line), list(line)) == (5, list(sequences))


def test_those_passed_over_return_to_the_front_in_their_order() -> None:
    sequences = five()
    for num_taken in range(6):
        line = WaitingLine()
        for sequence in sequences:
            line.put(sequence)
        taken = [line.pop_first() for _ in range(num_taken)]
        assert taken == list(sequences[:num_taken])
        line.put_back(sequence for sequence in taken if sequence is not None)
        assert list(line) == list(sequences)
    assert WaitingLine().pop_first() is None


def test_one_that_leaves_takes_nobody_with_it() -> None:
    for leaver in range(5):
        sequences = list(five())
        line = WaitingLine()
        for sequence in sequences:
            line.put(sequence)
        line.remove(sequences.pop(leaver))
        assert list(line) == sequences


@pytest.mark.parametrize("caching", [False, True])
def test_a_refusal_for_want_of_blocks_is_asked_again_when_blocks_come_free(caching: bool) -> None:
    """Pool 6: "a" and "c" run in a block each, "b" needs 5 and waits for the end of "a"."""
    scheduler = make_scheduler(num_blocks=6, enable_prefix_caching=caching)
    scheduler.add(make_request("a", 1, 2))
    scheduler.add(make_request("c", 1, 3))
    step(scheduler)
    scheduler.add(make_request("b", 20, 1))
    assert step(scheduler).joined == ()
    assert scheduler.waiting_cause is IdleCause.WAITING_FOR_BLOCKS
    assert [sequence.request_id for sequence in scheduler.take_finished()] == ["a"]
    assert [join.request_id for join in step(scheduler).joined] == ["b"]
