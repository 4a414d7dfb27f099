"""Between a layer's qkv projection and its attention: norm, rotation, keys and values to slots.

One program has some heads of one token: of q, or of k and of v. Offsets into the cache are int64.
"""

import triton
import triton.language as tl

from syncline.model_ops_rocm.triton.kernels.dependent import await_inputs
from syncline.model_ops_rocm.triton.kernels.kv import store_heads
from syncline.model_ops_rocm.triton.kernels.norm import inverse_rms, weighted
from syncline.model_ops_rocm.triton.kernels.rotary import angles, partners, rotated


@triton.jit
def _normed_and_rotated(
    x_ptr,
    weight_ptr,
    angles_ptr,
    row,
    last,
    weight_stride,
    angles_strides,
    eps,
    position,
    num_positions,
    is_head,
    HEAD_DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    HAS_NORM: tl.constexpr,
    STYLE: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    columns = tl.arange(0, BLOCK_DIM)
    partner = partners(ROTARY, IS_INTERLEAVED, BLOCK_DIM)
    is_dim = columns < HEAD_DIM
    mask = is_head[:, None] & is_dim[None, :]
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    x = tl.load(x_ptr + row + (columns * last)[None, :], mask=mask, other=0.0).to(tl.float32)
    other = tl.load(x_ptr + row + (partner * last)[None, :], mask=mask, other=0.0).to(tl.float32)
    if HAS_NORM:
        weight = tl.load(weight_ptr + columns * weight_stride, mask=is_dim, other=0.0)
        other_weight = tl.load(weight_ptr + partner * weight_stride, mask=is_dim, other=0.0)
    # After the loads of x, which do not wait for the position.
    cos, sin = angles(
        angles_ptr,
        position,
        num_positions,
        angles_strides[0],
        angles_strides[1],
        ROTARY,
        IS_INTERLEAVED,
        BLOCK_DIM,
        dtype,
    )
    if HAS_NORM:
        inverse = inverse_rms(x, eps, HEAD_DIM)[:, None]
        x = weighted(x, inverse, weight.to(tl.float32)[None, :], dtype, STYLE)
        other = weighted(other, inverse, other_weight.to(tl.float32)[None, :], dtype, STYLE)
        x, other = x.to(tl.float32), other.to(tl.float32)
    return rotated(x, other, cos, sin, ROTARY, BLOCK_DIM, dtype)


@triton.jit(do_not_specialize=["num_positions", "num_slots", "scale_head", "eps"])
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
    scale_head,
    scale_block,
    scale_slot,
    NUM_Q_HEADS: tl.constexpr,
    NUM_K_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    HAS_NORM: tl.constexpr,
    STYLE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,  # places of `kv_places`, as in `kv`
    VALUES: tl.constexpr,
    SCALES_PER: tl.constexpr,
    CODE: tl.constexpr,
    CLAMP: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    OVERLAP: tl.constexpr,  # CUDA: launched while the kernel before it ends
):
    await_inputs(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    position = tl.load(positions_ptr + token * positions_stride).to(tl.int64)
    columns = tl.arange(0, BLOCK_DIM)
    NUM_Q_GROUPS: tl.constexpr = (NUM_Q_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    if group < NUM_Q_GROUPS:
        heads = group * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        is_head = heads < NUM_Q_HEADS
        turned = _normed_and_rotated(
            q_ptr,
            q_weight_ptr,
            angles_ptr,
            token * q_token + heads[:, None] * q_head,
            q_last,
            q_weight_stride,
            (angles_row, angles_last),
            eps,
            position,
            num_positions,
            is_head,
            HEAD_DIM,
            ROTARY,
            IS_INTERLEAVED,
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
        v_at = token * v_token + heads[:, None] * v_head + (columns * v_last)[None, :]
        mask = is_head[:, None] & (columns < HEAD_DIM)[None, :]
        v = tl.load(v_ptr + v_at, mask=mask, other=0.0)
        turned = _normed_and_rotated(
            k_ptr,
            k_weight_ptr,
            angles_ptr,
            token * k_token + heads[:, None] * k_head,
            k_last,
            k_weight_stride,
            (angles_row, angles_last),
            eps,
            position,
            num_positions,
            is_head,
            HEAD_DIM,
            ROTARY,
            IS_INTERLEAVED,
            HAS_NORM,
            STYLE,
            BLOCK_DIM,
        )
        # -1 writes nothing; nor does a slot that the pool has not, which a device cannot report.
        is_slot = (slot >= 0) & (slot < num_slots)
        is_written = is_head & is_slot
        slot = tl.where(is_slot, slot, 0)
        block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        scale_strides = (scale_head.to(tl.int64), scale_block, scale_slot)
        store_heads(
            turned,
            k_cache_ptr,
            k_scale_ptr,
            heads,
            is_written,
            block,
            offset,
            scale_strides,
            KEYS,
            CODE,
            NATIVE,
            CLAMP,
            SCALES_PER,
            HEAD_DIM,
            BLOCK_DIM,
        )
        store_heads(
            v,
            v_cache_ptr,
            v_scale_ptr,
            heads,
            is_written,
            block,
            offset,
            scale_strides,
            VALUES,
            CODE,
            NATIVE,
            CLAMP,
            SCALES_PER,
            HEAD_DIM,
            BLOCK_DIM,
        )
