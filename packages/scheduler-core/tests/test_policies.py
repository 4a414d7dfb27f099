"""Order, and how prefills share a step: nobody starves, and nobody takes turns for ever."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest

from syncline.kv_cache import KVCacheManager
from syncline.scheduler_core import (
    IdleCause,
    Request,
    Scheduler,
    SchedulerConfig,
    Sequence,
)
from syncline.scheduler_core.oracle import (
    HashModel,
    Scenario,
    apply_at_once,
    apply_when_full,
    reference_output,
    run,
)
from syncline.scheduler_core.testing import make_config, make_request, make_scheduler, step

LONG = 10_000


def with_policy(
    config: SchedulerConfig | None = None,
    **policy: Any,  # Any: each field is checked by SchedulerConfig
) -> SchedulerConfig:
    return dataclasses.replace(make_config() if config is None else config, **policy)


def ranked(request_id: str, priority: int, prompt: int = 6, max_tokens: int = 6) -> Request:
    return dataclasses.replace(make_request(request_id, prompt, max_tokens), priority=priority)


@pytest.mark.parametrize(
    ("field", "value", "limit"),
    [
        ("scheduling_policy", "lifo", "must be 'fcfs' or 'priority', got 'lifo'"),
        ("long_prefill_token_threshold", -1, "must be at least 0, got -1"),
        ("max_num_partial_prefills", 0, "must be None or at least 1, got 0"),
    ],
)
def test_a_policy_out_of_range_is_refused_by_field_value_and_limit(
    field: str, value: Any, limit: str
) -> None:
    with pytest.raises(ValueError, match=f"{field} {limit}"):
        with_policy(**{field: value})


@pytest.mark.parametrize("priority", [-1, 1])
def test_under_fcfs_a_priority_is_refused_and_not_ignored(priority: int) -> None:
    scheduler = make_scheduler()
    with pytest.raises(ValueError, match=rf"priority of request 'a' must be 0 .*got {priority}"):
        scheduler.add(ranked("a", priority))
    assert not scheduler.has_unfinished
    scheduler.add(ranked("a", 0))


def test_prefills_that_have_begun_are_served_in_order_of_priority() -> None:
    """The urgent one comes last and begins last; from its second chunk on it is served first."""
    config = with_policy(
        make_config(max_num_batched_tokens=20),
        scheduling_policy="priority",
        long_prefill_token_threshold=8,
    )
    scheduler = make_scheduler(config=config)
    scheduler.add(ranked("slower", 6, 40))
    scheduler.add(ranked("slow", 5, 40))
    assert [join.request_id for join in step(scheduler).joined] == ["slow", "slower"]
    scheduler.add(ranked("urgent", -1, 40))
    slow, slower, urgent = 0, 1, 2
    served = [
        [(chunk.row, chunk.stop - chunk.start) for chunk in step(scheduler).prefill_chunks]
        for _ in range(2)
    ]
    assert served == [
        [(slow, 8), (slower, 8), (urgent, 4)],
        [(urgent, 8), (slow, 8), (slower, 4)],
    ]


def test_a_threshold_caps_the_chunk_of_one_prompt_per_step() -> None:
    config = with_policy(make_config(max_num_batched_tokens=20), long_prefill_token_threshold=8)
    scheduler = make_scheduler(config=config)
    for name in "abc":
        scheduler.add(make_request(name, 30))
    sizes = [[c.stop - c.start for c in step(scheduler).prefill_chunks] for _ in range(2)]
    assert sizes == [[8, 8, 4], [8, 8, 4]]
    alone = make_scheduler(config=config)
    alone.add(make_request("a", 30))
    assert [c.stop for c in step(alone).prefill_chunks] == [8]  # 12 tokens of budget unused.


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_decoding", [0, 3])
def test_a_short_prompt_gets_past_a_long_one_and_decodes_never_wait(
    depth: int, num_decoding: int
) -> None:
    """Threshold 64 of a budget of 96: a prompt of 80 needs three steps, whatever is before it."""
    config = with_policy(
        make_config(max_num_batched_tokens=96, max_model_len=20_000, max_steps_in_flight=depth),
        long_prefill_token_threshold=64,
    )
    scheduler = make_scheduler(num_blocks=3000, config=config)
    for i in range(num_decoding):
        scheduler.add(make_request(f"d{i}", 4, 500))
    if num_decoding:
        step(scheduler)
    scheduler.add(make_request("long", LONG))
    step(scheduler)
    scheduler.add(make_request("short", 80))
    short = scheduler.sequences[-1]
    num_steps = 0
    while not short.output_token_ids:
        plan = step(scheduler)
        num_steps += 1
        assert len(plan.decode_rows) == num_decoding
    assert num_steps == 3
    long = scheduler.sequences[-2]
    assert long.request_id == "long" and long.num_computed_tokens == 4 * 64


def test_without_a_threshold_a_short_prompt_waits_for_the_long_one() -> None:
    """The control of the test above."""
    config = make_config(max_num_batched_tokens=96, max_model_len=20_000)
    scheduler = make_scheduler(num_blocks=3000, config=config)
    scheduler.add(make_request("long", LONG))
    step(scheduler)
    scheduler.add(make_request("short", 80))
    for _ in range(50):
        step(scheduler)
    assert scheduler.sequences[-1].num_computed_tokens == 0
    assert scheduler.waiting_cause is IdleCause.MAX_NUM_BATCHED_TOKENS


@pytest.mark.parametrize("bound", [1, 2, 3])
def test_only_so_many_prompts_are_computed_in_part_and_short_ones_pass(bound: int) -> None:
    config = with_policy(
        make_config(max_num_batched_tokens=64),
        long_prefill_token_threshold=16,
        max_num_partial_prefills=bound,
    )
    scheduler = make_scheduler(num_blocks=200, config=config, enable_prefix_caching=False)
    for i in range(3):
        scheduler.add(make_request(f"long{i}", 60))
    scheduler.add(make_request("short", 10))
    first = step(scheduler)
    begun = [join.request_id for join in first.joined]
    assert begun == [f"long{i}" for i in range(bound)] + ["short"]
    expected = IdleCause.MAX_NUM_PARTIAL_PREFILLS if bound < 3 else None
    assert scheduler.waiting_cause is expected
    while scheduler.num_waiting:
        plan = step(scheduler)
        assert sum(not chunk.is_final for chunk in plan.prefill_chunks) <= bound
    assert scheduler.waiting_cause is None


def test_a_long_prompt_that_is_cached_is_no_long_prompt() -> None:
    config = with_policy(make_config(), long_prefill_token_threshold=16, max_num_partial_prefills=1)
    scheduler = make_scheduler(config=config)
    scheduler.add(make_request("first", list(range(40)), 1))
    while scheduler.has_unfinished:
        step(scheduler)
    scheduler.add(make_request("long", 60))
    scheduler.add(make_request("again", list(range(42)), 1))
    assert [join.request_id for join in step(scheduler).joined] == ["long", "again"]


def test_long_prompts_take_their_turns_in_order_and_one_that_ended_is_passed_over() -> None:
    config = with_policy(
        make_config(max_num_seqs=3),
        scheduling_policy="priority",
        long_prefill_token_threshold=16,
        max_num_partial_prefills=1,
    )
    scheduler = make_scheduler(num_blocks=900, config=config)
    for name, priority in (("a", 0), ("b", 3), ("c", 2), ("d", 1), ("e", 2)):
        scheduler.add(ranked(name, priority, 60, 1))
    step(scheduler)
    assert scheduler.num_parked == 4
    assert scheduler.waiting_cause is IdleCause.MAX_NUM_PARTIAL_PREFILLS
    scheduler.abort("c")
    begun: list[str] = []
    while scheduler.has_unfinished:
        plan = step(scheduler)
        begun += [join.request_id for join in plan.joined]
        num_partial = sum(not chunk.is_final for chunk in plan.prefill_chunks)
        # No turn is lost: while somebody waits for one, somebody has it.
        assert num_partial == 1 or (num_partial == 0 and not scheduler.num_parked)
        scheduler.check_integrity()
    assert begun == ["d", "e", "b"]


@pytest.mark.parametrize("how", ["abort", "preempt_one", "resize", "bump"])
def test_whatever_takes_the_turn_from_a_long_prompt_gives_it_to_another(how: str) -> None:
    config = with_policy(make_config(), long_prefill_token_threshold=16, max_num_partial_prefills=1)
    scheduler = make_scheduler(num_blocks=40, config=config)
    scheduler.add(make_request("a", 60, 1))
    scheduler.add(make_request("b", 60, 1))
    step(scheduler)
    match how:
        case "abort":
            scheduler.abort("a")
        case "preempt_one":
            scheduler.preempt_one()
        case "resize":
            scheduler.resize_pool(20)
        case _:
            scheduler.bump_kv_epoch()
    while scheduler.has_unfinished:
        step(scheduler)
        scheduler.check_integrity()
    assert [s.finish_reason for s in scheduler.take_finished()][-1] == "length"


POLICIES = [
    {"long_prefill_token_threshold": threshold, "max_num_partial_prefills": bound}
    for threshold, bound in itertools.product((0, 1, 3, 7), (None, 1, 2))
]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("depth", [1, 3])
def test_no_policy_changes_an_answer(policy: dict[str, Any], depth: int) -> None:
    """Under pressure, with shared prefixes, in both orders of priority."""
    prompts = [list(range(13)), [*range(8), 40, 41], list(range(9)), [50, 51, 52]]
    for order in (range(4), range(3, -1, -1)):
        requests = tuple(
            dataclasses.replace(make_request(f"r{i}", prompt, 9), priority=rank)
            for (i, prompt), rank in zip(enumerate(prompts), order, strict=True)
        )
        config = with_policy(
            make_config(max_num_batched_tokens=9, max_steps_in_flight=depth),
            scheduling_policy="priority",
            **policy,
        )
        outcome = run(Scenario(requests=requests, num_blocks=8, config=config))
        for request in requests:
            sequence = outcome.sequences[request.request_id, 0]
            expected = reference_output(HashModel(), request, 0, max_model_len=128)
            assert tuple(sequence.output_token_ids) == expected.token_ids


def num_blocks_of(sequence: Sequence, block_size: int) -> int:
    return -(-(sequence.num_tokens - 1) // block_size)


@pytest.mark.parametrize("lateness", [apply_at_once, apply_when_full])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("priorities", [(0, 0), (0, 1), (1, 0)])
def test_two_sequences_cannot_take_turns_in_any_pool(
    priorities: tuple[int, int], depth: int, lateness: Callable[[int, int], int]
) -> None:
    """Whoever is first in order is never preempted; the other at most once for each block that
    the first takes, and once for its own.
    """
    requests = tuple(
        ranked(name, priority, 5, 23) for name, priority in zip("ab", priorities, strict=True)
    )
    config = with_policy(make_config(max_steps_in_flight=depth), scheduling_policy="priority")
    preemptions: list[int] = []
    # From the smallest pool that holds one of them to one that holds both.
    for num_blocks in range(7, 15):
        outcome = run(
            Scenario(
                requests=requests,
                num_blocks=num_blocks,
                config=config,
                lateness=lateness,
                enable_prefix_caching=False,
            )
        )
        first, other = sorted(outcome.sequences.values(), key=lambda s: s.order_key)
        assert first.num_preemptions == 0
        assert other.num_preemptions <= 1 + num_blocks_of(first, 4)
        assert other.num_tokens == first.num_tokens == 28
        preemptions.append(other.num_preemptions)
    assert max(preemptions) > 0 and preemptions[-1] == 0  # Both fit into the last pool.


def test_an_urgent_newcomer_waits_for_blocks_and_takes_none_from_others() -> None:
    kv = KVCacheManager(4, 4)
    scheduler = Scheduler(with_policy(scheduling_policy="priority"), kv)
    scheduler.add(ranked("slow", 5, 12, 3))
    (slow,) = scheduler.sequences
    step(scheduler)
    scheduler.add(ranked("urgent", -5, 8, 2))
    assert step(scheduler).joined == ()
    assert scheduler.waiting_cause is IdleCause.WAITING_FOR_BLOCKS
    while slow.row is not None:
        step(scheduler)
    assert slow.is_finished and slow.num_preemptions == 0
    assert step(scheduler).joined[0].request_id == "urgent"
