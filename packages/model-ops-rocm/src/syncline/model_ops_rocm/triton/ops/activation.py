"""SwiGLU's activation by Triton."""

import torch

from syncline.model_ops_rocm.arguments import SILU_AND_MUL, check_silu_and_mul
from syncline.model_ops_rocm.triton.geometry import rows_of
from syncline.model_ops_rocm.triton.kernels.activation import silu_and_mul_kernel
from syncline.model_ops_rocm.triton.launch import LAUNCHER, require_reachable


def silu_and_mul(x_T2I: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """See `contracts.SiluAndMul`."""
    shape = check_silu_and_mul(x_T2I, out=out)
    if out is None:
        out = torch.empty(shape, dtype=x_T2I.dtype, device=x_T2I.device)
    require_reachable(SILU_AND_MUL, x=x_T2I, out=out)
    x, written = rows_of(SILU_AND_MUL, "x", x_T2I), rows_of(SILU_AND_MUL, "out", out)
    width = shape[-1]
    if x.num_rows == 0 or width == 0:
        return out
    chosen = LAUNCHER.config(SILU_AND_MUL, x_T2I.dtype, width)
    LAUNCHER.launch(
        silu_and_mul_kernel,
        (x.num_rows, -(-width // chosen[1].constants["BLOCK_WIDTH"])),
        chosen,
        (x_T2I, out, *x.strides, *written.strides),
        {"INNER": x.inner, "WIDTH": width},
    )
    return out
