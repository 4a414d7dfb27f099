"""Activations in fp8 by AITER, which rounds as its kernels do; weights never pass here.

AITER's kernels multiply by reciprocals: a scale may differ by a rounding from the recipe's, and a
few codes in a thousand by one. They set no flag for what is not finite.
"""

from collections.abc import Callable
from typing import Final

import torch

from syncline.model_ops_rocm.aiter.detect import Aiter
from syncline.model_ops_rocm.aiter.enums import QuantType
from syncline.model_ops_rocm.aiter.ops.common import (
    AiterOp,
    as_tensor,
    require_device,
    require_halves,
)
from syncline.model_ops_rocm.arguments.dense import check_rms_norm
from syncline.model_ops_rocm.arguments.fused import (
    QUANTISE,
    RMS_NORM_QUANT,
    check_encoded,
    check_quantise,
    check_recipe,
)
from syncline.model_ops_rocm.checks import refuse
from syncline.model_ops_rocm.contracts import NormStyle
from syncline.model_ops_rocm.formats.quantised import Quantised
from syncline.model_ops_rocm.layouts.base import empty_storage
from syncline.model_ops_rocm.quant import CodeType, E8m0Mode, Granularity, ScaleType

Encoded = tuple[torch.Tensor, torch.Tensor]
# What an architecture's matrix cores multiply, which is what AITER's kernels write.
NATIVE_CODES: Final = {"gfx942": CodeType.E4M3FNUZ, "gfx950": CodeType.E4M3FN}
_QUANT_TYPES: Final = {
    Granularity.TENSOR: QuantType.PER_TENSOR,
    Granularity.TOKEN: QuantType.PER_TOKEN,
    Granularity.BLOCK_1X128: QuantType.PER_1X128,
    Granularity.BLOCK_1X32: QuantType.PER_1X32,
}
_GROUPS: Final = {Granularity.BLOCK_1X128: 128, Granularity.BLOCK_1X32: 32}
# Of the fused norm: 0 is a scale per row; 32 makes fp4.
_NORM_GROUPS: Final = {Granularity.TOKEN: 0, Granularity.BLOCK_1X128: 128}


class AiterQuantiseActivation(AiterOp):
    """`get_hip_quant` of the recipe's granularity."""

    __slots__ = ()

    def __call__(
        self,
        x_TK: torch.Tensor,
        recipe: Quantised,
        *,
        scale: torch.Tensor | None = None,
        out: Encoded | None = None,
        nonfinite: torch.Tensor | None = None,
    ) -> Encoded:
        """See `contracts.QuantiseActivation`; no flag, and the rounding is AITER's."""
        check_quantise(x_TK, recipe, scale=scale, out=out, nonfinite=nonfinite)
        require_halves(QUANTISE, "x", x_TK)
        outs = _require_tensors(QUANTISE, self.aiter, out, nonfinite, x=x_TK, scale=scale)
        _require_recipe(QUANTISE, self.aiter, x_TK, recipe)
        choose = self.aiter.function("get_hip_quant")
        quant_type = self.aiter.member(_QUANT_TYPES[recipe.granularity])
        if x_TK.numel() == 0:
            return _empty(x_TK, recipe, scale, out)
        quantise = choose(quant_type)
        assert callable(quantise)
        keywords: dict[str, object] = {"quant_dtype": recipe.dtype}
        if scale is not None:
            keywords["scale"] = scale.view(1)
        if recipe.scale is ScaleType.E8M0:
            # Left out, it would be float32.
            keywords["scale_type"] = torch.float8_e8m0fnu
        rows = x_TK.reshape(-1, x_TK.shape[-1]).contiguous()
        codes, scales = _pair(quantise, rows, keywords)
        if scale is not None:
            return _written_bits(outs[0], codes.view(x_TK.shape)), scale
        if recipe.granularity is Granularity.TOKEN:
            _keep_zeros(codes, scales)
        return _stored(x_TK.shape, codes, scales, outs)


class AiterRMSNormQuant(AiterOp):
    """`rmsnorm_quant`: what it quantises is not rounded before, so one style has no form there."""

    __slots__ = ()

    def __call__(  # noqa: PLR0913 - the contract's keywords
        self,
        x_TH: torch.Tensor,
        weight_H: torch.Tensor,
        eps: float,
        recipe: Quantised,
        *,
        residual_TH: torch.Tensor | None = None,
        style: NormStyle = NormStyle.ROUND_THEN_WEIGHT,
        scale: torch.Tensor | None = None,
        out: Encoded | None = None,
        nonfinite: torch.Tensor | None = None,
    ) -> Encoded:
        """See `contracts.RMSNormQuant`; per token or 1x128, no flag, AITER's rounding."""
        check_rms_norm(
            x_TH, weight_H, eps, residual_TH=residual_TH, out=None, style=style, op=RMS_NORM_QUANT
        )
        check_recipe(RMS_NORM_QUANT, recipe, scale)
        check_encoded(
            *(RMS_NORM_QUANT, recipe, x_TH.shape, (scale, out), nonfinite),
            residual=residual_TH,
            x=x_TH,
            weight=weight_H,
        )
        require_halves(RMS_NORM_QUANT, "x", x_TH)
        if style is NormStyle.ROUND_THEN_WEIGHT:
            refuse(RMS_NORM_QUANT, "style", "round once, after the weight, for AITER", style)
        if recipe.granularity not in _NORM_GROUPS or recipe.scale is not ScaleType.FP32:
            limit = "be per token or 1x128 with fp32 scales for AITER"
            refuse(RMS_NORM_QUANT, "recipe", limit, recipe.describe())
        outs = _require_tensors(
            RMS_NORM_QUANT,
            self.aiter,
            out,
            nonfinite,
            x=x_TH,
            weight=weight_H,
            residual=residual_TH,
        )
        _require_recipe(RMS_NORM_QUANT, self.aiter, x_TH, recipe)
        norm = self.aiter.function("rmsnorm_quant")
        if residual_TH is not None:
            x_TH = residual_TH.add_(x_TH)
        if x_TH.numel() == 0:
            return _empty(x_TH, recipe, None, out)
        rows = x_TH.reshape(-1, x_TH.shape[-1]).contiguous()
        codes = empty_storage(rows.shape, recipe.dtype, rows.device)
        group = _NORM_GROUPS[recipe.granularity]
        scales = torch.empty(
            (rows.shape[0], rows.shape[1] // group if group else 1),
            dtype=torch.float32,
            device=rows.device,
        )
        is_gemma = style is NormStyle.ONE_PLUS_WEIGHT_THEN_ROUND
        norm(codes, rows, scales, weight_H.contiguous(), eps, group, False, is_gemma)
        return _stored(x_TH.shape, codes, scales, outs)


def _require_tensors(
    op: str,
    aiter: Aiter,
    out: Encoded | None,
    nonfinite: torch.Tensor | None,
    **tensors: torch.Tensor | None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    outs = (None, None) if out is None else out
    require_device(op, aiter, codes_out=outs[0], scales_out=outs[1], **tensors)
    if nonfinite is not None:
        refuse(op, "nonfinite", "be None for AITER, which does not look", "a tensor")
    return outs


def _require_recipe(op: str, aiter: Aiter, x: torch.Tensor, recipe: Quantised) -> None:
    """The kind of fp8 of the architecture, whole groups, and AITER's own choices of the rest."""
    arch = aiter.arch(x.device)
    native = NATIVE_CODES.get(arch)
    if recipe.code is not native:
        refuse(op, "recipe", f"have codes of {native} for AITER on {arch}", recipe.describe())
    if recipe.clamp is not None:
        refuse(op, "recipe", "use the type's whole range for AITER", recipe.describe())
    is_mx = recipe.granularity is Granularity.BLOCK_1X32
    if is_mx != (recipe.scale is ScaleType.E8M0):
        limit = "have e8m0 scales for 1x32 and for nothing else for AITER"
        refuse(op, "recipe", limit, recipe.describe())
    if is_mx and recipe.e8m0_mode is not E8m0Mode.ROUND_UP:
        refuse(op, "recipe", "round e8m0 scales up for AITER", recipe.describe())
    group = _GROUPS.get(recipe.granularity, 1)
    if x.shape[-1] % group != 0:
        refuse(op, "x", f"have a last dimension that is a multiple of {group}", list(x.shape))


def _pair(
    quantise: Callable[..., object], rows: torch.Tensor, keywords: dict[str, object]
) -> Encoded:
    result = quantise(rows, **keywords)
    assert isinstance(result, tuple)
    return as_tensor(result[0]), as_tensor(result[1])


def _keep_zeros(codes: torch.Tensor, scales: torch.Tensor) -> None:
    """A row of zeros has a scale of 0 there, and codes that only this scale makes zeros."""
    is_zero = scales == 0
    codes.view(torch.uint8).masked_fill_(is_zero, 0)
    scales.masked_fill_(is_zero, 1.0)


def _stored(
    shape: torch.Size,
    codes: torch.Tensor,
    scales: torch.Tensor,
    outs: tuple[torch.Tensor | None, torch.Tensor | None],
) -> Encoded:
    scales = scales.view(*shape[:-1], scales.shape[-1])
    return _written_bits(outs[0], codes.view(shape)), _written_bits(outs[1], scales)


def _written_bits(out: torch.Tensor | None, result: torch.Tensor) -> torch.Tensor:
    """As bytes: a copy between fp8 tensors may convert where PyTorch has no kernel for it."""
    if out is None or out is result:
        return result
    if out.itemsize == 1:
        out.view(torch.uint8).copy_(result.view(torch.uint8))
        return out
    return out.copy_(result)


def _empty(
    x: torch.Tensor, recipe: Quantised, scale: torch.Tensor | None, out: Encoded | None
) -> Encoded:
    """The result of no rows."""
    if out is not None:
        return out if scale is None else (out[0], scale)
    specs = recipe.storage_spec(x.shape)
    made = [empty_storage(one.shape, one.dtype, x.device) for one in specs.values()]
    return made[0], made[1] if scale is None else scale
