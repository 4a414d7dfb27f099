"""Where a row of several tokens ends its sequence: at every index, by every criterion and mix.

And what a stop matcher that fails does: it ends its own sequence, and nothing else.
"""

import itertools
from collections.abc import Callable
from collections.abc import Sequence as SequenceABC

import pytest

from syncline.scheduler_core import (
    FinishReason,
    IdleCause,
    Scheduler,
    Sequence,
    SequenceId,
    StepPlan,
    StopMatch,
    StopMatcher,
    StopRules,
)
from syncline.scheduler_core.testing import (
    EndOnId,
    make_config,
    make_counted_result,
    make_request,
    make_result,
    make_scheduler,
    step,
)

FIRST = 50  # The id of the token that comes before the row.
CRITERIA = ["stop_id", "eos", "sequence", "string", "max_tokens", "max_model_len"]


def finish(
    rows: list[list[int]],
    rules: StopRules,
    *,
    end_on: int | None = None,
    max_model_len: int = 128,
    depth: int = 1,
) -> tuple[Sequence, Scheduler]:
    """One sequence (prompt of 3): `FIRST`, then rows of verified tokens, all in flight at once.

    A row is cut to what the plan allows, as a runner would.
    """
    config = make_config(max_model_len=max_model_len, max_steps_in_flight=depth)
    scheduler = make_scheduler(config=config)
    matcher = None if end_on is None else (lambda: EndOnId(end_on))
    scheduler.add(make_request(prompt=3, stop=rules, make_stop_matcher=matcher))
    (sequence,) = scheduler.sequences
    step(scheduler, FIRST)
    rows_left = iter(rows)
    while scheduler.has_unfinished or scheduler.steps_in_flight:
        plans: list[StepPlan] = []
        while (plan := scheduler.plan(num_draft_tokens=4)) is not None:
            plans.append(plan)
        for plan in plans:
            num_allowed = 1 + (plan.num_draft_tokens or (0,))[0]
            row = next(rows_left, [60])[:num_allowed]
            scheduler.apply(make_counted_result(plan, [row]))
            scheduler.check_integrity()
    assert scheduler.take_finished() == [sequence]
    assert sequence.logprobs[1:] == [-0.5 - i for i in sequence.output_token_ids[1:]]
    stats = scheduler.stats
    assert stats.num_accepted_tokens == sequence.num_output_tokens
    assert stats.num_draft_tokens == (
        stats.num_accepted_draft_tokens + stats.num_rejected_draft_tokens
    )
    return sequence, scheduler


def rules_for(criterion: str, id_: int, previous: int, num_kept: int) -> StopRules:
    """Rules that end the sample at this token, which is its `num_kept`th."""
    if criterion == "stop_id":
        return StopRules(max_tokens=40, stop_token_ids=frozenset({id_}))
    if criterion == "eos":
        return StopRules(max_tokens=40, eos_token_ids=frozenset({id_}))
    if criterion == "sequence":
        return StopRules(max_tokens=40, stop_sequences=((previous, id_),))
    return StopRules(max_tokens=num_kept if criterion == "max_tokens" else 40)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("criterion", CRITERIA)
def test_every_criterion_ends_a_verified_row_at_every_index(criterion: str, depth: int) -> None:
    for width in range(1, 6):
        for index in range(width):
            row = [30 + i for i in range(width)]
            num_kept = index + 2
            sequence, scheduler = finish(
                [row],
                rules_for(criterion, row[index], [FIRST, *row][index], num_kept),
                end_on=row[index] if criterion == "string" else None,
                max_model_len=3 + num_kept if criterion == "max_model_len" else 128,
                depth=depth,
            )
            assert sequence.output_token_ids == [FIRST, *row[: index + 1]]
            is_length = criterion in ("max_tokens", "max_model_len")
            reason = FinishReason.LENGTH if is_length else FinishReason.STOP
            assert sequence.finish_reason is reason
            if not is_length:
                # The rest of the row, and one token of each later step in flight.
                num_later = depth - 1
                assert scheduler.stats.num_surplus_tokens == width - 1 - index + num_later


@pytest.mark.parametrize("min_tokens", range(1, 8))
def test_no_stop_of_a_verified_row_counts_before_min_tokens(min_tokens: int) -> None:
    """B35: every second token is an end; the first with at least `min_tokens` kept counts."""
    kinds = ("stop_id", "eos", "sequence", "string")
    for kind, width in itertools.product(kinds, range(1, 6)):
        tokens = [2, 5] * 5
        rows = [tokens[i : i + width] for i in range(0, 10, width)]
        rules = StopRules(
            max_tokens=12,
            min_tokens=min_tokens,
            stop_token_ids=frozenset({2} if kind == "stop_id" else ()),
            eos_token_ids=frozenset({2} if kind == "eos" else ()),
            stop_sequences=((2,),) if kind == "sequence" else (),
        )
        sequence, _ = finish(rows, rules, end_on=2 if kind == "string" else None)
        # Output: FIRST, 2, 5, 2, 5, ...: a 2 is kept as the 2nd, 4th, 6th ... token.
        num_kept = max(2, min_tokens + min_tokens % 2)
        assert sequence.output_token_ids == [FIRST, *tokens][:num_kept]
        assert sequence.finish_reason is FinishReason.STOP


def test_an_accepted_run_that_begins_with_an_end_goes_on_below_the_floor() -> None:
    """B35 (c): three drafts, [2, 5, 2, 5] accepted, at least three tokens."""
    rules = StopRules(max_tokens=8, min_tokens=3, eos_token_ids=frozenset({2}))
    sequence, _ = finish([[2, 5, 2, 5]], rules)
    assert sequence.output_token_ids == [FIRST, 2, 5, 2]
    rules = StopRules(max_tokens=8, min_tokens=3, eos_token_ids=frozenset({2}), ignore_eos=True)
    sequence, _ = finish([[2, 5, 2, 5], [2, 5, 2, 5]], rules)
    assert sequence.output_token_ids == [FIRST, 2, 5, 2, 5, 2, 5, 2]
    assert sequence.finish_reason is FinishReason.LENGTH


def test_a_stop_inside_the_budget_is_not_masked_by_the_cap() -> None:
    """B13: max_tokens 4, stop id 7, one token so far; the rows of the report."""
    rules = StopRules(max_tokens=4, stop_token_ids=frozenset({7}))
    cases = (
        ([2, 7, 5], [2, 7], FinishReason.STOP),
        ([2, 3, 4], [2, 3, 4], FinishReason.LENGTH),
        ([2, 3, 7], [2, 3, 7], FinishReason.STOP),
    )
    for row, kept, reason in cases:
        sequence, scheduler = finish([row], rules)
        assert sequence.output_token_ids == [FIRST, *kept]
        assert sequence.finish_reason is reason
        assert sequence.row is None and not sequence.table.block_ids
        assert scheduler.num_running == 0


def test_the_earliest_stop_wins_whatever_the_order_of_the_criteria() -> None:
    """D11: four kinds of stop at four indices of one row of five."""
    for order in itertools.permutations(["stop_id", "eos", "sequence", "string"]):
        ids = {name: 40 + i for i, name in enumerate(order)}
        rules = StopRules(
            max_tokens=20,
            stop_token_ids=frozenset({ids["stop_id"]}),
            eos_token_ids=frozenset({ids["eos"]}),
            stop_sequences=((ids["sequence"],), (ids["eos"], 99)),
        )
        sequence, _ = finish([[39, 40, 41, 42, 43]], rules, end_on=ids["string"])
        assert sequence.output_token_ids == [FIRST, 39, 40]
        expected = {"stop_id": 40, "eos": None, "sequence": None, "string": "end"}
        assert sequence.stop_reason == expected[order[0]]
    for runs in itertools.permutations([(105,), (107,)]):
        rules = StopRules(max_tokens=9, stop_sequences=runs)
        sequence, _ = finish([[107, 105, 109]], rules)
        assert sequence.output_token_ids == [FIRST, 107]


def test_a_stop_sequence_may_span_the_borders_of_rows_at_every_place() -> None:
    run = (70, 71, 72, 73)
    tokens = [*range(30, 34), *run, 34, 35]
    rules = StopRules(max_tokens=20, stop_sequences=(run,))
    for widths in itertools.product(range(1, 6), repeat=3):
        bounds = [0, *itertools.accumulate(widths), 99]
        rows = [tokens[a:b] for a, b in itertools.pairwise(bounds) if tokens[a:b]]
        sequence, _ = finish([row[i : i + 5] for row in rows for i in range(0, len(row), 5)], rules)
        assert sequence.output_token_ids == [FIRST, *tokens[:8]]


class Raises:
    """Fails at the first call that shows it at least `num_tokens` tokens."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens

    def find(self, output_token_ids: SequenceABC[int], num_new: int) -> None:
        if len(output_token_ids) >= self._num_tokens:
            raise KeyError("no such state")


class Answers:
    """Always names the same position."""

    def __init__(self, num_output_tokens: int) -> None:
        self._num_output_tokens = num_output_tokens

    def find(self, output_token_ids: object, num_new: int) -> StopMatch:
        return StopMatch(num_output_tokens=self._num_output_tokens, stop_reason="?")


FAILING: dict[str, tuple[str, Callable[[], StopMatcher]]] = {
    "raises": ("between 2 and 4 tokens, raised KeyError: 'no such state'", lambda: Raises(2)),
    "too late": ("between 2 and 4 tokens, answered 5", lambda: Answers(5)),
    "too early": ("between 2 and 4 tokens, answered 1", lambda: Answers(1)),
    "nowhere": ("between 2 and 4 tokens, answered -1", lambda: Answers(-1)),
}


@pytest.mark.parametrize("name", FAILING)
@pytest.mark.parametrize("depth", [1, 2])
def test_a_failing_matcher_ends_its_own_sequence_and_all_else_is_applied(
    name: str, depth: int
) -> None:
    """Its row stands between two others; tokens that no matcher has passed are not delivered."""
    message, make_matcher = FAILING[name]
    scheduler = make_scheduler(config=make_config(max_steps_in_flight=depth))
    rules = StopRules(max_tokens=20, min_tokens=2)  # The first token is not shown to a matcher.
    scheduler.add(make_request("a", 4, 20))
    scheduler.add(make_request("bad", 4, stop=rules, make_stop_matcher=make_matcher))
    scheduler.add(make_request("c", 4, 2))
    step(scheduler, FIRST)
    plans = [scheduler.plan(num_draft_tokens=2) for _ in range(depth)]
    assert plans[0] is not None and plans[0].num_draft_tokens == (2, 2, 0)
    scheduler.apply(make_counted_result(plans[0], [[1, 2]], [[3, 4, 5]], [[6]]))
    scheduler.check_integrity()
    bad, c = scheduler.take_finished()
    assert (bad.request_id, bad.finish_reason) == ("bad", FinishReason.ERROR)
    assert bad.finish_detail.endswith(message)
    assert bad.output_token_ids == [FIRST] and len(bad.logprobs) == 1
    assert bad.row is None and not bad.table.block_ids
    assert c.output_token_ids == [FIRST, 6] and c.finish_reason is FinishReason.LENGTH
    (a,) = scheduler.sequences
    assert a.output_token_ids == [FIRST, 1, 2]
    stats = scheduler.stats
    assert (stats.num_accepted_tokens, stats.num_surplus_tokens) == (6, 3)
    assert (stats.num_draft_tokens, stats.num_accepted_draft_tokens) == (2, 1)
    for plan in plans[1:]:
        assert plan is not None
        scheduler.apply(make_counted_result(plan, [[8]], [[9]]))
        scheduler.check_integrity()
        assert a.output_token_ids == [FIRST, 1, 2, 8]
        assert bad.output_token_ids == [FIRST]
    assert scheduler.plan(num_draft_tokens={SequenceId(1): 2}) is not None


@pytest.mark.parametrize("name", FAILING)
def test_a_matcher_that_fails_at_a_single_token_ends_its_sequence_too(name: str) -> None:
    """In the plain path, and for a sequence that was preempted in the meantime."""
    _, make_matcher = FAILING[name]
    for is_preempted in (False, True):
        scheduler = make_scheduler(config=make_config(max_steps_in_flight=2))
        rules = StopRules(max_tokens=20, min_tokens=2)
        scheduler.add(make_request(prompt=4, stop=rules, make_stop_matcher=make_matcher))
        step(scheduler, FIRST)
        plan = scheduler.plan()
        assert plan is not None
        if is_preempted:
            scheduler.preempt_one()
        scheduler.apply(make_result(plan, 8))
        scheduler.check_integrity()
        (bad,) = scheduler.take_finished()
        assert bad.output_token_ids == [FIRST] and bad.finish_reason is FinishReason.ERROR
        assert scheduler.plan() is None and scheduler.idle_cause is IdleCause.NO_REQUESTS


def test_a_matcher_is_shown_a_verified_row_once_and_whole() -> None:
    seen: list[tuple[list[int], int]] = []

    class Recorder:
        def find(self, output_token_ids: SequenceABC[int], num_new: int) -> None:
            seen.append((list(output_token_ids), num_new))

    scheduler = make_scheduler()
    rules = StopRules(max_tokens=20, min_tokens=3)
    scheduler.add(make_request(prompt=3, stop=rules, make_stop_matcher=Recorder))
    step(scheduler, FIRST)
    for row in ([1, 2, 3], [4, 5]):
        plan = scheduler.plan(num_draft_tokens=2)
        assert plan is not None
        scheduler.apply(make_counted_result(plan, [row]))
    # Kept counts below min_tokens are not asked about.
    assert seen == [([FIRST, 1, 2, 3], 2), ([FIRST, 1, 2, 3, 4, 5], 2)]
