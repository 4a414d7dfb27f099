"""Linear of quantised weights: codes times codes, floating point times codes, and MX times MX.

Unit: one tile of the result. Sums of fp8 products are promoted to float32 every 128 of K: a tensor
core keeps fewer digits of them. Scales of rows and matrices multiply the sums at the end, those of
128 of K their part of the sum, those of 32 of K the decoded weight, which is exact for powers of
two. Knows no recipe by name; the wrapper says what shares a scale.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from syncline.model_ops_rocm.triton.kernels.linear import store_product
from syncline.model_ops_rocm.triton.kernels.tiles import (
    as_scale,
    await_kernel_before,
    e4m3_to_float,
    grouped_tile,
    load_head,
    load_rows,
    load_weight,
    release_kernel_after,
)

K_BLOCK: tl.constexpr = tl.constexpr(128)  # of scales, and the longest sum in a tensor core


@triton.jit
def tile_scales(
    ptr, first, count, row_stride, E8M0: tl.constexpr, SHARED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """[BLOCK] scales of the rows from `first`, of which SHARED have one; a scalar if all have."""
    if SHARED % BLOCK == 0:
        stored = tl.load(ptr + (first // SHARED).to(tl.int64) * row_stride)
    else:
        rows = first.to(tl.int64) + tl.arange(0, BLOCK)
        stored = tl.load(ptr + rows // SHARED * row_stride, mask=rows < count, other=0)
    return as_scale(stored, E8M0)


@triton.jit
def scaled(acc, x_scale, weight_scale, SWAP: tl.constexpr):
    """acc times both scales, each a scalar or a vector of its side of the tile."""
    if len(x_scale.shape) == 1:
        x_scale = x_scale[None, :] if SWAP else x_scale[:, None]
    if len(weight_scale.shape) == 1:
        weight_scale = weight_scale[:, None] if SWAP else weight_scale[None, :]
    return acc * x_scale * weight_scale


@triton.jit
def _sides(x, weight, DECODE: tl.constexpr, FNUZ: tl.constexpr, SWAP: tl.constexpr):
    """(left, right) operands; with SWAP the weight is the left one."""
    if DECODE:
        x, weight = e4m3_to_float(x, FNUZ), e4m3_to_float(weight, FNUZ)
    return (weight, tl.trans(x)) if SWAP else (x, tl.trans(weight))


@triton.jit
def _multiplied(x, weight, acc, DECODE: tl.constexpr, FNUZ: tl.constexpr, SWAP: tl.constexpr):
    """acc plus codes of x times codes of the weight's tile."""
    left, right = _sides(x, weight, DECODE, FNUZ, SWAP)
    if DECODE:
        acc = tl.dot(left, right, acc, input_precision="ieee")
    else:
        acc = tl.dot(left, right, acc, max_num_imprecise_acc=K_BLOCK)
    return acc


@triton.jit(do_not_specialize=["num_rows"])
def codes_linear_kernel(
    x_ptr,  # with DECODE bytes, as is the weight; else both of one native type
    x_scale_ptr,
    weight_ptr,
    weight_scale_ptr,
    bias_ptr,
    out_ptr,
    parts_ptr,  # with SPLITS > 1 float32 [SPLITS, num_rows, num_columns]
    counters_ptr,  # with MERGES int32, one for each tile
    num_rows,
    num_columns,
    depth,
    stored_rows,
    stored_depth,
    x_stride,
    x_last,
    x_scale_row,  # strides of scales: 0 where one serves all
    x_scale_block,
    weight_scale_row,
    weight_scale_block,
    out_stride,
    out_last,
    bias_stride,
    HAS_BIAS: tl.constexpr,
    X_E8M0: tl.constexpr,
    WEIGHT_E8M0: tl.constexpr,
    SCALE_ROWS: tl.constexpr,  # of the weight that share a scale: 1 or 128
    SCALES_OF_BLOCKS: tl.constexpr,  # whether any scale changes along K
    DECODE: tl.constexpr,
    FNUZ: tl.constexpr,
    CHUNK: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_STORED_K: tl.constexpr,
    SWAP: tl.constexpr,
    SPLITS: tl.constexpr,
    MERGES: tl.constexpr,  # whether the last program of a tile adds its parts
    GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # K_BLOCK, or without SCALES_OF_BLOCKS a multiple of it
    PREFETCH: tl.constexpr,  # of K, with OVERLAP, where rows are whole tiles
    RELEASE: tl.constexpr,  # eighths of the blocks after which the next kernel may begin
    OVERLAP: tl.constexpr,  # CUDA: launched while the kernel before it ends
    HEAD: tl.constexpr,  # of K, whole blocks, without SCALES_OF_BLOCKS: read before the wait
):
    tile_m, tile_n = grouped_tile(
        tl.program_id(0), num_rows, num_columns, BLOCK_M, BLOCK_N, GROUP_M
    )
    first_m, first_n = tile_m * BLOCK_M, tile_n * BLOCK_N
    acc = tl.zeros((BLOCK_N, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_N), dtype=tl.float32)
    num_blocks = tl.cdiv(depth, BLOCK_K)
    split = tl.program_id(1)
    per_split = tl.cdiv(num_blocks, SPLITS)
    start = split * per_split
    stop = tl.minimum(start + per_split, num_blocks)
    HEAD_BLOCKS: tl.constexpr = HEAD // BLOCK_K
    if OVERLAP and RELEASE < 0:
        gdc_launch_dependents()
    if HEAD:
        head = load_head(weight_ptr, first_n, start * BLOCK_K, stored_depth, BLOCK_N, HEAD)
    if OVERLAP:
        await_kernel_before(
            *(weight_ptr, first_n, (start + HEAD_BLOCKS) * BLOCK_K, stop * BLOCK_K, stored_depth),
            *(stored_depth, CHUNK, BLOCK_N, PREFETCH),
        )
    if HEAD:
        x_head = load_rows(
            *(x_ptr, first_m, num_rows, start * BLOCK_K, depth, x_stride, x_last),
            *(BLOCK_M, HEAD, False, True),
        )
    for block in range(start + HEAD_BLOCKS, stop):
        if OVERLAP and RELEASE >= 0:
            release_kernel_after(block, start + (stop - start) * RELEASE // 8)
        k = block * BLOCK_K
        x = load_rows(
            *(x_ptr, first_m, num_rows, k, depth, x_stride, x_last),
            *(BLOCK_M, BLOCK_K, False, EVEN_K),
        )
        weight = load_weight(
            *(weight_ptr, first_n, stored_rows, k, stored_depth, stored_depth, 1),
            *(CHUNK, BLOCK_N, BLOCK_K, EVEN_N, EVEN_STORED_K),
        )
        if SCALES_OF_BLOCKS:
            left, right = _sides(x, weight, DECODE, FNUZ, SWAP)
            part = tl.dot(left, right, input_precision="ieee")
            at = tl.cast(block, tl.int64)
            acc += scaled(
                part,
                tile_scales(
                    *(x_scale_ptr + at * x_scale_block, first_m, num_rows, x_scale_row),
                    *(X_E8M0, 1, BLOCK_M),
                ),
                tile_scales(
                    *(weight_scale_ptr + at * weight_scale_block, first_n, stored_rows),
                    *(weight_scale_row, WEIGHT_E8M0, SCALE_ROWS, BLOCK_N),
                ),
                SWAP,
            )
        else:
            acc = _multiplied(x, weight, acc, DECODE, FNUZ, SWAP)
    if HEAD:
        acc = _multiplied(x_head, head, acc, DECODE, FNUZ, SWAP)
    if not SCALES_OF_BLOCKS:
        acc = scaled(
            acc,
            tile_scales(x_scale_ptr, first_m, num_rows, x_scale_row, X_E8M0, 1, BLOCK_M),
            tile_scales(
                *(weight_scale_ptr, first_n, stored_rows),
                *(weight_scale_row, WEIGHT_E8M0, SCALE_ROWS, BLOCK_N),
            ),
            SWAP,
        )
    store_product(
        *(acc, out_ptr, parts_ptr, counters_ptr, bias_ptr, first_m, num_rows),
        *(first_n, num_columns, out_stride, out_last, bias_stride),
        *(HAS_BIAS, SPLITS, MERGES, SWAP, BLOCK_M, BLOCK_N),
    )
