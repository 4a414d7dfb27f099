"""Rectangles of a matrix that share a scale: cut into blocks, maxima, codes and back.

Unit: a matrix [..., N, K] or a rectangle of it, cut at multiples of a block's size counted from
the matrix' corner. A rectangle may start and end inside a block; what it lacks of the block counts
as zero, which changes no maximum. Knows no storage format.

A maximum is kept as the bits of a float32 in an int32: magnitudes compare as integers, and what is
not finite is above everything, so maxima of parts combine by an integer maximum on any transport,
in any order, and a NaN cannot be lost on the way as it can be in a maximum of floats.
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import torch
import torch.nn.functional as nn_functional

from syncline.model_ops_rocm.quant.minifloat import encode_minifloat
from syncline.model_ops_rocm.quant.scheme import CODE_DTYPES, MINI_FLOATS, CodeType

Interval = tuple[int, int]
_NAN_BITS: Final = 0x7FC0_0000


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """How a rectangle of rows and columns lies on the grid of blocks."""

    rows: Interval
    columns: Interval
    block: tuple[int, int]

    @property
    def grid(self) -> tuple[Interval, Interval]:
        """The rows and columns of the scale grid that the rectangle touches."""
        return (_grid(self.rows, self.block[0]), _grid(self.columns, self.block[1]))

    def split(self, x: torch.Tensor) -> torch.Tensor:
        """[..., rows, columns] -> [..., R, rows of a block, C, columns of a block]."""
        top, bottom, height = _padding(self.rows, self.block[0])
        left, right, width = _padding(self.columns, self.block[1])
        if top or bottom or left or right:
            x = nn_functional.pad(x, (left, right, top, bottom))
        *lead, rows, columns = x.shape
        return x.reshape(*lead, rows // height, height, columns // width, width)

    def join(self, blocks: torch.Tensor) -> torch.Tensor:
        """The inverse of `split`; the padding is dropped."""
        x = blocks.flatten(-4, -3).flatten(-2)
        top, left = _padding(self.rows, self.block[0])[0], _padding(self.columns, self.block[1])[0]
        height, width = self.rows[1] - self.rows[0], self.columns[1] - self.columns[0]
        return x[..., top : top + height, left : left + width]

    def counts(self) -> torch.Tensor:
        """int64 [R, C]: how many elements of the rectangle lie in each block that it touches."""
        return torch.outer(
            _overlaps(self.rows, self.block[0]), _overlaps(self.columns, self.block[1])
        )


def amax_bits(x: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """float32 [..., rows, columns] -> int32 [..., R, C]; what is not finite gives one NaN."""
    split = blocks.split(x.contiguous().view(torch.int32) & 0x7FFF_FFFF)
    bits = split.amax(dim=(-3, -1))
    return bits.masked_fill(bits >= 0x7F80_0000, _NAN_BITS)


def amax_of_bits(bits: torch.Tensor) -> torch.Tensor:
    """The maxima as float32."""
    return bits.contiguous().view(torch.float32)


def encode_blocks(
    x: torch.Tensor, scale: torch.Tensor, blocks: Blocks, *, code: CodeType, clamp: float
) -> torch.Tensor:
    """float32 x and float32 scales [..., R, C] -> codes of the shape of `x`; e2m1 unpacked uint8.

    x / scale, exactly, clamped, to nearest even. Where the scale is no positive number, or x is not
    finite, the code is 0, so the bytes do not depend on what a cast makes of a NaN.
    """
    split = blocks.split(x)
    spread = scale[..., :, None, :, None]
    quotient = split / spread
    usable = (spread > 0) & spread.isfinite() & split.isfinite()
    quotient = torch.where(usable, quotient, 0.0).clamp_(-clamp, clamp)
    if code is CodeType.E2M1:
        return blocks.join(encode_minifloat(quotient, MINI_FLOATS[code]))
    if code is CodeType.INT8:
        return blocks.join(quotient.round_().to(torch.int8))
    # The cast equals the integer encoder for every clamped float32; see the tests of that one.
    return blocks.join(quotient.to(CODE_DTYPES[code]).view(torch.uint8)).view(CODE_DTYPES[code])


def decode_blocks(values: torch.Tensor, scale: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """float32 values of codes times float32 scales [..., R, C]."""
    return blocks.join(blocks.split(values) * scale[..., :, None, :, None])


def _grid(interval: Interval, size: int) -> Interval:
    start, stop = interval
    return (start // size, -(-stop // size))


def _padding(interval: Interval, size: int) -> tuple[int, int, int]:
    """Zeros before and after, and the extent of one block once they are there."""
    start, stop = interval
    if start // size == (stop - 1) // size:
        # Inside one block, of whatever size: nothing to add, so a huge block costs nothing.
        return (0, 0, stop - start)
    return (start % size, -stop % size, size)


def _overlaps(interval: Interval, size: int) -> torch.Tensor:
    start, stop = interval
    first, last = _grid(interval, size)
    edges = [start, *(size * i for i in range(first + 1, last)), stop]
    return torch.tensor([b - a for a, b in pairwise(edges)], dtype=torch.int64)


def grid_shape(rows: int, columns: int, block: tuple[int, int]) -> tuple[int, int]:
    """The scales of a whole matrix; a block that the edge cuts has one too."""
    return (math.ceil(rows / block[0]), math.ceil(columns / block[1]))
