"""What the engine asks of whoever executes its plans, and what the answers look like.

Fault-injection tests put a stand-in behind `Runner`; nothing here knows a model, torch or sampling.

The order of calls
    register(request_id, sampling)   before the first plan that joins a sequence of the request
    launch(plan), launch(plan) ...   plans in step order, at most `max_steps_in_flight` uncollected
    collect() -> StepResult          the oldest launched plan's result; blocks until it exists
    forget(request_id)               once no sequence of the request can be joined again; rows that
                                     already joined keep what they need until their plan's `left`

Columns in `StepResult.columns` (values are plain Python, positions absolute)
    TOP_LOGPROBS      for rows whose request has `logprobs` > 0. One value, at the position of the
                      sampled token: `TopLogprobs`, likeliest first, ties by lowest id. It has fewer
                      than `logprobs` entries when filters left fewer tokens possible, and does not
                      repeat the sampled token when that is not among them (its logprob is in
                      `StepResult.logprobs`).
    PROMPT_LOGPROBS   for rows whose request has `prompt_logprobs` (0 or more), for the positions
                      the chunk computes: position 0 is None (nothing precedes it), every other one
                      a `PromptLogprob`. Always of the unfiltered distribution at temperature 1,
                      padded vocabulary excluded. A request that wants it puts
                      `PROMPT_LOGPROBS_COLUMN` into `Request.required_prompt_columns`.

A row whose logits are not numbers yields no token (count 0) and one `RowError` that names the
request; all other rows are unaffected.
"""

from typing import Final, NamedTuple, Protocol

from syncline.engine.sampling.resolved import ResolvedSampling
from syncline.scheduler_core import StepPlan, StepResult

TOP_LOGPROBS_COLUMN: Final = "top_logprobs"
PROMPT_LOGPROBS_COLUMN: Final = "prompt_logprobs"

TopLogprobs = tuple[tuple[int, float], ...]  # (token id, logprob), likeliest first


class PromptLogprob(NamedTuple):
    """The logprob of the prompt token at one position, and the likeliest tokens there."""

    logprob: float
    top: TopLogprobs


class Runner(Protocol):
    """Executes plans in order; see the module for the order of calls."""

    @property
    def num_in_flight(self) -> int:
        """Plans launched and not collected."""
        ...

    def register(self, request_id: str, sampling: ResolvedSampling) -> None:
        """Make a request's sampling known; RunnerError when the id is registered already."""
        ...

    def forget(self, request_id: str) -> None:
        """Drop a request's sampling; RunnerError when the id is not registered."""
        ...

    def launch(self, plan: StepPlan) -> None:
        """Start a step; needs no result of the steps still in flight."""
        ...

    def collect(self) -> StepResult:
        """The result of the oldest launched step; RunnerError when none is in flight."""
        ...
