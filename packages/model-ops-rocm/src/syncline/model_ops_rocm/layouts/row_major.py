"""The identity layout: elements stored in the order of their logical indices."""

from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass

import torch

from syncline.model_ops_rocm.layouts.base import check_write
from syncline.model_ops_rocm.regions import Region, region_view


@dataclass(frozen=True, slots=True)
class RowMajor:
    """Any shape, any dtype, no precondition."""

    def describe(self) -> str:
        return "row_major"

    def check(self, shape: SequenceABC[int], dtype: torch.dtype) -> None:
        """Every shape and dtype fits."""

    def tile(self, dtype: torch.dtype) -> tuple[int, int]:
        return (1, 1)

    def apply(self, logical: torch.Tensor) -> torch.Tensor:
        return logical.clone(memory_format=torch.contiguous_format)

    def inverse(self, stored: torch.Tensor) -> torch.Tensor:
        return stored.clone(memory_format=torch.contiguous_format)

    def apply_into(self, out: torch.Tensor, source: torch.Tensor, region: Region) -> None:
        check_write(self, out, source, region)
        region_view(out, region).copy_(source)
