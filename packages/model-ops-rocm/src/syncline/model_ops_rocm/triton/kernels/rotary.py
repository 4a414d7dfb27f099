"""Rotary embedding of queries and keys in one launch, neox style.

Source: arXiv:2104.09864, rounded as transformers' Qwen3 does: each product, then the sum.
"""

import triton
import triton.language as tl


@triton.jit
def _rotate(
    x_ptr,
    out_ptr,
    x_strides,
    out_strides,
    token,
    heads,
    cos,
    sin,
    NUM_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    columns = tl.arange(0, BLOCK_HALF)
    mask = (heads < NUM_HEADS)[:, None] & (columns < HALF)[None, :]
    dtype = out_ptr.dtype.element_ty
    x_at = token * x_strides[0] + heads[:, None] * x_strides[1] + (columns * x_strides[2])[None, :]
    first = tl.load(x_ptr + x_at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + x_at + HALF * x_strides[2], mask=mask, other=0.0).to(tl.float32)
    # Rounded products; without fusion of multiply and add in float32, which the launch forbids.
    left = (first * cos).to(dtype).to(tl.float32) - (second * sin).to(dtype).to(tl.float32)
    right = (second * cos).to(dtype).to(tl.float32) + (first * sin).to(dtype).to(tl.float32)
    out_at = token * out_strides[0] + heads[:, None] * out_strides[1]
    out_at += (columns * out_strides[2])[None, :]
    tl.store(out_ptr + out_at, left.to(dtype), mask=mask)
    tl.store(out_ptr + out_at + HALF * out_strides[2], right.to(dtype), mask=mask)


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
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    columns = tl.arange(0, BLOCK_HALF)
    position = tl.load(positions_ptr + token * positions_stride).to(tl.int64)
    # A position outside the cache reads nothing and turns the token into NaN, which shows.
    is_known = (position >= 0) & (position < num_positions)
    row = cache_ptr + tl.where(is_known, position, 0) * cache_row
    mask = (columns < HALF) & is_known
    dtype = out_q_ptr.dtype.element_ty
    cos = tl.load(row + columns * cache_last, mask=mask, other=float("nan"))
    sin = tl.load(row + (columns + HALF) * cache_last, mask=mask, other=float("nan"))
    cos = cos.to(dtype).to(tl.float32)[None, :]
    sin = sin.to(dtype).to(tl.float32)[None, :]
    num_q_groups: tl.constexpr = (NUM_Q_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    if group < num_q_groups:
        heads = group * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        _rotate(
            q_ptr,
            out_q_ptr,
            (q_token, q_head, q_last),
            (out_q_token, out_q_head, out_q_last),
            token,
            heads,
            cos,
            sin,
            NUM_Q_HEADS,
            HALF,
            BLOCK_HALF,
        )
    else:
        heads = (group - num_q_groups) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        _rotate(
            k_ptr,
            out_k_ptr,
            (k_token, k_head, k_last),
            (out_k_token, out_k_head, out_k_last),
            token,
            heads,
            cos,
            sin,
            NUM_K_HEADS,
            HALF,
            BLOCK_HALF,
        )
