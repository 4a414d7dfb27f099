"""Preemption: who goes, what is kept, what is recomputed, and that nobody takes turns for ever."""

import itertools

import pytest

from syncline.kv_cache import KVCacheManager
from syncline.scheduler_core import (
    FinishReason,
    IdleCause,
    PrefillChunk,
    Scheduler,
    SchedulerConfig,
)
from syncline.scheduler_core.oracle import Scenario, run
from syncline.scheduler_core.testing import (
    make_config,
    make_request,
    make_result,
    make_scheduler,
    step,
)


def test_a_recompute_is_final_where_the_known_tokens_end_not_the_prompt() -> None:
    """Prompt 128, 209 tokens generated, budget 256: chunks of 256 and 81."""
    config = make_config(max_num_batched_tokens=256, max_model_len=1000)
    scheduler = make_scheduler(
        num_blocks=200, block_size=4, config=config, enable_prefix_caching=False
    )
    scheduler.add(make_request("a", 128, 400))
    (sequence,) = scheduler.sequences
    for _ in range(209):
        step(scheduler)
    assert sequence.num_output_tokens == 209
    scheduler.preempt_one()
    first = step(scheduler)
    assert first.prefill_chunks == (PrefillChunk(row=0, start=0, stop=256, is_final=False),)
    assert sequence.num_output_tokens == 209
    second = step(scheduler)
    assert second.prefill_chunks == (PrefillChunk(row=0, start=256, stop=337, is_final=True),)
    assert sequence.num_output_tokens == 210
    assert sequence.num_recomputed_tokens == scheduler.stats.num_recomputed_tokens == 336


def test_a_resumed_sequence_hits_its_own_blocks_and_the_sizes_agree() -> None:
    """Prompt 8, one output; cached 8 and scheduled 1, also with a budget of 4."""
    for budget, num_chunks in ((64, 1), (4, 2)):
        config = make_config(max_num_seqs=4, max_num_batched_tokens=budget)
        scheduler = make_scheduler(config=config)
        scheduler.add(make_request("b", 8, 5))
        (sequence,) = scheduler.sequences
        for _ in range(num_chunks):
            step(scheduler)
        assert sequence.num_output_tokens == 1
        scheduler.preempt_one()
        plan = step(scheduler)
        assert plan.joined[0].num_computed_tokens == sequence.num_cached_tokens == 8
        assert plan.prefill_chunks == (PrefillChunk(row=0, start=8, stop=9, is_final=True),)
        assert len(plan.joined[0].block_ids) == 3
        assert sequence.num_recomputed_tokens == 0


def test_a_refused_admission_leaves_no_count_behind() -> None:
    """Refused while its two blocks are cached, admitted when both are evicted: cached 0, nine due.

    Pool 4 of 4: "b" holds 8 tokens and needs a third block, "x" grows over both of its blocks.
    """
    scheduler = make_scheduler(num_blocks=4, block_size=4)
    scheduler.add(make_request("x", 5, 9))
    scheduler.add(make_request("b", 8, 5))
    _, b = scheduler.sequences
    step(scheduler)
    step(scheduler)
    assert (b.num_preemptions, b.num_output_tokens) == (1, 1)
    num_refusals = 0
    while not (plan := step(scheduler)).joined:
        assert scheduler.waiting_cause is IdleCause.WAITING_FOR_BLOCKS
        assert (b.row, b.num_computed_tokens, b.num_cached_tokens) == (None, 0, 0)
        scheduler.check_integrity()
        num_refusals += 1
    assert num_refusals == 7  # All that "x" has to go.
    (join,) = plan.joined
    assert (join.seq_id, join.num_computed_tokens, len(join.block_ids)) == (b.seq_id, 0, 3)
    assert plan.prefill_chunks == (PrefillChunk(row=join.row, start=0, stop=9, is_final=True),)
    while scheduler.has_unfinished:
        step(scheduler)
    assert (b.num_output_tokens, b.num_cached_tokens) == (5, 0)


def test_the_youngest_is_the_victim_and_returns_to_its_place() -> None:
    scheduler = make_scheduler(config=make_config(max_num_seqs=3))
    for name in "abcd":
        scheduler.add(make_request(name, 4, 20))
    step(scheduler)
    a, b, c, d = scheduler.sequences
    assert scheduler.preempt_one() == c.seq_id
    assert scheduler.preempt_one() == b.seq_id
    assert a.row == 0 and (b.row, c.row, d.row) == (None, None, None)
    plan = step(scheduler)
    assert plan.left == (2, 1)
    assert [join.request_id for join in plan.joined] == ["b", "c"]  # In order of arrival.
    assert scheduler.waiting_cause is IdleCause.MAX_NUM_SEQS


def test_nothing_is_running_nothing_is_preempted() -> None:
    scheduler = make_scheduler()
    assert scheduler.preempt_one() is None
    scheduler.add(make_request())
    assert scheduler.preempt_one() is None
    assert scheduler.stats.num_preemptions == 0


def test_an_aborted_sequence_stays_aborted_whatever_is_preempted() -> None:
    """Aborted before or after it could be preempted, with and without its row in flight."""
    for depth, is_aborted_first in itertools.product((1, 2), (False, True)):
        scheduler = make_scheduler(config=make_config(max_steps_in_flight=depth))
        scheduler.add(make_request("a", 4, 9))
        scheduler.add(make_request("b", 4, 9))
        a, b = scheduler.sequences
        step(scheduler)
        plan = scheduler.plan()
        assert plan is not None
        if is_aborted_first:
            assert scheduler.abort("b") == 1
            assert scheduler.preempt_one() == a.seq_id
        else:
            assert scheduler.preempt_one() == b.seq_id
            assert scheduler.abort("b") == 1
        scheduler.apply(make_result(plan))
        (ended,) = scheduler.take_finished()
        assert ended is b
        while scheduler.has_unfinished:
            assert scheduler.sequences == (a,)
            step(scheduler)
        assert b.finish_reason is FinishReason.ABORT and b.output_token_ids == [7]
        assert a.num_output_tokens == 9


def test_a_decode_that_needs_a_block_takes_it_from_the_youngest() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=4, enable_prefix_caching=False)
    scheduler.add(make_request("a", 7, 20))
    scheduler.add(make_request("b", 7, 20))
    a, b = scheduler.sequences
    step(scheduler)
    step(scheduler)
    plan = step(scheduler)  # Both need a third block: there is none.
    assert plan.left == (1,) and plan.decode_rows == (0,)
    assert len(plan.new_blocks) == 1 and plan.new_blocks[0][0] == a.row
    assert (b.row, b.num_preemptions, scheduler.num_waiting) == (None, 1, 1)
    assert scheduler.waiting_cause is IdleCause.WAITING_FOR_BLOCKS


def test_a_preempted_sequence_comes_back_with_room_to_grow() -> None:
    """It is not admitted into the very last blocks, to be preempted again by the next growth."""
    kv = KVCacheManager(14, 4, enable_prefix_caching=False)
    scheduler = Scheduler(make_config(), kv)
    for i, name in enumerate("abcde"):
        scheduler.add(make_request(name, 5 + i, 24 - 2 * i))
    num_returns = 0
    while scheduler.has_unfinished:
        plan = scheduler.plan()
        assert plan is not None
        num_others = scheduler.num_running - len(plan.joined)
        if num_others and any(len(join.token_ids) > join.num_prompt_tokens for join in plan.joined):
            num_returns += 1
            assert kv.num_free_blocks >= num_others
        scheduler.apply(make_result(plan))
    assert num_returns > 0
    assert scheduler.stats.num_preemptions == 3


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("num_blocks", [9, 10, 12, 15])
def test_every_preemption_buys_progress(depth: int, num_blocks: int) -> None:
    """Between two preemptions of one sequence it has got at least one token."""
    progress: dict[int, list[int]] = {}

    class Watched(Scheduler):
        __slots__ = ()

        def check(self) -> None:
            for sequence in self.sequences:
                seen = progress.setdefault(sequence.seq_id, [])
                if len(seen) < sequence.num_preemptions:
                    seen.append(sequence.target_len)

    def observe(scheduler: Scheduler) -> None:
        assert isinstance(scheduler, Watched)
        scheduler.check()

    def make(config: SchedulerConfig, kv: KVCacheManager) -> Scheduler:
        return Watched(config, kv)

    requests = tuple(make_request(name, 5, 28) for name in "abcde")
    config = make_config(max_num_seqs=5, max_num_batched_tokens=8, max_steps_in_flight=depth)
    outcome = run(
        Scenario(
            requests=requests, num_blocks=num_blocks, config=config, enable_prefix_caching=False
        ),
        make_scheduler=make,
        observe=observe,
    )
    assert outcome.stats.num_preemptions > 0
    for lengths in progress.values():
        assert lengths == sorted(set(lengths))
