"""RMSNorm by Triton, also with codes for a result; knows nothing of where the weight came from."""

import torch

from syncline.model_ops_rocm.arguments.dense import RMS_NORM, check_rms_norm
from syncline.model_ops_rocm.arguments.fused import (
    GROUPS,
    RMS_NORM_QUANT,
    check_encoded,
    check_recipe,
)
from syncline.model_ops_rocm.checks import refuse
from syncline.model_ops_rocm.contracts import NormStyle
from syncline.model_ops_rocm.formats.quantised import Quantised
from syncline.model_ops_rocm.triton.configs.elementwise import MAX_NORM_WIDTH
from syncline.model_ops_rocm.triton.geometry import power_of_two, rows_of
from syncline.model_ops_rocm.triton.kernels.norm import rms_norm_kernel, rms_norm_quant_kernel
from syncline.model_ops_rocm.triton.launch import LAUNCHER, overlaps, require_reachable
from syncline.model_ops_rocm.triton.ops.quantise import Encoded, destination_of, recipe_constants


def rms_norm(  # noqa: PLR0913 - the contract's keywords
    x_TH: torch.Tensor,
    weight_H: torch.Tensor,
    eps: float,
    *,
    residual_TH: torch.Tensor | None = None,
    style: NormStyle = NormStyle.ROUND_THEN_WEIGHT,
    batch_invariant: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `contracts.RMSNorm`. A row's sum has one order, so `batch_invariant` changes nothing."""
    check_rms_norm(x_TH, weight_H, eps, residual_TH=residual_TH, out=out, style=style)
    width = _checked_width(RMS_NORM, x_TH)
    require_reachable(RMS_NORM, x=x_TH, weight=weight_H, residual=residual_TH, out=out)
    if out is None:
        out = torch.empty(x_TH.shape, dtype=x_TH.dtype, device=x_TH.device)
    x, written = rows_of(RMS_NORM, "x", x_TH), rows_of(RMS_NORM, "out", out)
    residual_TH_or_x = x_TH if residual_TH is None else residual_TH
    residual = rows_of(RMS_NORM, "residual", residual_TH_or_x)
    if x.num_rows == 0 or width == 0:
        return out
    chosen = LAUNCHER.config(RMS_NORM, x_TH.dtype, width)
    LAUNCHER.launch(
        rms_norm_kernel,
        (-(-x.num_rows // chosen[1].constants["BLOCK_ROWS"]),),
        chosen,
        (
            *(x_TH, weight_H, residual_TH_or_x, out, x.num_rows, eps),
            *x.strides,
            *residual.strides,
            *written.strides,
            weight_H.stride(0),
        ),
        {
            "INNER": x.inner,
            "WIDTH": width,
            "HAS_RESIDUAL": residual_TH is not None,
            "STYLE": str(style),
            "OVERLAP": overlaps(chosen[1]),
            "BLOCK_WIDTH": power_of_two(width),
        },
    )
    return out


def rms_norm_quant(  # noqa: PLR0913 - the contract's keywords
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
    """See `contracts.RMSNormQuant`."""
    op = RMS_NORM_QUANT
    check_rms_norm(x_TH, weight_H, eps, residual_TH=residual_TH, out=None, style=style, op=op)
    check_recipe(op, recipe, scale)
    check_encoded(
        *(op, recipe, x_TH.shape, (scale, out), nonfinite),
        residual=residual_TH,
        x=x_TH,
        weight=weight_H,
    )
    width = _checked_width(op, x_TH)
    into = destination_of(tuple(x_TH.shape), x_TH, recipe, scale, out, nonfinite)
    require_reachable(op, x=x_TH, weight=weight_H, residual=residual_TH)
    require_reachable(op, codes=into.codes, scales=into.scales, nonfinite=nonfinite)
    residual_TH_or_x = x_TH if residual_TH is None else residual_TH
    x, residual = rows_of(op, "x", x_TH), rows_of(op, "residual", residual_TH_or_x)
    strides = into.strides(op)
    if x.num_rows == 0:
        return into.result
    chosen = LAUNCHER.config(op, x_TH.dtype, width)
    block_width = power_of_two(width)
    LAUNCHER.launch(
        rms_norm_quant_kernel,
        (-(-x.num_rows // chosen[1].constants["BLOCK_ROWS"]),),
        chosen,
        (
            *(x_TH, weight_H, residual_TH_or_x, *into.pointers, x.num_rows, eps),
            *x.strides,
            *residual.strides,
            *strides,
            weight_H.stride(0),
        ),
        {
            "INNER": x.inner,
            "WIDTH": width,
            "HAS_RESIDUAL": residual_TH is not None,
            "STYLE": str(style),
            "OVERLAP": overlaps(chosen[1]),
            "GROUP": min(GROUPS[recipe.granularity] or block_width, block_width),
            "HAS_FLAG": nonfinite is not None,
            "BLOCK_WIDTH": block_width,
            **recipe_constants(recipe, chosen[0].arch),
        },
    )
    return into.result


def _checked_width(op: str, x_TH: torch.Tensor) -> int:
    width = x_TH.shape[-1]
    if width > MAX_NORM_WIDTH:
        refuse(op, "x", f"have a last dimension up to {MAX_NORM_WIDTH}", list(x_TH.shape))
    return width
