"""Linear of few rows by a warp that feeds and four that multiply, where the tables have it: sm_90.

The tensor memory accelerator reads both operands by descriptors, which are made anew for each call
and lie in the launch itself, so that a recorded one replays them. It needs rows that lie close, at
addresses that are multiples of 16 bytes; products of others stay with `kernels.linear`.
"""

from typing import Final

import torch

from syncline.model_ops_rocm.triton.geometry import Matrix
from syncline.model_ops_rocm.triton.kernels.linear_specialised import specialised_linear_kernel
from syncline.model_ops_rocm.triton.launch import IS_INTERPRETED, LAUNCHER, overlaps, tiled
from syncline.model_ops_rocm.triton.ops.products import Product

_RUN_BYTES: Final = 16


def takes(x_TK: torch.Tensor, x: Matrix, weight: torch.Tensor) -> bool:
    """Whether the accelerator can read both; what is prepared stands for any that it can."""
    if IS_INTERPRETED:
        return False
    if LAUNCHER.is_preparing:
        return weight.shape[1] * weight.itemsize % _RUN_BYTES == 0
    of_weight = Matrix(weight.shape[0], weight.stride(0), weight.stride(1))
    return _is_readable(x_TK, x) and _is_readable(weight, of_weight)


def multiply(product: Product, x_TK: torch.Tensor, x: Matrix, weight: torch.Tensor) -> None:
    """out = x @ weight^T + bias."""
    chosen, (num_columns, depth) = product.chosen, weight.shape
    constants = chosen[1].constants
    of_weight = Matrix(num_columns, weight.stride(0), 1)
    LAUNCHER.launch(
        specialised_linear_kernel,
        product.grid,
        chosen,
        (
            _tiles(x_TK, x, depth, constants["BLOCK_M"], constants["BLOCK_K"]),
            _tiles(weight, of_weight, depth, constants["BLOCK_N"], constants["BLOCK_K"]),
            *(product.bias_or_out, product.out, product.num_rows, num_columns, depth),
            *product.strides,
        ),
        {"HAS_BIAS": product.adds_bias, "OVERLAP": overlaps(chosen[1])},
    )


def _is_readable(tensor: torch.Tensor, rows: Matrix) -> bool:
    return (
        rows.last_stride == 1
        and rows.stride >= tensor.shape[-1]
        and rows.stride * tensor.itemsize % _RUN_BYTES == 0
        and tensor.data_ptr() % _RUN_BYTES == 0
    )


def _tiles(tensor: torch.Tensor, rows: Matrix, depth: int, block_rows: int, block_k: int) -> object:
    """[rows, depth] in tiles of [block_rows, block_k]."""
    stride = rows.stride
    if LAUNCHER.is_preparing:
        # What is compiled depends on the type and the tile alone.
        tensor, stride = tensor.new_empty(0, device="meta"), depth
    return tiled(tensor, (rows.num_rows, depth), stride, (block_rows, block_k))
