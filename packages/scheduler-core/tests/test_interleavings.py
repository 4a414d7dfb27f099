"""Every way in which results can be late: all interleavings of plans and results of small runs.

Each tick the driver may apply none, one, or more of the results in flight. A run is repeated for
every such series of choices, found by trying the last choice that still has an alternative.
"""

from collections.abc import Iterator

import pytest

from syncline.scheduler_core import Scheduler
from syncline.scheduler_core.oracle import (
    HashModel,
    Outcome,
    Scenario,
    hash_drafter,
    reference_output,
    run,
)
from syncline.scheduler_core.testing import (
    assert_reference,
    make_config,
    make_request,
)

REQUESTS = (
    make_request("a", 3, 3),
    make_request("b", [1, 2, 3, 4], 3),
)
EXPECTED = {
    request.request_id: reference_output(HashModel(), request, 0, max_model_len=64)
    for request in REQUESTS
}


class Choices:
    """Replays a series of choices, then takes the first of each; knows where it could differ."""

    __slots__ = ("_num_taken", "_taken", "_widths")

    def __init__(self) -> None:
        self._taken: list[int] = []
        self._widths: list[int] = []
        self._num_taken = 0

    def __call__(self, tick: int, num_in_flight: int) -> int:
        if self._num_taken == len(self._taken):
            self._taken.append(0)
            self._widths.append(num_in_flight + 1)
        self._num_taken += 1
        return self._taken[self._num_taken - 1]

    def advance(self) -> bool:
        """Move on to the next series; False once there is none."""
        while self._taken and self._taken[-1] + 1 == self._widths[-1]:
            self._taken.pop()
            self._widths.pop()
        if not self._taken:
            return False
        self._taken[-1] += 1
        self._num_taken = 0
        return True


def every_interleaving(
    depth: int,
    num_blocks: int,
    *,
    num_drafts: int = 0,
    window: int = 1,
    aborts: dict[int, tuple[str, ...]] | None = None,
    preempts: frozenset[int] = frozenset(),
) -> Iterator[Outcome]:
    choices = Choices()
    is_left = True
    while is_left:
        yield run(
            Scenario(
                requests=REQUESTS,
                num_blocks=num_blocks,
                config=make_config(max_num_batched_tokens=8, max_steps_in_flight=depth),
                num_draft_tokens=num_drafts,
                drafter=hash_drafter(0.5),
                window=window,
                lateness=choices,
                aborts={} if aborts is None else aborts,
                preempts=preempts,
            ),
            observe=check_sometimes,
        )
        is_left = choices.advance()


def check_sometimes(scheduler: Scheduler) -> None:
    if scheduler.stats.num_plans % 4 == 3:
        scheduler.check_integrity()


def assert_true(outcome: Outcome, *, aborted: str = "") -> None:
    for (request_id, _), sequence in outcome.sequences.items():
        assert_reference(sequence, EXPECTED[request_id], may_abort=request_id == aborted)


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("num_blocks", [16, 3])
def test_no_interleaving_of_plans_and_results_changes_an_answer(
    depth: int, num_blocks: int
) -> None:
    num_runs = 0
    for outcome in every_interleaving(depth, num_blocks):
        assert_true(outcome)
        assert (outcome.stats.num_preemptions > 0) is (num_blocks == 3)
        num_runs += 1
    assert num_runs > 40


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize(("num_drafts", "window"), [(1, 1), (2, 1), (0, 2), (1, 2)])
def test_no_interleaving_changes_what_drafts_and_windows_yield(
    depth: int, num_drafts: int, window: int
) -> None:
    for outcome in every_interleaving(depth, 3, num_drafts=num_drafts, window=window):
        assert_true(outcome)


@pytest.mark.parametrize("num_drafts", [0, 2])
def test_no_interleaving_loses_what_an_abort_or_a_preemption_leaves_in_flight(
    num_drafts: int,
) -> None:
    for tick in range(1, 5):
        for outcome in every_interleaving(2, 16, num_drafts=num_drafts, aborts={tick: ("b",)}):
            assert_true(outcome, aborted="b")
        for outcome in every_interleaving(2, 16, num_drafts=num_drafts, preempts=frozenset({tick})):
            assert_true(outcome)
