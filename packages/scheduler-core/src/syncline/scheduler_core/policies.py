"""How prefills share a step: how much of one prompt, how many at once, and in which order.

Decodes come before any prefill, so they never wait for one. What is left of the budget goes to the
prefills that have begun, first in order first, then to admissions.
Source: vLLM v1's `long_prefill_token_threshold` (a cap on one prompt's chunk of a step). Differs: a
bound on prefills that have begun makes a prompt wait only if it cannot be finished in this step.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heappop, heappush

from syncline.scheduler_core.config import SchedulerConfig
from syncline.scheduler_core.parking import ParkingLot
from syncline.scheduler_core.request import Request
from syncline.scheduler_core.sequence import Sequence, order_of
from syncline.scheduler_core.types import SequenceId


@dataclass(frozen=True, slots=True)
class PartialTurn:
    """An event: this prompt, too long for one step, may begin."""

    seq_id: SequenceId


class PrefillPolicy:
    """The configured answers, and the line of those parked until a partial prefill ends."""

    __slots__ = ("_chunk_cap", "_max_num_partial", "_turns")

    def __init__(self, config: SchedulerConfig) -> None:
        threshold = config.long_prefill_token_threshold
        self._chunk_cap = threshold if threshold else config.max_num_batched_tokens
        self._max_num_partial = config.max_num_partial_prefills
        self._turns: list[tuple[tuple[int, int], Sequence]] = []  # A heap; may hold ended ones.

    def max_chunk(self, budget: int) -> int:
        """The most positions of one prompt that a step with this much budget left computes."""
        return min(budget, self._chunk_cap)

    def may_begin_partial(self, num_partial: int) -> bool:
        """With so many prefills begun and not final: may one more begin that will not be final?"""
        return self._max_num_partial is None or num_partial < self._max_num_partial

    def queue(self, sequence: Sequence) -> None:
        """It has been parked until its `PartialTurn`."""
        heappush(self._turns, (sequence.order_key, sequence))

    def take_turns(self, num_partial: int, parked: ParkingLot) -> list[PartialTurn]:
        """Whose turn it is, the first in order first, with so many prefills begun and not final."""
        turns: list[PartialTurn] = []
        while self._turns and self.may_begin_partial(num_partial + len(turns)):
            _, sequence = heappop(self._turns)
            if sequence in parked:
                turns.append(PartialTurn(sequence.seq_id))
        return turns

    def in_order(self, prefilling: Iterable[Sequence]) -> list[Sequence]:
        """Prefills that have begun, in the order in which they are served: that of admission."""
        return sorted(prefilling, key=order_of)


def require_priority_allowed(config: SchedulerConfig, request: Request) -> None:
    """Raises ValueError for a priority that the policy would ignore."""
    if request.priority and config.scheduling_policy != "priority":
        raise ValueError(
            f"priority of request {request.request_id!r} must be 0 under scheduling_policy "
            f"{config.scheduling_policy!r}, got {request.priority}"
        )
