"""A permutation of the elements of a tensor, as the order of the digits of their indices.

Unit: elements. Each of the last dimensions is written as digits in a mixed radix, most significant
first: row 37 with digits (REST, 16) is (2, 5). Storage counts through the same digits in another
order. That is AITER's reshape, permute, reshape as a value; `address` and `index` are the same
permutation as arithmetic, so that one can be tested against the other. Knows no dtype, padding or
precondition beyond divisibility. Leading dimensions stay outermost.
"""

import itertools
import math
from collections.abc import Iterator
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass
from typing import Final

import torch

from syncline.model_ops_rocm.regions import Region

REST: Final = -1  # the one digit of a dimension that takes what the others leave


@dataclass(frozen=True, slots=True)
class DigitOrder:
    """`digits` of each of the last dimensions, and the stored `order` of all of them.

    The digits are numbered through all dimensions; `order` lists them, most significant first. Each
    dimension has one REST, with at most one digit before it.
    """

    digits: tuple[tuple[int, ...], ...]
    order: tuple[int, ...]

    def __post_init__(self) -> None:
        for split in self.digits:
            if split.count(REST) != 1 or split.index(REST) > 1:
                raise ValueError(
                    f"digits must have one REST in each dimension, first or second, got {split}"
                )
            if any(size < 1 for size in split if size != REST):
                raise ValueError(f"digits must be REST or positive, got {split}")
        if sorted(self.order) != list(range(sum(len(split) for split in self.digits))):
            raise ValueError(f"order must name each digit of {self.digits} once, got {self.order}")

    @property
    def multiples(self) -> tuple[int, ...]:
        """What each of the last dimensions must be a multiple of."""
        return tuple(math.prod(size for size in split if size != REST) for split in self.digits)

    @property
    def tile(self) -> tuple[int, ...]:
        """The digits after REST: indices that share the rest of their digits."""
        return tuple(math.prod(split[split.index(REST) + 1 :]) for split in self.digits)

    def sizes(self, shape: SequenceABC[int]) -> tuple[int, ...]:
        """The size of each digit. ValueError unless the last dimensions fit the digits."""
        num_lead = len(shape) - len(self.digits)
        if num_lead < 0:
            raise ValueError(f"shape must have {len(self.digits)} dimensions, got {list(shape)}")
        sizes: list[int] = []
        for split, multiple, size in zip(
            self.digits, self.multiples, shape[num_lead:], strict=True
        ):
            if size % multiple != 0:
                raise ValueError(f"shape must have multiples of {self.multiples}, got {shape}")
            sizes.extend(size // multiple if digit == REST else digit for digit in split)
        return tuple(sizes)

    def stored_sizes(self, shape: SequenceABC[int]) -> tuple[int, ...]:
        sizes = self.sizes(shape)
        return tuple(sizes[digit] for digit in self.order)

    def in_stored_order(self, logical: torch.Tensor) -> torch.Tensor:
        """A view of a tensor in logical order, whose row-major order is the stored one."""
        lead = logical.shape[: logical.ndim - len(self.digits)]
        split = logical.reshape(*lead, *self.sizes(logical.shape))
        return split.permute(*range(len(lead)), *(len(lead) + digit for digit in self.order))

    def in_logical_order(self, stored: torch.Tensor, shape: SequenceABC[int]) -> torch.Tensor:
        """A view of contiguous storage of a tensor of `shape`: one dimension per logical digit."""
        num_lead = len(shape) - len(self.digits)
        split = stored.view(*shape[:num_lead], *self.stored_sizes(shape))
        back = sorted(range(len(self.order)), key=self.order.__getitem__)
        return split.permute(*range(num_lead), *(num_lead + place for place in back))

    def write(
        self, stored: torch.Tensor, source: torch.Tensor, shape: SequenceABC[int], region: Region
    ) -> None:
        """Copy `source`, the logical elements of `region`, to where they are stored.

        The region consists of whole tiles; both tensors have a dtype that can be copied.
        """
        num_lead = len(shape) - len(self.digits)
        places = self.in_logical_order(stored, shape)
        everything = [slice(None)] * num_lead
        lead = [slice(start, stop) for start, stop in region[:num_lead]]
        bands = [
            list(_bands(split, size, bounds))
            for split, size, bounds in zip(
                self.digits, shape[num_lead:], region[num_lead:], strict=True
            )
        ]
        for chosen in itertools.product(*bands):
            digits: list[int | slice] = [*lead]
            for band in chosen:
                digits.extend(band.digits)
            target = places[tuple(digits)]
            part = source[(*everything, *(band.rows for band in chosen))]
            target.copy_(part.reshape(target.shape))

    def address(self, shape: SequenceABC[int], index: SequenceABC[int]) -> int:
        """Where the element at a logical index is stored, in elements from the start."""
        num_lead = len(shape) - len(self.digits)
        sizes = self.sizes(shape)
        values = [0] * len(sizes)
        last = len(sizes)
        for split, coordinate in zip(reversed(self.digits), reversed(index), strict=False):
            for place in range(last - 1, last - len(split) - 1, -1):
                coordinate, values[place] = divmod(coordinate, sizes[place])
            last -= len(split)
        address = 0
        for size, coordinate in zip(shape[:num_lead], index[:num_lead], strict=True):
            address = address * size + coordinate
        for digit in self.order:
            address = address * sizes[digit] + values[digit]
        return address

    def index(self, shape: SequenceABC[int], address: int) -> tuple[int, ...]:
        """The logical index of the element stored at an address; undoes `address`."""
        num_lead = len(shape) - len(self.digits)
        sizes = self.sizes(shape)
        values = [0] * len(sizes)
        for digit in reversed(self.order):
            address, values[digit] = divmod(address, sizes[digit])
        lead: list[int] = []
        for size in reversed(shape[:num_lead]):
            address, coordinate = divmod(address, size)
            lead.append(coordinate)
        last: list[int] = []
        first = 0
        for split in self.digits:
            coordinate = 0
            for place in range(first, first + len(split)):
                coordinate = coordinate * sizes[place] + values[place]
            last.append(coordinate)
            first += len(split)
        return (*reversed(lead), *last)


@dataclass(frozen=True, slots=True)
class _Band:
    """A part of one dimension that is a rectangle of its digits."""

    digits: tuple[int | slice, ...]  # how to index the digits
    rows: slice  # the same part, counted from the start of the region


def _bands(split: tuple[int, ...], size: int, bounds: tuple[int, int]) -> Iterator[_Band]:
    """Cut a range of whole tiles where the digit before REST changes."""
    start, stop = bounds
    at = split.index(REST)
    num_parts = math.prod(split[:at])
    tile = math.prod(split[at + 1 :])
    inner = (slice(None),) * (len(split) - at - 1)
    per_part = size // num_parts
    for part in range(num_parts):
        low, high = max(start, part * per_part), min(stop, (part + 1) * per_part)
        if low < high:
            rest = slice((low - part * per_part) // tile, (high - part * per_part) // tile)
            outer: tuple[int | slice, ...] = () if at == 0 else (part,)
            yield _Band((*outer, rest, *inner), slice(low - start, high - start))
