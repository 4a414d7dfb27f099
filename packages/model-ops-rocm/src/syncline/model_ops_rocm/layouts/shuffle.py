"""AITER's 16x16 weight shuffle and its inverse; knows no recipe and no kernel.

Unit: bytes within a row, since the order depends on the element size alone. A matrix is cut into
tiles of 16 rows x 16 bytes; a tile is stored as one run of 256 bytes, row after row, and tiles are
in row-major order. With P = 16 / itemsize elements per 16 bytes, element (b, n, k) of [B, N, K] is
stored at (((b * (N / 16) + n / 16) * (K / P) + k / P) * 16 + n % 16) * P + k % P.
Source: ROCm/aiter e4048607a `aiter/ops/shuffle.py` shuffle_weight(layout=(16, 16)). Differs: it
writes into given storage by region, has an inverse, raises instead of asserting, and sets no
`is_shuffled` on the tensor (an attribute that `view`, `clone` and `nn.Parameter` lose).
"""

from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass

import torch

from syncline.model_ops_rocm.errors import LayoutError
from syncline.model_ops_rocm.layouts.base import as_bits, check_write
from syncline.model_ops_rocm.regions import Region, region_numel

_TILE_ROWS = 16
_TILE_BYTES = 16
# The kernels load two 16-element chunks per step, so K is a multiple of 32 *elements* (of bytes
# for packed fp4) whatever the element size, as AITER asserts.
_K_MULTIPLE = 32
_ITEM_SIZES = (1, 2, 4)


@dataclass(frozen=True, slots=True)
class Shuffle16x16:
    """shuffle_weight with layout (16, 16): [..., N, K] with N % 16 == 0 and K % 32 == 0.

    Leading dimensions are independent matrices. Element sizes 1, 2 and 4.
    """

    def describe(self) -> str:
        return "shuffle_16x16"

    def check(self, shape: SequenceABC[int], dtype: torch.dtype) -> None:
        if dtype.itemsize not in _ITEM_SIZES:
            raise LayoutError(
                layout=self.describe(), precondition="elements of 1, 2 or 4 bytes", got=str(dtype)
            )
        if len(shape) < 2 or shape[-2] % _TILE_ROWS != 0 or shape[-1] % _K_MULTIPLE != 0:
            raise LayoutError(
                layout=self.describe(),
                precondition=f"[..., N, K] with N % {_TILE_ROWS} == 0 and K % {_K_MULTIPLE} == 0",
                got=f"shape {list(shape)}",
            )

    def tile(self, dtype: torch.dtype) -> tuple[int, int]:
        return (_TILE_ROWS, _TILE_BYTES // dtype.itemsize)

    def apply(self, logical: torch.Tensor) -> torch.Tensor:
        self.check(logical.shape, logical.dtype)
        out = torch.empty_like(logical, memory_format=torch.contiguous_format)
        tiles = _logical_tiles(as_bits(logical.contiguous()), logical.itemsize)
        as_bits(out).view(tiles.shape).copy_(tiles)
        return out

    def inverse(self, stored: torch.Tensor) -> torch.Tensor:
        self.check(stored.shape, stored.dtype)
        out = torch.empty_like(stored, memory_format=torch.contiguous_format)
        tiles = _logical_tiles(as_bits(out), out.itemsize)
        tiles.copy_(as_bits(stored.contiguous()).view(tiles.shape))
        return out

    def apply_into(self, out: torch.Tensor, source: torch.Tensor, region: Region) -> None:
        check_write(self, out, source, region)
        if region_numel(region) == 0:
            return
        columns = _TILE_BYTES // out.itemsize
        *lead, rows, width = out.shape
        stored = as_bits(out).view(*lead, rows // _TILE_ROWS, width // columns, _TILE_ROWS, columns)
        (row_start, row_stop), (column_start, column_stop) = region[-2:]
        part = stored[
            (
                *(slice(start, stop) for start, stop in region[:-2]),
                slice(row_start // _TILE_ROWS, row_stop // _TILE_ROWS),
                slice(column_start // columns, column_stop // columns),
            )
        ]
        part.copy_(_logical_tiles(as_bits(source.contiguous()), source.itemsize))


def _logical_tiles(logical: torch.Tensor, itemsize: int) -> torch.Tensor:
    """View a contiguous [..., N, K] in logical order as [..., N/16, K/P, 16, P]."""
    columns = _TILE_BYTES // itemsize
    *lead, rows, width = logical.shape
    split = logical.view(*lead, rows // _TILE_ROWS, _TILE_ROWS, width // columns, columns)
    return split.transpose(-3, -2)
