"""One side of a product of codes by Triton: what a kernel is told of its codes and its scales."""

from dataclasses import dataclass
from typing import Final

import torch

from syncline.model_ops_rocm.formats.quantised import Quantised
from syncline.model_ops_rocm.quant.scheme import CodeType, Granularity, ScaleType
from syncline.model_ops_rocm.triton.kernels import linear_decoded
from syncline.model_ops_rocm.triton.launch import IS_INTERPRETED
from syncline.model_ops_rocm.triton.targets import casts_natively

_BYTES: Final = torch.uint8
_SCALE_DEPTHS: Final = {
    Granularity.TENSOR: 0,
    Granularity.TOKEN: 0,
    Granularity.BLOCK_1X128: 128,
    Granularity.BLOCK_128X128: 128,
    Granularity.BLOCK_1X32: 32,
}
_NATIVE: Final = linear_decoded.NATIVE.value
CODE_NUMBERS: Final = {
    CodeType.E4M3FN: linear_decoded.E4M3FN.value,
    CodeType.E4M3FNUZ: linear_decoded.E4M3FNUZ.value,
    CodeType.E2M1: linear_decoded.E2M1.value,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """Codes and scales of one side, and how a kernel steps through the scales."""

    codes: torch.Tensor
    scale: torch.Tensor
    recipe: Quantised

    @property
    def scales(self) -> torch.Tensor:
        """As a kernel can read them: e8m0 as bytes."""
        return self.scale.view(_BYTES) if self.is_e8m0 else self.scale

    @property
    def is_e8m0(self) -> bool:
        return self.recipe.scale is ScaleType.E8M0

    @property
    def is_mx(self) -> bool:
        return self.is_e8m0 and self.scale_depth == 32

    @property
    def scale_row(self) -> int:
        return 0 if self.recipe.granularity is Granularity.TENSOR else self.scale.stride(0)

    @property
    def scale_block(self) -> int:
        return int(self.scale_depth != 0)

    @property
    def scale_rows(self) -> int:
        return 128 if self.recipe.granularity is Granularity.BLOCK_128X128 else 1

    @property
    def scale_depth(self) -> int:
        return _SCALE_DEPTHS[self.recipe.granularity]

    def native(self, arch: str) -> bool:
        """Whether the target has instructions for the codes, which the interpreter has not."""
        return not IS_INTERPRETED and casts_natively(arch, self.recipe.code)

    def readable(self, arch: str) -> torch.Tensor:
        return self.codes if self.native(arch) else self.codes.view(_BYTES)

    def code(self, arch: str) -> int:
        return int(_NATIVE if self.native(arch) else CODE_NUMBERS[self.recipe.code])
