"""The cheapest device that a scheduler accepts: it counts tokens and keeps no KV.

For runs without checks. Ends each sample where its length says, as the oracle's runner does with
the ending model, so both give the scheduler the same work.
"""

from collections import deque
from collections.abc import Mapping

from syncline.scheduler_core.plan import StepPlan, StepResult
from syncline.scheduler_core.simulate.workload import END_TOKEN_ID
from syncline.scheduler_core.types import RowId

# Every sequence repeats an id of its own: no two outputs are equal, as under the oracle's model.
_FIRST_FILLER_ID = END_TOKEN_ID + 1


class CountingRunner:
    """Results wait until they are collected, oldest first. output_lens: see `Load`."""

    __slots__ = ("_fillers", "_left", "_output_lens", "_results")

    def __init__(self, output_lens: Mapping[tuple[str, int], int]) -> None:
        self._output_lens = output_lens
        self._left: dict[RowId, int] = {}  # Tokens to come, the end one included.
        self._fillers: dict[RowId, int] = {}
        self._results: deque[StepResult] = deque()

    @property
    def num_in_flight(self) -> int:
        return len(self._results)

    def launch(self, plan: StepPlan) -> None:
        left = self._left
        for join in plan.joined:
            num_output = len(join.token_ids) - join.num_prompt_tokens
            self._fillers[join.row] = _FIRST_FILLER_ID + join.seq_id
            left[join.row] = self._output_lens[join.request_id, join.sample_index] - num_output
        window = plan.window
        fillers = self._fillers
        token_ids = [fillers[row] for row in plan.decode_rows for _ in range(window)]
        for i, row in enumerate(plan.decode_rows):
            num_left = left[row]
            left[row] = num_left - window
            if 0 < num_left <= window:
                token_ids[i * window + num_left - 1] = END_TOKEN_ID
        for chunk in plan.prefill_chunks:
            if chunk.is_final:
                left[chunk.row] -= 1
                token_ids.append(fillers[chunk.row] if left[chunk.row] else END_TOKEN_ID)
        num_finals = len(token_ids) - len(plan.decode_rows) * window
        self._results.append(
            StepResult(
                step_id=plan.step_id,
                token_ids=token_ids,
                logprobs=[-1.0] * len(token_ids),
                counts=None
                if window == 1
                else (window,) * len(plan.decode_rows) + (1,) * num_finals,
            )
        )

    def collect(self) -> StepResult:
        """The result of the oldest launched step. Raises IndexError when none is in flight."""
        return self._results.popleft()
