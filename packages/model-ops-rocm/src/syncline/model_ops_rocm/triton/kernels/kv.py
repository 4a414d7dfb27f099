"""Writing a step's keys and values to their slots, and copying blocks; copies bits.

A layer's cache is two contiguous tensors [NB, K, BS, D]. Offsets into them are int64: a pool may
hold more than 2^31 elements.
"""

import triton
import triton.language as tl


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
