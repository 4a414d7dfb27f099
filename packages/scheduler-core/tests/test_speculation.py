"""How many drafts a decode row gets: what was asked for, as far as nobody else pays for it."""

import itertools
from collections.abc import Mapping

import pytest

from syncline.kv_cache import KVCacheManager
from syncline.scheduler_core import Scheduler, SequenceId, StepPlan
from syncline.scheduler_core.oracle import (
    Scenario,
    accept_all,
    accept_none,
    hash_drafter,
    run,
)
from syncline.scheduler_core.speculation import new_token_interval, share_budget
from syncline.scheduler_core.testing import (
    describe,
    make_config,
    make_counted_result,
    make_request,
    make_result,
    make_scheduler,
    step,
)


def decoding(
    num_rows: int = 2,
    *,
    max_tokens: int = 40,
    budget: int = 64,
    depth: int = 1,
    num_blocks: int = 64,
    max_model_len: int = 128,
) -> Scheduler:
    """Sequences 0, 1, ... with prompts of 4 and one token each, all in decode."""
    config = make_config(
        max_num_batched_tokens=budget, max_model_len=max_model_len, max_steps_in_flight=depth
    )
    scheduler = make_scheduler(config=config, num_blocks=num_blocks)
    for i in range(num_rows):
        scheduler.add(make_request("abcdefgh"[i], 4, max_tokens))
    while any(sequence.num_output_tokens == 0 for sequence in scheduler.sequences):
        step(scheduler)
    return scheduler


def drafts_of(plan: StepPlan | None) -> tuple[int, ...] | None:
    assert plan is not None
    return plan.num_draft_tokens


def test_a_row_gets_the_drafts_it_is_asked_to_verify() -> None:
    assert drafts_of(decoding().plan(num_draft_tokens=3)) == (3, 3)
    wanted = {SequenceId(1): 2}
    assert drafts_of(decoding().plan(num_draft_tokens=wanted)) == (0, 2)
    assert drafts_of(decoding().plan(num_draft_tokens=0)) is None
    assert drafts_of(decoding().plan(num_draft_tokens={})) is None
    assert drafts_of(decoding().plan(num_draft_tokens={SequenceId(0): 0})) is None
    assert drafts_of(decoding().plan()) is None


def test_the_number_may_differ_from_row_to_row_and_from_step_to_step() -> None:
    scheduler = decoding()
    for first, second in itertools.product(range(3), repeat=2):
        plan = scheduler.plan(num_draft_tokens={SequenceId(0): first, SequenceId(1): second})
        assert plan is not None
        assert plan.num_draft_tokens == ((first, second) if first or second else None)
        scheduler.check_integrity()
        scheduler.apply(make_counted_result(plan, [[7] * (1 + first)], [[7]]))
        scheduler.check_integrity()
    assert [s.num_output_tokens for s in scheduler.sequences] == [1 + 9 + 9, 1 + 9]


def test_an_entry_of_a_sequence_that_does_not_decode_is_not_used() -> None:
    scheduler = decoding()
    scheduler.add(make_request("w", 9, 4))  # Sequence 2 waits, then prefills.
    scheduler.abort("a")
    wanted = {SequenceId(i): 1 for i in range(3)}  # Sequence 0 has ended.
    plan = scheduler.plan(num_draft_tokens=wanted)
    assert plan is not None and plan.num_draft_tokens == (1,)
    assert [chunk.is_final for chunk in plan.prefill_chunks] == [True]


WRONG: list[tuple[str, int | Mapping[SequenceId, int]]] = [
    ("num_draft_tokens must be at least 0, got -1", -1),
    ("num_draft_tokens of sequence 1 must be at least 0, got -2", {SequenceId(1): -2}),
    ("num_draft_tokens must name sequences below 2, got 2", {SequenceId(2): 1}),
    ("num_draft_tokens must name sequences below 2, got -1", {SequenceId(-1): 1}),
]


@pytest.mark.parametrize(("message", "wanted"), WRONG)
def test_a_wrong_number_of_drafts_is_refused_and_changes_nothing(
    message: str, wanted: int | Mapping[SequenceId, int]
) -> None:
    scheduler = decoding()
    before = describe(scheduler)
    with pytest.raises(ValueError, match=message):
        scheduler.plan(num_draft_tokens=wanted)
    assert describe(scheduler) == before
    assert drafts_of(scheduler.plan(num_draft_tokens=1)) == (1, 1)


def test_what_a_row_may_yield_grows_with_window_and_drafts() -> None:
    assert [new_token_interval(w, k) for w, k in ((1, 0), (3, 0), (1, 4), (3, 4))] == [
        (1, 1),
        (1, 3),
        (1, 5),
        (1, 15),
    ]
    for window, num_drafts in itertools.product((1, 2, 3), range(4)):
        scheduler = decoding()
        sequence, _ = scheduler.sequences
        assert sequence.target_len == 5
        scheduler.plan(window=window, num_draft_tokens={sequence.seq_id: num_drafts})
        assert sequence.target_len == 5 + window * (1 + num_drafts)


@pytest.mark.parametrize("limit", ["max_tokens", "max_model_len"])
def test_drafts_go_up_to_a_length_limit_and_never_past_it(limit: str) -> None:
    """D3, D5: at most remaining // window - 1 drafts, for every remaining length and window."""
    for left, window, wanted in itertools.product(range(1, 9), (1, 2, 3), range(5)):
        scheduler = decoding(
            1,
            max_tokens=1 + left if limit == "max_tokens" else 99,
            max_model_len=5 + left if limit == "max_model_len" else 128,
        )
        plan = scheduler.plan(window=window, num_draft_tokens=wanted)
        assert plan is not None and plan.window == min(window, left)
        num_drafts = min(wanted, left // plan.window - 1)
        assert plan.num_draft_tokens == ((num_drafts,) if num_drafts else None)
        scheduler.check_integrity()
        scheduler.apply(make_counted_result(plan, [[7] * (1 + num_drafts)] * plan.window))
        scheduler.check_integrity()
        has_ended = plan.window * (1 + num_drafts) == left
        assert [s.num_output_tokens for s in scheduler.take_finished()] == [1 + left] * has_ended


def test_a_row_whose_steps_in_flight_may_reach_its_limit_drains() -> None:
    """Seven tokens left: 4, then 3 are in flight at most; the third plan has no such row."""
    scheduler = decoding(1, max_tokens=8, depth=3)
    (sequence,) = scheduler.sequences
    first = scheduler.plan(num_draft_tokens=3)
    second = scheduler.plan(num_draft_tokens=3)
    assert drafts_of(first) == (3,) and drafts_of(second) == (2,)
    assert scheduler.plan(num_draft_tokens=3) is None
    assert first is not None and second is not None
    scheduler.apply(make_counted_result(first, [[7]]))
    assert scheduler.plan(num_draft_tokens=3) is None  # All it may have is in flight still.
    scheduler.apply(make_counted_result(second, [[7, 7]]))
    scheduler.check_integrity()
    assert sequence.num_output_tokens == 4
    assert drafts_of(scheduler.plan(num_draft_tokens=9)) == (3,)


def test_drafts_get_what_the_rows_own_tokens_leave_of_the_budget() -> None:
    for budget, wanted in itertools.product(range(8, 16), range(5)):
        scheduler = decoding(4, budget=budget)
        plan = scheduler.plan(num_draft_tokens=wanted)
        assert plan is not None and len(plan.decode_rows) == 4
        drafts = plan.num_draft_tokens or (0,) * 4
        assert sum(drafts) == min(4 * wanted, budget - 4)
        assert max(drafts) - min(drafts) <= 1


def test_a_window_costs_the_budget_of_one_of_its_steps() -> None:
    scheduler = decoding(2, budget=8)
    assert drafts_of(scheduler.plan(window=4, num_draft_tokens=9)) == (3, 3)


@pytest.mark.parametrize("is_prefilling", [True, False])
def test_prompts_get_at_least_half_of_what_the_rows_leave(is_prefilling: bool) -> None:
    scheduler = decoding(4, budget=20)
    scheduler.add(make_request("p", 60, 4))
    if is_prefilling:
        step(scheduler)
        assert scheduler.num_waiting == 0
    plan = scheduler.plan(num_draft_tokens=9)
    assert plan is not None and plan.num_draft_tokens == (2, 2, 2, 2)
    (chunk,) = plan.prefill_chunks
    assert chunk.stop - chunk.start == 8


def test_shares_of_a_budget_are_level_and_use_it_up() -> None:
    for wanted in itertools.product(range(4), repeat=4):
        for budget in range(14):
            shares = share_budget(wanted, budget)
            assert sum(shares) == min(budget, sum(wanted))
            assert all(0 <= s <= w for s, w in zip(shares, wanted, strict=True))
            # Whoever got less than it wants has at most one less than anybody else.
            cut = [s for s, w in zip(shares, wanted, strict=True) if s < w]
            assert not cut or max(shares) <= min(cut) + 1


@pytest.mark.parametrize(("window", "num_drafts"), [(1, 3), (1, 4), (2, 3), (3, 9)])
def test_every_position_of_every_draft_is_reserved(window: int, num_drafts: int) -> None:
    """D8: also where a row crosses one block border, several, or ends exactly on one."""
    for num_outputs in range(1, 9):
        scheduler = decoding(1, max_tokens=99)
        for _ in range(num_outputs - 1):
            step(scheduler)
        (sequence,) = scheduler.sequences
        plan = scheduler.plan(window=window, num_draft_tokens=num_drafts)
        assert drafts_of(plan) == (num_drafts,)
        last_position = 4 + num_outputs - 1 + window * (1 + num_drafts) - 1
        assert sequence.table.num_tokens_capacity > last_position
        assert sequence.table.num_tokens_capacity <= last_position + 4


def test_drafts_take_no_block_that_others_may_need_soon() -> None:
    """Two rows with one full block each; free blocks are left for both, or no draft gets one."""
    for num_spare in range(8):
        scheduler = decoding(2, num_blocks=4 + num_spare)
        plan = scheduler.plan(num_draft_tokens=7)
        # Each row's own token has taken a block with three more positions in it.
        assert plan is not None
        num_new = sum(len(block_ids) for _, _, block_ids in plan.new_blocks) - 2
        assert num_new == (0, 0, 0, 1, 2, 2, 2, 2)[num_spare]
        assert plan.num_draft_tokens == {0: (3, 3), 1: (7, 3), 2: (7, 7)}[num_new]
        scheduler.check_integrity()


def test_a_full_pool_leaves_a_row_the_drafts_that_its_blocks_hold() -> None:
    scheduler = decoding(2, num_blocks=4)
    num_drafts: list[tuple[int, ...] | None] = []
    for _ in range(4):
        plan = scheduler.plan(num_draft_tokens=4)
        assert plan is not None
        num_drafts.append(plan.num_draft_tokens)
        scheduler.apply(make_counted_result(plan, [[7]], [[7]]))
    assert num_drafts == [(3, 3), (2, 2), (1, 1), None]
    assert scheduler.stats.num_preemptions == 0


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_drafts_cost_nobody_a_preemption(depth: int) -> None:
    """With no draft ever right, rows get on as without: the first victim falls no sooner."""
    requests = tuple(make_request(name, 3 + i, 60) for i, name in enumerate("abcd"))
    config = make_config(max_num_seqs=4, max_steps_in_flight=depth)
    for num_blocks, window in itertools.product((8, 11, 14, 17, 20), (1, 2)):
        first_ticks: list[int] = []
        for num_drafts in (0, 1, 2, 4):
            ticks: list[int] = []

            def note(scheduler: Scheduler, ticks: list[int] = ticks) -> None:
                if not scheduler.stats.num_preemptions:
                    ticks.append(scheduler.stats.num_plans)

            run(
                Scenario(
                    requests=requests,
                    num_blocks=num_blocks,
                    config=config,
                    window=window,
                    num_draft_tokens=num_drafts,
                    drafter=accept_none,
                    max_ticks=60,
                    aborts={30: ("a", "b", "c", "d")},
                ),
                observe=note,
            )
            first_ticks.append(ticks[-1])
        assert min(first_ticks) == first_ticks[0]


@pytest.mark.parametrize("num_blocks", range(6, 12))
def test_drafts_take_no_prompt_hold(num_blocks: int) -> None:
    """Two of three samples run, the hold waits for the third: it is given up no sooner."""
    num_steps_held: list[int] = []
    for num_drafts in (0, 1, 3, 9):
        kv = KVCacheManager(num_blocks, 4, enable_prefix_caching=False)
        scheduler = Scheduler(make_config(max_num_seqs=2), kv)
        scheduler.add(make_request("a", 7, 14, num_samples=3))
        step(scheduler)
        step(scheduler)
        assert kv.prompt_holds.block_ids
        num_held = 0
        while kv.prompt_holds.block_ids:
            plan = scheduler.plan(num_draft_tokens=num_drafts)
            assert plan is not None
            scheduler.apply(make_result(plan))
            scheduler.check_integrity()
            num_held += 1
        num_steps_held.append(num_held)
    assert min(num_steps_held) == num_steps_held[0]


def test_planned_positions_of_drafts_are_counted() -> None:
    scheduler = decoding()
    before = scheduler.stats.num_decode_tokens
    scheduler.plan(window=3, num_draft_tokens={SequenceId(0): 2})
    assert scheduler.stats.num_decode_tokens - before == 3 * (1 + 2) + 3


def test_the_drafters_are_pure_and_do_what_they_say() -> None:
    assert (accept_all(5, 1, 4), accept_none(5, 1, 4)) == (4, 0)
    for rate, low, high in ((0.0, 0, 0), (0.5, 0.4, 0.6), (0.9, 0.85, 0.95), (1.0, 1, 1)):
        drafter = hash_drafter(rate)
        asked = [(step_id, row, 1) for step_id in range(50) for row in range(8)]
        right = [drafter(*question) for question in asked]
        assert right == [drafter(*question) for question in asked]
        assert low <= sum(right) / len(right) <= high
    with pytest.raises(ValueError, match="acceptance_rate must be between 0 and 1, got 2"):
        hash_drafter(2)
