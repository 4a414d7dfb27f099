"""Small runs with drafts, disturbed at every tick: preemptions, aborts, lateness, wrong orders."""

import dataclasses
import itertools
from collections.abc import Callable

import pytest

from syncline.kv_cache import KVCacheManager
from syncline.scheduler_core import (
    Scheduler,
    StepOrderError,
    StepResult,
    StopRules,
)
from syncline.scheduler_core.oracle import (
    HashModel,
    OracleKV,
    OracleRunner,
    Outcome,
    Scenario,
    accept_none,
    hash_drafter,
    reference_output,
    run,
)
from syncline.scheduler_core.testing import (
    assert_reference,
    check_every,
    describe,
    make_config,
    make_request,
)

RULES = StopRules(max_tokens=12, min_tokens=3, stop_token_ids=frozenset({11, 12, 13}))
REQUESTS = (
    make_request("a", 6, 10),
    make_request("b", [1, 2, 3, 4, 5, 6, 7, 8], stop=RULES),
    make_request("c", [1, 2, 3, 4, 5, 6, 7, 8, 9], 7),
)
EXPECTED = {
    request.request_id: reference_output(HashModel(), request, 0, max_model_len=64)
    for request in REQUESTS
}
SETTINGS = [(1, 3, hash_drafter(0.6)), (2, 2, hash_drafter(0.7)), (1, 4, accept_none)]


def make_scenario(depth: int, num_blocks: int, setting: int) -> Scenario:
    window, num_drafts, drafter = SETTINGS[setting]
    return Scenario(
        requests=REQUESTS,
        num_blocks=num_blocks,
        config=make_config(
            max_num_seqs=3,
            max_num_batched_tokens=12,
            max_model_len=64,
            max_steps_in_flight=depth,
        ),
        window=window,
        num_draft_tokens=num_drafts,
        drafter=drafter,
    )


def assert_true(outcome: Outcome, *, aborted: str = "") -> None:
    for (request_id, _), sequence in outcome.sequences.items():
        assert_reference(sequence, EXPECTED[request_id], may_abort=request_id == aborted)
    stats = outcome.stats
    counters = (
        stats.num_draft_tokens,
        stats.num_accepted_draft_tokens,
        stats.num_rejected_draft_tokens,
        stats.num_recovered_tokens,
        stats.num_bonus_tokens,
    )
    assert min(counters) >= 0 and counters[0] == counters[1] + counters[2]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("setting", range(len(SETTINGS)))
def test_a_preemption_at_every_tick_changes_nothing(depth: int, setting: int) -> None:
    """#28 #29 #68 #82: drafts in flight or none, whatever of them turns out right."""
    for num_blocks in (40, 7) if setting == 0 else (7,):
        scenario = make_scenario(depth, num_blocks, setting)
        for tick in range(run(scenario).num_ticks):
            outcome = run(
                dataclasses.replace(scenario, preempts=frozenset({tick})), observe=check_every(5)
            )
            assert_true(outcome)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_two_preemptions_at_every_near_pair_of_ticks_change_nothing(depth: int) -> None:
    scenario = dataclasses.replace(make_scenario(depth, 40, 0), requests=REQUESTS[:2])
    for tick, gap in itertools.product(range(run(scenario).num_ticks), range(1, depth + 2)):
        preempts = frozenset({tick, tick + gap})
        outcome = run(dataclasses.replace(scenario, preempts=preempts), observe=check_every(5))
        assert_true(outcome)


@pytest.mark.parametrize(("depth", "setting"), [(1, 0), (2, 1), (3, 0)])
def test_an_abort_at_every_tick_of_every_request(depth: int, setting: int) -> None:
    """B12: nothing of the aborted one is counted once it has ended."""
    scenario = make_scenario(depth, 9, setting)
    for tick, request in itertools.product(range(run(scenario).num_ticks), REQUESTS):
        aborted = request.request_id
        outcome = run(
            dataclasses.replace(scenario, aborts={tick: (aborted,)}), observe=check_every(5)
        )
        assert_true(outcome, aborted=aborted)


def apply_by(pattern: tuple[int, ...]) -> Callable[[int, int], int]:
    """Results applied after each tick, over and over."""
    return lambda tick, num_in_flight: pattern[tick % len(pattern)]


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("setting", [0, 1])
def test_every_number_of_steps_of_lateness_changes_nothing(depth: int, setting: int) -> None:
    for period in (1, 2):
        for pattern in itertools.product(range(depth + 1), repeat=period):
            if not any(pattern):
                continue
            scenario = dataclasses.replace(
                make_scenario(depth, (7, 40)[sum(pattern) % 2], setting),
                lateness=apply_by(pattern),
            )
            assert_true(run(scenario, observe=lambda scheduler: None))


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_every_refused_order_at_every_tick_changes_nothing(depth: int) -> None:
    """Each result is first offered under, and in place of, every other step's id."""
    kv = KVCacheManager(9, 4)
    scheduler = Scheduler(make_scenario(depth, 9, 1).config, kv)
    runner = OracleRunner(OracleKV(9, 4), drafter=hash_drafter(0.7))
    for request in REQUESTS:
        scheduler.add(request)
    while scheduler.has_unfinished or scheduler.steps_in_flight:
        while (plan := scheduler.plan(window=2, num_draft_tokens=2)) is not None:
            runner.launch(plan)
        results: list[StepResult] = [runner.collect() for _ in range(runner.num_in_flight)]
        before = describe(scheduler)
        for i, result in enumerate(results):
            for other in (*results[i + 1 :], dataclasses.replace(result, step_id=-1)):
                with pytest.raises(StepOrderError) as caught:
                    scheduler.apply(other)
                assert (caught.value.expected, caught.value.got) == (result.step_id, other.step_id)
                assert describe(scheduler) == before
            scheduler.apply(result)
            scheduler.check_integrity()
            before = describe(scheduler)
            with pytest.raises(StepOrderError):
                scheduler.apply(result)  # Once is enough.
            assert describe(scheduler) == before
    for sequence in scheduler.take_finished():
        assert tuple(sequence.output_token_ids) == EXPECTED[sequence.request_id].token_ids
    assert kv.num_free_blocks == 9
