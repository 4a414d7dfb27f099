"""Between a layer's qkv projection and its attention: norm, rotation, keys and values to slots.

One program has some heads of one token: of q, or of k and of v. A cache is walked by the strides of
its logical [NB, K, BS, D]; offsets into it are int64.
"""

import triton
import triton.language as tl

from syncline.model_ops_rocm.triton.kernels.norm import inverse_rms, weighted
from syncline.model_ops_rocm.triton.kernels.quant_cast import (
    codes_of,
    fp32_scales,
    magnitude_bits,
)
from syncline.model_ops_rocm.triton.kernels.rotary import angles, rotated


@triton.jit
def _normed_and_rotated(
    x_ptr,
    weight_ptr,
    row,
    last,
    weight_stride,
    eps,
    is_head,
    cos,
    sin,
    partner,
    HEAD_DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    HAS_NORM: tl.constexpr,
    STYLE: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    columns = tl.arange(0, BLOCK_DIM)
    mask = is_head[:, None] & (columns < HEAD_DIM)[None, :]
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    x = tl.load(x_ptr + row + (columns * last)[None, :], mask=mask, other=0.0).to(tl.float32)
    other = tl.load(x_ptr + row + (partner * last)[None, :], mask=mask, other=0.0).to(tl.float32)
    if HAS_NORM:
        inverse = inverse_rms(x, eps, HEAD_DIM)[:, None]
        is_dim = columns < HEAD_DIM
        weight = tl.load(weight_ptr + columns * weight_stride, mask=is_dim, other=0.0)
        other_weight = tl.load(weight_ptr + partner * weight_stride, mask=is_dim, other=0.0)
        x = weighted(x, inverse, weight.to(tl.float32)[None, :], dtype, STYLE)
        other = weighted(other, inverse, other_weight.to(tl.float32)[None, :], dtype, STYLE)
        x, other = x.to(tl.float32), other.to(tl.float32)
    return rotated(x, other, cos, sin, ROTARY, BLOCK_DIM, dtype)


@triton.jit
def _store_tokens(
    x,  # [heads, D] in q's dtype, zero beyond D
    cache_ptr,
    scale_ptr,
    cache_at,
    scale_at,  # per head [heads] or per tensor; what is read, or written per token
    cache_last,
    is_head,
    HEAD_DIM: tl.constexpr,
    SCALE: tl.constexpr,  # a `KVScale`
    CODE: tl.constexpr,
    CLAMP: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    columns = tl.arange(0, BLOCK_DIM)
    mask = is_head[:, None] & (columns < HEAD_DIM)[None, :]
    at = cache_at[:, None] + (columns * cache_last)[None, :]
    if SCALE == "none":
        tl.store(cache_ptr + at, x, mask=mask)
    else:
        x = x.to(tl.float32)
        if SCALE == "token":
            bits = tl.max(magnitude_bits(x), axis=1)
            scales = fp32_scales(bits, CLAMP, True)
            tl.store(scale_ptr + scale_at, scales, mask=is_head)
            # Where the scale is NaN, codes are zero.
            usable = (bits < 0x7F800000)[:, None]
            quotients = tl.div_rn(tl.where(usable, x, 0.0), tl.where(usable, scales[:, None], 1.0))
        else:
            scales = tl.load(scale_ptr + scale_at, mask=is_head, other=1.0)
            quotients = tl.div_rn(x, scales[:, None])
        is_nan = magnitude_bits(quotients) > 0x7F800000
        quotients = tl.where(is_nan, 0.0, quotients)
        quotients = tl.minimum(tl.maximum(quotients, -1.0 * CLAMP), 1.0 * CLAMP)
        codes = codes_of(quotients, CODE, NATIVE)
        nan_code: tl.constexpr = 0x7F if CODE == "e4m3fn" else 0x80
        tl.store(cache_ptr + at, tl.where(is_nan, nan_code, codes).to(tl.uint8), mask=mask)


@triton.jit(do_not_specialize=["num_positions", "num_slots", "eps"])
def qk_norm_rope_kv_write_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    q_weight_ptr,
    k_weight_ptr,
    angles_ptr,
    positions_ptr,
    k_cache_ptr,
    v_cache_ptr,
    k_scale_ptr,
    v_scale_ptr,
    slots_ptr,
    num_positions,
    num_slots,
    eps,
    q_token,
    q_head,
    q_last,
    k_token,
    k_head,
    k_last,
    v_token,
    v_head,
    v_last,
    out_token,
    out_head,
    out_last,
    q_weight_stride,
    k_weight_stride,
    angles_row,
    angles_last,
    positions_stride,
    slots_stride,
    NUM_Q_HEADS: tl.constexpr,
    NUM_K_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    HAS_NORM: tl.constexpr,
    STYLE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    # Strides of logical [NB, K, BS, D], which follow from the sizes above and the order.
    CACHE_BLOCK: tl.constexpr,
    K_HEAD: tl.constexpr,
    K_SLOT: tl.constexpr,
    K_LAST: tl.constexpr,
    V_HEAD: tl.constexpr,
    V_SLOT: tl.constexpr,
    V_LAST: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
    SCALE_HEAD: tl.constexpr,
    SCALE_SLOT: tl.constexpr,
    SCALE: tl.constexpr,
    CODE: tl.constexpr,
    CLAMP: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    cos, sin, partner = angles(
        angles_ptr,
        positions_ptr,
        token,
        num_positions,
        angles_row,
        angles_last,
        positions_stride,
        ROTARY,
        IS_INTERLEAVED,
        BLOCK_DIM,
        q_ptr.dtype.element_ty,
    )
    columns = tl.arange(0, BLOCK_DIM)
    NUM_Q_GROUPS: tl.constexpr = (NUM_Q_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    if group < NUM_Q_GROUPS:
        heads = group * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        is_head = heads < NUM_Q_HEADS
        turned = _normed_and_rotated(
            q_ptr,
            q_weight_ptr,
            token * q_token + heads[:, None] * q_head,
            q_last,
            q_weight_stride,
            eps,
            is_head,
            cos,
            sin,
            partner,
            HEAD_DIM,
            ROTARY,
            HAS_NORM,
            STYLE,
            BLOCK_DIM,
        )
        mask = is_head[:, None] & (columns < HEAD_DIM)[None, :]
        out_at = token * out_token + heads[:, None] * out_head + (columns * out_last)[None, :]
        tl.store(out_ptr + out_at, turned, mask=mask)
    else:
        heads = (group - NUM_Q_GROUPS) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        is_head = heads < NUM_K_HEADS
        slot = tl.load(slots_ptr + token * slots_stride).to(tl.int64)
        # -1 writes nothing; nor does a slot that the pool has not, which a device cannot report.
        if (slot >= 0) & (slot < num_slots):
            turned = _normed_and_rotated(
                k_ptr,
                k_weight_ptr,
                token * k_token + heads[:, None] * k_head,
                k_last,
                k_weight_stride,
                eps,
                is_head,
                cos,
                sin,
                partner,
                HEAD_DIM,
                ROTARY,
                HAS_NORM,
                STYLE,
                BLOCK_DIM,
            )
            block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
            scale_at = block * SCALE_BLOCK + heads * SCALE_HEAD + offset * SCALE_SLOT
            _store_tokens(
                turned,
                k_cache_ptr,
                k_scale_ptr,
                block * CACHE_BLOCK + heads * K_HEAD + offset * K_SLOT,
                scale_at,
                K_LAST,
                is_head,
                HEAD_DIM,
                SCALE,
                CODE,
                CLAMP,
                NATIVE,
                BLOCK_DIM,
            )
            v_at = token * v_token + heads[:, None] * v_head + (columns * v_last)[None, :]
            mask = is_head[:, None] & (columns < HEAD_DIM)[None, :]
            _store_tokens(
                tl.load(v_ptr + v_at, mask=mask, other=0.0),
                v_cache_ptr,
                v_scale_ptr,
                block * CACHE_BLOCK + heads * V_HEAD + offset * V_SLOT,
                scale_at,
                V_LAST,
                is_head,
                HEAD_DIM,
                SCALE,
                CODE,
                CLAMP,
                NATIVE,
                BLOCK_DIM,
            )
