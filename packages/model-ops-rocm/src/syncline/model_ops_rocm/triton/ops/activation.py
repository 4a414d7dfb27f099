"""SwiGLU's activation by Triton."""

import torch

from syncline.model_ops_rocm.checks import refuse, require_float, require_out
from syncline.model_ops_rocm.triton.geometry import rows_of
from syncline.model_ops_rocm.triton.kernels.activation import silu_and_mul_kernel
from syncline.model_ops_rocm.triton.launch import LAUNCHER, require_reachable

_OP = "silu_and_mul"


def silu_and_mul(x_T2I: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """See `contracts.SiluAndMul`."""
    require_float(_OP, "x", x_T2I)
    if x_T2I.ndim == 0 or x_T2I.shape[-1] % 2 != 0:
        refuse(_OP, "x", "have an even last dimension", list(x_T2I.shape))
    shape = (*x_T2I.shape[:-1], x_T2I.shape[-1] // 2)
    if out is None:
        out = torch.empty(shape, dtype=x_T2I.dtype, device=x_T2I.device)
    else:
        require_out(_OP, out, shape, x_T2I.dtype)
    require_reachable(_OP, x=x_T2I, out=out)
    x, written = rows_of(_OP, "x", x_T2I), rows_of(_OP, "out", out)
    width = shape[-1]
    if x.num_rows == 0 or width == 0:
        return out
    chosen = LAUNCHER.config(_OP, x_T2I.dtype, width)
    LAUNCHER.launch(
        silu_and_mul_kernel,
        (x.num_rows, -(-width // chosen[1].constants["BLOCK_WIDTH"])),
        chosen,
        (x_T2I, out, *x.strides, *written.strides),
        {"INNER": x.inner, "WIDTH": width},
    )
    return out
