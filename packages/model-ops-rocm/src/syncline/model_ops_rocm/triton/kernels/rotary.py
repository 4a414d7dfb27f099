"""Rotary embedding of queries and keys in one launch.

Source: arXiv:2104.09864, rounded as transformers' Qwen3 does: each product, then the sum. Every
dimension is computed from itself and its partner, with a sine that is negative for the first of a
pair: (-a) + b is b - a, bit for bit.
"""

import triton
import triton.language as tl

from syncline.model_ops_rocm.triton.kernels.dependent import await_inputs


@triton.jit
def partners(ROTARY: tl.constexpr, IS_INTERLEAVED: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """With which dimension each one turns: itself from ROTARY on."""
    columns = tl.arange(0, BLOCK_DIM)
    if IS_INTERLEAVED:
        partner = columns ^ 1
    else:
        partner = tl.where(columns < ROTARY // 2, columns + ROTARY // 2, columns - ROTARY // 2)
    return tl.where(columns < ROTARY, partner, columns)


@triton.jit
def angles(
    cache_ptr,
    position,
    num_positions,
    cache_row,
    cache_last,
    ROTARY: tl.constexpr,  # dimensions of a head that turn
    IS_INTERLEAVED: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """(cos, signed sin) of every dimension at an int64 position, rounded to DTYPE."""
    columns = tl.arange(0, BLOCK_DIM)
    HALF: tl.constexpr = ROTARY // 2
    if IS_INTERLEAVED:
        angle, is_first = columns // 2, columns % 2 == 0
    else:
        is_first = columns < HALF
        angle = tl.where(is_first, columns, columns - HALF)
    # A position outside the cache reads nothing and turns the token into NaN, which shows.
    is_known = (position >= 0) & (position < num_positions)
    row = cache_ptr + tl.where(is_known, position, 0) * cache_row
    mask = (columns < ROTARY) & is_known
    cos = tl.load(row + angle * cache_last, mask=mask, other=float("nan"))
    sin = tl.load(row + (angle + HALF) * cache_last, mask=mask, other=float("nan"))
    cos, sin = cos.to(DTYPE).to(tl.float32), sin.to(DTYPE).to(tl.float32)
    return cos, tl.where(is_first, -sin, sin)


@triton.jit
def rotated(
    x, partner, cos, sin, ROTARY: tl.constexpr, BLOCK_DIM: tl.constexpr, DTYPE: tl.constexpr
):
    """DTYPE [heads, BLOCK_DIM] of float32 tiles; dimensions from ROTARY on stay what they are."""
    # Rounded products; without fusion of multiply and add in float32, which the launch forbids.
    left = (x * cos[None, :]).to(DTYPE).to(tl.float32)
    right = (partner * sin[None, :]).to(DTYPE).to(tl.float32)
    turned = (left + right).to(DTYPE)
    if ROTARY < BLOCK_DIM:
        turned = tl.where((tl.arange(0, BLOCK_DIM) < ROTARY)[None, :], turned, x.to(DTYPE))
    return turned


@triton.jit
def _rotate(
    x_ptr,
    out_ptr,
    x_strides,
    out_strides,
    cache_ptr,
    cache_strides,
    token,
    heads,
    position,
    num_positions,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    columns = tl.arange(0, BLOCK_DIM)
    partner = partners(ROTARY, IS_INTERLEAVED, BLOCK_DIM)
    mask = (heads < NUM_HEADS)[:, None] & (columns < HEAD_DIM)[None, :]
    row = x_ptr + token * x_strides[0] + heads[:, None] * x_strides[1]
    x = tl.load(row + (columns * x_strides[2])[None, :], mask=mask, other=0.0)
    other = tl.load(row + (partner * x_strides[2])[None, :], mask=mask, other=0.0)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    # After the loads of x, which do not wait for the position.
    cos, sin = angles(
        cache_ptr,
        position,
        num_positions,
        cache_strides[0],
        cache_strides[1],
        ROTARY,
        IS_INTERLEAVED,
        BLOCK_DIM,
        dtype,
    )
    turned = rotated(x.to(tl.float32), other.to(tl.float32), cos, sin, ROTARY, BLOCK_DIM, dtype)
    out_at = token * out_strides[0] + heads[:, None] * out_strides[1]
    tl.store(out_ptr + out_at + (columns * out_strides[2])[None, :], turned, mask=mask)


@triton.jit(do_not_specialize=["num_positions"])
def rotary_kernel(
    q_ptr,
    k_ptr,
    cache_ptr,
    positions_ptr,
    out_q_ptr,
    out_k_ptr,
    num_positions,
    q_token,
    q_head,
    q_last,
    k_token,
    k_head,
    k_last,
    out_q_token,
    out_q_head,
    out_q_last,
    out_k_token,
    out_k_head,
    out_k_last,
    cache_row,
    cache_last,
    positions_stride,
    NUM_Q_HEADS: tl.constexpr,
    NUM_K_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    OVERLAP: tl.constexpr,  # CUDA: launched while the kernel before it ends
):
    await_inputs(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    position = tl.load(positions_ptr + token * positions_stride).to(tl.int64)
    num_q_groups: tl.constexpr = (NUM_Q_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    if group < num_q_groups:
        _rotate(
            q_ptr,
            out_q_ptr,
            (q_token, q_head, q_last),
            (out_q_token, out_q_head, out_q_last),
            cache_ptr,
            (cache_row, cache_last),
            token,
            group * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS),
            position,
            num_positions,
            NUM_Q_HEADS,
            HEAD_DIM,
            ROTARY,
            IS_INTERLEAVED,
            BLOCK_DIM,
        )
    else:
        _rotate(
            k_ptr,
            out_k_ptr,
            (k_token, k_head, k_last),
            (out_k_token, out_k_head, out_k_last),
            cache_ptr,
            (cache_row, cache_last),
            token,
            (group - num_q_groups) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS),
            position,
            num_positions,
            NUM_K_HEADS,
            HEAD_DIM,
            ROTARY,
            IS_INTERLEAVED,
            BLOCK_DIM,
        )
