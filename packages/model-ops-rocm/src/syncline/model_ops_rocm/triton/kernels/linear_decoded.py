"""Linear of floating point with a weight of codes: each tile is decoded, then multiplied.

Unit: one tile of the result. Codes are exact in every floating type of x. Scales of rows and
matrices multiply the sums at the end, those of 128 of K their part of the sum; those of 32 of K the
decoded codes, which powers of two leave exact in bfloat16; otherwise the product is in float32.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from syncline.model_ops_rocm.triton.kernels.linear import store_product
from syncline.model_ops_rocm.triton.kernels.linear_quantised import scaled, tile_scales
from syncline.model_ops_rocm.triton.kernels.tiles import (
    as_scale,
    await_kernel_before,
    e2m1_to_float,
    e4m3_to_float,
    grouped_tile,
    load_rows,
    load_weight,
    release_kernel_after,
)

# The codes of a weight, as `CODE`: bytes of each type, or e4m3 as a type that the target converts.
E4M3FN: tl.constexpr = tl.constexpr(0)
E4M3FNUZ: tl.constexpr = tl.constexpr(1)
E2M1: tl.constexpr = tl.constexpr(2)
NATIVE: tl.constexpr = tl.constexpr(3)


@triton.jit
def decoded(stored, CODE: tl.constexpr):
    """Codes as float32; e2m1 has two in each byte of a row."""
    if CODE == NATIVE:
        values = stored.to(tl.float32)
    elif CODE == E2M1:
        values = e2m1_to_float(stored)
    else:
        values = e4m3_to_float(stored, CODE == E4M3FNUZ)
    return values


@triton.jit
def times_blocks(values, scales, BLOCK_ROWS: tl.constexpr, BLOCK_K: tl.constexpr):
    """[BLOCK_ROWS, BLOCK_K] times [BLOCK_ROWS, BLOCK_K / 32]."""
    blocks = values.reshape(BLOCK_ROWS, BLOCK_K // 32, 32) * scales[:, :, None]
    return blocks.reshape(BLOCK_ROWS, BLOCK_K)


@triton.jit(do_not_specialize=["num_rows"])
def decoded_linear_kernel(
    x_ptr,
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
    stored_depth,  # elements of a stored row: for e2m1 bytes
    x_stride,
    x_last,
    weight_scale_row,  # strides of scales: 0 where one serves all
    weight_scale_block,
    out_stride,
    out_last,
    bias_stride,
    HAS_BIAS: tl.constexpr,
    WEIGHT_E8M0: tl.constexpr,
    SCALE_ROWS: tl.constexpr,  # of the weight that share a scale: 1 or 128
    SCALE_DEPTH: tl.constexpr,  # of K that share a scale: 0 for all, 128 or 32
    CODE: tl.constexpr,
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
    BLOCK_K: tl.constexpr,  # with scales of blocks of K at most 128
    PREFETCH: tl.constexpr,  # of K, with OVERLAP, where rows are whole tiles
    RELEASE: tl.constexpr,  # eighths of the blocks after which the next kernel may begin
    HEAD: tl.constexpr,  # of other products
    OVERLAP: tl.constexpr,  # CUDA: launched while the kernel before it ends
):
    tile_m, tile_n = grouped_tile(
        tl.program_id(0), num_rows, num_columns, BLOCK_M, BLOCK_N, GROUP_M
    )
    first_m, first_n = tile_m * BLOCK_M, tile_n * BLOCK_N
    acc = tl.zeros((BLOCK_N, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_N), dtype=tl.float32)
    PER_BYTE: tl.constexpr = 2 if CODE == E2M1 else 1
    num_blocks = tl.cdiv(depth, BLOCK_K)
    split = tl.program_id(1)
    per_split = tl.cdiv(num_blocks, SPLITS)
    start = split * per_split
    stop = tl.minimum(start + per_split, num_blocks)
    if OVERLAP:
        if RELEASE < 0:
            gdc_launch_dependents()
        await_kernel_before(
            *(
                weight_ptr,
                first_n,
                start * BLOCK_K // PER_BYTE,
                stop * BLOCK_K // PER_BYTE,
                stored_depth,
            ),
            *(stored_depth, CHUNK, BLOCK_N, PREFETCH // PER_BYTE),
        )
    for block in range(start, stop):
        if OVERLAP and RELEASE >= 0:
            release_kernel_after(block, start + (stop - start) * RELEASE // 8)
        k = block * BLOCK_K
        x = load_rows(
            *(x_ptr, first_m, num_rows, k, depth, x_stride, x_last),
            *(BLOCK_M, BLOCK_K, False, EVEN_K),
        )
        stored = load_weight(
            *(weight_ptr, first_n, stored_rows, k // PER_BYTE, stored_depth, stored_depth, 1),
            *(CHUNK, BLOCK_N, BLOCK_K // PER_BYTE, EVEN_N, EVEN_STORED_K),
        )
        weight = decoded(stored, CODE)
        if SCALE_DEPTH == 32:
            scales = load_rows(
                *(weight_scale_ptr, first_n, stored_rows, k // 32, tl.cdiv(depth, 32)),
                *(weight_scale_row, weight_scale_block, BLOCK_N, BLOCK_K // 32, EVEN_N, EVEN_K),
            )
            weight = times_blocks(weight, as_scale(scales, WEIGHT_E8M0), BLOCK_N, BLOCK_K)
            if not WEIGHT_E8M0 or x.dtype == tl.float16:
                x = x.to(tl.float32)
        weight = weight.to(x.dtype)
        left, right = (weight, tl.trans(x)) if SWAP else (x, tl.trans(weight))
        if SCALE_DEPTH == 128:
            part = tl.dot(left, right, input_precision="ieee")
            at = weight_scale_ptr + (k // 128).to(tl.int64) * weight_scale_block
            scale = tile_scales(
                at, first_n, stored_rows, weight_scale_row, WEIGHT_E8M0, SCALE_ROWS, BLOCK_N
            )
            acc += scaled(part, tl.full((), 1.0, tl.float32), scale, SWAP)
        else:
            acc = tl.dot(left, right, acc, input_precision="ieee")
    if SCALE_DEPTH == 0:
        scale = tile_scales(
            *(weight_scale_ptr, first_n, stored_rows, weight_scale_row),
            *(WEIGHT_E8M0, SCALE_ROWS, BLOCK_N),
        )
        acc = scaled(acc, tl.full((), 1.0, tl.float32), scale, SWAP)
    store_product(
        *(acc, out_ptr, parts_ptr, counters_ptr, bias_ptr, first_m, num_rows),
        *(first_n, num_columns, out_stride, out_last, bias_stride),
        *(HAS_BIAS, SPLITS, MERGES, SWAP, BLOCK_M, BLOCK_N),
    )
