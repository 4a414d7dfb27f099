"""Paged attention: decode rows with split KV, rows with many queries, and both in one step.

Unit: one launch. Every length and table is read on the device, so a recorded launch serves other
ones; what a grid is larger than the step ends at once. Offsets of blocks are int64.
"""

import triton
import triton.language as tl

from syncline.model_ops_rocm.triton.kernels.attention_tiles import (
    LOG2_E,
    blocks_of,
    finished,
    in_half,
    query_rows,
    start_state,
    walk,
)
from syncline.model_ops_rocm.triton.kernels.dependent import await_turn


@triton.jit
def _queries(q_ptr, strides, token, heads, is_row, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    dims = tl.arange(0, BLOCK_D)
    at = token.to(tl.int64) * strides[0] + heads * strides[1]
    mask = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    return tl.load(q_ptr + at[:, None] + (dims * strides[2])[None, :], mask=mask, other=0.0)


@triton.jit
def _store(ptr, strides, token, heads, is_row, rows, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    dims = tl.arange(0, BLOCK_D)
    at = token.to(tl.int64) * strides[0] + heads * strides[1]
    mask = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    target = ptr + at[:, None] + (dims * strides[2])[None, :]
    tl.store(target, rows.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _scale_of(scale_ptr, kv_head, PER: tl.constexpr):
    """What all of a head's numbers are multiplied by: PER 1 is one scale for the tensor, 2 one
    per head; 0 is none, and 3 one per token, which a tile multiplies by."""
    if PER == 1:
        return tl.load(scale_ptr)
    elif PER == 2:
        return tl.load(scale_ptr + kv_head)
    else:
        return 1.0


@triton.jit(
    do_not_specialize=[
        "num_splits",
        "lse_part",
        "lse_token",
        "lse_head",
        "table_row",
        "table_tokens",
    ],
    do_not_specialize_on_alignment=["lse_ptr", "lens_ptr", "table_ptr"],
)
def decode_kernel(  # noqa: PLR0915 - one program
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,  # [T, N, D], or float32 [splits, T, N, D]
    lse_ptr,  # None, or float32 [T, N], or float32 [splits, T, N]
    k_scale_ptr,
    v_scale_ptr,
    sinks_ptr,
    lens_ptr,
    table_ptr,
    qk_scale,
    num_splits,
    q_token,
    q_head,
    q_last,
    out_part,
    out_token,
    out_head,
    out_last,
    lse_part,
    lse_token,
    lse_head,
    table_row,
    table_last,
    table_tokens,  # that a row of it has room for
    scale_head,
    scale_block,
    scale_slot,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PACKED: tl.constexpr,
    NUM_Q_BLOCKS: tl.constexpr,
    Q_LEN: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    OVERLAP: tl.constexpr,
    WINDOW: tl.constexpr,
    SHAPE: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    CODE: tl.constexpr,
    SCALES_PER: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Program (row, key/value head, group of its query heads, block of queries; split)."""
    NUM_GROUPS: tl.constexpr = (GROUP + PACKED - 1) // PACKED
    BLOCK_Q: tl.constexpr = BLOCK_M // PACKED
    HEAD_DIM: tl.constexpr = SHAPE[1]
    BLOCK_D: tl.constexpr = SHAPE[2]
    await_turn(OVERLAP)
    unit, split = tl.program_id(0), tl.program_id(1)
    q_block = unit % NUM_Q_BLOCKS
    unit = unit // NUM_Q_BLOCKS
    head_group = unit % NUM_GROUPS
    unit = unit // NUM_GROUPS
    kv_head = unit % NUM_KV_HEADS
    row = unit // NUM_KV_HEADS
    q_start = row * Q_LEN
    table = (table_ptr + row.to(tl.int64) * table_row, table_last)
    seq_len = tl.load(lens_ptr + row).to(tl.int32)
    first_tile = split
    if WINDOW == 0:
        # Started beside the load of the length, not after it: the entry exists, whatever it holds.
        is_entry = first_tile * BLOCK_N < table_tokens
        block = blocks_of(table, first_tile * BLOCK_N, is_entry, seq_len, SHAPE[0], BLOCK_N)
    tokens, heads, is_row = query_rows(q_block, Q_LEN, kv_head, head_group, BLOCK_M, PACKED, GROUP)
    q = _queries(
        q_ptr, (q_token, q_head, q_last), q_start + tokens, heads, is_row, HEAD_DIM, BLOCK_D
    )
    first_position = seq_len - Q_LEN + q_block * BLOCK_Q
    stop_position = tl.minimum(first_position + BLOCK_Q, seq_len)
    num_tiles = tl.cdiv(tl.maximum(stop_position, 0), BLOCK_N)
    if WINDOW > 0:
        first_tile += tl.maximum(first_position - WINDOW + 1, 0) // BLOCK_N
        is_entry = first_tile < num_tiles
        block = blocks_of(table, first_tile * BLOCK_N, is_entry, seq_len, SHAPE[0], BLOCK_N)
    if IS_SPLIT:
        out_ptr += split.to(tl.int64) * out_part
        lse_ptr += split.to(tl.int64) * lse_part
        lse_at = (q_start + tokens).to(tl.int64) * lse_token + heads * lse_head
        if (split > 0) & (first_tile >= num_tiles):
            tl.store(lse_ptr + lse_at, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=is_row)
            return
    q, factor = in_half(q, CODE != 0)
    factor *= qk_scale * LOG2_E * _scale_of(k_scale_ptr, kv_head, SCALES_PER)
    scales = (k_scale_ptr, v_scale_ptr, kv_head.to(tl.int64) * scale_head, scale_block, scale_slot)
    state = start_state(heads, is_row, sinks_ptr, split == 0, BLOCK_M, BLOCK_D)
    # Splits take turns: which tile is first does not depend on the length.
    state = walk(
        state,
        q,
        seq_len - Q_LEN + tokens,
        (first_tile, num_tiles, num_splits if IS_SPLIT else 1),
        block,
        (k_ptr + kv_head * KEYS[1], v_ptr + kv_head * VALUES[1]),
        table,
        scales,
        seq_len,
        factor,
        WINDOW,
        True,
        SHAPE,
        KEYS,
        VALUES,
        CODE,
        SCALES_PER,
        q_ptr.dtype.element_ty,
        BLOCK_N,
    )
    mean, lse = finished(state, _scale_of(v_scale_ptr, kv_head, SCALES_PER))
    if seq_len <= 0:
        mean = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
        lse = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    strides = (out_token, out_head, out_last)
    _store(out_ptr, strides, q_start + tokens, heads, is_row, mean, HEAD_DIM, BLOCK_D)
    if lse_ptr is not None:
        at = (q_start + tokens).to(tl.int64) * lse_token + heads * lse_head
        tl.store(lse_ptr + at, lse, mask=is_row)


@triton.jit
def _row_of(block, starts_ptr, first_row, num_rows, BLOCK_Q: tl.constexpr):
    """The row that a block of queries belongs to; rows past the last are tokens of no row.

    Row r's blocks start at starts[r] // BLOCK_Q + r, counted from the first row, which leaves room
    for each row's last, partial block.
    """
    origin = tl.load(starts_ptr + first_row).to(tl.int32)
    low = 0
    high = num_rows + 1
    while high - low > 1:
        middle = (low + high) // 2
        at = (tl.load(starts_ptr + first_row + middle).to(tl.int32) - origin) // BLOCK_Q + middle
        if at <= block:
            low = middle
        else:
            high = middle
    start = tl.load(starts_ptr + first_row + low).to(tl.int32)
    return low, start, block - ((start - origin) // BLOCK_Q + low)


@triton.jit(
    do_not_specialize=[
        "first_row",
        "num_rows",
        "num_tokens",
        "lse_token",
        "lse_head",
        "table_row",
    ],
    do_not_specialize_on_alignment=["lse_ptr", "starts_ptr", "lens_ptr", "table_ptr"],
)
def prefill_kernel(  # noqa: PLR0915 - one program
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    k_scale_ptr,
    v_scale_ptr,
    sinks_ptr,
    starts_ptr,
    lens_ptr,
    table_ptr,
    qk_scale,
    first_row,
    num_rows,  # from the first
    num_tokens,  # of q, all rows together
    q_token,
    q_head,
    q_last,
    out_token,
    out_head,
    out_last,
    lse_token,
    lse_head,
    table_row,
    table_last,
    scale_head,
    scale_block,
    scale_slot,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PACKED: tl.constexpr,
    WINDOW: tl.constexpr,
    SHAPE: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    CODE: tl.constexpr,
    SCALES_PER: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Program (key/value head, group of its query heads; block of queries, the last first)."""
    NUM_GROUPS: tl.constexpr = (GROUP + PACKED - 1) // PACKED
    BLOCK_Q: tl.constexpr = BLOCK_M // PACKED
    HEAD_DIM: tl.constexpr = SHAPE[1]
    BLOCK_D: tl.constexpr = SHAPE[2]
    unit = tl.program_id(0)
    # Late blocks see the most tokens: started first, they leave the short ones for the end.
    block = tl.num_programs(1) - 1 - tl.program_id(1)
    head_group = unit % NUM_GROUPS
    kv_head = unit // NUM_GROUPS
    row, q_start, q_block = _row_of(block, starts_ptr, first_row, num_rows, BLOCK_Q)
    if row < num_rows:
        q_len = tl.load(starts_ptr + first_row + row + 1).to(tl.int32) - q_start
        seq_len = tl.load(lens_ptr + first_row + row).to(tl.int32)
    else:
        q_len = num_tokens - q_start
        seq_len = 0
    if q_block * BLOCK_Q >= q_len:
        return
    tokens, heads, is_row = query_rows(q_block, q_len, kv_head, head_group, BLOCK_M, PACKED, GROUP)
    strides = (out_token, out_head, out_last)
    lse_at = (q_start + tokens).to(tl.int64) * lse_token + heads * lse_head
    if seq_len <= 0:
        zeros = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
        _store(out_ptr, strides, q_start + tokens, heads, is_row, zeros, HEAD_DIM, BLOCK_D)
        if lse_ptr is not None:
            tl.store(lse_ptr + lse_at, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=is_row)
        return
    first_position = seq_len - q_len + q_block * BLOCK_Q
    stop_position = tl.minimum(first_position + BLOCK_Q, seq_len)
    num_tiles = tl.cdiv(tl.maximum(stop_position, 0), BLOCK_N)
    # Tiles [first, whole) and [diagonal, num_tiles) are seen in part, those between by every row.
    diagonal = tl.maximum(first_position + 1, 0) // BLOCK_N
    first = 0
    whole = 0
    if WINDOW > 0:
        first = tl.maximum(first_position - WINDOW + 1, 0) // BLOCK_N
        whole = tl.cdiv(tl.maximum(stop_position - WINDOW, 0), BLOCK_N)
        diagonal = tl.maximum(diagonal, tl.minimum(whole, num_tiles))
    q = _queries(
        q_ptr, (q_token, q_head, q_last), q_start + tokens, heads, is_row, HEAD_DIM, BLOCK_D
    )
    q, factor = in_half(q, CODE != 0)
    factor *= qk_scale * LOG2_E * _scale_of(k_scale_ptr, kv_head, SCALES_PER)
    scales = (k_scale_ptr, v_scale_ptr, kv_head.to(tl.int64) * scale_head, scale_block, scale_slot)
    positions = seq_len - q_len + tl.minimum(tokens, q_len - 1)
    cache = (k_ptr + kv_head * KEYS[1], v_ptr + kv_head * VALUES[1])
    table = (table_ptr + (first_row + row).to(tl.int64) * table_row, table_last)
    state = start_state(heads, is_row, sinks_ptr, True, BLOCK_M, BLOCK_D)
    if WINDOW > 0:
        state = walk(
            state,
            q,
            positions,
            (first, tl.minimum(whole, num_tiles), 1),
            blocks_of(
                table,
                first * BLOCK_N,
                first < tl.minimum(whole, num_tiles),
                seq_len,
                SHAPE[0],
                BLOCK_N,
            ),
            cache,
            table,
            scales,
            seq_len,
            factor,
            WINDOW,
            True,
            SHAPE,
            KEYS,
            VALUES,
            CODE,
            SCALES_PER,
            q_ptr.dtype.element_ty,
            BLOCK_N,
        )
    state = walk(
        state,
        q,
        positions,
        (whole, diagonal, 1),
        blocks_of(table, whole * BLOCK_N, whole < diagonal, seq_len, SHAPE[0], BLOCK_N),
        cache,
        table,
        scales,
        seq_len,
        factor,
        WINDOW,
        False,
        SHAPE,
        KEYS,
        VALUES,
        CODE,
        SCALES_PER,
        q_ptr.dtype.element_ty,
        BLOCK_N,
    )
    state = walk(
        state,
        q,
        positions,
        (diagonal, num_tiles, 1),
        blocks_of(table, diagonal * BLOCK_N, diagonal < num_tiles, seq_len, SHAPE[0], BLOCK_N),
        cache,
        table,
        scales,
        seq_len,
        factor,
        WINDOW,
        True,
        SHAPE,
        KEYS,
        VALUES,
        CODE,
        SCALES_PER,
        q_ptr.dtype.element_ty,
        BLOCK_N,
    )
    mean, lse = finished(state, _scale_of(v_scale_ptr, kv_head, SCALES_PER))
    _store(out_ptr, strides, q_start + tokens, heads, is_row, mean, HEAD_DIM, BLOCK_D)
    if lse_ptr is not None:
        tl.store(lse_ptr + lse_at, lse, mask=is_row)
