"""fp8 codes with one float32 scale per row: the quantised recipe under its first name.

Unit: a row of the last dimension. Stores exactly what `Quantised` of token granularity stores.
"""

from collections.abc import Mapping
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass
from typing import Final

import torch

from syncline.model_ops_rocm.formats.quantised import Quantised
from syncline.model_ops_rocm.formats.recipes import Encoded, TensorSpec
from syncline.model_ops_rocm.quant import FP8_MAX
from syncline.model_ops_rocm.quant.scheme import CodeType, Granularity
from syncline.model_ops_rocm.regions import Region

_RECIPES: Final = {
    torch.float8_e4m3fn: Quantised(granularity=Granularity.TOKEN, code=CodeType.E4M3FN),
    torch.float8_e4m3fnuz: Quantised(granularity=Granularity.TOKEN, code=CodeType.E4M3FNUZ),
}


@dataclass(frozen=True, slots=True)
class PerTokenFp8:
    """fp8 codes with one float32 scale per row of the last dimension; decodes to float32."""

    dtype: torch.dtype = torch.float8_e4m3fn

    def __post_init__(self) -> None:
        if self.dtype not in FP8_MAX:
            raise ValueError(
                f"PerTokenFp8: dtype must be one of {[str(known) for known in FP8_MAX]},"
                f" got {self.dtype}"
            )

    @property
    def recipe(self) -> Quantised:
        """The recipe that it is."""
        return _RECIPES[self.dtype]

    def describe(self) -> str:
        return f"per_token_{str(self.dtype).removeprefix('torch.')}"

    def storage_spec(self, logical_shape: SequenceABC[int]) -> dict[str, TensorSpec]:
        return self.recipe.storage_spec(logical_shape)

    def logical_shape(self, weight_shape: SequenceABC[int]) -> tuple[int, ...]:
        return self.recipe.logical_shape(weight_shape)

    def code_region(self, region: Region) -> Region | None:
        return self.recipe.code_region(region)

    def is_whole_domain(self, logical_shape: SequenceABC[int], region: Region) -> bool:
        return self.recipe.is_whole_domain(logical_shape, region)

    def scale_region(self, logical_shape: SequenceABC[int], region: Region) -> dict[str, Region]:
        return self.recipe.scale_region(logical_shape, region)

    def encode(
        self,
        source: torch.Tensor,
        *,
        logical_shape: SequenceABC[int],
        region: Region,
        scales: torch.Tensor | None = None,
    ) -> Encoded:
        return self.recipe.encode(source, logical_shape=logical_shape, region=region, scales=scales)

    def decode(self, stored: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self.recipe.decode(stored)
