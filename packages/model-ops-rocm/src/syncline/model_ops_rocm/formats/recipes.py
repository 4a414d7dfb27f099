"""Recipes: how the numbers of a weight become codes and scales; knows no layout.

Unit: tensors in logical order. A recipe names its stored tensors; "weight" holds the codes and has
the logical shape, so a layout can permute it. Scales stay row-major.
"""

import math
from collections.abc import Mapping
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass
from typing import Protocol

import torch

from syncline.model_ops_rocm.quant import (
    FP8_MAX,
    per_token_fp8_decode,
    per_token_fp8_encode,
)
from syncline.model_ops_rocm.regions import Region, region_numel

WEIGHT = "weight"
WEIGHT_SCALE = "weight_scale"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Shape and dtype of one stored tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Recipe(Protocol):
    """One way to store numbers; compared by value."""

    def describe(self) -> str:
        """A short name for errors and reports."""
        ...

    def storage_spec(self, logical_shape: SequenceABC[int]) -> dict[str, TensorSpec]:
        """The stored tensors by name. ValueError for a shape the recipe cannot hold."""
        ...

    def is_whole_domain(self, logical_shape: SequenceABC[int], region: Region) -> bool:
        """Whether every scale that `region` touches depends on `region` alone."""
        ...

    def scale_region(self, region: Region) -> dict[str, Region]:
        """For each stored tensor but the weight, the part that a whole region owns."""
        ...

    def encode(self, source: torch.Tensor) -> dict[str, torch.Tensor]:
        """The stored tensors of a source that is whole in the scales' domain."""
        ...

    def decode(self, stored: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The numbers again, from tensors in logical order."""
        ...


@dataclass(frozen=True, slots=True)
class Unquantised:
    """Elements of one dtype, rounded to nearest even from whatever floating dtype arrives."""

    dtype: torch.dtype

    def __post_init__(self) -> None:
        if not self.dtype.is_floating_point or self.dtype.itemsize < 2:
            raise ValueError(
                "Unquantised: dtype must be a floating type of at least 16 bits (narrower ones need"
                f" a scale), got {self.dtype}"
            )

    def describe(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def storage_spec(self, logical_shape: SequenceABC[int]) -> dict[str, TensorSpec]:
        return {WEIGHT: TensorSpec(shape=tuple(logical_shape), dtype=self.dtype)}

    def is_whole_domain(self, logical_shape: SequenceABC[int], region: Region) -> bool:
        return True

    def scale_region(self, region: Region) -> dict[str, Region]:
        return {}

    def encode(self, source: torch.Tensor) -> dict[str, torch.Tensor]:
        return {WEIGHT: source.to(self.dtype)}

    def decode(self, stored: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return stored[WEIGHT]


@dataclass(frozen=True, slots=True)
class PerTokenFp8:
    """fp8 codes with one float32 scale per row of the last dimension.

    Decoding gives float32. A source with a value that is not finite is refused: its row would
    decode to NaN.
    """

    dtype: torch.dtype = torch.float8_e4m3fn

    def __post_init__(self) -> None:
        if self.dtype not in FP8_MAX:
            raise ValueError(
                f"PerTokenFp8: dtype must be one of {[str(known) for known in FP8_MAX]},"
                f" got {self.dtype}"
            )

    def describe(self) -> str:
        return f"per_token_{str(self.dtype).removeprefix('torch.')}"

    def storage_spec(self, logical_shape: SequenceABC[int]) -> dict[str, TensorSpec]:
        if not logical_shape:
            raise ValueError(f"{self.describe()}: logical_shape must have a row dimension, got []")
        return {
            WEIGHT: TensorSpec(shape=tuple(logical_shape), dtype=self.dtype),
            WEIGHT_SCALE: TensorSpec(shape=(*logical_shape[:-1], 1), dtype=torch.float32),
        }

    def is_whole_domain(self, logical_shape: SequenceABC[int], region: Region) -> bool:
        return region_numel(region) == 0 or region[-1] == (0, logical_shape[-1])

    def scale_region(self, region: Region) -> dict[str, Region]:
        return {WEIGHT_SCALE: (*region[:-1], (0, 1))}

    def encode(self, source: torch.Tensor) -> dict[str, torch.Tensor]:
        codes, scale = per_token_fp8_encode(source.float(), self.dtype)
        if not bool(torch.isfinite(scale).all()):
            raise ValueError(
                f"{self.describe()}: source must be finite, got a row with an infinity or a NaN"
            )
        return {WEIGHT: codes, WEIGHT_SCALE: scale}

    def decode(self, stored: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return per_token_fp8_decode(stored[WEIGHT], stored[WEIGHT_SCALE])
