"""Linear of one token: a row of the weight times a vector, without a matrix instruction.

Unit: BLOCK_N rows of a row-major weight. Where launches overlap, the first piece of them is asked
for before the kernels ahead have ended: it depends on none of them, and it is what takes the time.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def rows_of(at, columns, depth, EVEN_K: tl.constexpr):
    """A piece of the rows; read once, so it need not stay in the cache."""
    if EVEN_K:
        piece = tl.load(at, eviction_policy="evict_first")
    else:
        mask = (columns < depth)[None, :]
        piece = tl.load(at, mask=mask, other=0.0, eviction_policy="evict_first")
    return piece


@triton.jit
def linear_vector_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    num_columns,
    x_last,
    weight_stride,
    out_last,
    bias_stride,
    DEPTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN_N: tl.constexpr,
    OVERLAP: tl.constexpr,  # CUDA: launched while the kernel before it ends
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    RUN: tl.constexpr = 8
    EVEN_K: tl.constexpr = DEPTH % BLOCK_K == 0
    NUM_PIECES: tl.constexpr = (DEPTH + BLOCK_K - 1) // BLOCK_K
    rows = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_K)
    # A row beyond the last reads the last: nobody stores what it gives.
    read = rows if EVEN_N else tl.minimum(rows, num_columns - 1)
    at = weight_ptr + read[:, None] * weight_stride + columns[None, :]
    if OVERLAP:
        gdc_launch_dependents()
    piece = rows_of(at, columns, DEPTH, EVEN_K)
    if OVERLAP:
        gdc_wait()
    # Each thread adds up the columns of its own 16 bytes at once, which leaves registers for loads.
    acc = tl.zeros((BLOCK_N, BLOCK_K // RUN), dtype=tl.float32)
    for number in tl.static_range(NUM_PIECES):
        x_columns = number * BLOCK_K + columns
        x = tl.load(x_ptr + x_columns * x_last, mask=x_columns < DEPTH, other=0.0)
        current = piece
        if number + 1 < NUM_PIECES:
            start = (number + 1) * BLOCK_K
            piece = rows_of(at + start, start + columns, DEPTH, EVEN_K)
        products = current.to(tl.float32) * x.to(tl.float32)[None, :]
        acc += tl.sum(products.reshape(BLOCK_N, BLOCK_K // RUN, RUN), axis=2)
    total = tl.sum(acc, axis=1)
    inside = rows < num_columns
    if HAS_BIAS:
        total += tl.load(bias_ptr + rows * bias_stride, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + rows * out_last, total.to(out_ptr.dtype.element_ty), mask=inside)
