"""The identity layout: elements stored in the order of their logical indices."""

from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass

import torch

from syncline.model_ops_rocm.layouts.base import (
    as_bits,
    check_apart,
    check_storage,
    check_target,
    check_write,
    empty_storage,
    refuse,
)
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

    def stored_shape(self, shape: SequenceABC[int], dtype: torch.dtype) -> tuple[int, ...]:
        return tuple(shape)

    def logical_shape(self, stored_shape: SequenceABC[int]) -> tuple[int, ...]:
        return tuple(stored_shape)

    def apply(self, logical: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        check_storage(self, logical)
        if out is None:
            out = empty_storage(logical.shape, logical.dtype, logical.device)
        check_target(self, out, logical.shape, logical.dtype)
        check_apart(self, out, logical)
        as_bits(out).copy_(as_bits(logical))
        return out

    def inverse(
        self,
        stored: torch.Tensor,
        *,
        shape: SequenceABC[int] | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if shape is not None and tuple(shape) != tuple(stored.shape):
            raise refuse(self, f"a stored tensor of shape {list(shape)}", list(stored.shape))
        return self.apply(stored, out=out)

    def apply_into(
        self,
        out: torch.Tensor,
        source: torch.Tensor,
        region: Region,
        *,
        shape: SequenceABC[int] | None = None,
    ) -> None:
        check_write(self, out, source, region, out.shape if shape is None else shape)
        as_bits(region_view(out, region)).copy_(as_bits(source))
