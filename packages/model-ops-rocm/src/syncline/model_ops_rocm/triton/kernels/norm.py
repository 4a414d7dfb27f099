"""RMSNorm with an optional residual; knows rows and their strides, no model.

Source: arXiv:1910.07467, rounded as transformers' Qwen3RMSNorm does.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows", "eps"])
def rms_norm_kernel(
    x_ptr,
    weight_ptr,
    residual_ptr,
    out_ptr,
    num_rows,
    eps,
    x_outer,
    x_inner,
    x_last,
    residual_outer,
    residual_inner,
    residual_last,
    out_outer,
    out_inner,
    out_last,
    weight_stride,
    INNER: tl.constexpr,  # rows per outer index: heads of a token, or 1
    WIDTH: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    # A tile is [BLOCK_ROWS, BLOCK_WIDTH]; BLOCK_WIDTH >= WIDTH, so a row is read once.
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.arange(0, BLOCK_WIDTH)
    mask = (rows < num_rows)[:, None] & (columns < WIDTH)[None, :]
    outer, inner = rows // INNER, rows % INNER
    x_at = (outer * x_outer + inner * x_inner)[:, None] + (columns * x_last)[None, :]
    x = tl.load(x_ptr + x_at, mask=mask, other=0.0).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    if HAS_RESIDUAL:
        residual_at = (outer * residual_outer + inner * residual_inner)[:, None]
        residual_at += (columns * residual_last)[None, :]
        residual = tl.load(residual_ptr + residual_at, mask=mask, other=0.0).to(tl.float32)
        total = (residual + x).to(dtype)
        tl.store(residual_ptr + residual_at, total, mask=mask)
        x = total.to(tl.float32)
    mean = tl.div_rn(tl.sum(x * x, axis=1), 1.0 * WIDTH)
    inverse = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
    normed = (x * inverse[:, None]).to(dtype).to(tl.float32)
    weight = tl.load(weight_ptr + columns * weight_stride, mask=columns < WIDTH, other=0.0)
    result = (normed * weight.to(tl.float32)[None, :]).to(dtype)
    out_at = (outer * out_outer + inner * out_inner)[:, None] + (columns * out_last)[None, :]
    tl.store(out_ptr + out_at, result, mask=mask)
