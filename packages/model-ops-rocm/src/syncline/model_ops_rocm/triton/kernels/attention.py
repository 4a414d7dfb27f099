"""Paged attention of rows with many queries.

Unit: one launch. Every length and table is read on the device, so a recorded launch serves other
ones; what a grid is larger than the step ends at once. Offsets of blocks are int64.
"""

import triton
import triton.language as tl

from syncline.model_ops_rocm.triton.kernels.attention_rows import (
    held_length,
    query_places,
    scale_of,
    store_rows,
)
from syncline.model_ops_rocm.triton.kernels.attention_tiles import (
    LOG2_E,
    blocks_of,
    finished,
    in_half,
    places_in_tile,
    query_rows,
    start_state,
    walk,
)


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
        "table_tokens",
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
    table_tokens,  # that a row of it has room for
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
        seq_len, held = held_length(lens_ptr + first_row + row, table_tokens)
    else:
        q_len = num_tokens - q_start
        seq_len = 0
        held = 1.0
    # Places outside q are nobody's to write, whatever the device says.
    q_len = tl.minimum(q_len, num_tokens - q_start)
    if (q_block * BLOCK_Q >= q_len) | (q_start < 0):
        return
    tokens, heads, is_row = query_rows(q_block, q_len, kv_head, head_group, BLOCK_M, PACKED, GROUP)
    strides = (out_token, out_head, out_last)
    lse_at = (q_start + tokens).to(tl.int64) * lse_token + heads * lse_head
    if seq_len <= 0:
        zeros = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
        store_rows(out_ptr, strides, q_start + tokens, heads, is_row, zeros, HEAD_DIM, BLOCK_D)
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
    at, is_query = query_places(
        q_ptr, (q_token, q_head, q_last), q_start + tokens, heads, is_row, HEAD_DIM, BLOCK_D
    )
    q = tl.load(at, mask=is_query, other=0.0)
    q, factor = in_half(q, CODE != 0)
    factor *= held * qk_scale * LOG2_E * scale_of(k_scale_ptr, kv_head, SCALES_PER)
    scales = (k_scale_ptr, v_scale_ptr, kv_head.to(tl.int64) * scale_head, scale_block, scale_slot)
    positions = seq_len - q_len + tl.minimum(tokens, q_len - 1)
    cache = (k_ptr + kv_head * KEYS[1], v_ptr + kv_head * VALUES[1])
    table = (table_ptr + (first_row + row).to(tl.int64) * table_row, table_last)
    state = start_state(heads, is_row, sinks_ptr, True, BLOCK_M, BLOCK_D)
    in_tile = places_in_tile(SHAPE, KEYS, VALUES, 1, BLOCK_N)
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
                "",
            ),
            in_tile,
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
        blocks_of(table, whole * BLOCK_N, whole < diagonal, seq_len, SHAPE[0], BLOCK_N, ""),
        in_tile,
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
        blocks_of(table, diagonal * BLOCK_N, diagonal < num_tiles, seq_len, SHAPE[0], BLOCK_N, ""),
        in_tile,
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
    mean, lse = finished(state, scale_of(v_scale_ptr, kv_head, SCALES_PER))
    store_rows(out_ptr, strides, q_start + tokens, heads, is_row, mean, HEAD_DIM, BLOCK_D)
    if lse_ptr is not None:
        tl.store(lse_ptr + lse_at, lse, mask=is_row)
