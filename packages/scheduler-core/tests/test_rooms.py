"""Rooms asked alone, where a fault would only delay or waste and so change no answer."""

import dataclasses
import itertools

import pytest

from syncline.kv_cache import KVCacheManager
from syncline.scheduler_core import IdleCause, RowError, Scheduler, Sequence
from syncline.scheduler_core.parking import ParkingLot
from syncline.scheduler_core.policies import PartialTurn, PrefillPolicy
from syncline.scheduler_core.records import RecordingScheduler
from syncline.scheduler_core.simulate.cli import main
from syncline.scheduler_core.testing import (
    make_config,
    make_request,
    make_result,
    make_scheduler,
    step,
)


def four() -> tuple[Sequence, ...]:
    scheduler = make_scheduler()
    for name in "abcd":
        scheduler.add(make_request(name))
    return scheduler.sequences


def test_every_order_of_parking_and_leaving_leaves_the_others_parked() -> None:
    for order in itertools.permutations(range(4)):
        sequences = four()
        lot = ParkingLot()
        for i in order:  # Two wait for one event, two for another.
            lot.park(sequences[i], IdleCause.WAITING_FOR_PREFIX, i % 2)
        assert (len(lot), len(list(lot))) == (4, 4)
        gone = order[0]
        lot.remove(sequences[gone])
        assert sequences[gone] not in lot
        left = [i for i in range(4) if i != gone]
        for event in (0, 1):
            expected = [i for i in left if i % 2 == event]
            assert lot.wake(event) == [sequences[i] for i in expected]
            assert not any(sequences[i] in lot for i in expected)
            assert lot.wake(event) == []
        assert (len(lot), list(lot), lot.first_cause) == (0, [], None)


def test_turns_are_given_to_those_that_are_parked_and_no_more_than_the_bound_allows() -> None:
    sequences = four()
    for bound, num_partial in itertools.product(range(1, 6), range(4)):
        config = dataclasses.replace(make_config(), max_num_partial_prefills=bound)
        policy, lot = PrefillPolicy(config), ParkingLot()
        for sequence in reversed(sequences):
            policy.queue(sequence)
            if sequence.request_id != "b":  # That one has ended since.
                lot.park(sequence, IdleCause.WAITING_FOR_PREFIX, PartialTurn(sequence.seq_id))
        turns = [turn.seq_id for turn in policy.take_turns(num_partial, lot)]
        waiting = [sequence.seq_id for sequence in sequences if sequence.request_id != "b"]
        assert turns == waiting[: max(0, bound - num_partial)]


def test_a_clock_is_not_turned_back_by_an_arrival_of_the_past() -> None:
    scheduler = make_scheduler()
    scheduler.add(dataclasses.replace(make_request("a"), arrival_s=5.0))
    scheduler.add(dataclasses.replace(make_request("b"), arrival_s=3.0))
    with pytest.raises(ValueError, match=r"not before 5\.0"):
        scheduler.plan(now_s=4.0)
    assert scheduler.plan(now_s=5.0) is not None


def test_a_refused_request_is_no_record() -> None:
    records: list[object] = []
    scheduler = RecordingScheduler(make_config(), KVCacheManager(8, 4), on_record=records.append)
    scheduler.add(make_request("a"))
    with pytest.raises(ValueError, match="in use"):
        scheduler.add(make_request("a"))
    assert len(records) == 1


def test_samples_of_a_prompt_whose_computer_failed_later_compute_it_anew() -> None:
    """Rows for two: the first computes, the second shares, then the first row fails."""
    config = make_config(max_num_seqs=2)
    scheduler = make_scheduler(config=config, enable_prefix_caching=False)
    scheduler.add(make_request("a", 10, 6, num_samples=3))
    step(scheduler)
    step(scheduler)
    plan = scheduler.plan()
    assert plan is not None
    error = RowError(row=0, message="a bad page")
    scheduler.apply(dataclasses.replace(make_result(plan), errors=(error,)))
    plan = step(scheduler)
    assert [(join.sample_index, join.num_computed_tokens) for join in plan.joined] == [(2, 0)]


def test_only_the_last_sample_takes_the_tail_of_a_hold() -> None:
    """A first sample of one token leaves the hold's tail to the hold; two others need it."""
    kv = KVCacheManager(8, 4, enable_prefix_caching=False)
    scheduler = Scheduler(make_config(max_num_seqs=1), kv)
    scheduler.add(make_request("a", 10, 1, num_samples=3))
    joins = [step(scheduler).joined[0] for _ in range(3)]
    assert [join.num_computed_tokens for join in joins] == [0, 9, 9]
    assert not scheduler.has_unfinished
    assert kv.num_free_blocks == 8


def test_a_group_that_is_through_holds_no_block_of_its_prompt() -> None:
    for num_samples in range(1, 5):
        kv = KVCacheManager(16, 4, enable_prefix_caching=False)
        scheduler = Scheduler(make_config(), kv)
        scheduler.add(make_request("a", 10, 3, num_samples=num_samples))
        while scheduler.has_unfinished:
            step(scheduler)
            scheduler.check_integrity()
        assert kv.num_free_blocks == 16


def test_a_simulated_sample_that_the_pool_cuts_short_is_compared_as_far_as_it_goes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = (
        "--num-requests 2 --prompt-len 4 --output-len 3 --num-blocks 1 --block-size 4 "
        "--max-num-seqs 2 --depth 1 --max-num-batched-tokens 16 --max-model-len 32"
    )
    assert main(argv.split()) == 0
    assert "length 2" in capsys.readouterr().out
