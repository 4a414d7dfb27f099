"""RMSNorm with an optional residual, and with codes for a result; knows rows, no model.

Source: arXiv:1910.07467, rounded by default as transformers' Qwen3RMSNorm does.
"""

import triton
import triton.language as tl

from syncline.model_ops_rocm.triton.kernels.dependent import await_inputs
from syncline.model_ops_rocm.triton.kernels.quantise import encoded_tile, store_scales


@triton.jit
def inverse_rms(x, eps, WIDTH: tl.constexpr):
    """Of float32 rows [R, W], zero beyond WIDTH: [R].

    A sum's order is that of the tile's layout. Wide rows have one layout in every kernel, since a
    tile is one row and what is stored beside x has x's shape and width, or another shape. Heads
    share a tile with others, in another number in each op, so they are summed in float64, where the
    sum is exact, in any order, unless squares differ by more than a factor of 2^20 or so.
    """
    squares = x * x
    if WIDTH <= 256:
        total = tl.sum(squares.to(tl.float64), axis=1).to(tl.float32)
    else:
        total = tl.sum(squares, axis=1)
    mean = tl.div_rn(total, 1.0 * WIDTH)
    return tl.div_rn(1.0, tl.sqrt_rn(mean + eps))


@triton.jit
def weighted(x, inverse, weight, DTYPE: tl.constexpr, STYLE: tl.constexpr):
    """The normalised x, in DTYPE; STYLE is a `NormStyle`."""
    normed = x * inverse
    if STYLE == "round_then_weight":
        normed = normed.to(DTYPE).to(tl.float32)
    elif STYLE == "one_plus_weight_then_round":
        weight = weight + 1.0
    return (normed * weight).to(DTYPE)


@triton.jit
def _normed_tile(
    x_ptr,
    weight_ptr,
    residual_ptr,
    eps,
    x_at,
    residual_at,
    weight_at,
    mask,
    weight_mask,
    WIDTH: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    STYLE: tl.constexpr,
):
    x = tl.load(x_ptr + x_at, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + weight_at, mask=weight_mask, other=0.0)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + residual_at, mask=mask, other=0.0).to(tl.float32)
        total = (residual + x).to(dtype)
        tl.store(residual_ptr + residual_at, total, mask=mask)
        x = total.to(tl.float32)
    inverse = inverse_rms(x, eps, WIDTH)
    return weighted(x, inverse[:, None], weight.to(tl.float32)[None, :], dtype, STYLE)


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
    STYLE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    OVERLAP: tl.constexpr,  # CUDA: launched while the kernel before it ends
):
    await_inputs(OVERLAP)
    # A tile is [BLOCK_ROWS, BLOCK_WIDTH]; BLOCK_WIDTH >= WIDTH, so a row is read once.
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.arange(0, BLOCK_WIDTH)
    mask = (rows < num_rows)[:, None] & (columns < WIDTH)[None, :]
    outer, inner = rows // INNER, rows % INNER
    result = _normed_tile(
        x_ptr,
        weight_ptr,
        residual_ptr,
        eps,
        (outer * x_outer + inner * x_inner)[:, None] + (columns * x_last)[None, :],
        (outer * residual_outer + inner * residual_inner)[:, None]
        + (columns * residual_last)[None, :],
        columns * weight_stride,
        mask,
        columns < WIDTH,
        WIDTH,
        HAS_RESIDUAL,
        STYLE,
    )
    out_at = (outer * out_outer + inner * out_inner)[:, None] + (columns * out_last)[None, :]
    tl.store(out_ptr + out_at, result, mask=mask)


@triton.jit(do_not_specialize=["num_rows", "eps"])
def rms_norm_quant_kernel(
    x_ptr,
    weight_ptr,
    residual_ptr,
    codes_ptr,
    scales_ptr,
    nonfinite_ptr,
    num_rows,
    eps,
    x_outer,
    x_inner,
    x_last,
    residual_outer,
    residual_inner,
    residual_last,
    codes_outer,
    codes_inner,
    codes_last,
    scales_outer,
    scales_inner,
    scales_last,
    weight_stride,
    INNER: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    STYLE: tl.constexpr,
    GROUP: tl.constexpr,  # columns that share a scale: at most BLOCK_WIDTH, a power of two
    HAS_FLAG: tl.constexpr,
    CODE: tl.constexpr,
    CLAMP: tl.constexpr,
    POWER: tl.constexpr,
    MANTISSA: tl.constexpr,
    E8M0_MODE: tl.constexpr,
    ZERO_IS_ONE: tl.constexpr,
    IS_GIVEN: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    OVERLAP: tl.constexpr,  # CUDA: launched while the kernel before it ends
):
    await_inputs(OVERLAP)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.arange(0, BLOCK_WIDTH)
    mask = (rows < num_rows)[:, None] & (columns < WIDTH)[None, :]
    outer, inner = rows // INNER, rows % INNER
    result = _normed_tile(
        x_ptr,
        weight_ptr,
        residual_ptr,
        eps,
        (outer * x_outer + inner * x_inner)[:, None] + (columns * x_last)[None, :],
        (outer * residual_outer + inner * residual_inner)[:, None]
        + (columns * residual_last)[None, :],
        columns * weight_stride,
        mask,
        columns < WIDTH,
        WIDTH,
        HAS_RESIDUAL,
        STYLE,
    )
    NUM_GROUPS: tl.constexpr = BLOCK_WIDTH // GROUP
    codes, scales, is_bad = encoded_tile(
        tl.reshape(result.to(tl.float32), (BLOCK_ROWS * NUM_GROUPS, GROUP)),
        scales_ptr,
        CODE,
        CLAMP,
        POWER,
        MANTISSA,
        E8M0_MODE,
        ZERO_IS_ONE,
        IS_GIVEN,
        NATIVE,
    )
    # In pieces, not in the shape of x: the layout of x, and so its sum, must be `rms_norm`'s.
    PIECE: tl.constexpr = 16 if BLOCK_WIDTH > 16 else 1
    piece = tl.arange(0, BLOCK_ROWS * BLOCK_WIDTH // PIECE)
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + piece // (BLOCK_WIDTH // PIECE)
    column = (piece % (BLOCK_WIDTH // PIECE) * PIECE)[:, None] + tl.arange(0, PIECE)[None, :]
    codes_at = (row // INNER * codes_outer + row % INNER * codes_inner)[:, None]
    tl.store(
        codes_ptr + codes_at + column * codes_last,
        tl.reshape(codes, (BLOCK_ROWS * BLOCK_WIDTH // PIECE, PIECE)),
        mask=(row < num_rows)[:, None] & (column < WIDTH),
    )
    groups = tl.arange(0, NUM_GROUPS)
    is_group = (rows < num_rows)[:, None] & (groups * GROUP < WIDTH)[None, :]
    scales_at = (outer * scales_outer + inner * scales_inner)[:, None]
    scales_at += (groups * scales_last)[None, :]
    store_scales(
        (scales_ptr, nonfinite_ptr),
        tl.reshape(scales, (BLOCK_ROWS, NUM_GROUPS)),
        tl.reshape(is_bad, (BLOCK_ROWS, NUM_GROUPS)),
        scales_at,
        is_group,
        IS_GIVEN,
        HAS_FLAG,
    )
