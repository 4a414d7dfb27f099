"""What every transport yields: a named tensor, whole or a rectangle of the whole.

Says nothing about where the tensor came from or where it will lie.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from syncline.weight_sync.regions import Region


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WeightPart:
    """A tensor, or the rectangle `part` of the sender's full shape (None: all of it)."""

    name: str
    tensor: torch.Tensor
    part: Region | None = None


Transport = Iterable[WeightPart]
