"""SwiGLU's activation, also with codes for a result; knows nothing of the projections around it."""

import triton
import triton.language as tl

from syncline.model_ops_rocm.triton.kernels.dependent import await_inputs
from syncline.model_ops_rocm.triton.kernels.quantise import groups_of_program, store_groups


@triton.jit
def _activated(x_ptr, gate_at, up_at, mask):
    """silu(gate) * up in x's dtype; zero where the mask is not."""
    gate = tl.load(x_ptr + gate_at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + up_at, mask=mask, other=0.0).to(tl.float32)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    # Rounded before the product; exp overflows to inf for a very negative gate, and gate / inf = 0.
    # The division is within 2 units, which is nothing beside exp's error, and takes a fourth.
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    return (silu * up).to(dtype)


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
    OVERLAP: tl.constexpr,  # CUDA: launched while the kernel before it ends
):
    await_inputs(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    mask = columns < WIDTH
    outer, inner = row // INNER, row % INNER
    x_row = x_ptr + outer * x_outer + inner * x_inner
    product = _activated(x_row, columns * x_last, (columns + WIDTH) * x_last, mask)
    out_row = out_ptr + outer * out_outer + inner * out_inner
    tl.store(out_row + columns * out_last, product, mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def silu_and_mul_quant_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    nonfinite_ptr,
    num_rows,
    x_outer,
    x_inner,
    x_last,
    codes_outer,
    codes_inner,
    codes_last,
    scales_outer,
    scales_inner,
    scales_last,
    INNER: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,  # columns that share a scale, or one piece of a row
    HAS_FLAG: tl.constexpr,
    CODE: tl.constexpr,
    CLAMP: tl.constexpr,
    POWER: tl.constexpr,
    MANTISSA: tl.constexpr,
    E8M0_MODE: tl.constexpr,
    ZERO_IS_ONE: tl.constexpr,
    IS_GIVEN: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_ELEMENTS: tl.constexpr,  # of one program, unless one group has more
    BLOCK_WIDTH: tl.constexpr,  # at least GROUP
    OVERLAP: tl.constexpr,  # CUDA: launched while the kernel before it ends
):
    await_inputs(OVERLAP)
    row, group, columns, mask = groups_of_program(
        num_rows, WIDTH, GROUP, BLOCK_ELEMENTS, BLOCK_WIDTH
    )
    outer, inner = row // INNER, row % INNER
    x_row = (outer * x_outer + inner * x_inner)[:, None]
    product = _activated(x_ptr, x_row + columns * x_last, x_row + (columns + WIDTH) * x_last, mask)
    store_groups(
        product.to(tl.float32),
        (codes_ptr, scales_ptr, nonfinite_ptr),
        (outer, inner, group),
        columns,
        (codes_outer, codes_inner, codes_last, scales_outer, scales_inner, scales_last),
        row < num_rows,
        mask,
        HAS_FLAG,
        CODE,
        CLAMP,
        POWER,
        MANTISSA,
        E8M0_MODE,
        ZERO_IS_ONE,
        IS_GIVEN,
        NATIVE,
    )
