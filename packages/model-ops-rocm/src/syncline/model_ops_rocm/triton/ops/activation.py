"""SwiGLU's activation by Triton, also with codes for a result."""

import torch

from syncline.model_ops_rocm.arguments.dense import SILU_AND_MUL, check_silu_and_mul
from syncline.model_ops_rocm.arguments.fused import (
    SILU_AND_MUL_QUANT,
    check_encoded,
    check_recipe,
)
from syncline.model_ops_rocm.formats.quantised import Quantised
from syncline.model_ops_rocm.triton.geometry import rows_of
from syncline.model_ops_rocm.triton.kernels.activation import (
    silu_and_mul_kernel,
    silu_and_mul_quant_kernel,
)
from syncline.model_ops_rocm.triton.launch import LAUNCHER, overlaps, require_reachable
from syncline.model_ops_rocm.triton.ops.quantise import (
    Encoded,
    choose_groups,
    destination_of,
    num_programs,
)


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
        {"INNER": x.inner, "WIDTH": width, "OVERLAP": overlaps(chosen[1])},
    )
    return out


def silu_and_mul_quant(
    x_T2I: torch.Tensor,
    recipe: Quantised,
    *,
    scale: torch.Tensor | None = None,
    out: Encoded | None = None,
    nonfinite: torch.Tensor | None = None,
) -> Encoded:
    """See `contracts.SiluAndMulQuant`."""
    op = SILU_AND_MUL_QUANT
    shape = check_silu_and_mul(x_T2I, out=None, op=op)
    check_recipe(op, recipe, scale)
    check_encoded(op, recipe, shape, (scale, out), nonfinite, x=x_T2I)
    into = destination_of(shape, x_T2I, recipe, scale, out, nonfinite)
    require_reachable(op, x=x_T2I, codes=into.codes, scales=into.scales, nonfinite=nonfinite)
    x, strides = rows_of(op, "x", x_T2I), into.strides(op)
    if x.num_rows == 0:
        return into.result
    chosen, constants, per_row = choose_groups(op, recipe, x_T2I.dtype, shape[-1])
    LAUNCHER.launch(
        silu_and_mul_quant_kernel,
        (num_programs(chosen, constants, x.num_rows * per_row),),
        chosen,
        (x_T2I, *into.pointers, x.num_rows, *x.strides, *strides),
        {"INNER": x.inner, "WIDTH": shape[-1], "HAS_FLAG": nonfinite is not None, **constants},
    )
    return into.result
