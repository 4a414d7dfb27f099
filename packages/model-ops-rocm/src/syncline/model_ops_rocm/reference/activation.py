"""SwiGLU's activation in PyTorch; knows nothing of the projections around it."""

import torch
import torch.nn.functional as F

from syncline.model_ops_rocm.checks import refuse, require_float, require_out

_OP = "silu_and_mul"


def silu_and_mul(x_T2I: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """See `contracts.SiluAndMul`."""
    require_float(_OP, "x", x_T2I)
    if x_T2I.ndim == 0 or x_T2I.shape[-1] % 2 != 0:
        refuse(_OP, "x", "have an even last dimension", list(x_T2I.shape))
    gate, up = x_T2I.chunk(2, dim=-1)
    if out is None:
        return F.silu(gate).mul_(up)
    require_out(_OP, out, gate.shape, gate.dtype)
    return torch.mul(F.silu(gate), up, out=out)
