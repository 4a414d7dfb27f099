"""Drafters that are pure functions: how many of a row's drafts are what the model will sample.

Knows no token: the runner makes the drafts, right ones first, then wrong ones.
"""

from collections.abc import Callable
from typing import TypeAlias

from syncline.scheduler_core.oracle.model import mix
from syncline.scheduler_core.types import RowId

Drafter: TypeAlias = Callable[[int, RowId, int], int]
"""(step, row, k) -> how many drafts are right before the first wrong one, 0 to k. In a window each
verify step asks once more, with the step counted on by one."""


def accept_all(step: int, row: RowId, num_draft_tokens: int) -> int:
    return num_draft_tokens


def accept_none(step: int, row: RowId, num_draft_tokens: int) -> int:
    return 0


def hash_drafter(acceptance_rate: float, seed: int = 0) -> Drafter:
    """Each draft after a right one is right with this probability, by a hash, not by chance."""
    if not 0.0 <= acceptance_rate <= 1.0:
        raise ValueError(f"acceptance_rate must be between 0 and 1, got {acceptance_rate}")

    def drafter(step: int, row: RowId, num_draft_tokens: int) -> int:
        state = mix(mix(seed, step), row)
        for i in range(num_draft_tokens):
            state = mix(state, i)
            if state / 2**64 >= acceptance_rate:
                return i
        return num_draft_tokens

    return drafter
