"""Mixture of experts of a few tokens: products of a matrix and one vector, for each pair.

Nothing is sorted. No matrix instruction would be a sixteenth full, so threads multiply and add,
each its own columns, and add up at the end. A thread adds up the columns of its own 16 bytes at
once, which leaves registers for loads; the next piece of the rows is asked for before this one is
multiplied.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from syncline.model_ops_rocm.triton.kernels.moe_experts import activated_of, scale_at, weight_at


@triton.jit
def _piece(at, mask, EVEN: tl.constexpr):
    """Weights, which are read once and need not stay in the cache."""
    if EVEN:
        piece = tl.load(at, eviction_policy="evict_first")
    else:
        piece = tl.load(at, mask=mask, other=0.0, eviction_policy="evict_first")
    return piece


@triton.jit
def _in_runs(weight, x, RUN: tl.constexpr):
    """[N, K // RUN] sums of weight [N, K] times x [K], each of RUN columns that lie together."""
    BLOCK_N: tl.constexpr = weight.shape[0]
    BLOCK_K: tl.constexpr = weight.shape[1]
    products = weight.to(tl.float32) * x[None, :]
    return tl.sum(products.reshape(BLOCK_N, BLOCK_K // RUN, RUN), axis=2)


@triton.jit
def _scale_of_codes(
    scale_ptr, rows, mask, column, WIDTH: tl.constexpr, SCALE: tl.constexpr, ENCODED: tl.constexpr
):
    """What codes of some rows are multiplied by at a column; 1 where they are no codes."""
    if ENCODED:
        PER_ROW: tl.constexpr = 1 if SCALE == 1 else (WIDTH + SCALE - 1) // SCALE
        block = 0 if SCALE == 1 else column // SCALE
        return tl.load(scale_ptr + rows * PER_ROW + block, mask=mask, other=0.0)
    else:
        return 1.0


@triton.jit
def direct_gate_up_kernel(  # noqa: PLR0915 - a kernel is one body
    x_ptr,
    x_scale_ptr,  # with ENCODED float32, [T, 1] or one per block of columns
    weight_ptr,  # [E, 2I, H]
    scale_ptr,
    activated_ptr,  # [T * k, I]
    ids_ptr,  # int32 [T, k]
    x_token,
    x_last,
    NUM_EXPERTS: tl.constexpr,
    HIDDEN: tl.constexpr,
    INTERMEDIATE: tl.constexpr,
    TOP_K: tl.constexpr,
    CHUNK: tl.constexpr,
    SCALE: tl.constexpr,
    ENCODED: tl.constexpr,  # x is codes, too: products of codes are exact
    OVERLAP: tl.constexpr,  # CUDA: launched while the kernel before it ends
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    RUN: tl.constexpr = 128 // weight_ptr.dtype.element_ty.primitive_bitwidth
    EVEN: tl.constexpr = INTERMEDIATE % BLOCK_N == 0 and HIDDEN % BLOCK_K == 0
    NUM_PIECES: tl.constexpr = (HIDDEN + BLOCK_K - 1) // BLOCK_K
    if OVERLAP:
        # In this order: the next kernel reads ids before it waits in turn.
        gdc_wait()
        gdc_launch_dependents()
    pair = tl.program_id(1).to(tl.int64)
    expert = tl.load(ids_ptr + pair).to(tl.int64)
    if (expert >= 0) & (expert < NUM_EXPERTS):
        rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        is_row = rows < INTERMEDIATE
        columns = tl.arange(0, BLOCK_K)
        mask = is_row[:, None] & (columns < HIDDEN)[None, :]
        token = pair // TOP_K
        x_ptr += token * x_token
        weight_ptr += expert * (2 * INTERMEDIATE * HIDDEN)
        next_gate = _piece(weight_ptr + weight_at(rows, columns, HIDDEN, CHUNK), mask, EVEN)
        at = weight_at(INTERMEDIATE + rows, columns, HIDDEN, CHUNK)
        next_up = _piece(weight_ptr + at, mask, EVEN)
        if SCALE == 1:
            scale_ptr += expert * (2 * INTERMEDIATE)
        elif SCALE > 1:
            scale_ptr += expert * (
                ((2 * INTERMEDIATE + SCALE - 1) // SCALE) * ((HIDDEN + SCALE - 1) // SCALE)
            )
        gates = tl.zeros([BLOCK_N, BLOCK_K // RUN], dtype=tl.float32)
        ups = tl.zeros([BLOCK_N, BLOCK_K // RUN], dtype=tl.float32)
        for number in tl.static_range(NUM_PIECES):
            start = number * BLOCK_K
            columns = start + tl.arange(0, BLOCK_K)
            x = tl.load(x_ptr + columns * x_last, mask=columns < HIDDEN, other=0.0).to(tl.float32)
            gate, up = next_gate, next_up
            if number + 1 < NUM_PIECES:
                columns += BLOCK_K
                mask = is_row[:, None] & (columns < HIDDEN)[None, :]
                at = weight_at(rows, columns, HIDDEN, CHUNK)
                next_gate = _piece(weight_ptr + at, mask, EVEN)
                at = weight_at(INTERMEDIATE + rows, columns, HIDDEN, CHUNK)
                next_up = _piece(weight_ptr + at, mask, EVEN)
            gate, up = _in_runs(gate, x, RUN), _in_runs(up, x, RUN)
            if SCALE > 1:
                of_x = _scale_of_codes(x_scale_ptr, token, True, start, HIDDEN, SCALE, ENCODED)
                scale = scale_at(scale_ptr, rows, start, 2 * INTERMEDIATE, HIDDEN, SCALE)
                gate *= (scale * of_x)[:, None]
                scale = scale_at(
                    scale_ptr, INTERMEDIATE + rows, start, 2 * INTERMEDIATE, HIDDEN, SCALE
                )
                up *= (scale * of_x)[:, None]
            gates += gate
            ups += up
        gate = tl.sum(gates, axis=1)
        up = tl.sum(ups, axis=1)
        if SCALE == 1:
            of_x = _scale_of_codes(x_scale_ptr, token, True, 0, HIDDEN, SCALE, ENCODED)
            gate *= tl.load(scale_ptr + rows, mask=is_row, other=0.0) * of_x
            up *= tl.load(scale_ptr + INTERMEDIATE + rows, mask=is_row, other=0.0) * of_x
        activated = activated_of(gate, up, activated_ptr.dtype.element_ty)
        tl.store(activated_ptr + pair * INTERMEDIATE + rows, activated, mask=is_row)


@triton.jit
def direct_down_kernel(  # noqa: PLR0915 - a kernel is one body
    activated_ptr,  # [T * k, I]
    activated_scale_ptr,  # with ENCODED float32, [T * k, 1] or one per block of columns
    weight_ptr,  # [E, H, I]
    scale_ptr,
    out_ptr,
    routing_ptr,  # float32 [T, k]
    ids_ptr,  # int32 [T, k]
    out_row,
    out_last,
    NUM_EXPERTS: tl.constexpr,
    HIDDEN: tl.constexpr,
    INTERMEDIATE: tl.constexpr,
    TOP_K: tl.constexpr,
    CHUNK: tl.constexpr,
    SCALE: tl.constexpr,
    ENCODED: tl.constexpr,
    OVERLAP: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # BLOCK_N results of one token, all of its experts at once: the sum needs no other launch.
    RUN: tl.constexpr = 128 // weight_ptr.dtype.element_ty.primitive_bitwidth
    NUM_PIECES: tl.constexpr = (INTERMEDIATE + BLOCK_K - 1) // BLOCK_K
    SHARED: tl.constexpr = SCALE if SCALE > 0 else 1
    SCALES: tl.constexpr = ((HIDDEN + SHARED - 1) // SHARED) * (
        (INTERMEDIATE + SHARED - 1) // SHARED
    )
    token = tl.program_id(1).to(tl.int64)
    slots = tl.arange(0, BLOCK_SLOTS)
    pairs = token * TOP_K + slots
    experts = tl.load(ids_ptr + pairs, mask=slots < TOP_K, other=-1).to(tl.int64)
    is_kept = (experts >= 0) & (experts < NUM_EXPERTS)
    experts = tl.where(is_kept, experts, 0)
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row = rows < HIDDEN
    matrices = weight_ptr + experts[:, None, None] * (HIDDEN * INTERMEDIATE)
    inputs = activated_ptr + pairs[:, None] * INTERMEDIATE
    has_weight = is_kept[:, None, None] & is_row[None, :, None]
    columns = tl.arange(0, BLOCK_K)
    at = weight_at(rows, columns, INTERMEDIATE, CHUNK)[None, :, :]
    mask = has_weight & (columns < INTERMEDIATE)[None, None, :]
    next_weight = _piece(matrices + at, mask, False)
    if OVERLAP:
        # Up to here nothing was read that the kernel before writes; it has waited for the others.
        gdc_wait()
        gdc_launch_dependents()
    sums = tl.zeros([BLOCK_SLOTS, BLOCK_N, BLOCK_K // RUN], dtype=tl.float32)
    for number in tl.static_range(NUM_PIECES):
        start = number * BLOCK_K
        columns = start + tl.arange(0, BLOCK_K)
        in_mask = is_kept[:, None] & (columns < INTERMEDIATE)[None, :]
        activated = tl.load(inputs + columns[None, :], mask=in_mask, other=0.0)
        weight = next_weight
        if number + 1 < NUM_PIECES:
            columns += BLOCK_K
            at = weight_at(rows, columns, INTERMEDIATE, CHUNK)[None, :, :]
            mask = has_weight & (columns < INTERMEDIATE)[None, None, :]
            next_weight = _piece(matrices + at, mask, False)
        products = weight.to(tl.float32) * activated.to(tl.float32)[:, None, :]
        part = tl.sum(products.reshape(BLOCK_SLOTS, BLOCK_N, BLOCK_K // RUN, RUN), axis=3)
        if SCALE > 1:
            of_rows = (rows // SCALE) * ((INTERMEDIATE + SCALE - 1) // SCALE) + start // SCALE
            scales = scale_ptr + experts[:, None] * SCALES + of_rows[None, :]
            scale = tl.load(scales, mask=is_kept[:, None] & is_row[None, :], other=0.0)
            part *= scale[:, :, None]
            if ENCODED:
                scale = _scale_of_codes(
                    *(activated_scale_ptr, pairs, is_kept, start, INTERMEDIATE, SCALE, ENCODED)
                )
                part *= scale[:, None, None]
        sums += part
    y = tl.sum(sums, axis=2)
    if SCALE == 1:
        scales = scale_ptr + experts[:, None] * HIDDEN + rows[None, :]
        y *= tl.load(scales, mask=is_kept[:, None] & is_row[None, :], other=0.0)
        if ENCODED:
            scale = _scale_of_codes(
                *(activated_scale_ptr, pairs, is_kept, 0, INTERMEDIATE, SCALE, ENCODED)
            )
            y *= scale[:, None]
    dtype = out_ptr.dtype.element_ty
    y = y.to(dtype).to(tl.float32)
    routing = tl.load(routing_ptr + pairs, mask=is_kept, other=0.0)
    summands = tl.where(is_kept[:, None], routing[:, None] * y, 0.0)
    total = tl.zeros([BLOCK_N], dtype=tl.float32)
    for slot in tl.static_range(TOP_K):
        # All others are zero: the sum is this slot's, and the order is that of the slots.
        total += tl.sum(tl.where((slots == slot)[:, None], summands, 0.0), axis=0)
    tl.store(out_ptr + token * out_row + rows * out_last, total.to(dtype), mask=is_row)
