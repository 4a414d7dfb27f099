"""The parked place: out of the line until an event, then back in the old place; never lost."""

import dataclasses
from collections import Counter
from collections.abc import Sequence as SequenceABC

import pytest

from syncline.kv_cache import BlockTable, KVCacheManager, PrefixMatch
from syncline.scheduler_core import IdleCause, Scheduler, UnfinishedPolicy
from syncline.scheduler_core.oracle import OracleKV, OracleRunner, Scenario, run
from syncline.scheduler_core.parking import ParkingLot
from syncline.scheduler_core.testing import (
    make_config,
    make_request,
    make_result,
    make_scheduler,
    step,
)

PROMPT = list(range(40))


class CountingKV(KVCacheManager):
    """Counts how often each table asks what is cached."""

    __slots__ = ("num_matches",)

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self.num_matches: Counter[int] = Counter()

    def match(self, table: BlockTable, token_ids: SequenceABC[int], max_tokens: int) -> PrefixMatch:
        self.num_matches[id(table)] += 1
        return super().match(table, token_ids, max_tokens)


def places(scheduler: Scheduler) -> tuple[int, int, IdleCause | None]:
    return scheduler.num_waiting, scheduler.num_parked, scheduler.waiting_cause


def test_an_event_wakes_exactly_those_that_wait_for_it_in_order_of_admission() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 4, 2, num_samples=5))
    sequences = scheduler.sequences
    lot = ParkingLot()
    assert lot.wake("x") == [] and len(lot) == 0
    for sequence, event in zip(sequences[::-1], "xyxyx", strict=True):
        lot.park(sequence, IdleCause.WAITING_FOR_PREFIX, event)
    lot.remove(sequences[2])
    assert len(lot) == 4 and sequences[2] not in lot and sequences[0] in lot
    assert lot.first_cause is IdleCause.WAITING_FOR_PREFIX
    assert lot.wake("x") == [sequences[0], sequences[4]]
    assert lot.wake("x") == []
    assert [(s, event) for s, _, event in lot] == [(sequences[3], "y"), (sequences[1], "y")]
    with pytest.raises(KeyError):
        lot.remove(sequences[0])


def test_how_often_a_parked_sequence_is_matched_does_not_grow_with_the_number_of_plans() -> None:
    """Plans are made while nothing is applied: first b and c wait for a, then c for b."""
    kv = CountingKV(64, 4)
    scheduler = Scheduler(make_config(max_steps_in_flight=6), kv)
    runner = OracleRunner(OracleKV(64, 4))
    requests = (("a", 20), ("b", 30), ("c", 40), ("d", 5))
    tables = {
        name: scheduler.sequences[-1].table
        for name, length in requests
        if scheduler.add(make_request(name, PROMPT[:length], 9))
    }
    num_plans = 0
    while scheduler.has_unfinished:
        while (plan := scheduler.plan()) is not None:
            runner.launch(plan)
            scheduler.check_integrity()
            num_plans += 1
        scheduler.apply(runner.collect())
    assert num_plans > 20
    num_matches = {name: kv.num_matches[id(table)] for name, table in tables.items()}
    assert num_matches == {"a": 1, "b": 2, "c": 3, "d": 2}


def test_a_woken_sequence_is_admitted_before_everybody_younger() -> None:
    scheduler = make_scheduler(config=make_config(max_num_seqs=2))
    scheduler.add(make_request("a", PROMPT[:9], 2))
    scheduler.add(make_request("b", PROMPT[:9], 2))
    scheduler.add(make_request("c", 9, 2))
    scheduler.add(make_request("d", 9, 2))
    assert [join.request_id for join in step(scheduler).joined] == ["a", "c"]
    assert places(scheduler) == (2, 1, IdleCause.WAITING_FOR_PREFIX)
    assert step(scheduler).joined == ()
    assert places(scheduler) == (2, 0, IdleCause.MAX_NUM_SEQS)
    assert [join.request_id for join in step(scheduler).joined] == ["b", "d"]


def test_a_parked_sequence_is_aborted_without_trace() -> None:
    for abort_all in (False, True):
        scheduler = make_scheduler()
        scheduler.add(make_request("a", PROMPT[:9], 2))
        scheduler.add(make_request("b", PROMPT[:9], 2))
        plan = scheduler.plan()
        assert plan is not None and scheduler.num_parked == 1
        assert scheduler.abort("b") == 1
        assert scheduler.num_parked == 0
        assert scheduler.abort("b") == 0
        if abort_all:
            assert scheduler.abort_all() == 1
        scheduler.check_integrity()
        scheduler.apply(make_result(plan))
        while scheduler.has_unfinished:
            step(scheduler)
        assert len(scheduler.take_finished()) == 2


def test_a_wait_pause_finishes_what_has_begun_though_it_was_parked() -> None:
    """b was preempted and waits for a's prefix; c has not begun and stays."""
    scheduler = make_scheduler(config=make_config(max_num_batched_tokens=32))
    scheduler.add(make_request("a", PROMPT[:8], 6))
    step(scheduler)
    scheduler.add(make_request("b", [*PROMPT[:8], 50, 51, 52], 6))
    step(scheduler)
    scheduler.bump_kv_epoch()
    scheduler.add(make_request("c", PROMPT[:8], 6))
    scheduler.pause("wait")
    seen_parked = False
    while (plan := scheduler.plan()) is not None:
        seen_parked = seen_parked or scheduler.num_parked > 0
        scheduler.apply(make_result(plan))
        scheduler.check_integrity()
    assert seen_parked
    assert [s.request_id for s in scheduler.take_finished()] == ["a", "b"]
    assert scheduler.idle_cause is IdleCause.PAUSED
    assert [s.request_id for s in scheduler.sequences] == ["c"]
    scheduler.resume()
    step(scheduler)


@pytest.mark.parametrize("policy", ["recompute", "keep_kv", "abort"])
def test_new_weights_wake_who_waits_for_kv_of_the_old_ones(policy: UnfinishedPolicy) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", PROMPT, 3))
    scheduler.add(make_request("b", PROMPT, 3))
    step(scheduler)
    assert scheduler.num_parked == 1
    scheduler.bump_kv_epoch()
    scheduler.set_weight_version(1, policy=policy)
    scheduler.check_integrity()
    while scheduler.has_unfinished:
        step(scheduler)
        scheduler.check_integrity()
    # Old KV under new weights is not shared: b then computes all of it.
    expected = {"recompute": 40 + 41 + 1, "keep_kv": 40 + 40, "abort": 40}[policy]
    assert scheduler.stats.num_prefill_tokens == expected


def test_a_resized_pool_wakes_or_ends_who_is_parked() -> None:
    for num_blocks, num_ended in ((12, 0), (9, 2)):
        scheduler = make_scheduler(num_blocks=20)
        scheduler.add(make_request("a", PROMPT, 3))
        scheduler.add(make_request("b", PROMPT, 3))
        step(scheduler)
        assert scheduler.num_parked == 1
        scheduler.resize_pool(num_blocks)
        assert len(scheduler.take_finished()) == num_ended
        scheduler.check_integrity()
        while scheduler.has_unfinished:
            step(scheduler)
            scheduler.check_integrity()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_disturbed_at_every_tick_a_chain_of_waiting_prompts_gets_through(depth: int) -> None:
    config = dataclasses.replace(
        make_config(max_num_seqs=3, max_num_batched_tokens=6, max_steps_in_flight=depth),
        scheduling_policy="priority",
    )
    requests = tuple(
        dataclasses.replace(make_request(name, PROMPT[:length], 3), priority=priority)
        for name, length, priority in (("a", 12, 1), ("b", 16, 0), ("c", 20, 2), ("d", 8, 0))
    )
    calm = run(Scenario(requests=requests, num_blocks=40, config=config))
    outputs = {key: s.output_token_ids for key, s in calm.sequences.items()}
    for tick in range(calm.num_ticks):
        for num_blocks in (40, 6):
            outcome = run(
                Scenario(
                    requests=requests,
                    num_blocks=num_blocks,
                    config=config,
                    preempts=frozenset({tick}),
                    aborts={tick: ("b",)},
                )
            )
            for key, sequence in outcome.sequences.items():
                expected = outputs[key]
                if key[0] != "b":
                    assert sequence.output_token_ids == expected
                assert sequence.output_token_ids == expected[: sequence.num_output_tokens]


def test_no_plan_looks_at_those_that_are_parked() -> None:
    kv = CountingKV(64, 4)
    scheduler = Scheduler(make_config(max_steps_in_flight=6), kv)
    for i in range(31):
        scheduler.add(make_request(f"r{i}", PROMPT, 9))
    plans = [scheduler.plan() for _ in range(5)]
    assert scheduler.num_parked == 30
    assert sum(kv.num_matches.values()) == 31
    assert plans[0] is not None
    scheduler.apply(make_result(plans[0]))
    assert scheduler.plan() is not None
    # All are woken, and asked in order as far as there are rows.
    assert sum(kv.num_matches.values()) == 31 + 7
    scheduler.check_integrity()
