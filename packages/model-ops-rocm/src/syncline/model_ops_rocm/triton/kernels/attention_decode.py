"""Paged attention of decode rows: few queries each, whose KV may be split.

Unit: one launch. Every length and table is read on the device, so a recorded launch serves other
ones; what a grid is larger than the step ends at once. Offsets of blocks are int64. Parts of a row
lie as [T, N, splits, D], and their logarithms as [T, N, splits]: merged by a launch after this one,
or, with counters, by the program that comes last.
"""

import triton
import triton.language as tl

from syncline.model_ops_rocm.triton.kernels.arrival import arrive
from syncline.model_ops_rocm.triton.kernels.attention_ahead import ask_ahead
from syncline.model_ops_rocm.triton.kernels.attention_parts import merged
from syncline.model_ops_rocm.triton.kernels.attention_rows import (
    held_length,
    query_places,
    scale_of,
    store_rows,
)
from syncline.model_ops_rocm.triton.kernels.attention_tiles import (
    LOG2_E,
    apart,
    blocks_of,
    finished,
    in_half,
    joined,
    places_in_tile,
    query_rows,
    start_state,
    walk,
)
from syncline.model_ops_rocm.triton.kernels.dependent import await_turn


@triton.jit
def _store_part(
    mean,
    lse,
    result,
    parts,
    counters_ptr,
    where,
    split,
    num_parts,
    merging,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Store a part; with a counter, the program that comes last merges all of them.

    `result` is (out, its strides, lse or None, its strides), `parts` (pointer, logarithms, splits
    that there is room for), `where` (tokens, heads, is_row, number of heads); `merging` is `where`
    of the rows that are any.
    """
    tokens, heads, is_row, num_heads = where
    dims = tl.arange(0, BLOCK_D)
    first = (tokens.to(tl.int64) * num_heads + heads) * parts[2]
    inside = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    parts_at = parts[0] + (first + split)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(parts_at, mean, mask=inside)
    tl.store(parts[1] + first + split, lse, mask=is_row)
    if counters_ptr is not None:
        is_last, is_astray = arrive(counters_ptr + tl.program_id(0), num_parts)
        if is_last | is_astray:
            _merge_parts(result, parts, merging, num_parts, is_astray, HEAD_DIM, BLOCK_D)


@triton.jit
def _merge_parts(
    result, parts, where, num_parts, is_astray, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr
):
    tokens, heads, is_row, num_heads = where
    first = (tokens.to(tl.int64) * num_heads + heads) * parts[2]
    at = parts[0] + first[:, None] * HEAD_DIM + tl.arange(0, BLOCK_D)[None, :]
    mean, lse = merged(at, parts[1] + first, is_row, num_parts, HEAD_DIM, 1, HEAD_DIM, BLOCK_D)
    mean = tl.where(is_astray, float("nan"), mean)
    lse = tl.where(is_astray, float("nan"), lse)
    _store_result(result, where, mean, lse, HEAD_DIM, BLOCK_D)


@triton.jit
def _rows_left(
    unit,
    q_start,
    COUNT: tl.constexpr,
    PACKED: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_HEADS: tl.constexpr,
):
    """(tokens, heads, is_row, number of heads) of the first COUNT rows of the unit's tile."""
    tokens, heads, is_row = query_rows(unit[0], unit[1], unit[2], unit[3], COUNT, PACKED, GROUP)
    return q_start + tokens, heads, is_row, NUM_HEADS


@triton.jit
def _store_result(result, where, mean, lse, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """See `_store_part`."""
    tokens, heads, is_row, _ = where
    store_rows(result[0], result[1], tokens, heads, is_row, mean, HEAD_DIM, BLOCK_D)
    if result[2] is not None:
        at = tokens.to(tl.int64) * result[3][0] + heads * result[3][1]
        tl.store(result[2] + at, lse, mask=is_row)


@triton.jit(
    do_not_specialize=[
        "num_splits",
        "num_blocks",
        "lse_token",
        "lse_head",
        "table_row",
        "table_tokens",
    ],
    do_not_specialize_on_alignment=[
        "lse_ptr",
        "parts_lse_ptr",
        "counters_ptr",
        "lens_ptr",
        "table_ptr",
    ],
)
def decode_kernel(  # noqa: PLR0915 - one program
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,  # None, or float32 [T, N]
    parts_ptr,  # of a split row, float32, else None
    parts_lse_ptr,
    counters_ptr,  # one for each unit, or None
    k_scale_ptr,
    v_scale_ptr,
    sinks_ptr,
    lens_ptr,
    table_ptr,
    qk_scale,
    num_splits,
    num_blocks,
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
    APART: tl.constexpr,  # lanes of a tile; 1: none
    AHEAD: tl.constexpr,  # tiles that are asked for before the wait
    NUM_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Program (row, key/value head, group of its query heads, block of queries; split)."""
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    NUM_GROUPS: tl.constexpr = (GROUP + PACKED - 1) // PACKED
    BLOCK_Q: tl.constexpr = BLOCK_M // PACKED
    HEAD_DIM: tl.constexpr = SHAPE[1]
    BLOCK_D: tl.constexpr = SHAPE[2]
    unit, split = tl.program_id(0), tl.program_id(1)
    q_block = unit % NUM_Q_BLOCKS
    unit = unit // NUM_Q_BLOCKS
    head_group = unit % NUM_GROUPS
    unit = unit // NUM_GROUPS
    kv_head = unit % NUM_KV_HEADS
    row = unit // NUM_KV_HEADS
    q_start = row * Q_LEN
    table = (table_ptr + row.to(tl.int64) * table_row, table_last)
    cache = (k_ptr + kv_head * KEYS[1], v_ptr + kv_head * VALUES[1])
    step = num_splits if IS_SPLIT else 1
    ask_ahead(
        lens_ptr + row,
        table,
        (split, tl.cdiv(table_tokens, BLOCK_N), step),
        cache,
        num_blocks,
        SHAPE,
        KEYS,
        VALUES,
        AHEAD if OVERLAP else 0,
        BLOCK_N,
    )
    # What no memory decides is worked out before the wait.
    tokens, heads, is_row = query_rows(q_block, Q_LEN, kv_head, head_group, BLOCK_M, PACKED, GROUP)
    q_at, is_query = query_places(
        q_ptr, (q_token, q_head, q_last), q_start + tokens, heads, is_row, HEAD_DIM, BLOCK_D
    )
    in_tile = places_in_tile(SHAPE, KEYS, VALUES, APART, BLOCK_N)
    await_turn(OVERLAP)
    seq_len, held = held_length(lens_ptr + row, table_tokens)
    first_tile = split
    if WINDOW == 0:
        # Started beside the load of the length, not after it: the entry exists, whatever it holds.
        is_entry = first_tile * BLOCK_N < table_tokens
        block = blocks_of(table, first_tile * BLOCK_N, is_entry, seq_len, SHAPE[0], BLOCK_N, "")
    q = tl.load(q_at, mask=is_query, other=0.0)
    first_position = seq_len - Q_LEN + q_block * BLOCK_Q
    stop_position = tl.minimum(first_position + BLOCK_Q, seq_len)
    num_tiles = tl.cdiv(tl.maximum(stop_position, 0), BLOCK_N)
    if WINDOW > 0:
        first_tile += tl.maximum(first_position - WINDOW + 1, 0) // BLOCK_N
        is_entry = first_tile < num_tiles
        block = blocks_of(table, first_tile * BLOCK_N, is_entry, seq_len, SHAPE[0], BLOCK_N, "")
    num_parts = 1
    if IS_SPLIT:
        # With counters nobody waits for, or reads, a part without a tile.
        if counters_ptr is None:
            num_parts = num_splits
        else:
            num_parts = tl.maximum(tl.minimum(num_tiles - (first_tile - split), num_splits), 1)
        if (split > 0) & (first_tile >= num_tiles):
            if counters_ptr is None:
                at = ((q_start + tokens).to(tl.int64) * NUM_HEADS + heads) * num_splits + split
                none = tl.full([BLOCK_M], float("-inf"), tl.float32)
                tl.store(parts_lse_ptr + at, none, mask=is_row)
            return
    q, factor = in_half(q, CODE != 0)
    factor *= held * qk_scale * LOG2_E * scale_of(k_scale_ptr, kv_head, SCALES_PER)
    scales = (k_scale_ptr, v_scale_ptr, kv_head.to(tl.int64) * scale_head, scale_block, scale_slot)
    state = start_state(heads, is_row, sinks_ptr, split == 0, BLOCK_M, BLOCK_D)
    q, state = apart(q, state, APART)
    # Splits take turns: which tile is first does not depend on the length.
    state = walk(
        state,
        q,
        seq_len - Q_LEN + tokens,
        (first_tile, num_tiles, step),
        block,
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
    # Most rows of a tile are often none: what is left to do is done for as few as may be.
    FEW: tl.constexpr = BLOCK_M if NUM_Q_BLOCKS > 1 else NUM_ROWS
    HALF: tl.constexpr = APART > 1 and 2 * FEW <= BLOCK_M
    LEFT: tl.constexpr = BLOCK_M // 2 if HALF else BLOCK_M
    if APART > 1:
        state = joined(state, HALF)
    unit = (q_block, Q_LEN, kv_head, head_group)
    where = _rows_left(unit, q_start, LEFT, PACKED, GROUP, NUM_HEADS)
    mean, lse = finished(state, scale_of(v_scale_ptr, kv_head, SCALES_PER))
    if seq_len <= 0:
        mean = tl.zeros([LEFT, BLOCK_D], dtype=tl.float32)
        lse = tl.full([LEFT], float("-inf"), dtype=tl.float32)
    result = (out_ptr, (out_token, out_head, out_last), lse_ptr, (lse_token, lse_head))
    if IS_SPLIT:
        _store_part(
            mean,
            lse,
            result,
            (parts_ptr, parts_lse_ptr, num_splits),
            counters_ptr,
            where,
            split,
            num_parts,
            _rows_left(unit, q_start, FEW, PACKED, GROUP, NUM_HEADS),
            HEAD_DIM,
            BLOCK_D,
        )
    else:
        _store_result(result, where, mean, lse, HEAD_DIM, BLOCK_D)
