"""Linear of one token by Triton, where the tables have it: weights in 16 bits, row-major."""

from typing import Final

import torch

from syncline.model_ops_rocm.arguments.linear import LINEAR
from syncline.model_ops_rocm.triton.configs import CONFIGS
from syncline.model_ops_rocm.triton.configs.linear import VECTOR, kind_for_vector
from syncline.model_ops_rocm.triton.geometry import matrix_of
from syncline.model_ops_rocm.triton.kernels.linear_vector import linear_vector_kernel
from syncline.model_ops_rocm.triton.launch import LAUNCHER, overlaps

# A kernel is unrolled over the pieces of a row.
_MAX_DEPTH: Final = 32_768
_KNOWN: Final = frozenset((key.arch, key.dtype) for key in CONFIGS if key.kind == VECTOR)


def takes(x_TK: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether a product of one row with `weight` is the vector kernel's."""
    return (
        (LAUNCHER.arch, x_TK.dtype) in _KNOWN
        and weight.stride(1) == 1
        and 0 < weight.shape[1] <= _MAX_DEPTH
        and weight.shape[0] > 0
    )


def multiply_row(
    x_TK: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    """out = x @ weight^T + bias for x of one row."""
    num_columns, depth = weight.shape
    chosen = LAUNCHER.config(LINEAR, x_TK.dtype, depth, kind_for_vector("", num_columns))
    block_n = chosen[1].constants["BLOCK_N"]
    x, written = matrix_of(LINEAR, "x", x_TK), matrix_of(LINEAR, "out", out)
    LAUNCHER.launch(
        linear_vector_kernel,
        (-(-num_columns // block_n),),
        chosen,
        (
            *(x_TK, weight, out if bias is None else bias, out, num_columns),
            *(x.last_stride, weight.stride(0), written.last_stride),
            0 if bias is None else bias.stride(0),
        ),
        {
            "DEPTH": depth,
            "HAS_BIAS": bias is not None,
            "EVEN_N": num_columns % block_n == 0,
            "OVERLAP": overlaps(chosen[1]),
        },
    )
