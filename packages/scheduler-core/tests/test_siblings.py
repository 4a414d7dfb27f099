"""n samples of one prompt compute it once, whatever the pool, the cache, the depth, the moment."""

import dataclasses
import itertools
from collections.abc import Mapping

import pytest

from syncline.kv_cache import KVCacheManager
from syncline.scheduler_core import (
    FinishReason,
    IdleCause,
    Request,
    RowError,
    Scheduler,
    StopRules,
)
from syncline.scheduler_core.oracle import (
    HashModel,
    OracleKV,
    OracleRunner,
    Outcome,
    ReferenceOutput,
    Scenario,
    reference_output,
    run,
)
from syncline.scheduler_core.testing import (
    check_every,
    make_config,
    make_request,
    make_result,
    make_scheduler,
    step,
)

MODEL = HashModel(vocab_size=32)
MAX_MODEL_LEN = 64
Expected = Mapping[tuple[str, int], ReferenceOutput]


def expected_of(*requests: Request) -> Expected:
    return {
        (request.request_id, i): reference_output(MODEL, request, i, max_model_len=MAX_MODEL_LEN)
        for request in requests
        for i in range(request.num_samples)
    }


def assert_true(outcome: Outcome, expected: Expected, *, aborted: str = "") -> None:
    for key, sequence in outcome.sequences.items():
        num_outputs = sequence.num_output_tokens
        assert sequence.output_token_ids == list(expected[key].token_ids[:num_outputs])
        assert sequence.logprobs == list(expected[key].logprobs[:num_outputs])
        if sequence.finish_reason is FinishReason.ABORT:
            assert key[0] == aborted
        else:
            assert sequence.finish_reason is expected[key].finish_reason
            assert num_outputs == len(expected[key].token_ids)


def scenario_of(requests: tuple[Request, ...], num_blocks: int, **changes: int) -> Scenario:
    """changes: caching (0 or 1), depth, budget, rows."""
    config = make_config(
        max_num_seqs=changes.get("rows", 4),
        max_num_batched_tokens=changes.get("budget", 8),
        max_model_len=MAX_MODEL_LEN,
        max_steps_in_flight=changes.get("depth", 1),
    )
    return Scenario(
        requests=requests,
        num_blocks=num_blocks,
        config=config,
        enable_prefix_caching=bool(changes.get("caching", 1)),
        model=MODEL,
    )


@pytest.mark.parametrize("caching", [0, 1])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_every_number_of_samples_of_every_prompt_in_every_pool(caching: int, depth: int) -> None:
    """Blocks of 4. From the pool that one sample fills exactly to one where nobody is in need."""
    for num_samples, num_prompt, max_tokens in itertools.product(
        (1, 2, 4), (1, 3, 4, 5, 8), (1, 6)
    ):
        stop = StopRules(max_tokens=max_tokens, stop_token_ids=frozenset({3}))
        request = make_request("a", num_prompt, stop=stop, num_samples=num_samples)
        expected = expected_of(request)
        fewest = -(-(num_prompt + max_tokens - 1) // 4)
        for num_blocks in (fewest, fewest + 1, fewest + 2, 30):
            scenario = scenario_of((request,), num_blocks, caching=caching, depth=depth)
            outcome = run(scenario, observe=check_every(4))
            assert_true(outcome, expected)
            if num_blocks == 30:
                # The prompt once, and its last token once more for every other sample.
                assert outcome.stats.num_prefill_tokens == num_prompt + num_samples - 1
                assert outcome.stats.num_preemptions == 0


@pytest.mark.parametrize("caching", [0, 1])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("num_blocks", [4, 12])
def test_preempted_or_aborted_at_every_tick(caching: int, depth: int, num_blocks: int) -> None:
    """The one that computes, a sample that waits, one that copies: each is hit at some tick."""
    stop = StopRules(max_tokens=4, stop_token_ids=frozenset({3}))
    requests = (
        make_request("a", 7, stop=stop, num_samples=3),
        make_request("b", 8, stop=stop, num_samples=2),
    )
    expected = expected_of(*requests)
    scenario = scenario_of(requests, num_blocks, caching=caching, depth=depth, budget=5)
    num_ticks = run(scenario).num_ticks
    for tick in range(num_ticks):
        ticks = frozenset({tick, tick + 1 + tick % 3} if tick % 2 else {tick})
        disturbed = dataclasses.replace(scenario, preempts=ticks)
        assert_true(run(disturbed, observe=check_every(4)), expected)
        for request_id in "ab":
            aborted = dataclasses.replace(scenario, aborts={tick: (request_id,)})
            assert_true(run(aborted, observe=check_every(4)), expected, aborted=request_id)


@pytest.mark.parametrize("depth", [1, 2])
def test_the_pool_is_emptied_at_every_tick(depth: int) -> None:
    """All preempted, or a new epoch: what was held is worth nothing any more."""
    requests = (make_request("a", 7, 5, num_samples=4), make_request("b", 9, 3, num_samples=2))
    expected = expected_of(*requests)
    scenario = scenario_of(requests, 9, depth=depth, budget=5, caching=0)
    num_ticks = run(scenario).num_ticks

    def preempt_all(scheduler: Scheduler, runner: OracleRunner) -> None:
        scheduler.preempt_all()

    def bump(scheduler: Scheduler, runner: OracleRunner) -> None:
        while runner.num_in_flight:
            scheduler.apply(runner.collect())
        scheduler.bump_kv_epoch()
        runner.kv = OracleKV(9, 4)

    for tick, control in itertools.product(range(num_ticks), (preempt_all, bump)):
        assert_true(run(dataclasses.replace(scenario, controls={tick: control})), expected)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("opted_out", [True, False])
def test_samples_share_their_prompt_without_a_cache_as_well(caching: bool, opted_out: bool) -> None:
    """Prompt of 10 in blocks of 4: two full blocks are shared, the third is copied."""
    scheduler = make_scheduler(enable_prefix_caching=caching)
    request = make_request("a", list(range(10)), 4, num_samples=4)
    scheduler.add(dataclasses.replace(request, use_prefix_cache=not opted_out))
    first = step(scheduler)
    assert [join.sample_index for join in first.joined] == [0]
    assert (scheduler.num_parked, scheduler.waiting_cause) == (0, IdleCause.WAITING_FOR_PREFIX)
    plan = step(scheduler)
    assert [join.sample_index for join in plan.joined] == [1, 2, 3]
    blocks = first.joined[0].block_ids
    for join, copy in zip(plan.joined, plan.block_copies, strict=True):
        assert join.num_computed_tokens == 9
        assert join.block_ids[:2] == blocks[:2] and copy == (blocks[2], join.block_ids[2])
    assert [(c.start, c.stop, c.is_final) for c in plan.prefill_chunks] == [(9, 10, True)] * 3
    assert len({sequence.row for sequence in scheduler.sequences}) == 4
    assert [s.num_cached_tokens for s in scheduler.sequences] == [0, 9, 9, 9]
    # Nothing is held any more than what the four have in their tables.
    held = {b for s in scheduler.sequences for b in s.table.block_ids}
    assert len(held) == 2 + 4
    scheduler.check_integrity()


def test_a_hold_outlives_a_first_sample_of_one_token() -> None:
    """It ends with the very result that completes the prompt; its last block is taken over."""
    kv = KVCacheManager(3, 4, enable_prefix_caching=False)
    scheduler = Scheduler(make_config(max_num_seqs=1), kv)
    scheduler.add(make_request("a", 10, 1, num_samples=3))
    blocks = step(scheduler).joined[0].block_ids
    assert kv.num_free_blocks == 0 and scheduler.num_running == 0
    # Without a free block the second computes what was in the last one.
    plan = step(scheduler)
    assert plan.joined[0].num_computed_tokens == 8 and plan.block_copies == ()
    assert plan.joined[0].block_ids[:2] == blocks[:2]
    plan = step(scheduler)
    assert plan.joined[0].num_computed_tokens == 8
    assert not scheduler.has_unfinished and kv.num_free_blocks == 3


def test_the_last_sample_takes_over_the_block_that_the_hold_has_to_itself() -> None:
    kv = KVCacheManager(8, 4)
    scheduler = Scheduler(make_config(max_num_seqs=2), kv)
    scheduler.add(make_request("a", 6, 4, num_samples=4))
    leader = step(scheduler).joined[0]
    plan = step(scheduler)
    # One sample copies, and the hold parts from the first one in the same plan.
    (join,) = plan.joined
    copies = dict(zip((join.block_ids[1], "hold"), plan.block_copies, strict=True))
    assert [source for source, _ in plan.block_copies] == [leader.block_ids[1]] * 2
    _, own = copies["hold"]
    assert own not in (*leader.block_ids, *join.block_ids)
    joins = [j for _ in range(6) for j in step(scheduler).joined]
    assert [j.sample_index for j in joins] == [2, 3]
    assert joins[1].block_ids[1] == own
    while scheduler.has_unfinished:
        step(scheduler)
    assert kv.num_free_blocks == 8


def test_a_full_pool_of_nothing_but_holds_is_never_stuck() -> None:
    """Rows for one; every first sample ends at once, so that holds alone fill the pool."""
    for num_prompt, num_blocks, block_size in itertools.product(range(1, 10), range(3, 8), (2, 4)):
        if num_prompt > num_blocks * block_size:
            continue
        priorities = (2, 1, 0)
        requests = tuple(
            dataclasses.replace(make_request(name, num_prompt, 1, num_samples=3), priority=priority)
            for name, priority in zip("abc", priorities, strict=True)
        )
        config = dataclasses.replace(
            make_config(max_num_seqs=1, max_num_batched_tokens=4), scheduling_policy="priority"
        )
        # Each request arrives when the one before it has computed its prompt.
        arrivals = {i: (request,) for i, request in enumerate(requests) if i}
        scenario = Scenario(
            requests=requests[:1],
            arrivals=arrivals,
            num_blocks=num_blocks,
            block_size=block_size,
            config=config,
            enable_prefix_caching=False,
            model=MODEL,
        )
        assert_true(run(scenario), expected_of(*requests))


def test_holds_are_given_up_before_anybody_is_preempted() -> None:
    kv = KVCacheManager(6, 4, enable_prefix_caching=False)
    scheduler = Scheduler(make_config(max_num_seqs=2), kv)
    scheduler.add(make_request("a", 7, 14, num_samples=3))
    step(scheduler)
    step(scheduler)
    # One shared block, one of each of the two and one of the hold, which a third sample waits for.
    assert (scheduler.num_running, kv.num_free_blocks) == (2, 2)
    while scheduler.stats.num_preemptions == 0 and kv.num_free_blocks:
        step(scheduler)
    assert scheduler.stats.num_preemptions == 0
    for _ in range(4):
        step(scheduler)
        held = {b for s in scheduler.sequences for b in s.table.block_ids}
        assert scheduler.stats.num_preemptions == 0 or len(held) + kv.num_free_blocks == 6
    while scheduler.has_unfinished:
        step(scheduler)
        scheduler.check_integrity()
    assert kv.num_free_blocks == 6


@pytest.mark.parametrize("how", ["preempt", "fail", "fail late"])
def test_another_sample_computes_the_prompt_when_the_first_one_does_not(how: str) -> None:
    scheduler = make_scheduler(enable_prefix_caching=False)
    scheduler.add(make_request("a", 10, 4, num_samples=3))
    if how == "fail late":
        step(scheduler)
    plan = scheduler.plan()
    assert plan is not None
    if how == "preempt":
        assert scheduler.preempt_one() == 0
        scheduler.apply(make_result(plan))
    else:
        result = make_result(plan)
        errors = (RowError(row=0, message="nan"),)
        scheduler.apply(dataclasses.replace(result, errors=errors))
    scheduler.check_integrity()
    plan = step(scheduler)
    scheduler.check_integrity()
    if how == "fail late":
        assert plan.joined == ()
    else:
        assert [join.num_computed_tokens for join in plan.joined] == [0]
        assert [j.num_computed_tokens for j in step(scheduler).joined] == [9] * (
            2 if how == "preempt" else 1
        )
    while scheduler.has_unfinished:
        step(scheduler)
    reasons = [s.finish_reason for s in scheduler.take_finished()]
    assert reasons.count(FinishReason.ERROR) == (how != "preempt")


def test_samples_take_over_the_columns_of_the_prompt() -> None:
    """The position that each computes anew keeps the value of the first."""
    scheduler = make_scheduler()
    request = make_request("a", 6, 3, num_samples=3)
    scheduler.add(dataclasses.replace(request, required_prompt_columns=frozenset({"p"})))
    runner = OracleRunner(OracleKV(64, 4), columns=("p", "q"))
    while (plan := scheduler.plan()) is not None:
        runner.launch(plan)
        scheduler.apply(runner.collect())
        scheduler.check_integrity()
    first, *others = sorted(scheduler.take_finished(), key=lambda s: s.sample_index)
    assert [s.finish_reason for s in (first, *others)] == [FinishReason.LENGTH] * 3
    prompt = {p: v for p, v in first.columns["p"].items() if p < 6}
    assert sorted(prompt) == list(range(6))
    for sequence in others:
        assert {p: v for p, v in sequence.columns["p"].items() if p < 6} == prompt
        assert sorted(sequence.columns["p"]) == list(range(8))
        # What nobody asked for is not carried over.
        assert sorted(sequence.columns["q"]) == list(range(5, 8))
    assert scheduler.stats.num_prefill_tokens == 6 + 2


@pytest.mark.parametrize("policy", ["recompute", "keep_kv"])
def test_columns_of_older_weights_are_not_taken_over(policy: str) -> None:
    """The first sample has the columns of version 0 and goes on; the others are of version 1."""
    scheduler = make_scheduler(config=make_config(max_num_seqs=2, max_num_batched_tokens=8))
    request = make_request("a", 6, 9, num_samples=3)
    scheduler.add(dataclasses.replace(request, required_prompt_columns=frozenset({"p"})))
    runner = OracleRunner(OracleKV(64, 4), columns=("p",), is_strict=False, keeps_kv=True)

    def one_step() -> None:
        plan = scheduler.plan()
        assert plan is not None
        runner.launch(plan)
        scheduler.apply(runner.collect())
        scheduler.check_integrity()

    one_step()
    scheduler.bump_kv_epoch()
    if policy == "recompute":
        scheduler.set_weight_version(1, policy="recompute")
    else:
        scheduler.set_weight_version(1, policy="keep_kv")
    while scheduler.has_unfinished:
        one_step()
    columns = [s.columns["p"] for s in sorted(scheduler.take_finished(), key=lambda s: s.seq_id)]
    context = 0
    version_1: list[int] = []
    for token_id in request.prompt_token_ids:
        context = HashModel().extend(context, token_id, 1)
        version_1.append(context)
    assert [columns[0][p] for p in range(6)] != version_1
    for column in columns[1:]:
        assert [column[p] for p in range(6)] == version_1


def test_a_fully_cached_prompt_is_waited_for_by_nobody() -> None:
    scheduler = make_scheduler()
    prompt = list(range(8))
    scheduler.add(make_request("a", prompt, 1))
    step(scheduler)
    scheduler.add(make_request("b", prompt, 2, num_samples=3))
    assert [join.num_computed_tokens for join in step(scheduler).joined] == [7, 7, 7]


def test_samples_of_a_prompt_that_has_to_wait_for_its_turn_wait_for_one_of_them() -> None:
    config = dataclasses.replace(
        make_config(max_num_batched_tokens=16),
        long_prefill_token_threshold=4,
        max_num_partial_prefills=1,
    )
    scheduler = make_scheduler(config=config, enable_prefix_caching=False)
    scheduler.add(make_request("long", 24, 2))
    scheduler.add(make_request("a", 10, 2, num_samples=4))
    while scheduler.has_unfinished:
        step(scheduler)
        scheduler.check_integrity()
    assert scheduler.stats.num_prefill_tokens == 24 + 10 + 3


def test_admission_of_many_groups_looks_at_each_sample_twice() -> None:
    """96 x 8 samples, 32 rows: a sample is parked once and admitted once."""
    kv = KVCacheManager(2000, 16)
    config = make_config(max_num_seqs=32, max_num_batched_tokens=4096, max_model_len=512)
    scheduler = Scheduler(config, kv)
    for i in range(96):
        scheduler.add(make_request(f"g{i}", [i, *range(99)], 2, num_samples=8))
    while scheduler.has_unfinished:
        step(scheduler)
        assert scheduler.num_parked <= 7 * 32
    assert scheduler.stats.num_prefill_tokens == 96 * (100 + 7)
    assert kv.num_free_blocks == 2000
