"""RMSNorm in PyTorch; knows nothing of where the weight came from.

Source: arXiv:1910.07467, rounded by default as transformers' Qwen3RMSNorm does. Five small kernels,
in place where possible: PyTorch's `rms_norm` runs eight on a CPU, and rounds once where Qwen3 does
twice.
"""

import torch
import torch.nn.functional as nn_functional

from syncline.model_ops_rocm.arguments.dense import check_rms_norm
from syncline.model_ops_rocm.contracts import NormStyle


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
    """See `contracts.RMSNorm`."""
    check_rms_norm(x_TH, weight_H, eps, residual_TH=residual_TH, out=out, style=style)
    if residual_TH is not None:
        x_TH = residual_TH.add_(x_TH)
    x32 = x_TH.float()
    squares = x32 * x32
    mean = _mean_by_halves(squares) if batch_invariant else torch.mean(squares, -1, keepdim=True)
    inverse = mean.add_(eps).rsqrt_()
    if style is NormStyle.ROUND_THEN_WEIGHT:
        normed = (x32 * inverse).to(x_TH.dtype)
        return torch.mul(normed, weight_H, out=out) if out is not None else normed.mul_(weight_H)
    weight = weight_H.float()
    if style is NormStyle.ONE_PLUS_WEIGHT_THEN_ROUND:
        weight = weight + 1.0
    result = (x32 * inverse).mul_(weight)
    return result.to(x_TH.dtype) if out is None else out.copy_(result)


def _mean_by_halves(x_TH: torch.Tensor) -> torch.Tensor:
    """In one order for every row: `torch.mean` cuts a row where few rows meet many threads."""
    width = x_TH.shape[-1]
    padded = 1 << max(width - 1, 0).bit_length()
    total = nn_functional.pad(x_TH, (0, padded - width))
    while total.shape[-1] > 1:
        first, second = total.chunk(2, dim=-1)
        total = first + second
    return total.div_(width)
