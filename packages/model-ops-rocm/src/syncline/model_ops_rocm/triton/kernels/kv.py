"""Writing a step's keys and values to their slots, and copying blocks.

A layer's cache is two contiguous tensors, [NB, K, BS, D] or in the order that eight numbers say, as
in `attention_tiles`. Offsets into them are int64: a pool may hold more than 2^31 elements.
"""

import triton
import triton.language as tl

from syncline.model_ops_rocm.triton.kernels.attention_tiles import along
from syncline.model_ops_rocm.triton.kernels.quant_cast import (
    clamped_quotients,
    codes_of,
    fp32_scales,
    magnitude_bits,
)


@triton.jit
def _write_one(
    x_ptr,
    cache_ptr,
    x_at,
    strides,
    cache_at,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    columns = tl.arange(0, BLOCK_DIM)
    mask = (heads < NUM_HEADS)[:, None] & (columns < HEAD_DIM)[None, :]
    source = x_ptr + x_at + heads[:, None] * strides[0] + columns[None, :] * strides[1]
    values = tl.load(source, mask=mask)
    target = cache_at + heads[:, None] * (BLOCK_SIZE * HEAD_DIM) + columns[None, :]
    tl.store(cache_ptr + target, values, mask=mask)


@triton.jit(do_not_specialize=["num_slots"])
def kv_write_kernel(
    k_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slots_ptr,
    num_slots,
    k_token,
    k_head,
    k_last,
    v_token,
    v_head,
    v_last,
    slots_stride,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token * slots_stride).to(tl.int64)
    # -1 writes nothing; nor does a slot that the pool has not, which a device cannot report.
    if (slot >= 0) & (slot < num_slots):
        block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        cache_at = (block * (NUM_HEADS * BLOCK_SIZE) + offset) * HEAD_DIM
        _write_one(
            k_ptr,
            k_cache_ptr,
            token * k_token,
            (k_head, k_last),
            cache_at,
            NUM_HEADS,
            HEAD_DIM,
            BLOCK_SIZE,
            BLOCK_HEADS,
            BLOCK_DIM,
        )
        _write_one(
            v_ptr,
            v_cache_ptr,
            token * v_token,
            (v_head, v_last),
            cache_at,
            NUM_HEADS,
            HEAD_DIM,
            BLOCK_SIZE,
            BLOCK_HEADS,
            BLOCK_DIM,
        )


@triton.jit
def _encode(x, scale, CODE: tl.constexpr, NATIVE: tl.constexpr, CLAMP: tl.constexpr):
    """Codes of x / scale, for scales that were given: NaN is the type's NaN."""
    clamped = tl.minimum(tl.maximum(tl.div_rn(x, scale), -1.0 * CLAMP), 1.0 * CLAMP)
    codes = codes_of(tl.where(x != x, 0.0, clamped), CODE, NATIVE)
    nan: tl.constexpr = 0x7F if CODE == "e4m3fn" else 0x80
    return tl.where(x != x, nan, codes).to(tl.uint8)


@triton.jit
def store_heads(
    values,  # [heads, BLOCK_DIM] of one token, zero beyond HEAD_DIM
    cache_ptr,
    scale_ptr,
    heads,
    is_head,  # which of them are written
    block,
    offset,
    scale_strides,
    PLACES: tl.constexpr,
    CODE: tl.constexpr,
    NATIVE: tl.constexpr,
    CLAMP: tl.constexpr,
    SCALES_PER: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """To their slot, encoded if the layout has scales."""
    dims = tl.arange(0, BLOCK_DIM)
    mask = is_head[:, None] & (dims < HEAD_DIM)[None, :]
    if SCALES_PER == 3:
        x = values.to(tl.float32)
        scale = fp32_scales(tl.max(magnitude_bits(x), 1), CLAMP, True)
        quotients = clamped_quotients(x, scale[:, None], CLAMP, True)
        values = codes_of(quotients, CODE, NATIVE)
        at = heads * scale_strides[0] + block * scale_strides[1] + offset * scale_strides[2]
        tl.store(scale_ptr + at, scale, mask=is_head)
    elif SCALES_PER == 2:
        scale = tl.load(scale_ptr + heads, mask=is_head, other=1.0)
        values = _encode(values.to(tl.float32), scale[:, None], CODE, NATIVE, CLAMP)
    elif SCALES_PER == 1:
        scale = tl.load(scale_ptr)
        values = _encode(values.to(tl.float32), scale, CODE, NATIVE, CLAMP)
    at = block * PLACES[0] + along(offset, PLACES[2], PLACES[3], PLACES[4])
    at += heads[:, None] * PLACES[1]
    target = at + along(dims, PLACES[5], PLACES[6], PLACES[7])[None, :]
    tl.store(cache_ptr + target, values, mask=mask)


@triton.jit
def _write_stored(
    x_ptr,
    cache_ptr,
    scale_ptr,
    x_at,
    strides,
    block,
    offset,
    scale_strides,
    PLACES: tl.constexpr,
    CODE: tl.constexpr,
    NATIVE: tl.constexpr,
    CLAMP: tl.constexpr,
    SCALES_PER: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    dims = tl.arange(0, BLOCK_DIM)
    is_head = heads < NUM_HEADS
    mask = is_head[:, None] & (dims < HEAD_DIM)[None, :]
    source = x_ptr + x_at + heads[:, None] * strides[0] + dims[None, :] * strides[1]
    store_heads(
        tl.load(source, mask=mask, other=0),
        cache_ptr,
        scale_ptr,
        heads,
        is_head,
        block,
        offset,
        scale_strides,
        PLACES,
        CODE,
        NATIVE,
        CLAMP,
        SCALES_PER,
        HEAD_DIM,
        BLOCK_DIM,
    )


@triton.jit(do_not_specialize=["num_slots", "scale_head"])
def kv_write_layout_kernel(
    k_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    k_scale_ptr,
    v_scale_ptr,
    slots_ptr,
    num_slots,
    k_token,
    k_head,
    k_last,
    v_token,
    v_head,
    v_last,
    slots_stride,
    scale_head,
    scale_block,
    scale_slot,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    CODE: tl.constexpr,
    NATIVE: tl.constexpr,
    CLAMP: tl.constexpr,
    SCALES_PER: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token * slots_stride).to(tl.int64)
    if (slot >= 0) & (slot < num_slots):
        block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        _write_stored(
            k_ptr,
            k_cache_ptr,
            k_scale_ptr,
            token * k_token,
            (k_head, k_last),
            block,
            offset,
            (scale_head.to(tl.int64), scale_block, scale_slot),
            KEYS,
            CODE,
            NATIVE,
            CLAMP,
            SCALES_PER,
            NUM_HEADS,
            HEAD_DIM,
            BLOCK_HEADS,
            BLOCK_DIM,
        )
        _write_stored(
            v_ptr,
            v_cache_ptr,
            v_scale_ptr,
            token * v_token,
            (v_head, v_last),
            block,
            offset,
            (scale_head.to(tl.int64), scale_block, scale_slot),
            VALUES,
            CODE,
            NATIVE,
            CLAMP,
            SCALES_PER,
            NUM_HEADS,
            HEAD_DIM,
            BLOCK_HEADS,
            BLOCK_DIM,
        )


@triton.jit(do_not_specialize=["num_blocks"])
def copy_blocks_kernel(
    k_source_ptr,
    v_source_ptr,
    k_target_ptr,
    v_target_ptr,
    pairs_ptr,  # int64 or int32 [C, 2], contiguous: source, destination
    num_blocks,
    BLOCK_ELEMENTS: tl.constexpr,  # of one cache
    FROM_POOL: tl.constexpr,  # block -> entry of the workspace; else entry -> block
    BLOCK_WIDTH: tl.constexpr,
):
    entry = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    source = tl.load(pairs_ptr + 2 * entry).to(tl.int64)
    target = tl.load(pairs_ptr + 2 * entry + 1).to(tl.int64)
    is_source = (source >= 0) & (source < num_blocks)
    if is_source & (target >= 0) & (target < num_blocks):
        if FROM_POOL:
            start, stop = source * BLOCK_ELEMENTS, entry * BLOCK_ELEMENTS
        else:
            start, stop = entry * BLOCK_ELEMENTS, target * BLOCK_ELEMENTS
        mask = columns < BLOCK_ELEMENTS
        keys = tl.load(k_source_ptr + start + columns, mask=mask)
        values = tl.load(v_source_ptr + start + columns, mask=mask)
        tl.store(k_target_ptr + stop + columns, keys, mask=mask)
        tl.store(v_target_ptr + stop + columns, values, mask=mask)
