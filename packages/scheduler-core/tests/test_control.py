"""Abort, pause, weight versions, KV epochs and pool size: also with results in flight."""

from collections.abc import Callable

import pytest

from syncline.kv_cache import KVCacheManager
from syncline.scheduler_core import (
    FinishReason,
    IdleCause,
    Scheduler,
    StepsInFlightError,
    UnfinishedPolicy,
)
from syncline.scheduler_core.oracle import (
    HashModel,
    OracleKV,
    OracleRunner,
    Scenario,
    apply_at_once,
    reference_output,
    run,
)
from syncline.scheduler_core.testing import (
    describe,
    make_config,
    make_request,
    make_result,
    make_scheduler,
    step,
)


def test_abort_ends_queued_running_and_in_flight_samples_and_twice_is_no_error() -> None:
    config = make_config(max_num_seqs=3, max_steps_in_flight=2)
    scheduler = make_scheduler(config=config)
    scheduler.add(make_request("a", 6, 9, num_samples=3))
    scheduler.add(make_request("b", 6, 9))
    step(scheduler)
    step(scheduler)
    plan = scheduler.plan()
    assert plan is not None
    assert scheduler.abort("a") == 3
    assert scheduler.abort("a") == 0 and scheduler.abort("unknown") == 0
    ended = scheduler.take_finished()
    assert [s.finish_reason for s in ended] == [FinishReason.ABORT] * 3
    assert [s.output_token_ids for s in ended] == [[7, 7], [7], []]
    assert [len(s.logprobs) for s in ended] == [2, 1, 0]
    scheduler.apply(make_result(plan))
    assert [s.output_token_ids for s in ended] == [[7, 7], [7], []]
    assert scheduler.stats.num_surplus_tokens == 2
    scheduler.check_integrity()
    assert [s.request_id for s in scheduler.sequences] == ["b"]
    scheduler.add(make_request("a", 6, 9))  # The id may be used again at once.


def test_abort_frees_every_block() -> None:
    kv = KVCacheManager(16, 4)
    scheduler = Scheduler(make_config(), kv)
    for name in "abc":
        scheduler.add(make_request(name, 9, 9))
    step(scheduler)
    assert scheduler.abort_all() == 3
    assert kv.num_free_blocks == 16 and not scheduler.has_unfinished
    assert scheduler.plan() is None and scheduler.idle_cause is IdleCause.NO_REQUESTS


def test_pause_abort_ends_everything_and_queues_what_comes() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a"))
    step(scheduler)
    scheduler.pause("abort")
    assert [s.finish_reason for s in scheduler.take_finished()] == [FinishReason.ABORT]
    scheduler.add(make_request("b"))
    assert scheduler.plan() is None and scheduler.idle_cause is IdleCause.PAUSED
    scheduler.resume()
    assert step(scheduler).joined[0].request_id == "b"


def test_pause_wait_runs_what_has_begun_to_its_end_preempted_or_not() -> None:
    scheduler = make_scheduler(config=make_config(max_num_seqs=2))
    scheduler.add(make_request("a", 6, 4))
    scheduler.add(make_request("b", 6, 4, num_samples=2))
    scheduler.add(make_request("c", 6, 4))
    step(scheduler)
    scheduler.pause("wait")
    scheduler.preempt_one()
    scheduler.preempt_one()
    scheduler.add(make_request("d", 6, 4))
    while (plan := scheduler.plan()) is not None:
        scheduler.apply(make_result(plan))
    assert scheduler.idle_cause is IdleCause.PAUSED and scheduler.is_paused
    ended = [(s.request_id, s.sample_index) for s in scheduler.take_finished()]
    # A request has begun when one of its samples has.
    assert sorted(ended) == [("a", 0), ("b", 0), ("b", 1)]
    assert [s.request_id for s in scheduler.sequences] == ["c", "d"]
    scheduler.resume()
    assert [join.request_id for join in step(scheduler).joined] == ["c", "d"]


@pytest.mark.parametrize("in_flight", [0, 1, 2])
def test_pause_keep_loses_no_token_and_repeats_none(in_flight: int) -> None:
    """Paused with results in flight, the cache flushed, resumed: the output is the same."""
    request = make_request("a", 6, 10)
    expected = reference_output(HashModel(), request, 0, max_model_len=128)

    def pause(scheduler: Scheduler, runner: OracleRunner) -> None:
        scheduler.pause("keep")
        assert scheduler.plan() is None and scheduler.idle_cause is IdleCause.PAUSED

    def flush(scheduler: Scheduler, runner: OracleRunner) -> None:
        assert scheduler.steps_in_flight == 0
        scheduler.bump_kv_epoch()

    def resume(scheduler: Scheduler, runner: OracleRunner) -> None:
        assert scheduler.is_paused
        scheduler.resume()

    outcome = run(
        Scenario(
            requests=(request,),
            num_blocks=16,
            config=make_config(max_steps_in_flight=3),
            controls={5: pause, 10: flush, 12: resume},
            lateness=lambda tick, num: max(0, num - in_flight),
        )
    )
    sequence = outcome.sequences["a", 0]
    assert tuple(sequence.output_token_ids) == expected.token_ids
    assert sequence.num_preemptions == 1  # The flush took its KV.
    assert outcome.stats.num_surplus_tokens == 0


def test_pause_refuses_an_unknown_mode() -> None:
    scheduler = make_scheduler()
    with pytest.raises(ValueError, match="mode must be 'abort', 'wait' or 'keep', got 'stop'"):
        scheduler.pause("stop")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="policy must be 'recompute', 'abort' or 'keep_kv'"):
        scheduler.set_weight_version(1, policy="x")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def bump(scheduler: Scheduler) -> None:
    scheduler.bump_kv_epoch()


def set_version(scheduler: Scheduler) -> None:
    scheduler.set_weight_version(1, policy="recompute")


def shrink(scheduler: Scheduler) -> None:
    scheduler.resize_pool(8)


@pytest.mark.parametrize("action", [bump, set_version, shrink])
def test_what_changes_kv_is_refused_while_a_step_is_in_flight(
    action: Callable[[Scheduler], None],
) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a"))
    plan = scheduler.plan()
    assert plan is not None
    before = describe(scheduler)
    with pytest.raises(StepsInFlightError) as caught:
        action(scheduler)
    assert caught.value.num_steps == 1
    assert describe(scheduler) == before
    scheduler.apply(make_result(plan))
    action(scheduler)
    scheduler.check_integrity()


@pytest.mark.parametrize("flush", ["bump", "recompute"])
def test_kv_of_old_weights_is_never_hit_again(flush: str) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", list(range(8)), 1))
    step(scheduler)
    if flush == "bump":
        scheduler.bump_kv_epoch()
    else:
        scheduler.set_weight_version(1, policy="recompute")
    scheduler.add(make_request("b", list(range(8)), 1))
    plan = step(scheduler)
    assert plan.joined[0].num_computed_tokens == 0
    assert plan.kv_epoch == 1 and plan.weight_version == (0 if flush == "bump" else 1)


def change_weights(policy: UnfinishedPolicy) -> Callable[[Scheduler, OracleRunner], None]:
    def control(scheduler: Scheduler, runner: OracleRunner) -> None:
        scheduler.bump_kv_epoch()
        scheduler.set_weight_version(1, policy=policy)

    return control


def test_recompute_continues_every_sequence_under_the_new_weights() -> None:
    requests = (make_request("a", 6, 9), make_request("b", 7, 9))
    outcome = run(
        Scenario(
            requests=requests,
            num_blocks=16,
            config=make_config(),
            controls={4: change_weights("recompute")},
            lateness=apply_at_once,
        )
    )
    for request in requests:
        sequence = outcome.sequences[request.request_id, 0]
        assert sequence.version_runs == [(0, 4), (1, 5)]
        token_ids = list(request.prompt_token_ids)
        for i, token_id in enumerate(sequence.output_token_ids):
            version = 0 if i < 4 else 1
            assert HashModel().next_token(token_ids, weight_version=version)[0] == token_id
            token_ids.append(token_id)


def test_abort_ends_every_sequence_at_a_change_of_weights() -> None:
    scheduler = make_scheduler(config=make_config(max_num_seqs=1))
    scheduler.add(make_request("a"))
    scheduler.add(make_request("b"))
    step(scheduler)
    scheduler.set_weight_version(3, policy="abort")
    ended = scheduler.take_finished()
    assert [s.finish_detail for s in ended] == ["weights changed to version 3"] * 2
    assert scheduler.weight_version == 3


def test_keep_kv_decodes_on_and_never_publishes_the_mixture() -> None:
    kv = KVCacheManager(16, 4)
    scheduler = Scheduler(make_config(), kv)
    scheduler.add(make_request("a", list(range(8)), 9))
    (sequence,) = scheduler.sequences
    step(scheduler)
    scheduler.bump_kv_epoch()
    scheduler.set_weight_version(1, policy="keep_kv")
    assert step(scheduler).decode_rows == (0,)
    assert sequence.num_preemptions == 0
    while scheduler.has_unfinished:
        step(scheduler)
    assert kv.num_cached_blocks == 0
    assert sequence.version_runs == [(0, 1), (1, 8)]
    scheduler.add(make_request("b", list(range(8)), 1))
    assert step(scheduler).joined[0].num_computed_tokens == 0


def test_a_kept_sequence_that_is_preempted_recomputes_under_the_new_weights() -> None:
    kv = KVCacheManager(16, 4)
    scheduler = Scheduler(make_config(), kv)
    scheduler.add(make_request("a", list(range(8)), 9))
    step(scheduler)
    scheduler.set_weight_version(1, policy="keep_kv")
    step(scheduler)
    scheduler.preempt_one()
    assert kv.num_cached_blocks == 0
    assert step(scheduler).joined[0].num_computed_tokens == 0
    assert kv.num_cached_blocks == 2  # Computed anew, so it may be shared.


def test_without_a_declared_policy_kv_of_an_older_epoch_is_recomputed() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 6, 9))
    (sequence,) = scheduler.sequences
    step(scheduler)
    scheduler.bump_kv_epoch()
    plan = step(scheduler)
    assert plan.left == (0,) and plan.joined[0].num_computed_tokens == 0
    assert sequence.num_preemptions == 1
    step(scheduler)
    assert sequence.num_preemptions == 1


@pytest.mark.parametrize("depth", [1, 2])
def test_sleep_in_the_middle_of_everything_changes_no_output(depth: int) -> None:
    """Drain, lose all KV content, go on: as if nothing had been."""
    requests = tuple(make_request(name, 5 + i, 12) for i, name in enumerate("abcd"))
    config = make_config(max_num_batched_tokens=8, max_steps_in_flight=depth)

    def sleep(scheduler: Scheduler, runner: OracleRunner) -> None:
        while scheduler.steps_in_flight:
            scheduler.apply(runner.collect())
        scheduler.bump_kv_epoch()
        runner.kv = OracleKV(runner.kv.num_blocks, runner.kv.block_size)

    for tick in range(1, 20):
        scenario = Scenario(requests=requests, num_blocks=12, config=config, controls={tick: sleep})
        outcome = run(scenario)
        for request in requests:
            expected = reference_output(HashModel(), request, 0, max_model_len=128)
            sequence = outcome.sequences[request.request_id, 0]
            assert tuple(sequence.output_token_ids) == expected.token_ids


def test_the_pool_is_resized_in_the_middle_of_a_run() -> None:
    requests = tuple(make_request(name, 9, 20) for name in "abc")

    def resize(num_blocks: int) -> Callable[[Scheduler, OracleRunner], None]:
        def control(scheduler: Scheduler, runner: OracleRunner) -> None:
            scheduler.resize_pool(num_blocks)
            runner.resize(num_blocks)

        return control

    outcome = run(
        Scenario(
            requests=requests,
            num_blocks=30,
            config=make_config(),
            controls={5: resize(8), 30: resize(9), 60: resize(30)},
            lateness=apply_at_once,
        )
    )
    for request in requests:
        expected = reference_output(HashModel(), request, 0, max_model_len=128)
        sequence = outcome.sequences[request.request_id, 0]
        assert tuple(sequence.output_token_ids) == expected.token_ids


def test_preempt_all_takes_every_block_and_each_sequence_goes_on() -> None:
    kv = KVCacheManager(16, 4)
    scheduler = Scheduler(make_config(), kv)
    scheduler.add(make_request("a", 6, 5))
    scheduler.add(make_request("b", 6, 5))
    step(scheduler)
    assert scheduler.preempt_all() == 2 and scheduler.preempt_all() == 0
    assert kv.num_free_blocks == 16 and scheduler.num_running == 0
    while scheduler.has_unfinished:
        step(scheduler)
    assert [s.num_output_tokens for s in scheduler.take_finished()] == [5, 5]
