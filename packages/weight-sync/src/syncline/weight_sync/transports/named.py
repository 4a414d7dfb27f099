"""Named tensors of the same process, e.g. a trainer's `state_dict().items()`.

Yields them one by one, without a copy and without looking inside; what a name means, and whether
it may come twice, is the update's matter. Once only: a generator that is read again would yield
nothing, and an update must not take that for a sender with nothing to send.
"""

from collections.abc import Iterable, Iterator

import torch

from syncline.weight_sync.errors import TransportError
from syncline.weight_sync.parts import WeightPart


class NamedTensors:
    """Whole tensors by name."""

    __slots__ = ("_consumed", "_tensors")

    def __init__(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._tensors = tensors
        self._consumed = False

    def __iter__(self) -> Iterator[WeightPart]:
        """Raises TransportError the second time."""
        if self._consumed:
            raise TransportError("these named tensors were read already; make a new transport")
        self._consumed = True
        return (WeightPart(name=name, tensor=tensor) for name, tensor in self._tensors)
