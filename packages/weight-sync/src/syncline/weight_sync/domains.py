"""The grid of a slot along which its encoder may be called, found by asking the encoder.

An encoder refuses a region that cuts the domain of one scale or one tile of its layout. The
regions that it takes form a grid: a region is encodable if and only if both its bounds are cuts in
every dimension. This module finds the cuts near a region; it does not know what a domain is for.
A cut is searched for one position at a time and remembered, so a slot with one scale for a very
long dimension, sent in parts, costs one question per position, once.
"""

import itertools

from syncline.weight_sync.errors import EncoderContractError
from syncline.weight_sync.regions import Region, whole_region
from syncline.weight_sync.slots import WeightSlot


class DomainGrid:
    """The cuts of one slot."""

    __slots__ = ("_is_cut", "_slot", "_whole")

    def __init__(self, slot: WeightSlot) -> None:
        self._slot = slot
        self._whole = whole_region(slot.logical_shape)
        self._is_cut: dict[tuple[int, int], bool] = {}

    def encodable(self, region: Region) -> bool:
        return self._slot.encoder.region_is_encodable(self._slot.logical_shape, region)

    def blocks(self, region: Region) -> list[Region]:
        """Disjoint encodable regions that together hold `region`, and no domain it does not touch.

        Each block either lies inside `region` or is one domain wide where `region` cuts it.
        Raises EncoderContractError when the encoder's answers are no grid.
        """
        blocks: list[Region] = [()]
        for dim, (start, stop) in enumerate(region):
            intervals = self._intervals(dim, start, stop)
            blocks = [(*block, interval) for block in blocks for interval in intervals]
        for block in blocks:
            if not self.encodable(block):
                raise EncoderContractError(
                    self._slot.name, f"it refuses {block}, whose bounds it takes one by one"
                )
        return blocks

    def hull(self, region: Region) -> Region:
        """The smallest encodable region around this one: every domain that it touches."""
        return tuple(
            (self._cut_below(dim, start), self._cut_above(dim, stop))
            for dim, (start, stop) in enumerate(region)
        )

    def _intervals(self, dim: int, start: int, stop: int) -> list[tuple[int, int]]:
        outer_start, inner_start = self._cut_below(dim, start), self._cut_above(dim, start)
        inner_stop, outer_stop = self._cut_below(dim, stop), self._cut_above(dim, stop)
        if inner_start > inner_stop:
            return [(outer_start, outer_stop)]
        bounds = [outer_start, inner_start, inner_stop, outer_stop]
        return [(a, b) for a, b in itertools.pairwise(bounds) if a < b]

    def _cut_below(self, dim: int, position: int) -> int:
        while not self._cut_at(dim, position):
            position -= 1
        return position

    def _cut_above(self, dim: int, position: int) -> int:
        while not self._cut_at(dim, position):
            position += 1
        return position

    def _cut_at(self, dim: int, position: int) -> bool:
        if position in self._whole[dim]:
            return True
        known = self._is_cut.get((dim, position))
        if known is None:
            head = (*self._whole[:dim], (0, position), *self._whole[dim + 1 :])
            known = self._is_cut[dim, position] = self.encodable(head)
        return known
