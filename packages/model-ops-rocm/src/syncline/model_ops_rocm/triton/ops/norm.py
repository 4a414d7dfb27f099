"""RMSNorm by Triton; knows nothing of where the weight came from."""

import torch

from syncline.model_ops_rocm.arguments import RMS_NORM, check_rms_norm
from syncline.model_ops_rocm.checks import refuse
from syncline.model_ops_rocm.triton.configs.elementwise import MAX_NORM_WIDTH
from syncline.model_ops_rocm.triton.geometry import power_of_two, rows_of
from syncline.model_ops_rocm.triton.kernels.norm import rms_norm_kernel
from syncline.model_ops_rocm.triton.launch import LAUNCHER, require_reachable


def rms_norm(
    x_TH: torch.Tensor,
    weight_H: torch.Tensor,
    eps: float,
    *,
    residual_TH: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `contracts.RMSNorm`."""
    check_rms_norm(x_TH, weight_H, eps, residual_TH=residual_TH, out=out)
    width = x_TH.shape[-1]
    if width > MAX_NORM_WIDTH:
        refuse(RMS_NORM, "x", f"have a last dimension up to {MAX_NORM_WIDTH}", list(x_TH.shape))
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
            "BLOCK_WIDTH": power_of_two(width),
        },
    )
    return out
