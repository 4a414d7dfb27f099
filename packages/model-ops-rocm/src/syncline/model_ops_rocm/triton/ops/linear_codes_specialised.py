"""Linear of many rows in codes by a warp that feeds and eight that multiply, on sm_90.

The tensor memory accelerator reads the codes of both by descriptors, which are made anew for each
call. It needs rows that begin at multiples of 16 bytes; products of others stay with
`kernels.linear_quantised`, and so do scales of other kinds than float32 of both sides' rows, or of
1x128 by 128x128.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import torch

from syncline.model_ops_rocm.arguments.linear import LINEAR_QUANTISED
from syncline.model_ops_rocm.triton.configs.linear import CODES, CODES_OF_BLOCKS, Sizes
from syncline.model_ops_rocm.triton.configs.linear_many import (
    BOUNDS,
    PROGRAMS,
    TILE_ROWS,
    kind_for_many,
)
from syncline.model_ops_rocm.triton.kernels.linear_codes_pieces import PIECE_M
from syncline.model_ops_rocm.triton.kernels.linear_codes_specialised import (
    specialised_codes_kernel,
)
from syncline.model_ops_rocm.triton.kernels.linear_quantised import K_BLOCK
from syncline.model_ops_rocm.triton.launch import IS_INTERPRETED, LAUNCHER, can_be_tiled, tiled
from syncline.model_ops_rocm.triton.ops.linear_operand import Operand
from syncline.model_ops_rocm.triton.ops.products import Product

_RUN: Final = 16  # codes, of a byte each, that the accelerator's addresses are multiples of
_X_TILE: Final = (int(PIECE_M.value), int(K_BLOCK.value))


def feed(
    product: Product, x: Operand, weight: Operand, depth: int, workspace: torch.Tensor | None
) -> bool:
    """Whether a warp of its own feeds this product with a row-major weight, which then is launched.

    To prepare it launches what any number of rows up to the product's takes.
    """
    chosen = list(_chosen(product, weight, depth)) if _takes(x, weight) else []
    for one in chosen:
        _multiply(one, x, weight, depth, workspace)
    return bool(chosen)


def _takes(x: Operand, weight: Operand) -> bool:
    """Whether the kernel knows such scales, and the accelerator can read both."""
    if IS_INTERPRETED or x.is_e8m0 or weight.is_e8m0 or x.scale_depth != weight.scale_depth:
        return False
    is_known = x.scale_depth == 0 or weight.scale_rows == K_BLOCK.value
    return is_known and _is_readable(x.codes) and _is_readable(weight.codes)


def _is_readable(codes: torch.Tensor) -> bool:
    return codes.shape[1] % _RUN == 0 and can_be_tiled(codes, codes.shape[1])


def _chosen(product: Product, weight: Operand, depth: int) -> Iterator[Product]:
    """The product, and to prepare it those of fewer rows, each by the kind that it is of."""
    kind = CODES_OF_BLOCKS if weight.scale_depth else CODES
    every = {product.num_rows}
    if LAUNCHER.is_preparing:
        every |= {bound for bound in BOUNDS if bound < product.num_rows}
    for num_rows in sorted(every):
        sizes = Sizes(num_rows, product.num_columns, depth)
        found = kind_for_many(LAUNCHER.arch, kind, sizes)
        if found is not None:
            chosen = LAUNCHER.config(LINEAR_QUANTISED, weight.codes.dtype, num_rows, found)
            yield replace(product, chosen=chosen, num_rows=num_rows)


def _multiply(
    product: Product, x: Operand, weight: Operand, depth: int, workspace: torch.Tensor | None
) -> None:
    """out = x @ weight^T + bias."""
    constants = product.chosen[1].constants
    tiles_m = -(-product.num_rows // TILE_ROWS)
    tiles_n = -(-product.num_columns // (constants["COLUMNS"] * constants["BLOCK_N"]))
    parts = product.parts(workspace)
    LAUNCHER.launch(
        specialised_codes_kernel,
        (min(tiles_m * tiles_n * product.splits, PROGRAMS),),
        product.chosen,
        (
            # The rows without what pads them.
            tiled(x.codes, (product.num_rows, depth), x.codes.shape[1], _X_TILE),
            tiled(
                *(weight.codes, (product.num_columns, depth), weight.codes.shape[1]),
                (constants["BLOCK_N"], _X_TILE[1]),
            ),
            *(x.scales, weight.scales, product.bias_or_out, product.out, parts),
            *(product.num_rows, product.num_columns, depth, x.scale_row, weight.scale_row),
            *product.strides,
        ),
        {"HAS_BIAS": product.adds_bias, "SCALES_OF_BLOCKS": weight.scale_depth != 0},
    )
    product.finish(parts)
