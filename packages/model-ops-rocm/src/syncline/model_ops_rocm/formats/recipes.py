"""Recipes: how the numbers of a weight become codes and scales; knows no layout.

Unit: tensors in logical order. A recipe names its stored tensors; "weight" holds the codes, so a
layout can permute it: it has the logical shape, but for codes packed along the last dimension.
Scales stay row-major.
"""

import math
from collections.abc import Mapping
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass
from typing import Final, Protocol

import torch

from syncline.model_ops_rocm.regions import Region

WEIGHT: Final = "weight"
WEIGHT_SCALE: Final = "weight_scale"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Shape and dtype of one stored tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Encoded:
    """Stored tensors of one region, and whether it held anything that has no code.

    `nonfinite` is a bool of no dimensions on the source's device, so that nobody need wait for it:
    an infinity or a NaN in the source, or a given scale that is no positive number. None when the
    recipe has no scales: then such values are stored as they are.
    """

    tensors: Mapping[str, torch.Tensor]
    nonfinite: torch.Tensor | None


class Recipe(Protocol):
    """One way to store numbers; compared by value."""

    def describe(self) -> str:
        """A short name for errors and reports."""
        ...

    def storage_spec(self, logical_shape: SequenceABC[int]) -> dict[str, TensorSpec]:
        """The stored tensors by name. ValueError for a shape the recipe cannot hold."""
        ...

    def logical_shape(self, weight_shape: SequenceABC[int]) -> tuple[int, ...]:
        """The shape whose "weight" has this one."""
        ...

    def code_region(self, region: Region) -> Region | None:
        """The same rectangle of "weight"; None if it cuts an element that holds several codes."""
        ...

    def is_whole_domain(self, logical_shape: SequenceABC[int], region: Region) -> bool:
        """Whether every scale that `region` touches depends on `region` alone."""
        ...

    def scale_region(self, logical_shape: SequenceABC[int], region: Region) -> dict[str, Region]:
        """For each stored tensor but the weight, the part that the region touches."""
        ...

    def encode(
        self,
        source: torch.Tensor,
        *,
        logical_shape: SequenceABC[int],
        region: Region,
        scales: torch.Tensor | None = None,
    ) -> Encoded:
        """The stored tensors of `region`, not empty: codes, and the scales that it touches.

        Without `scales` the region is whole in their domain. With them, the whole weight's, they
        are used as they are.
        """
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

    def logical_shape(self, weight_shape: SequenceABC[int]) -> tuple[int, ...]:
        return tuple(weight_shape)

    def code_region(self, region: Region) -> Region | None:
        return region

    def is_whole_domain(self, logical_shape: SequenceABC[int], region: Region) -> bool:
        return True

    def scale_region(self, logical_shape: SequenceABC[int], region: Region) -> dict[str, Region]:
        return {}

    def encode(
        self,
        source: torch.Tensor,
        *,
        logical_shape: SequenceABC[int],
        region: Region,
        scales: torch.Tensor | None = None,
    ) -> Encoded:
        if scales is not None:
            raise ValueError(f"{self.describe()}: scales must be None, the recipe has none")
        return Encoded(tensors={WEIGHT: source.to(self.dtype)}, nonfinite=None)

    def decode(self, stored: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return stored[WEIGHT]
