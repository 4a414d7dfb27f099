"""Linear of MX codes with MX codes: every 32 of K have a power of two, and the hardware knows it.

Unit: one tile of the result. Targets without such an instruction are not for this kernel; DECODE
does the same in float32, for the interpreter.
"""

import triton
import triton.language as tl

from syncline.model_ops_rocm.triton.kernels.linear import store_tile
from syncline.model_ops_rocm.triton.kernels.linear_decoded import E2M1, decoded, times_blocks
from syncline.model_ops_rocm.triton.kernels.tiles import (
    as_scale,
    grouped_tile,
    load_rows,
    load_weight,
)


@triton.jit(do_not_specialize=["num_rows"])
def mx_linear_kernel(
    x_ptr,  # e2m1 has two codes in a byte, as the weight
    x_scale_ptr,
    weight_ptr,
    weight_scale_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    num_columns,
    depth,  # a multiple of 32, as `stored_depth`
    stored_rows,
    stored_depth,
    x_scale_row,
    weight_scale_row,
    out_stride,
    out_last,
    bias_stride,
    HAS_BIAS: tl.constexpr,
    X_CODE: tl.constexpr,
    WEIGHT_CODE: tl.constexpr,
    DECODE: tl.constexpr,
    CHUNK: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_STORED_K: tl.constexpr,
    SWAP: tl.constexpr,
    SPLITS: tl.constexpr,  # 1
    MERGES: tl.constexpr,  # no parts
    GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HEAD: tl.constexpr,  # of other products
    PREFETCH: tl.constexpr,  # as the next two, of other targets
    RELEASE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    tile_m, tile_n = grouped_tile(
        tl.program_id(0), num_rows, num_columns, BLOCK_M, BLOCK_N, GROUP_M
    )
    first_m, first_n = tile_m * BLOCK_M, tile_n * BLOCK_N
    X_PER_BYTE: tl.constexpr = 2 if X_CODE == E2M1 else 1
    PER_BYTE: tl.constexpr = 2 if WEIGHT_CODE == E2M1 else 1
    X_FORMAT: tl.constexpr = "e2m1" if X_CODE == E2M1 else "e4m3"
    FORMAT: tl.constexpr = "e2m1" if WEIGHT_CODE == E2M1 else "e4m3"
    x_row, weight_row = depth // X_PER_BYTE, stored_depth // PER_BYTE
    acc = tl.zeros((BLOCK_N, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_N), dtype=tl.float32)
    for block in range(tl.cdiv(depth, BLOCK_K)):
        k = block * BLOCK_K
        x = load_rows(
            *(x_ptr, first_m, num_rows, k // X_PER_BYTE, x_row, x_row, 1),
            *(BLOCK_M, BLOCK_K // X_PER_BYTE, False, EVEN_K),
        )
        x_scale = load_rows(
            *(x_scale_ptr, first_m, num_rows, k // 32, depth // 32, x_scale_row, 1),
            *(BLOCK_M, BLOCK_K // 32, False, EVEN_K),
        )
        weight = load_weight(
            *(weight_ptr, first_n, stored_rows, k // PER_BYTE, weight_row, weight_row, 1),
            *(CHUNK, BLOCK_N, BLOCK_K // PER_BYTE, EVEN_N, EVEN_STORED_K),
        )
        weight_scale = load_rows(
            *(weight_scale_ptr, first_n, stored_rows, k // 32, stored_depth // 32),
            *(weight_scale_row, 1, BLOCK_N, BLOCK_K // 32, EVEN_N, EVEN_STORED_K),
        )
        if DECODE:
            x = times_blocks(decoded(x, X_CODE), as_scale(x_scale, True), BLOCK_M, BLOCK_K)
            weight = times_blocks(
                decoded(weight, WEIGHT_CODE), as_scale(weight_scale, True), BLOCK_N, BLOCK_K
            )
            left, right = (weight, tl.trans(x)) if SWAP else (x, tl.trans(weight))
            acc = tl.dot(left, right, acc, input_precision="ieee")
        elif SWAP:
            acc = tl.dot_scaled(weight, weight_scale, FORMAT, tl.trans(x), x_scale, X_FORMAT, acc)
        else:
            acc = tl.dot_scaled(x, x_scale, X_FORMAT, tl.trans(weight), weight_scale, FORMAT, acc)
    store_tile(
        *(acc, out_ptr, bias_ptr, first_m, num_rows, first_n, num_columns, out_stride, out_last),
        *(bias_stride, HAS_BIAS, SWAP, BLOCK_M, BLOCK_N),
    )
