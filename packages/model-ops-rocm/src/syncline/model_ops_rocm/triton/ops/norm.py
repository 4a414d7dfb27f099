"""RMSNorm by Triton; knows nothing of where the weight came from."""

import torch

from syncline.model_ops_rocm.checks import (
    refuse,
    require_dtype,
    require_float,
    require_out,
    require_shape,
)
from syncline.model_ops_rocm.triton.configs import MAX_NORM_WIDTH
from syncline.model_ops_rocm.triton.geometry import power_of_two, rows_of
from syncline.model_ops_rocm.triton.kernels.norm import rms_norm_kernel
from syncline.model_ops_rocm.triton.launch import LAUNCHER, require_reachable

_OP = "rms_norm"


def rms_norm(
    x_TH: torch.Tensor,
    weight_H: torch.Tensor,
    eps: float,
    *,
    residual_TH: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `contracts.RMSNorm`."""
    _check(x_TH, weight_H, eps, residual_TH, out)
    width = x_TH.shape[-1]
    if out is None:
        out = torch.empty(x_TH.shape, dtype=x_TH.dtype, device=x_TH.device)
    x, written = rows_of(_OP, "x", x_TH), rows_of(_OP, "out", out)
    residual_TH_or_x = x_TH if residual_TH is None else residual_TH
    residual = rows_of(_OP, "residual", residual_TH_or_x)
    if x.num_rows == 0 or width == 0:
        return out
    chosen = LAUNCHER.config(_OP, x_TH.dtype, width)
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
            "BLOCK_WIDTH": power_of_two(width),
        },
    )
    return out


def _check(
    x_TH: torch.Tensor,
    weight_H: torch.Tensor,
    eps: float,
    residual_TH: torch.Tensor | None,
    out: torch.Tensor | None,
) -> None:
    require_float(_OP, "x", x_TH)
    if x_TH.ndim == 0:
        refuse(_OP, "x", "have a last dimension to normalise", "a scalar")
    require_shape(_OP, "weight", weight_H, x_TH.shape[-1:])
    require_dtype(_OP, "weight", weight_H, x_TH.dtype)
    if not eps > 0.0:
        refuse(_OP, "eps", "be positive", eps)
    if x_TH.shape[-1] > MAX_NORM_WIDTH:
        refuse(_OP, "x", f"have a last dimension up to {MAX_NORM_WIDTH}", list(x_TH.shape))
    if out is not None:
        require_out(_OP, out, x_TH.shape, x_TH.dtype)
    if residual_TH is not None:
        require_shape(_OP, "residual", residual_TH, x_TH.shape)
        require_dtype(_OP, "residual", residual_TH, x_TH.dtype)
    require_reachable(_OP, x=x_TH, weight=weight_H, residual=residual_TH, out=out)
