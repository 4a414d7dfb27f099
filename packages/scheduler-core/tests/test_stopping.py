"""Where a sequence ends: the earliest position over all criteria, at every index of a row."""

import itertools
from collections.abc import Sequence as SequenceABC

import pytest

from syncline.scheduler_core import (
    FinishReason,
    Sequence,
    StepResult,
    StopRules,
)
from syncline.scheduler_core.stopping import earliest_stop
from syncline.scheduler_core.testing import (
    EndOnId,
    make_config,
    make_request,
    make_result,
    make_scheduler,
)


def finish(
    rows: list[list[int]],
    rules: StopRules,
    *,
    end_on: int | None = None,
    max_model_len: int = 128,
) -> Sequence:
    """Let one sequence (prompt of 3) receive rows of tokens until it ends; the first has one."""
    scheduler = make_scheduler(config=make_config(max_model_len=max_model_len))
    matcher = None if end_on is None else (lambda: EndOnId(end_on))
    scheduler.add(make_request(prompt=3, stop=rules, make_stop_matcher=matcher))
    for row in rows:
        plan = scheduler.plan(window=16)
        assert plan is not None
        window = plan.window if plan.decode_rows else 1
        row = row[:window]
        scheduler.apply(
            StepResult(
                step_id=plan.step_id,
                token_ids=row,
                logprobs=[-0.5 - token_id for token_id in row],
                counts=(len(row),),
            )
        )
        scheduler.check_integrity()
        ended = scheduler.take_finished()
        if ended:
            assert not scheduler.has_unfinished
            return ended[0]
    (sequence,) = scheduler.sequences
    return sequence


def test_a_stop_before_the_cap_wins_and_nothing_after_it_is_kept() -> None:
    rules = StopRules(max_tokens=4, stop_token_ids=frozenset({7}))
    sequence = finish([[1], [2, 7, 5]], rules)
    assert (sequence.output_token_ids[:], sequence.finish_reason) == ([1, 2, 7], FinishReason.STOP)
    assert sequence.stop_reason == 7
    assert len(sequence.logprobs) == 3


def test_the_cap_wins_when_no_stop_comes_before_it() -> None:
    rules = StopRules(max_tokens=4, stop_token_ids=frozenset({7}))
    sequence = finish([[1], [2, 3, 4]], rules)
    assert (sequence.output_token_ids[:], sequence.finish_reason) == (
        [1, 2, 3, 4],
        FinishReason.LENGTH,
    )
    assert sequence.finish_detail == "max_tokens 4"


def test_a_stop_exactly_on_the_cap_is_a_stop() -> None:
    rules = StopRules(max_tokens=4, stop_token_ids=frozenset({7}))
    sequence = finish([[1], [2, 3, 7]], rules)
    assert (sequence.output_token_ids[:], sequence.finish_reason) == (
        [1, 2, 3, 7],
        FinishReason.STOP,
    )


def test_no_stop_behind_the_cap_counts_however_many_tokens_came() -> None:
    """A row never brings so many; the rule holds for whoever asks."""
    rules = StopRules(max_tokens=4, stop_token_ids=frozenset({7}), stop_sequences=((4, 7),))
    for end_on in (None, 7):
        matcher = None if end_on is None else (lambda: EndOnId(7))
        scheduler = make_scheduler()
        scheduler.add(make_request(prompt=3, stop=rules, make_stop_matcher=matcher))
        (sequence,) = scheduler.sequences
        sequence.append([1, 2, 3, 4, 7], [-0.5] * 5, 0)
        stop = earliest_stop(sequence, 4)
        assert stop is not None
        assert (stop.num_output_tokens, stop.reason) == (4, FinishReason.LENGTH)


def test_a_stop_id_goes_before_a_string_that_ends_with_the_same_token() -> None:
    rules = StopRules(max_tokens=9, stop_token_ids=frozenset({7}))
    sequence = finish([[1], [2, 7]], rules, end_on=7)
    assert sequence.output_token_ids == [1, 2, 7]
    assert (sequence.stop_reason, sequence.finish_detail) == (7, "stop token 7")


def test_the_earliest_stop_sequence_wins_whatever_their_order_in_the_list() -> None:
    for runs in itertools.permutations([(105,), (107,)]):
        rules = StopRules(max_tokens=9, stop_sequences=runs)
        sequence = finish([[1], [107, 105, 109]], rules)
        assert sequence.output_token_ids == [1, 107]
        assert sequence.finish_detail == "stop sequence (107,)"


def test_an_end_of_sequence_token_before_a_stop_sequence_wins() -> None:
    rules = StopRules(max_tokens=9, eos_token_ids=frozenset({2}), stop_sequences=((5, 6),))
    sequence = finish([[1], [2, 5, 6]], rules)
    assert sequence.output_token_ids == [1, 2]
    assert sequence.stop_reason is None
    assert sequence.finish_detail == "end of sequence token 2"


def test_a_stop_sequence_may_begin_in_an_earlier_row_but_not_in_the_prompt() -> None:
    rules = StopRules(max_tokens=9, stop_sequences=((4, 5, 6),))
    assert finish([[4], [5], [6], [1]], rules).output_token_ids == [4, 5, 6]
    scheduler = make_scheduler()
    rules = StopRules(max_tokens=2, stop_sequences=((8, 9),))
    scheduler.add(make_request(prompt=[3, 8], stop=rules))
    plan = scheduler.plan()
    assert plan is not None
    scheduler.apply(make_result(plan, 9))
    assert scheduler.has_unfinished


@pytest.mark.parametrize("criterion", ["stop_id", "eos", "sequence", "string", "max_tokens", "len"])
def test_every_criterion_ends_a_row_at_every_index(criterion: str) -> None:
    for width, index in itertools.product(range(1, 6), range(5)):
        if index >= width:
            continue
        row = [30 + i for i in range(width)]
        num_kept = index + 2  # The first token came before the row.
        max_model_len = 128
        end_on = None
        rules = StopRules(max_tokens=20)
        if criterion == "stop_id":
            rules = StopRules(max_tokens=20, stop_token_ids=frozenset({30 + index}))
        elif criterion == "eos":
            rules = StopRules(max_tokens=20, eos_token_ids=frozenset({30 + index}))
        elif criterion == "sequence":
            previous = 30 + index - 1 if index else 9
            rules = StopRules(max_tokens=20, stop_sequences=((previous, 30 + index),))
        elif criterion == "string":
            end_on = 30 + index
        elif criterion == "max_tokens":
            rules = StopRules(max_tokens=num_kept)
        else:
            max_model_len = 3 + num_kept
        sequence = finish([[9], row], rules, end_on=end_on, max_model_len=max_model_len)
        is_length = criterion in ("max_tokens", "len")
        assert sequence.output_token_ids == [9, *row[: index + 1]]
        assert sequence.logprobs == [-0.5 - token_id for token_id in sequence.output_token_ids]
        assert sequence.finish_reason is (FinishReason.LENGTH if is_length else FinishReason.STOP)


def test_the_earliest_of_all_criteria_wins_in_every_arrangement() -> None:
    """Four kinds of stop at four indices of one row: whichever comes first decides."""
    for order in itertools.permutations(["stop_id", "eos", "sequence", "string"]):
        ids = {name: 40 + i for i, name in enumerate(order)}
        rules = StopRules(
            max_tokens=20,
            stop_token_ids=frozenset({ids["stop_id"]}),
            eos_token_ids=frozenset({ids["eos"]}),
            stop_sequences=((ids["sequence"],),),
        )
        sequence = finish([[9], [40, 41, 42, 43]], rules, end_on=ids["string"])
        assert sequence.output_token_ids == [9, 40]
        expected = {"stop_id": 40, "eos": None, "sequence": None, "string": "end"}
        assert sequence.stop_reason == expected[order[0]]


def test_max_model_len_ends_a_sequence_in_decode() -> None:
    sequence = finish([[1], [2], [3], [4], [5]], StopRules(max_tokens=100), max_model_len=6)
    assert sequence.num_tokens == 6
    assert sequence.finish_detail == "max_model_len 6"


def test_no_stop_counts_before_min_tokens_are_kept() -> None:
    rules = StopRules(max_tokens=8, min_tokens=3, eos_token_ids=frozenset({2}))
    # The mask of the runner held: the end comes after the floor.
    assert finish([[5], [5], [5], [2]], rules).output_token_ids == [5, 5, 5, 2]
    # The mask did not hold: the floor does, and the first end at or after it counts.
    assert finish([[2], [2], [2], [2]], rules).output_token_ids == [2, 2, 2]
    # In one row: the end at index 0 is passed over.
    assert finish([[2], [5, 2, 5]], rules).output_token_ids == [2, 5, 2]


def test_min_tokens_holds_for_stop_strings_and_stop_sequences() -> None:
    rules = StopRules(max_tokens=8, min_tokens=3, stop_sequences=((6,),))
    assert finish([[6], [6, 6, 6]], rules).output_token_ids == [6, 6, 6]
    rules = StopRules(max_tokens=8, min_tokens=3)
    assert finish([[6], [6, 6, 6]], rules, end_on=6).output_token_ids == [6, 6, 6]


def test_ignore_eos_runs_to_the_cap_but_not_past_a_stop_id() -> None:
    rules = StopRules(max_tokens=8, eos_token_ids=frozenset({2}), ignore_eos=True)
    sequence = finish([[2]] * 8, rules)
    assert sequence.output_token_ids == [2] * 8 and sequence.finish_reason is FinishReason.LENGTH
    rules = StopRules(
        max_tokens=8,
        stop_token_ids=frozenset({3}),
        eos_token_ids=frozenset({2}),
        ignore_eos=True,
    )
    assert finish([[2], [3]], rules).output_token_ids == [2, 3]


def test_a_matcher_per_sample_sees_the_output_grow_in_order() -> None:
    seen: list[tuple[int, list[int], int]] = []

    class Recorder:
        def __init__(self, number: int) -> None:
            self.number = number

        def find(self, output_token_ids: SequenceABC[int], num_new: int) -> None:
            seen.append((self.number, list(output_token_ids), num_new))

    numbers = iter(range(9))
    scheduler = make_scheduler()
    scheduler.add(
        make_request(
            prompt=3, max_tokens=2, num_samples=2, make_stop_matcher=lambda: Recorder(next(numbers))
        )
    )
    for token_id in (7, 8, 9):
        plan = scheduler.plan()
        assert plan is not None
        scheduler.apply(make_result(plan, token_id))
    # The second sample starts when the first one has computed their prompt.
    assert seen == [(0, [7], 1), (0, [7, 8], 1), (1, [8], 1), (1, [8, 9], 1)]
