"""Linear of one token in codes: a row of the weight times a vector, without a matrix instruction.

Unit: BLOCK_N rows of a row-major weight, asked for as in `linear_vector`; their scales are, too, by
the same rule: no kernel that writes them lets the next begin before it has ended.
Products of two codes are exact in float32, and sums are float32 throughout. Scales multiply one
after another, as in `linear_quantised`: the sum, or where they change along K, each run's part.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from syncline.model_ops_rocm.triton.kernels.dependent import read_ahead
from syncline.model_ops_rocm.triton.kernels.linear_vector import rows_of
from syncline.model_ops_rocm.triton.kernels.tiles import as_scale, e4m3_to_float

K_BLOCK: tl.constexpr = tl.constexpr(128)  # of scales
RUN: tl.constexpr = tl.constexpr(16)  # codes of a thread that lie together


@triton.jit
def _row_of(ptr, columns, depth, EVEN_K: tl.constexpr):
    """A piece of x, which all programs read."""
    if EVEN_K:
        piece = tl.load(ptr + columns)
    else:
        piece = tl.load(ptr + columns, mask=columns < depth, other=0.0)
    return piece


@triton.jit
def _in_runs(weight, x, DECODE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """[BLOCK_N, BLOCK_K // RUN] sums of the products of RUN codes that lie together."""
    if DECODE:
        weight, x = e4m3_to_float(weight, False), e4m3_to_float(x, False)
    products = weight.to(tl.float32) * x.to(tl.float32)[None, :]
    return tl.sum(products.reshape(BLOCK_N, BLOCK_K // RUN, RUN), axis=2)


@triton.jit
def _scaled_runs(
    sums, x_scale_ptr, weight_scale_ptr, rows, first_row, first_column, depth,
    x_scale_block, weight_scale_row, weight_scale_block,
    X_E8M0: tl.constexpr, WEIGHT_E8M0: tl.constexpr, SCALE_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The sums of runs, each times both scales of its columns."""
    columns = first_column + tl.arange(0, BLOCK_K // RUN) * RUN
    inside, block = columns < depth, columns // K_BLOCK
    x_scales = tl.load(x_scale_ptr + block * x_scale_block, mask=inside, other=0)
    # One row's scales stand for all, if they are.
    shared = (first_row + tl.arange(0, 1)) if SCALE_ROWS % BLOCK_N == 0 else rows
    at = shared[:, None] // SCALE_ROWS * weight_scale_row + (block * weight_scale_block)[None, :]
    weight_scales = tl.load(weight_scale_ptr + at, mask=inside[None, :], other=0)
    return sums * as_scale(x_scales, X_E8M0)[None, :] * as_scale(weight_scales, WEIGHT_E8M0)


@triton.jit
def codes_vector_kernel(
    x_ptr,  # with DECODE bytes, as is the weight; else both of one native type
    x_scale_ptr,
    weight_ptr,
    weight_scale_ptr,
    bias_ptr,
    out_ptr,
    num_columns,
    weight_stride,
    x_scale_block,  # strides of scales: 0 where one serves all
    weight_scale_row,
    weight_scale_block,
    out_last,
    bias_stride,
    DEPTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    X_E8M0: tl.constexpr,
    WEIGHT_E8M0: tl.constexpr,
    SCALE_ROWS: tl.constexpr,  # of the weight that share a scale: 1 or 128
    SCALES_OF_BLOCKS: tl.constexpr,  # whether any scale changes along K
    DECODE: tl.constexpr,
    EVEN_N: tl.constexpr,
    OVERLAP: tl.constexpr,  # CUDA: launched while the kernel before it ends
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    EVEN_K: tl.constexpr = DEPTH % BLOCK_K == 0
    NUM_PIECES: tl.constexpr = (DEPTH + BLOCK_K - 1) // BLOCK_K
    first_row = tl.program_id(0).to(tl.int64) * BLOCK_N
    rows = first_row + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_K)
    # A row beyond the last reads the last: nobody stores what it gives.
    read = rows if EVEN_N else tl.minimum(rows, num_columns - 1)
    at = weight_ptr + read[:, None] * weight_stride + columns[None, :]
    if OVERLAP:
        gdc_launch_dependents()
    piece = rows_of(at, columns, DEPTH, EVEN_K)
    if not SCALES_OF_BLOCKS:
        scale = as_scale(read_ahead(weight_scale_ptr + read * weight_scale_row), WEIGHT_E8M0)
    if OVERLAP:
        gdc_wait()
    x_scale = as_scale(tl.load(x_scale_ptr), X_E8M0)
    acc = tl.zeros((BLOCK_N, BLOCK_K // RUN), dtype=tl.float32)
    for number in tl.static_range(NUM_PIECES):
        x = _row_of(x_ptr, number * BLOCK_K + columns, DEPTH, EVEN_K)
        current, start = piece, (number + 1) * BLOCK_K
        if number + 1 < NUM_PIECES:
            piece = rows_of(at + start, start + columns, DEPTH, EVEN_K)
        part = _in_runs(current, x, DECODE, BLOCK_N, BLOCK_K)
        if SCALES_OF_BLOCKS:
            part = _scaled_runs(
                *(part, x_scale_ptr, weight_scale_ptr, read, first_row, number * BLOCK_K, DEPTH),
                *(x_scale_block, weight_scale_row, weight_scale_block),
                *(X_E8M0, WEIGHT_E8M0, SCALE_ROWS, BLOCK_N, BLOCK_K),
            )
        elif number == 0:
            # NaN as the sum's factor is NaN in it, too. This uses the scale: a load that is used
            # at the end alone is moved there, and then every program ends by waiting for it.
            part += tl.where(x_scale != x_scale, float("nan"), 0.0)
        acc += part
    total = tl.sum(acc, axis=1)
    if not SCALES_OF_BLOCKS:
        total = total * x_scale * scale
    inside = rows < num_columns
    if HAS_BIAS:
        total += tl.load(bias_ptr + rows * bias_stride, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + rows * out_last, total.to(out_ptr.dtype.element_ty), mask=inside)
