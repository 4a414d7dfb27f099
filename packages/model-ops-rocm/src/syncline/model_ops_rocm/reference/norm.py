"""RMSNorm in PyTorch; knows nothing of where the weight came from.

Source: arXiv:1910.07467, rounded as transformers' Qwen3RMSNorm does. Five small kernels, in place
where possible: PyTorch's `rms_norm` runs eight on a CPU, and rounds once where Qwen3 rounds twice.
"""

import torch

from syncline.model_ops_rocm.checks import (
    refuse,
    require_dtype,
    require_float,
    require_out,
    require_shape,
)

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
    require_float(_OP, "x", x_TH)
    if x_TH.ndim == 0:
        refuse(_OP, "x", "have a last dimension to normalise", "a scalar")
    require_shape(_OP, "weight", weight_H, x_TH.shape[-1:])
    require_dtype(_OP, "weight", weight_H, x_TH.dtype)
    if not eps > 0.0:
        refuse(_OP, "eps", "be positive", eps)
    if out is not None:
        require_out(_OP, out, x_TH.shape, x_TH.dtype)
    if residual_TH is not None:
        require_shape(_OP, "residual", residual_TH, x_TH.shape)
        require_dtype(_OP, "residual", residual_TH, x_TH.dtype)
        x_TH = residual_TH.add_(x_TH)
    x32 = x_TH.float()
    inverse = torch.mean(x32 * x32, -1, keepdim=True).add_(eps).rsqrt_()
    normed = (x32 * inverse).to(x_TH.dtype)
    return torch.mul(normed, weight_H, out=out) if out is not None else normed.mul_(weight_H)
