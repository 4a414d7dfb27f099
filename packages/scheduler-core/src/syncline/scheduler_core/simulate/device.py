"""The cheapest device that a scheduler accepts: it counts tokens and keeps no KV.

For runs without checks. Ends each sample where its length says, as the oracle's runner does with
the ending model, so both give the scheduler the same work.
"""

from collections import deque
from collections.abc import Mapping

from syncline.scheduler_core.oracle.drafters import Drafter, accept_all
from syncline.scheduler_core.plan import StepPlan, StepResult
from syncline.scheduler_core.simulate.workload import END_TOKEN_ID
from syncline.scheduler_core.types import RowId

# Every sequence repeats an id of its own: no two outputs are equal, as under the oracle's model.
_FIRST_FILLER_ID = END_TOKEN_ID + 1


class CountingRunner:
    """Results wait until they are collected, oldest first. output_lens: see `Load`.

    drafter: how many of a row's drafts are right, see the oracle's.
    """

    __slots__ = ("_drafter", "_fillers", "_left", "_output_lens", "_results")

    def __init__(
        self, output_lens: Mapping[tuple[str, int], int], drafter: Drafter = accept_all
    ) -> None:
        self._drafter = drafter
        self._output_lens = output_lens
        self._left: dict[RowId, int] = {}  # Tokens to come, the end one included.
        self._fillers: dict[RowId, int] = {}
        self._results: deque[StepResult] = deque()

    @property
    def num_in_flight(self) -> int:
        return len(self._results)

    def launch(self, plan: StepPlan) -> None:
        left, fillers = self._left, self._fillers
        for join in plan.joined:
            fillers[join.row] = _FIRST_FILLER_ID + join.seq_id
            num_output = len(join.token_ids) - join.num_prompt_tokens
            left[join.row] = self._output_lens[join.request_id, join.sample_index] - num_output
        token_ids: list[int] = []
        counts: list[int] | None = None
        window_counts: tuple[int, ...] | None = None
        if plan.window == 1 and plan.num_draft_tokens is None:
            for row in plan.decode_rows:
                left[row] = num_left = left[row] - 1
                token_ids.append(fillers[row] if num_left else END_TOKEN_ID)
        else:
            by_step = self._num_tokens_by_step(plan)
            counts = []
            for i, row in enumerate(plan.decode_rows):
                count = sum(by_step[i * plan.window : (i + 1) * plan.window])
                token_ids += self._tokens(row, count)
                counts.append(count)
            if plan.window > 1 and plan.num_draft_tokens is not None:
                window_counts = tuple(by_step)
        for chunk in plan.prefill_chunks:
            if chunk.is_final:
                token_ids += self._tokens(chunk.row, 1)
                if counts is not None:
                    counts.append(1)
        self._results.append(
            StepResult(
                step_id=plan.step_id,
                token_ids=token_ids,
                logprobs=[-1.0] * len(token_ids),
                counts=None if counts is None else tuple(counts),
                window_counts=window_counts,
            )
        )

    def _tokens(self, row: RowId, count: int) -> list[int]:
        """The row's next tokens; it goes on after its end, until the scheduler knows of it."""
        token_ids = [self._fillers[row]] * count
        num_left = self._left[row]
        self._left[row] = num_left - count
        if 0 < num_left <= count:
            token_ids[num_left - 1] = END_TOKEN_ID
        return token_ids

    def _num_tokens_by_step(self, plan: StepPlan) -> list[int]:
        """Of each decode row in each step of the window: its own token and the right drafts."""
        num_drafts = plan.num_draft_tokens or (0,) * len(plan.decode_rows)
        return [
            1 + self._drafter(plan.step_id + step, row, num)
            for row, num in zip(plan.decode_rows, num_drafts, strict=True)
            for step in range(plan.window)
        ]

    def collect(self) -> StepResult:
        """The result of the oldest launched step. Raises IndexError when none is in flight."""
        return self._results.popleft()
