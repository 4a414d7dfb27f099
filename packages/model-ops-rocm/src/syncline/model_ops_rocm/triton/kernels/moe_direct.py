"""Mixture of experts of a few tokens: products of a matrix and one vector, for each pair.

Nothing is sorted. No matrix instruction would be a sixteenth full, so threads multiply and add,
each its own columns, and add up at the end. What one step loads is in flight while the step before
is computed.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from syncline.model_ops_rocm.triton.kernels.moe_experts import scale_at, weight_at


@triton.jit
def direct_gate_up_kernel(  # noqa: PLR0915 - a kernel is one body
    x_ptr,
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
    OVERLAP: tl.constexpr,  # CUDA: launched while the kernel before it ends
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    if OVERLAP:
        # In this order: the next kernel reads ids before it waits in turn.
        gdc_wait()
        gdc_launch_dependents()
    pair = tl.program_id(1).to(tl.int64)
    expert = tl.load(ids_ptr + pair).to(tl.int64)
    if (expert >= 0) & (expert < NUM_EXPERTS):
        rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        is_row = rows < INTERMEDIATE
        x_ptr += (pair // TOP_K) * x_token
        weight_ptr += expert * (2 * INTERMEDIATE * HIDDEN)
        if SCALE == 1:
            scale_ptr += expert * (2 * INTERMEDIATE)
        elif SCALE > 1:
            scale_ptr += expert * (
                ((2 * INTERMEDIATE + SCALE - 1) // SCALE) * ((HIDDEN + SCALE - 1) // SCALE)
            )
        gates = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
        ups = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
        for start in tl.range(0, HIDDEN, BLOCK_K, num_stages=STAGES):
            columns = start + tl.arange(0, BLOCK_K)
            is_column = columns < HIDDEN
            mask = is_row[:, None]
            if HIDDEN % BLOCK_K != 0:
                mask &= is_column[None, :]
            at = weight_at(rows, columns, HIDDEN, CHUNK)
            up_at = weight_at(INTERMEDIATE + rows, columns, HIDDEN, CHUNK)
            gate = tl.load(weight_ptr + at, mask=mask, other=0.0).to(tl.float32)
            up = tl.load(weight_ptr + up_at, mask=mask, other=0.0).to(tl.float32)
            x = tl.load(x_ptr + columns * x_last, mask=is_column, other=0.0).to(tl.float32)
            if SCALE > 1:
                gate *= scale_at(scale_ptr, rows, start, 2 * INTERMEDIATE, HIDDEN, SCALE)[:, None]
                up *= scale_at(
                    scale_ptr, INTERMEDIATE + rows, start, 2 * INTERMEDIATE, HIDDEN, SCALE
                )[:, None]
            gates = tl.fma(gate, tl.broadcast_to(x[None, :], [BLOCK_N, BLOCK_K]), gates)
            ups = tl.fma(up, tl.broadcast_to(x[None, :], [BLOCK_N, BLOCK_K]), ups)
        gate = tl.sum(gates, axis=1)
        up = tl.sum(ups, axis=1)
        if SCALE == 1:
            gate *= tl.load(scale_ptr + rows, mask=is_row, other=0.0)
            up *= tl.load(scale_ptr + INTERMEDIATE + rows, mask=is_row, other=0.0)
        dtype = activated_ptr.dtype.element_ty
        gate = gate.to(dtype).to(tl.float32)
        activated = tl.div_rn(gate, 1.0 + tl.exp(-gate)).to(dtype).to(tl.float32)
        activated *= up.to(dtype).to(tl.float32)
        tl.store(activated_ptr + pair * INTERMEDIATE + rows, activated.to(dtype), mask=is_row)


@triton.jit
def direct_down_kernel(  # noqa: PLR0915 - a kernel is one body
    activated_ptr,  # [T * k, I]
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
    OVERLAP: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # BLOCK_N results of one token, all of its experts at once: the sum needs no other launch.
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
    weight = tl.load(matrices + at, mask=mask, other=0.0)
    if OVERLAP:
        # Up to here nothing was read that the kernel before writes; it has waited for the others.
        gdc_wait()
    in_mask = is_kept[:, None] & (columns < INTERMEDIATE)[None, :]
    activated = tl.load(inputs + columns[None, :], mask=in_mask, other=0.0)
    sums = tl.zeros([BLOCK_SLOTS, BLOCK_N, BLOCK_K], dtype=tl.float32)
    for start in range(0, INTERMEDIATE, BLOCK_K):
        columns = start + BLOCK_K + tl.arange(0, BLOCK_K)
        is_column = columns < INTERMEDIATE
        at = weight_at(rows, columns, INTERMEDIATE, CHUNK)[None, :, :]
        mask = has_weight & is_column[None, None, :]
        next_weight = tl.load(matrices + at, mask=mask, other=0.0)
        in_mask = is_kept[:, None] & is_column[None, :]
        next_activated = tl.load(inputs + columns[None, :], mask=in_mask, other=0.0)
        factor = weight.to(tl.float32)
        if SCALE > 1:
            of_rows = (rows // SCALE) * ((INTERMEDIATE + SCALE - 1) // SCALE) + start // SCALE
            scales = scale_ptr + experts[:, None] * SCALES + of_rows[None, :]
            scale = tl.load(scales, mask=is_kept[:, None] & is_row[None, :], other=0.0)
            factor *= scale[:, :, None]
        wide = tl.broadcast_to(
            activated.to(tl.float32)[:, None, :], [BLOCK_SLOTS, BLOCK_N, BLOCK_K]
        )
        sums = tl.fma(factor, wide, sums)
        weight, activated = next_weight, next_activated
    y = tl.sum(sums, axis=2)
    if SCALE == 1:
        scales = scale_ptr + experts[:, None] * HIDDEN + rows[None, :]
        y *= tl.load(scales, mask=is_kept[:, None] & is_row[None, :], other=0.0)
    dtype = out_ptr.dtype.element_ty
    y = y.to(dtype).to(tl.float32)
    routing = tl.load(routing_ptr + pairs, mask=is_kept, other=0.0)
    summands = tl.where(is_kept[:, None], routing[:, None] * y, 0.0)
    total = tl.zeros([BLOCK_N], dtype=tl.float32)
    for slot in tl.static_range(TOP_K):
        # All others are zero: the sum is this slot's, and the order is that of the slots.
        total += tl.sum(tl.where((slots == slot)[:, None], summands, 0.0), axis=0)
    tl.store(out_ptr + token * out_row + rows * out_last, total.to(dtype), mask=is_row)
