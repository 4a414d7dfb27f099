"""The uniforms of steady decode rows, made for many steps at once.

One draw is some eighty tiny operations whatever the number of rows; a window of them costs little
more. Every value equals the one that `sampling.pipeline.draw` gives for its row and position.
"""

from typing import Final

import torch
from torch import Tensor

from syncline.engine.runner.inputs import Membership
from syncline.engine.sampling.pipeline import draw

WINDOW: Final = 32


class DrawWindow:
    """Relies on what a Membership promises: each use is one step, in which all its rows advance."""

    __slots__ = ("_members", "_num_used", "_offsets", "_uniform_RW")

    def __init__(self, device: torch.device) -> None:
        self._offsets = torch.arange(WINDOW, device=device)
        self._members: Membership | None = None
        self._uniform_RW: Tensor | None = None
        self._num_used = 0

    def next(self, members: Membership, positions_R: Tensor) -> Tensor | None:
        """Uniforms of `members` at `positions_R`; None when every row is greedy."""
        if members.sampling.is_all_greedy:
            return None
        if members is not self._members:
            # Rows that have just changed often change again: no window for them yet.
            self._members = members
            self._uniform_RW = None
            return draw(members.sampling, positions_R)
        if self._uniform_RW is None or self._num_used == WINDOW:
            self._uniform_RW = draw(members.sampling, positions_R[:, None] + self._offsets)
            self._num_used = 0
        uniform_R = self._uniform_RW[:, self._num_used]
        self._num_used += 1
        return uniform_R
