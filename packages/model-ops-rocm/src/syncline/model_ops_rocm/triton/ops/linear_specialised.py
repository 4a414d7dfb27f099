"""Linear of few rows by warps that feed and warps that multiply, where the tables have it: sm_90.

The tensor memory accelerator reads both operands by descriptors, which are made anew for each call
and lie in the launch itself, so that a recorded one replays them. It needs rows that lie close, at
addresses that are multiples of 16 bytes; products of others are multiplied as if no warps fed any.
So are those of 64 rows that programs of a cluster share where the result cannot be stored two
columns at a time.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import torch

from syncline.model_ops_rocm.triton.configs.linear import Sizes
from syncline.model_ops_rocm.triton.configs.linear_specialised import (
    ROWS,
    SPECIALISED,
    THIRDS,
    kind_for_specialised,
)
from syncline.model_ops_rocm.triton.geometry import Matrix
from syncline.model_ops_rocm.triton.kernels.linear_cluster import cluster_linear_kernel
from syncline.model_ops_rocm.triton.kernels.linear_quantised import K_BLOCK
from syncline.model_ops_rocm.triton.kernels.linear_specialised import specialised_linear_kernel
from syncline.model_ops_rocm.triton.kernels.linear_thirds import thirds_linear_kernel
from syncline.model_ops_rocm.triton.launch import IS_INTERPRETED, LAUNCHER, can_be_tiled, tiled
from syncline.model_ops_rocm.triton.ops.products import Product

# The rows that one prepared number of them stands for begin after these.
_FEWEST: Final = ROWS[0]
_THIRDS: Final = f"{SPECIALISED}-{THIRDS}"
_PAIR_BYTES: Final = 4  # two columns of 16 bits


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One operand: `rows` of `depth` elements at `tensor`; of codes the scales of rows."""

    tensor: torch.Tensor
    rows: Matrix
    depth: int
    scale: torch.Tensor | None = None  # float32
    scale_row: int = 0  # 0 where one serves all

    @property
    def is_readable(self) -> bool:
        """Whether the accelerator can; what is prepared stands for any whose rows lie close."""
        rows = self.rows
        is_close = rows.last_stride == 1 and rows.stride >= self.depth
        return (LAUNCHER.is_preparing or is_close) and can_be_tiled(self.tensor, rows.stride)

    def tiles(self, block_rows: int, block_k: int, num_ctas: int = 1) -> object:
        """Of [block_rows, block_k]; of codes so wide that a sum of them is not too long.

        For each of the `num_ctas` programs of a cluster.
        """
        if self.scale is not None:
            block_k = min(block_k, K_BLOCK.value)
        shape = self.rows.num_rows, self.depth
        tile = block_rows, block_k
        return tiled(self.tensor, shape, self.rows.stride, tile, num_ctas=num_ctas)


def feed(product: Product, x: Side, weight: Side) -> bool:
    """Whether out = x @ weight^T + bias is multiplied so, which it then has been."""
    is_fed = False
    if IS_INTERPRETED or not (x.is_readable and weight.is_readable):
        return is_fed
    for num_rows in _rows(product.num_rows):
        sizes = Sizes(num_rows, product.num_columns, weight.depth)
        kind = kind_for_specialised(LAUNCHER.arch, weight.tensor.dtype, sizes)
        if kind is not None:
            chosen = LAUNCHER.config(product.op, weight.tensor.dtype, num_rows, kind)
            one = replace(product, chosen=chosen)
            if kind == _THIRDS:
                _launch_thirds(one, x, weight)
            elif chosen[1].num_ctas == 1:
                _launch(one, x, weight)
            elif _takes_pairs(product):
                _launch_clusters(one, x, weight)
            else:
                continue
            is_fed = True
    return is_fed


def _rows(num_rows: int) -> Iterator[int]:
    """How many are multiplied; of a call that is prepared, of each bucket that it stands for."""
    yield num_rows
    if LAUNCHER.is_preparing and _FEWEST < num_rows <= ROWS[-1]:
        yield from (rows for rows in ROWS if _FEWEST < rows < num_rows)


def _launch(product: Product, x: Side, weight: Side) -> None:
    constants = product.chosen[1].constants
    nothing = product.out
    LAUNCHER.launch(
        specialised_linear_kernel,
        product.grid,
        product.chosen,
        (
            x.tiles(constants["BLOCK_M"], constants["BLOCK_K"]),
            weight.tiles(constants["BLOCK_N"], constants["BLOCK_K"]),
            nothing if x.scale is None else x.scale,
            nothing if weight.scale is None else weight.scale,
            *(product.bias_or_out, product.out),
            *(product.num_rows, product.num_columns, weight.depth),
            *(x.scale_row, weight.scale_row, *product.strides),
        ),
        {"HAS_BIAS": product.adds_bias},
    )


def _takes_pairs(product: Product) -> bool:
    """Whether the result can be stored two columns at a time; what is prepared stands for any."""
    stride, last_stride, _ = product.strides
    is_close = last_stride == 1 and stride % 2 == 0
    is_even = is_close and product.out.data_ptr() % _PAIR_BYTES == 0
    return product.num_columns % 2 == 0 and (LAUNCHER.is_preparing or is_even)


def _launch_thirds(product: Product, x: Side, weight: Side) -> None:
    """Three tiles of the weight for each cluster."""
    config = product.chosen[1]
    constants, num_ctas = config.constants, config.num_ctas
    LAUNCHER.launch(
        thirds_linear_kernel,
        (-(-product.num_columns // (3 * constants["BLOCK_N"])),),
        product.chosen,
        (
            x.tiles(constants["BLOCK_M"], constants["BLOCK_K"], num_ctas),
            weight.tiles(constants["BLOCK_N"], constants["BLOCK_K"], num_ctas),
            *(product.bias_or_out, product.out),
            *(product.num_rows, product.num_columns, weight.depth, *product.strides),
        ),
        {"HAS_BIAS": product.adds_bias},
    )


def _launch_clusters(product: Product, x: Side, weight: Side) -> None:
    """Of exactly as many rows of x as a tile has."""
    config = product.chosen[1]
    constants, num_ctas = config.constants, config.num_ctas
    out_stride, _, bias_stride = product.strides
    LAUNCHER.launch(
        cluster_linear_kernel,
        product.grid,
        product.chosen,
        (
            x.tiles(constants["BLOCK_M"], constants["BLOCK_K"], num_ctas),
            weight.tiles(constants["BLOCK_N"], constants["BLOCK_K"], num_ctas),
            *(product.bias_or_out, product.out),
            *(product.num_columns, weight.depth, out_stride, bias_stride),
        ),
        {"HAS_BIAS": product.adds_bias},
    )
