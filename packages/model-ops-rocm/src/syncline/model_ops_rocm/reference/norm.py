"""RMSNorm in PyTorch; knows nothing of where the weight came from.

Source: arXiv:1910.07467, rounded as transformers' Qwen3RMSNorm does. Five small kernels, in place
where possible: PyTorch's `rms_norm` runs eight on a CPU, and rounds once where Qwen3 rounds twice.
"""

import torch

from syncline.model_ops_rocm.arguments import check_rms_norm


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
    if residual_TH is not None:
        x_TH = residual_TH.add_(x_TH)
    x32 = x_TH.float()
    inverse = torch.mean(x32 * x32, -1, keepdim=True).add_(eps).rsqrt_()
    normed = (x32 * inverse).to(x_TH.dtype)
    return torch.mul(normed, weight_H, out=out) if out is not None else normed.mul_(weight_H)
