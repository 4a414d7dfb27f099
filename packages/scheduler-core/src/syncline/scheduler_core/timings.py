"""The caller's clock, and one place for all that is worth telling about a finished sequence.

Reads no clock: a time is what a caller passed as `now_s`, in seconds from an origin of its choice.
"""

import math
from dataclasses import dataclass

from syncline.scheduler_core.types import FinishReason, SequenceId


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimings:
    """When things happened to one sequence, by the caller's clock.

    None: it has not happened, or the call in which it happened was given no time.

    arrival_s           `Request.arrival_s`
    first_scheduled_s   the plan that first admitted it
    first_token_s       the result that brought its first token
    finished_s          the call that ended it: `apply`, `abort`, or any other
    """

    arrival_s: float | None = None
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None

    @property
    def queue_s(self) -> float | None:
        """From arrival to first admission."""
        return _between(self.arrival_s, self.first_scheduled_s)

    @property
    def time_to_first_token_s(self) -> float | None:
        """From arrival to the first token."""
        return _between(self.arrival_s, self.first_token_s)

    @property
    def total_s(self) -> float | None:
        """From arrival to the end."""
        return _between(self.arrival_s, self.finished_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSummary:
    """What a caller wants to know of one sequence besides its tokens; final once it has ended.

    num_cached_tokens       prefix hits of its first admission: prompt tokens that cost nothing
    num_recomputed_tokens   positions computed again after preemptions
    version_runs            (weight version, number of output tokens sampled under it)
    """

    seq_id: SequenceId
    request_id: str
    sample_index: int
    finish_reason: FinishReason | None
    finish_detail: str
    stop_reason: int | str | None
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    num_recomputed_tokens: int
    version_runs: tuple[tuple[int, int], ...]
    timings: RequestTimings


class Clock:
    """The time of the call being served. Never runs backwards.

    now_s: None while a call is served that was given no time.
    """

    __slots__ = ("_latest_s", "now_s")

    def __init__(self) -> None:
        self.now_s: float | None = None
        self._latest_s = -math.inf

    def check(self, now_s: float | None) -> None:
        """Raises ValueError, with nothing changed, for a time before one already given."""
        if now_s is not None and not isinstance(now_s, int | float):  # pyright: ignore[reportUnnecessaryIsInstance]  a caller's data
            raise ValueError(f"now_s must be a number or None, got {now_s!r}")
        if now_s is not None and not self._latest_s <= now_s < math.inf:
            raise ValueError(
                f"now_s must be finite and not before {self._latest_s}, a time already given, "
                f"got {now_s}"
            )

    def enter(self, now_s: float | None) -> None:
        """A call with this checked time is being served."""
        self.now_s = now_s
        if now_s is not None:
            self._latest_s = now_s

    def arrive(self, arrival_s: float | None) -> None:
        """A request is being added. Arrivals come in any order; the latest counts."""
        self.now_s = arrival_s
        if arrival_s is not None:
            self._latest_s = max(self._latest_s, arrival_s)


def _between(start_s: float | None, stop_s: float | None) -> float | None:
    return None if start_s is None or stop_s is None else stop_s - start_s
