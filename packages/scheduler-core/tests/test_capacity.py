"""Requests that do not fit: refused with numbers, or ended with a reason; never a livelock."""

import pytest

from syncline.kv_cache import KVCacheManager
from syncline.scheduler_core import FinishReason, IdleCause, Scheduler, Sequence
from syncline.scheduler_core.oracle import HashModel, Scenario, reference_output, run
from syncline.scheduler_core.testing import make_config, make_request, make_scheduler, step


def test_a_prompt_that_can_never_fit_ends_at_once_with_its_numbers() -> None:
    """Pool 4 blocks of 4, prompt 20; the request behind it is not held up."""
    scheduler = make_scheduler(num_blocks=4, block_size=4)
    scheduler.add(make_request("a", 20, 5, num_samples=2))
    scheduler.add(make_request("b", 4, 2))
    refused = scheduler.take_finished()
    assert [(s.request_id, s.sample_index) for s in refused] == [("a", 0), ("a", 1)]
    assert {s.finish_reason for s in refused} == {FinishReason.ERROR}
    assert refused[0].finish_detail == (
        "the prompt can never fit; kv capacity: 20 tokens need 5 blocks of 4, the pool has 4"
    )
    for _ in range(2):
        step(scheduler)
    (b,) = scheduler.take_finished()
    assert b.num_output_tokens == 2
    assert not scheduler.has_unfinished


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_sequence_that_outgrows_the_pool_ends_with_the_pools_numbers(depth: int) -> None:
    """Prompt 15 in 16 slots: one more position, whose token needs no KV of its own."""
    request = make_request("c", 15, 10)
    outcome = run(
        Scenario(requests=(request,), num_blocks=4, config=make_config(max_steps_in_flight=depth))
    )
    sequence = outcome.sequences["c", 0]
    expected = reference_output(HashModel(), request, 0, max_model_len=128)
    assert tuple(sequence.output_token_ids) == expected.token_ids[:2]
    assert sequence.finish_reason is FinishReason.LENGTH
    assert sequence.finish_detail == ("kv capacity: 17 tokens need 5 blocks of 4, the pool has 4")
    assert outcome.stats.num_preemptions == 0


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("prompt", [1, 4, 7, 8])
def test_a_sequence_that_exactly_fills_the_pool_finishes_undisturbed(
    depth: int, prompt: int
) -> None:
    """The last token needs no KV: 2 blocks of 4 are enough for 9 tokens."""
    request = make_request("a", prompt, 9 - prompt)
    outcome = run(
        Scenario(requests=(request,), num_blocks=2, config=make_config(max_steps_in_flight=depth))
    )
    sequence = outcome.sequences["a", 0]
    assert sequence.num_tokens == 9
    assert sequence.finish_detail == f"max_tokens {9 - prompt}"
    assert outcome.stats.num_preemptions == 0


def test_what_ends_by_capacity_does_not_depend_on_who_else_runs() -> None:
    def ended(others: int) -> Sequence:
        requests = [make_request("long", 9, 90)]
        requests += [make_request(f"o{i}", 5, 9) for i in range(others)]
        config = make_config(max_num_batched_tokens=16)
        scenario = Scenario(requests=tuple(requests), num_blocks=6, config=config)
        return run(scenario).sequences["long", 0]

    alone, crowded = ended(0), ended(5)
    assert alone.output_token_ids == crowded.output_token_ids
    assert alone.num_tokens == crowded.num_tokens == 25
    assert alone.finish_detail == crowded.finish_detail


def test_a_smaller_pool_ends_what_no_longer_fits_and_keeps_the_rest() -> None:
    scheduler = make_scheduler(num_blocks=16, block_size=4)
    scheduler.add(make_request("long", 30, 20))
    scheduler.add(make_request("short", 4, 20))
    for _ in range(3):
        step(scheduler)
    scheduler.add(make_request("new", 29, 20))
    scheduler.resize_pool(8)
    scheduler.check_integrity()
    ended = {s.request_id: s for s in scheduler.take_finished()}
    assert set(ended) == {"long"}
    assert ended["long"].finish_reason is FinishReason.LENGTH  # It has output: kept.
    assert "33 tokens need 9 blocks of 4, the pool has 8" in ended["long"].finish_detail
    scheduler.resize_pool(7)
    (refused,) = scheduler.take_finished()
    assert refused.request_id == "new" and refused.finish_reason is FinishReason.ERROR
    while scheduler.has_unfinished:
        step(scheduler)
    (short,) = scheduler.take_finished()
    assert short.num_output_tokens == 20
    assert short.finish_detail == "max_tokens 20"


def test_a_larger_pool_lifts_the_limit_again() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=4)
    scheduler.add(make_request("a", 10, 30))
    step(scheduler)
    scheduler.resize_pool(16)
    while scheduler.has_unfinished:
        step(scheduler)
    (a,) = scheduler.take_finished()
    assert a.num_output_tokens == 30 and a.finish_detail == "max_tokens 30"


def test_blocks_leased_to_others_are_waited_for_and_the_cause_is_named() -> None:
    """Once for an admission, once for a lone sequence that must grow."""
    kv = KVCacheManager(4, 4, enable_prefix_caching=False)
    scheduler = Scheduler(make_config(), kv)
    table = kv.new_table()
    reservation = kv.reserve(table, 12)
    assert reservation is not None
    lease = kv.lease(reservation.new_block_ids)
    kv.release(table)
    scheduler.add(make_request("a", 6, 4))
    assert scheduler.plan() is None
    assert scheduler.idle_cause is IdleCause.WAITING_FOR_BLOCKS
    lease.release()
    step(scheduler)
    reservation = kv.reserve(table, 8)
    assert reservation is not None
    lease = kv.lease(reservation.new_block_ids)
    kv.release(table)
    step(scheduler)
    step(scheduler)
    for _ in range(3):
        assert scheduler.plan() is None
        assert scheduler.idle_cause is IdleCause.WAITING_FOR_BLOCKS
    assert scheduler.stats.num_preemptions == 1
    lease.release()
    step(scheduler)
    (a,) = scheduler.take_finished()
    assert a.output_token_ids == [7, 7, 7, 7]


def test_the_first_in_line_waits_for_blocks_and_is_not_overtaken() -> None:
    scheduler = make_scheduler(num_blocks=6, block_size=4)
    scheduler.add(make_request("a", 12, 9))
    step(scheduler)
    scheduler.add(make_request("big", 16, 2))
    scheduler.add(make_request("small", 4, 1))
    step(scheduler)
    assert scheduler.waiting_cause is IdleCause.WAITING_FOR_BLOCKS
    assert scheduler.num_waiting == 2
    order: list[str] = []
    while scheduler.has_unfinished:
        order += [join.request_id for join in step(scheduler).joined]
    assert order == ["big", "small"]
