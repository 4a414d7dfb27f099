"""SwiGLU's activation in PyTorch; knows nothing of the projections around it."""

import torch
import torch.nn.functional as F

from syncline.model_ops_rocm.arguments.dense import check_silu_and_mul


def silu_and_mul(x_T2I: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """See `contracts.SiluAndMul`."""
    check_silu_and_mul(x_T2I, out=out)
    gate, up = x_T2I.chunk(2, dim=-1)
    if out is None:
        return F.silu(gate).mul_(up)
    return torch.mul(F.silu(gate), up, out=out)
