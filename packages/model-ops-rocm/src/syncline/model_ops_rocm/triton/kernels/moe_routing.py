"""Routing, sorting and combining of mixture of experts; knows no projection."""

import triton
import triton.language as tl

from syncline.model_ops_rocm.triton.kernels.dependent import await_inputs


@triton.jit
def _as_key(logits, experts, KEY: tl.constexpr, BITS: tl.constexpr):
    """Integers in the order of the logits, of equal ones the lower expert's first; all different.

    KEY is the integer that holds a number of BITS bits above the 16 of an expert. A NaN is as -inf.
    """
    # -0.0 equals 0.0, and would come after it.
    ranked = tl.where(logits == logits, tl.where(logits == 0.0, 0.0, logits), float("-inf"))
    if BITS == 16:
        bits = ranked.to(logits.dtype).to(tl.int16, bitcast=True).to(tl.int32)
    else:
        bits = ranked.to(tl.float32).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & ((1 << (BITS - 1)) - 1))
    return (ordered.to(KEY) << BITS) | (0xFFFF - experts).to(KEY)


@triton.jit
def _number_of(key, dtype: tl.constexpr, BITS: tl.constexpr):
    """The logit in a key, as float32."""
    ordered = (key >> BITS).to(tl.int32)
    bits = ordered ^ ((ordered >> 31) & ((1 << (BITS - 1)) - 1))
    if BITS == 16:
        return bits.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    else:
        return bits.to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["num_tokens"])
def route_kernel(  # noqa: PLR0915 - a kernel is one body
    logits_ptr,
    weights_ptr,  # float32 [T, k]
    ids_ptr,  # int32 [T, k]
    replicas_ptr,  # int32 [E, R]
    counts_ptr,  # int32 [E]
    positions_ptr,
    num_tokens,
    logits_token,
    logits_last,
    positions_stride,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    RENORMALISE: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
    MAX_REPLICAS: tl.constexpr,  # 0: no map
    OVERLAP: tl.constexpr,  # CUDA: launched while the kernel before it ends
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    await_inputs(OVERLAP)
    dtype: tl.constexpr = logits_ptr.dtype.element_ty
    BITS: tl.constexpr = dtype.primitive_bitwidth
    KEY: tl.constexpr = tl.int32 if BITS == 16 else tl.int64
    LOWEST: tl.constexpr = -(1 << (2 * BITS - 1))
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    experts = tl.arange(0, BLOCK_EXPERTS)
    slots = tl.arange(0, BLOCK_K)
    is_row = rows < num_tokens
    at = rows.to(tl.int64)[:, None] * logits_token + experts[None, :] * logits_last
    mask = is_row[:, None] & (experts < NUM_EXPERTS)[None, :]
    logits = tl.load(logits_ptr + at, mask=mask, other=float("-inf"))
    keys = tl.where(mask, _as_key(logits, experts[None, :], KEY, BITS), LOWEST)
    chosen = tl.zeros([BLOCK_ROWS, BLOCK_K], dtype=KEY)
    for slot in tl.static_range(TOP_K):
        # One reduction finds the number and the expert.
        best = tl.max(keys, axis=1)
        keys = tl.where(keys == best[:, None], LOWEST, keys)
        chosen = tl.where((slots == slot)[None, :], best[:, None], chosen)
    top = tl.max(tl.where(slots[None, :] < TOP_K, chosen, LOWEST), axis=1)
    top = _number_of(top, dtype, BITS)[:, None]
    # A NaN reaches the sum; so does -inf - -inf.
    parts = tl.exp(logits.to(tl.float32) - top)
    total = tl.sum(tl.where((experts < NUM_EXPERTS)[None, :], parts, 0.0), axis=1)
    weights = tl.exp(_number_of(chosen, dtype, BITS) - top)
    weights = tl.where((slots < TOP_K)[None, :], weights, 0.0)
    chosen = (0xFFFF - (chosen & 0xFFFF)).to(tl.int32)
    weights = tl.div_rn(weights, tl.broadcast_to(total[:, None], [BLOCK_ROWS, BLOCK_K]))
    if RENORMALISE:
        of_chosen = tl.sum(weights, axis=1)
        weights = tl.div_rn(weights, tl.broadcast_to(of_chosen[:, None], [BLOCK_ROWS, BLOCK_K]))
    is_pair = is_row[:, None] & (slots < TOP_K)[None, :]
    is_padding = tl.zeros([BLOCK_ROWS], dtype=tl.int32) > 0
    position = tl.zeros([BLOCK_ROWS], dtype=tl.int64)
    if HAS_POSITIONS:
        found = tl.load(positions_ptr + rows * positions_stride, mask=is_row, other=0)
        is_padding = found < 0
        position = tl.maximum(found, 0).to(tl.int64)
    if MAX_REPLICAS > 0:
        count = tl.load(counts_ptr + chosen, mask=is_pair, other=0)
        entry = (position[:, None] % tl.maximum(count, 1).to(tl.int64)).to(tl.int32)
        is_there = is_pair & (count > 0) & (entry < MAX_REPLICAS)
        chosen = tl.load(replicas_ptr + chosen * MAX_REPLICAS + entry, mask=is_there, other=-1)
    chosen = tl.where(is_padding[:, None], -1, chosen)
    weights = tl.where(is_padding[:, None], 0.0, weights)
    pair = rows.to(tl.int64)[:, None] * TOP_K + slots[None, :]
    tl.store(weights_ptr + pair, weights, mask=is_pair)
    tl.store(ids_ptr + pair, chosen, mask=is_pair)


@triton.jit
def _groups_of(ids_ptr, pair, num_pairs, num_groups, GROUP_SIZE: tl.constexpr):
    """Each pair's group, and whether it has one."""
    expert = tl.load(ids_ptr + pair, mask=pair < num_pairs, other=-1)
    return _groups(expert, num_groups, GROUP_SIZE)


@triton.jit
def _groups(expert, num_groups, GROUP_SIZE: tl.constexpr):
    """Likewise, of pairs' experts."""
    is_kept = (expert >= 0) & (expert < num_groups * GROUP_SIZE)
    return tl.where(is_kept, expert // GROUP_SIZE, 0), is_kept


@triton.jit
def _pairs_before(
    ids_ptr, stop, group, num_groups, GROUP_SIZE: tl.constexpr, BLOCK_PAIRS: tl.constexpr
):
    """int32: how many of the pairs before `stop` are the group's."""
    AT_ONCE: tl.constexpr = 4  # blocks: asked for one by one, each would wait for the one before
    ones = tl.zeros([BLOCK_PAIRS], dtype=tl.int32)
    for start in range(0, stop, AT_ONCE * BLOCK_PAIRS):
        pair = start + tl.arange(0, AT_ONCE * BLOCK_PAIRS)
        found, is_kept = _groups_of(ids_ptr, pair, stop, num_groups, GROUP_SIZE)
        is_own = (is_kept & (found == group)).to(tl.int32)
        ones += tl.sum(is_own.reshape(AT_ONCE, BLOCK_PAIRS), axis=0)
    return tl.sum(ones, axis=0)


@triton.jit(do_not_specialize=["num_pairs"])
def count_kernel(
    ids_ptr,
    counts_ptr,
    num_pairs,
    GROUP_SIZE: tl.constexpr,
    OVERLAP: tl.constexpr,  # CUDA: launched while the kernel before it ends
    BLOCK_PAIRS: tl.constexpr,
):
    """A program for each group."""
    await_inputs(OVERLAP)
    group, num_groups = tl.program_id(0), tl.num_programs(0)
    count = _pairs_before(ids_ptr, num_pairs, group, num_groups, GROUP_SIZE, BLOCK_PAIRS)
    tl.store(counts_ptr + group, count)


@triton.jit
def _counts_of(
    ids_ptr, num_pairs, num_groups, GROUP_SIZE: tl.constexpr, BLOCK_GROUPS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
):  # fmt: skip
    """int32 [BLOCK_GROUPS]: the pairs of every group."""
    offsets = tl.arange(0, BLOCK_PAIRS)
    counts = tl.zeros([BLOCK_GROUPS], dtype=tl.int32)
    for start in range(0, num_pairs, BLOCK_PAIRS):
        found, is_kept = _groups_of(ids_ptr, start + offsets, num_pairs, num_groups, GROUP_SIZE)
        counts += tl.histogram(found, BLOCK_GROUPS, mask=is_kept)
    return counts


@triton.jit
def _fill(
    pairs_ptr, block_groups_ptr, group, count, first_block, num_blocks, all_blocks, num_pairs,
    capacity, num_groups, BLOCK_SIZE: tl.constexpr, BLOCK_PAIRS: tl.constexpr,
):  # fmt: skip
    """Whose a group's blocks are, and what is no pair: to whole blocks, and behind the last one."""
    offsets = tl.arange(0, BLOCK_PAIRS)
    for start in range(0, num_blocks, BLOCK_PAIRS):
        block = start + offsets
        tl.store(block_groups_ptr + first_block + block, group, mask=block < num_blocks)
    for start in range(count, num_blocks * BLOCK_SIZE, BLOCK_PAIRS):
        entry = start + offsets
        at = pairs_ptr + first_block * BLOCK_SIZE + entry
        tl.store(at, num_pairs, mask=entry < num_blocks * BLOCK_SIZE)
    # What lies behind the last block is every group's.
    step = num_groups * BLOCK_PAIRS
    for start in range(all_blocks * BLOCK_SIZE + group * BLOCK_PAIRS, capacity, step):
        entry = start + offsets
        tl.store(pairs_ptr + entry, num_pairs, mask=entry < capacity)
    for start in range(all_blocks + group * BLOCK_PAIRS, capacity // BLOCK_SIZE, step):
        block = start + offsets
        tl.store(block_groups_ptr + block, -1, mask=block < capacity // BLOCK_SIZE)


@triton.jit(do_not_specialize=["num_pairs", "pairs_each", "capacity", "num_groups"])
def sort_kernel(
    ids_ptr,
    pairs_ptr,
    block_groups_ptr,
    counts_ptr,
    places_ptr,
    num_pairs,
    pairs_each,  # of a program
    capacity,
    num_groups,
    GROUP_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_PLACES: tl.constexpr,
    IS_COUNTED: tl.constexpr,  # by `count_kernel`; else one program has all pairs
    OVERLAP: tl.constexpr,  # CUDA: launched while the kernel before it ends
    BLOCK_GROUPS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
):
    """Program (group; run of pairs): puts the group's of them to their places."""
    await_inputs(OVERLAP)
    # Each counts by itself what others put before its own, so that none waits for another.
    group, first_pair = tl.program_id(0), tl.program_id(1) * pairs_each
    bins = tl.arange(0, BLOCK_GROUPS)
    if IS_COUNTED:
        counts = tl.load(counts_ptr + bins, mask=bins < num_groups, other=0)
    else:
        counts = _counts_of(ids_ptr, num_pairs, num_groups, GROUP_SIZE, BLOCK_GROUPS, BLOCK_PAIRS)
    blocks = (counts + (BLOCK_SIZE - 1)) // BLOCK_SIZE
    first_block = tl.sum(tl.where(bins < group, blocks, 0), axis=0)
    if tl.program_id(1) == 0:
        num_blocks = tl.sum(tl.where(bins == group, blocks, 0), axis=0)
        count = tl.sum(tl.where(bins == group, counts, 0), axis=0)
        if not IS_COUNTED:
            tl.store(counts_ptr + group, count)
        _fill(
            *(pairs_ptr, block_groups_ptr, group, count, first_block, num_blocks),
            *(tl.sum(blocks, axis=0), num_pairs, capacity, num_groups, BLOCK_SIZE, BLOCK_PAIRS),
        )
    first = first_block * BLOCK_SIZE
    if IS_COUNTED:
        first += _pairs_before(ids_ptr, first_pair, group, num_groups, GROUP_SIZE, BLOCK_PAIRS)
    stop = tl.minimum(first_pair + pairs_each, num_pairs)
    pair = first_pair + tl.arange(0, BLOCK_PAIRS)
    upcoming = tl.load(ids_ptr + pair, mask=pair < stop, other=-1)
    for _ in range(first_pair, stop, BLOCK_PAIRS):
        # The next ones are asked for before these are stored, after which nothing is read sooner.
        expert = upcoming
        upcoming = tl.load(ids_ptr + pair + BLOCK_PAIRS, mask=pair < stop - BLOCK_PAIRS, other=-1)
        found, is_kept = _groups(expert, num_groups, GROUP_SIZE)
        is_own = is_kept & (found == group)
        ones = is_own.to(tl.int32)
        at = first + tl.cumsum(ones, axis=0) - ones
        tl.store(pairs_ptr + at, pair, mask=is_own)
        if HAS_PLACES:
            tl.store(places_ptr + pair, at, mask=is_own)
            is_skipped = (is_kept == 0) & (pair < stop) & (group == 0)
            tl.store(places_ptr + pair, -1, mask=is_skipped)
        first += tl.sum(ones, axis=0)
        pair += BLOCK_PAIRS


@triton.jit(do_not_specialize=["num_pairs"])
def permute_kernel(
    x_ptr,
    ids_ptr,  # int32 [T, k]
    pairs_ptr,  # int32 [C]
    rows_ptr,
    row_ids_ptr,  # int32 [C]
    num_pairs,
    x_token,
    x_last,
    rows_row,
    rows_last,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    OVERLAP: tl.constexpr,  # CUDA: launched while the kernel before it ends
    BLOCK_WIDTH: tl.constexpr,
):
    await_inputs(OVERLAP)
    entry = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    pair = tl.load(pairs_ptr + entry)
    is_pair = (pair >= 0) & (pair < num_pairs)
    expert = tl.load(ids_ptr + pair, mask=is_pair, other=-1)
    token = tl.where(is_pair, pair // TOP_K, 0).to(tl.int64)
    mask = columns < WIDTH
    x = tl.load(x_ptr + token * x_token + columns * x_last, mask=mask & (expert >= 0), other=0.0)
    tl.store(rows_ptr + entry * rows_row + columns * rows_last, x, mask=mask)
    if tl.program_id(1) == 0:
        tl.store(row_ids_ptr + entry, tl.where(expert >= 0, expert % GROUP_SIZE, -1))


@triton.jit(do_not_specialize=["num_rows"])
def combine_kernel(
    y_ptr,
    weights_ptr,
    places_ptr,
    out_ptr,
    num_rows,  # places below it are kept
    y_row,
    y_last,
    out_row,
    out_last,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    BY_PAIR: tl.constexpr,  # places are ids of experts; a pair's row of y is its number
    OVERLAP: tl.constexpr,  # CUDA: launched while the kernel before it ends
    BLOCK_WIDTH: tl.constexpr,
):
    await_inputs(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    mask = columns < WIDTH
    total = tl.zeros([BLOCK_WIDTH], dtype=tl.float32)
    for slot in tl.static_range(TOP_K):
        pair = token * TOP_K + slot
        place = tl.load(places_ptr + pair).to(tl.int64)
        is_kept = (place >= 0) & (place < num_rows)
        row = pair if BY_PAIR else place
        weight = tl.load(weights_ptr + pair)
        y = tl.load(y_ptr + row * y_row + columns * y_last, mask=mask & is_kept, other=0.0)
        total = tl.where(is_kept, total + weight * y.to(tl.float32), total)
    out = total.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * out_row + columns * out_last, out, mask=mask)
