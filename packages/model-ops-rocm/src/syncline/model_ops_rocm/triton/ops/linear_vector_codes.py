"""Linear of one token in codes by Triton, where the tables have it: fp8 by fp8, row-major."""

from typing import Final

import torch

from syncline.model_ops_rocm.arguments.linear import LINEAR_QUANTISED
from syncline.model_ops_rocm.triton.configs import CONFIGS
from syncline.model_ops_rocm.triton.configs.linear import (
    CODES,
    CODES_OF_BLOCKS,
    VECTOR,
    kind_for_vector,
)
from syncline.model_ops_rocm.triton.geometry import matrix_of
from syncline.model_ops_rocm.triton.kernels.linear_vector_codes import codes_vector_kernel
from syncline.model_ops_rocm.triton.launch import IS_INTERPRETED, LAUNCHER, overlaps
from syncline.model_ops_rocm.triton.ops.linear_operand import Operand

# A kernel is unrolled over the pieces of a row.
_MAX_DEPTH: Final = 32_768
# Codes of 16 bytes: of rows that are no whole number of them each code would be a load.
_RUN: Final = 16
_KNOWN: Final = frozenset(
    (key.arch, key.dtype)
    for key in CONFIGS
    if key.op == LINEAR_QUANTISED and key.kind.startswith(VECTOR)
)


def takes(weight: Operand, num_columns: int, depth: int) -> bool:
    """Whether a product of one row with a row-major `weight` is the vector kernel's."""
    return (
        (LAUNCHER.arch, weight.codes.dtype) in _KNOWN
        and 0 < depth <= _MAX_DEPTH
        and depth % _RUN == 0
        and weight.codes.shape[1] % _RUN == 0
        and num_columns > 0
    )


def multiply_row(
    x: Operand, weight: Operand, bias: torch.Tensor | None, out: torch.Tensor, depth: int
) -> None:
    """out = x @ weight^T + bias for the first row of x, `depth` of it, of one type with weight."""
    arch, num_columns = LAUNCHER.arch, out.shape[-1]
    of_blocks = bool(x.scale_depth or weight.scale_depth)
    kind = kind_for_vector(CODES_OF_BLOCKS if of_blocks else CODES, num_columns)
    chosen = LAUNCHER.config(LINEAR_QUANTISED, weight.codes.dtype, depth, kind)
    block_n = chosen[1].constants["BLOCK_N"]
    LAUNCHER.launch(
        codes_vector_kernel,
        (-(-num_columns // block_n),),
        chosen,
        (
            *(x.readable(arch), x.scales, weight.readable(arch), weight.scales),
            *(out if bias is None else bias, out, num_columns, weight.codes.stride(0)),
            *(x.scale_block, weight.scale_row, weight.scale_block),
            matrix_of(LINEAR_QUANTISED, "out", out).last_stride,
            0 if bias is None else bias.stride(0),
        ),
        {
            "DEPTH": depth,
            "HAS_BIAS": bias is not None,
            "X_E8M0": x.is_e8m0,
            "WEIGHT_E8M0": weight.is_e8m0,
            "SCALE_ROWS": weight.scale_rows,
            "SCALES_OF_BLOCKS": of_blocks,
            "DECODE": IS_INTERPRETED,
            "EVEN_N": num_columns % block_n == 0,
            "OVERLAP": overlaps(chosen[1]),
        },
    )
