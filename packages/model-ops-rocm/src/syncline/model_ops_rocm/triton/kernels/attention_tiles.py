"""The inner part of paged attention: tiles of queries against tiles of cached keys and values.

Unit: BLOCK_M rows of queries, which are BLOCK_M // PACKED tokens of the PACKED query heads that
share a key/value head, and BLOCK_N tokens of KV, at absolute multiples of BLOCK_N. Scores are in
log2. Knows no grid.

A state is (sums [M, D], top [M], total [M]) of each row; or, of `apart` lanes that each walk a part
of every tile, all of them with a dimension of lanes before. A product of such a state is one of
batches, which the compiler gives a warp each: warps then share nothing until `joined`, where they
else meet several times for each tile. It pays where tiles are too few to hide that.

Where an element of a cache is, eight numbers say (`KEYS`, `VALUES`): the strides of a block and of
a head, then for a slot and for a dimension (split, outer, inner): index i of them is at
i // split * outer + i % split * inner.
Source: online softmax over tiles, FlashAttention-2 (arXiv:2307.08691).
"""

import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)
# Below every score, and finite: a row that has seen nothing yet weighs it by exp2(0), not NaN.
LOWEST: tl.constexpr = tl.constexpr(-1.0e30)
# What is stored, CODE: a number of the queries' dtype, or a byte of fp8 that the target converts,
# or one that integers do.
NUMBER: tl.constexpr = tl.constexpr(0)
NATIVE_E4M3FN: tl.constexpr = tl.constexpr(1)
NATIVE_E4M3FNUZ: tl.constexpr = tl.constexpr(2)
BYTE_E4M3FN: tl.constexpr = tl.constexpr(3)


@triton.jit
def along(index, SPLIT: tl.constexpr, OUTER: tl.constexpr, INNER: tl.constexpr):
    if SPLIT == 1:
        return index * OUTER
    else:
        return index // SPLIT * OUTER + index % SPLIT * INNER


@triton.jit
def decoded(x, dtype: tl.constexpr, CODE: tl.constexpr):
    """Stored elements as numbers of `dtype`; every fp8 code is one exactly."""
    if CODE == NUMBER:
        return x
    elif CODE == NATIVE_E4M3FN:
        return x.to(tl.float8e4nv, bitcast=True).to(dtype)
    elif CODE == NATIVE_E4M3FNUZ:
        return x.to(tl.float8e4b8, bitcast=True).to(dtype)
    else:
        # A code's exponent and fraction are those of a float16 that is 2^8, or 2^7, times smaller.
        wide = x.to(tl.uint16)
        half = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
        if CODE == BYTE_E4M3FN:
            number = half.to(tl.float32) * 256.0
            number = tl.where((x & 0x7F) == 0x7F, float("nan"), number)
        else:
            number = half.to(tl.float32) * 128.0
            number = tl.where(x == 0x80, float("nan"), number)
        return number.to(dtype)


@triton.jit
def in_half(q, IS_CODE: tl.constexpr):
    """Queries as they meet the keys, and the factor [BLOCK_M] that this leaves to the scores.

    Codes are float16 at no cost, and bfloat16 at a high one: then queries of 16 bits are float16
    too, each divided by the power of two in its largest element, which no rounding follows.
    """
    if IS_CODE and q.dtype.primitive_bitwidth == 16:
        numbers = q.to(tl.float32)
        bits = tl.max(tl.abs(numbers), 1).to(tl.int32, bitcast=True) & 0x7F800000
        # Of zeros and subnormals, and of what is not finite, nothing is taken out.
        bits = tl.where((bits == 0) | (bits == 0x7F800000), 127 << 23, bits)
        inverse = tl.maximum((254 << 23) - bits, 1 << 23).to(tl.float32, bitcast=True)
        halves = (numbers * inverse[:, None]).to(tl.float16)
        return halves, bits.to(tl.float32, bitcast=True)
    else:
        return q, tl.full([q.shape[0]], 1.0, dtype=tl.float32)


@triton.jit
def query_rows(
    q_block,
    q_len,
    kv_head,
    head_group,
    BLOCK_M: tl.constexpr,
    PACKED: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Token of the row's queries and query head of each tile row, and whether it is one."""
    BLOCK_Q: tl.constexpr = BLOCK_M // PACKED
    rows = tl.arange(0, BLOCK_M)
    tokens = q_block * BLOCK_Q + rows // PACKED
    members = head_group * PACKED + rows % PACKED
    is_row = (rows < BLOCK_Q * PACKED) & (tokens < q_len) & (members < GROUP)
    return tokens, kv_head * GROUP + members, is_row


@triton.jit
def blocks_of(
    table,
    start,
    is_used,
    seq_len,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CACHE: tl.constexpr,
):
    """Ids of the block, or blocks, that hold tokens [start, start + BLOCK_N).

    Past the last token a table holds anything: block 0 exists, and is not looked at.
    """
    if BLOCK_SIZE % BLOCK_N == 0:
        entry = table[0] + start // BLOCK_SIZE * table[1]
        return tl.load(entry, mask=is_used, other=0, cache_modifier=CACHE)
    else:
        tokens = start + tl.arange(0, BLOCK_N)
        entries = table[0] + tokens // BLOCK_SIZE * table[1]
        is_token = is_used & (tokens < seq_len)
        return tl.load(entries, mask=is_token, other=0, cache_modifier=CACHE)


@triton.jit
def _tile(at, dims, is_token, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, IS_CUT: tl.constexpr):
    """Elements [..., N, BLOCK_D]; zero past the head, and with IS_CUT where no token is."""
    if HEAD_DIM == BLOCK_D:
        if IS_CUT:
            return tl.load(at, mask=tl.expand_dims(is_token, -1), other=0)
        else:
            return tl.load(at)
    is_dim = dims < HEAD_DIM
    is_dim = is_dim[None, None, :] if len(at.shape) == 3 else is_dim[None, :]
    if IS_CUT:
        return tl.load(at, mask=tl.expand_dims(is_token, -1) & is_dim, other=0)
    else:
        return tl.load(at, mask=is_dim, other=0)


@triton.jit
def _transposed(x):
    if len(x.shape) == 3:
        return tl.trans(x, 0, 2, 1)
    else:
        return tl.trans(x)


@triton.jit
def _offsets(APART: tl.constexpr, BLOCK_N: tl.constexpr):
    """Of a tile's tokens: [BLOCK_N], or [APART, BLOCK_N // APART]."""
    offsets = tl.arange(0, BLOCK_N)
    if APART > 1:
        return tl.reshape(offsets, [APART, BLOCK_N // APART])
    else:
        return offsets


@triton.jit
def places_in_tile(
    SHAPE: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    APART: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """(tokens of a tile, places of its keys, those of its values): what no memory decides.

    Of lanes, where every tile is a straight part of one block, places are from its first token, of
    all tokens and dimensions; else from each token's own, of dimensions alone, which takes fewer
    registers.
    """
    offsets = _offsets(APART, BLOCK_N)
    dims = tl.arange(0, SHAPE[2])
    k = along(dims, KEYS[5], KEYS[6], KEYS[7])
    v = along(dims, VALUES[5], VALUES[6], VALUES[7])
    if (APART > 1) & (SHAPE[0] % BLOCK_N == 0) & (KEYS[2] == 1) & (VALUES[2] == 1):
        k = tl.expand_dims(offsets * KEYS[3], -1) + k
        v = tl.expand_dims(offsets * VALUES[3], -1) + v
    return offsets, k, v


@triton.jit
def walk(  # noqa: PLR0915 - one loop
    state,
    q,
    positions,
    tiles,
    first_block,
    in_tile,
    cache,
    table,
    scales,
    seq_len,
    qk_scale,
    WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
    SHAPE: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    CODE: tl.constexpr,
    SCALES_PER: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Adds tiles (first, stop, step) to (sums, top, total) of each row.

    `in_tile` is what `places_in_tile` gives, `cache` the pointers to this head's keys and values,
    `table` (pointer, stride) of the row's block ids, `scales` pointers to those of keys and values,
    and of this head the offset, and the strides of a block and a slot, if SCALES_PER is 3, per
    token; `qk_scale` [BLOCK_M], SHAPE (BLOCK_SIZE, HEAD_DIM, BLOCK_D), DTYPE that of the result.
    Without MASKED every row sees every token of the tiles.
    """
    acc, top, total = state
    BLOCK_SIZE: tl.constexpr = SHAPE[0]
    HEAD_DIM: tl.constexpr = SHAPE[1]
    BLOCK_D: tl.constexpr = SHAPE[2]
    # Of what has an entry for each token, and of scores: the dimension of tokens.
    LAST: tl.constexpr = len(acc.shape) - 1
    dims = tl.arange(0, BLOCK_D)
    offsets, k_in_tile, v_in_tile = in_tile
    next_block = first_block
    for tile in range(tiles[0], tiles[1], tiles[2]):
        start = tile * BLOCK_N
        tokens = start + offsets
        block = next_block.to(tl.int64)
        # Read one tile ahead: a load that waits for another is not started early by the compiler.
        after = tile + tiles[2]
        next_block = blocks_of(
            table, after * BLOCK_N, after < tiles[1], seq_len, BLOCK_SIZE, BLOCK_N, ""
        )
        if BLOCK_SIZE % BLOCK_N == 0:
            slots = start % BLOCK_SIZE + offsets
        else:
            block = tl.reshape(block, offsets.shape)
            slots = tokens % BLOCK_SIZE
        if len(k_in_tile.shape) == len(acc.shape):
            k_at = cache[0] + (block * KEYS[0] + start % BLOCK_SIZE * KEYS[3])
            v_at = cache[1] + (block * VALUES[0] + start % BLOCK_SIZE * VALUES[3])
        else:
            k_at = cache[0] + block * KEYS[0] + along(slots, KEYS[2], KEYS[3], KEYS[4])
            v_at = cache[1] + block * VALUES[0] + along(slots, VALUES[2], VALUES[3], VALUES[4])
            k_at = tl.expand_dims(k_at, -1)
            v_at = tl.expand_dims(v_at, -1)
        k_at = k_at + k_in_tile
        v_at = v_at + v_in_tile
        k = _tile(k_at, dims, tokens < seq_len, HEAD_DIM, BLOCK_D, False)
        k = decoded(k, q.dtype, CODE)
        scores = tl.dot(q, _transposed(k), input_precision="ieee")
        if SCALES_PER == 3:
            at = scales[2] + block * scales[3] + slots * scales[4]
            k_scale = tl.load(scales[0] + at, mask=tokens < seq_len, other=0.0)
            v_scale = tl.load(scales[1] + at, mask=tokens < seq_len, other=0.0)
            scores *= tl.expand_dims(k_scale, -2)
        if MASKED:
            seen = tl.expand_dims(tokens, -2)
            is_seen = seen <= positions[:, None]
            if WINDOW > 0:
                is_seen &= seen > positions[:, None] - WINDOW
            scores = tl.where(is_seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, LAST) * qk_scale)
        weights = tl.exp2(scores * qk_scale[:, None] - tl.expand_dims(new_top, -1))
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weights, LAST)
        acc = acc * tl.expand_dims(shrink, -1)
        if SCALES_PER == 3:
            weights *= tl.expand_dims(v_scale, -2)
        # A slot past the sequence may hold NaN, which a weight of 0 would let through.
        v = _tile(v_at, dims, tokens < seq_len, HEAD_DIM, BLOCK_D, MASKED)
        # A weight times a scale of its token may be out of float16's range.
        v = decoded(v, DTYPE if SCALES_PER == 3 else q.dtype, CODE)
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
        top = new_top
    return acc, top, total


@triton.jit
def start_state(heads, is_row, sinks_ptr, is_first, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """What a row has before it sees a token: its head's sink, if it has one."""
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    if sinks_ptr is None:
        top = tl.full([BLOCK_M], LOWEST, dtype=tl.float32)
        total = tl.zeros([BLOCK_M], dtype=tl.float32)
    else:
        sinks = tl.load(sinks_ptr + heads, mask=is_row & is_first, other=float("-inf"))
        sinks = sinks.to(tl.float32) * LOG2_E
        top = tl.maximum(sinks, LOWEST)
        total = tl.exp2(sinks - top)
    return acc, top, total


@triton.jit
def apart(q, state, APART: tl.constexpr):
    """Queries and a state that has seen no token, for lanes; the first of them has the sinks."""
    if APART > 1:
        acc, top, total = state
        is_first = tl.arange(0, APART)[:, None] == 0
        q = tl.broadcast_to(q[None, :, :], [APART, q.shape[0], q.shape[1]])
        acc = tl.zeros([APART, acc.shape[0], acc.shape[1]], dtype=tl.float32)
        top = tl.where(is_first, top[None, :], LOWEST)
        total = tl.where(is_first, total[None, :], 0.0)
        return q, (acc, top, total)
    else:
        return q, state


@triton.jit
def _lower(x):
    """The first half of the rows of lanes."""
    if len(x.shape) == 3:
        x = tl.reshape(x, [x.shape[0], 2, x.shape[1] // 2, x.shape[2]])
        low, _ = tl.split(tl.permute(x, 0, 2, 3, 1))
    else:
        x = tl.reshape(x, [x.shape[0], 2, x.shape[1] // 2])
        low, _ = tl.split(tl.permute(x, 0, 2, 1))
    return low


@triton.jit
def _sum_of_lanes(x):
    """[W, M, D] to [M, D]: W first moves into the registers of a thread, where sums are cheap."""
    if x.shape[0] == 1:
        return tl.reshape(x, [x.shape[1], x.shape[2]])
    elif x.shape[0] == 2:
        even, odd = tl.split(tl.permute(x, 1, 2, 0))
        return even + odd
    else:
        pairs = tl.reshape(x, [x.shape[0] // 2, 2, x.shape[1], x.shape[2]])
        even, odd = tl.split(tl.permute(pairs, 0, 2, 3, 1))
        return _sum_of_lanes(even + odd)


@triton.jit
def joined(state, HALF: tl.constexpr):
    """The state of lanes as one; with HALF of the first half of the rows, if others are none."""
    acc, top, total = state
    if HALF:
        acc = _lower(acc)
        top = _lower(top)
        total = _lower(total)
    highest = tl.max(top, 0)
    share = tl.exp2(top - highest[None, :])
    return _sum_of_lanes(acc * share[:, :, None]), highest, tl.sum(total * share, 0)


@triton.jit
def finished(state, v_scale):
    """The weighted mean of the values, and the natural logarithm of the weights' sum."""
    acc, top, total = state
    is_empty = total == 0.0
    total = tl.where(is_empty, 1.0, total)
    mean = acc / total[:, None] * v_scale
    log = tl.log2(total)
    lse = tl.where(is_empty, float("-inf"), (top + log) * LN_2)
    return mean, lse
