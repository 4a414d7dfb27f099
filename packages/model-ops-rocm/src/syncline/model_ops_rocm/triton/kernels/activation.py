"""SwiGLU's activation; knows nothing of the projections around it."""

import triton
import triton.language as tl


@triton.jit
def silu_and_mul_kernel(
    x_ptr,
    out_ptr,
    x_outer,
    x_inner,
    x_last,
    out_outer,
    out_inner,
    out_last,
    INNER: tl.constexpr,
    WIDTH: tl.constexpr,  # of the result: a row of x holds WIDTH gates, then WIDTH ups
    BLOCK_WIDTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    mask = columns < WIDTH
    outer, inner = row // INNER, row % INNER
    x_row = x_ptr + outer * x_outer + inner * x_inner
    gate = tl.load(x_row + columns * x_last, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_row + (columns + WIDTH) * x_last, mask=mask, other=0.0).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    # Rounded before the product; exp overflows to inf for a very negative gate, and gate / inf = 0.
    activated = tl.div_rn(gate, 1.0 + tl.exp(-gate)).to(dtype).to(tl.float32)
    out_row = out_ptr + outer * out_outer + inner * out_inner
    tl.store(out_row + columns * out_last, (activated * up).to(dtype), mask=mask)
