"""A weight that comes as fp8 codes with scales, for a storage format to keep or to encode anew.

Unit: one rectangle of a weight, with the scales of its own blocks, counted from its own corner.
Codes that fit are kept bit for bit: same type, same granularity, same type of scale; e4m3fn codes
for e4m3fnuz storage become that type once, by `to_e4m3fnuz`. Otherwise, or where other scales are
given, the numbers count: code times scale in float32. Knows no layout.
"""

from dataclasses import dataclass

import torch

from syncline.model_ops_rocm.formats.quantised import Quantised
from syncline.model_ops_rocm.formats.recipes import WEIGHT, WEIGHT_SCALE, Encoded
from syncline.model_ops_rocm.layouts.base import as_bits
from syncline.model_ops_rocm.quant.e8m0 import E8m0Mode
from syncline.model_ops_rocm.quant.fnuz import E4m3fnuzWeight, E4m3fnWeight, to_e4m3fnuz
from syncline.model_ops_rocm.quant.scales import scales_as_float32
from syncline.model_ops_rocm.quant.scheme import CodeType, Granularity, ScaleType


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CodedSource:
    """Codes [..., N, K] and their scales on the grid of `granularity`, as a recipe stores them."""

    weight: E4m3fnWeight | E4m3fnuzWeight
    granularity: Granularity

    def __post_init__(self) -> None:
        wanted = self.recipe.storage_spec(self.weight.codes.shape)[WEIGHT_SCALE].shape
        if tuple(self.weight.scale.shape) != wanted:
            raise ValueError(
                f"CodedSource: scale must have shape {list(wanted)}, one of {self.granularity} for"
                f" codes of {list(self.weight.codes.shape)}, got {list(self.weight.scale.shape)}"
            )

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"source codes": self.weight.codes, "source scale": self.weight.scale}

    @property
    def shape(self) -> torch.Size:
        return self.weight.codes.shape

    @property
    def recipe(self) -> Quantised:
        """A recipe that stores such codes and scales; how it would make scales means nothing."""
        is_fn = isinstance(self.weight, E4m3fnWeight)
        is_fp32 = self.weight.scale.dtype == torch.float32
        return Quantised(
            granularity=self.granularity,
            code=CodeType.E4M3FN if is_fn else CodeType.E4M3FNUZ,
            scale=ScaleType.FP32 if is_fp32 else ScaleType.E8M0,
            e8m0_mode=None if is_fp32 else E8m0Mode.ROUND_UP,
        )

    def fits(self, recipe: Quantised) -> bool:
        """Whether codes and scales can be kept as they are, or, from e4m3fn, as e4m3fnuz."""
        own = self.recipe
        return (
            recipe.clamp is None
            and recipe.granularity is own.granularity
            and recipe.scale is own.scale
            and (
                recipe.code is own.code
                or (own.code is CodeType.E4M3FN and recipe.code is CodeType.E4M3FNUZ)
            )
        )

    def numbers(self) -> torch.Tensor:
        """float32: code * scale. NaN for a code or a scale that is."""
        return self.recipe.decode({WEIGHT: self.weight.codes, WEIGHT_SCALE: self.weight.scale})

    def kept(self, recipe: Quantised, grid: tuple[int, ...]) -> Encoded:
        """The codes, and their scales on a grid that may be larger: there are scales of zeros.

        Of a recipe that it fits. Looks at the scales on the host if the codes are converted;
        ValueError if one has no double, see `to_e4m3fnuz`.
        """
        weight = self.weight
        if recipe.code is CodeType.E4M3FNUZ and isinstance(weight, E4m3fnWeight):
            weight = to_e4m3fnuz(weight)
        scale, numbers = weight.scale, scales_as_float32(weight.scale)
        bad_scale = ~((numbers > 0) & numbers.isfinite()).all()
        if tuple(scale.shape) != grid:
            scale = recipe.scales_of(torch.zeros(grid, device=scale.device))
            corner = tuple(slice(size) for size in weight.scale.shape)
            as_bits(scale)[corner] = as_bits(weight.scale)
        return Encoded(
            tensors={WEIGHT: weight.codes, WEIGHT_SCALE: scale},
            nonfinite=bad_scale | weight.codes.float().isnan().any(),
        )
