"""Attention over parts of a context, merged: each part weighted by the exp of its lse.

Unit: one tile of rows, each a token and a head. The parts are added one after another in their own
order, so that the bits depend neither on who adds them nor on how a tile lies in registers. Knows
no grid and no counter.
"""

import triton
import triton.language as tl

from syncline.model_ops_rocm.triton.kernels.arrival import load_part
from syncline.model_ops_rocm.triton.kernels.attention_tiles import LN_2, LOG2_E

PARTS_AT_ONCE: tl.constexpr = tl.constexpr(8)


@triton.jit
def merged(
    parts_at,
    lse_at,
    is_row,
    num_parts,
    part_stride,
    lse_stride,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    AT_ONCE: tl.constexpr = PARTS_AT_ONCE,  # parts that are asked for together
):
    """(mean [M, BLOCK_D], lse [M]) of the parts whose first are at `parts_at` and `lse_at` [M]."""
    dims = tl.arange(0, BLOCK_D)
    inside = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    acc = tl.zeros([is_row.shape[0], BLOCK_D], dtype=tl.float32)
    top = tl.full([is_row.shape[0]], float("-inf"), dtype=tl.float32)
    total = tl.zeros([is_row.shape[0]], dtype=tl.float32)
    for start in range(0, num_parts, AT_ONCE):
        for index in tl.static_range(AT_ONCE):
            part = tl.cast(start + index, tl.int64)
            is_part = part < num_parts
            lse = load_part(lse_at + part * lse_stride, is_row & is_part)
            lse = tl.where(is_part, lse, float("-inf"))
            rows = load_part(parts_at + part * part_stride, inside & is_part)
            new_top = tl.maximum(top, lse)
            shift = tl.where(new_top == float("-inf"), 0.0, new_top)
            weight = tl.exp2((lse - shift) * LOG2_E)
            shrink = tl.exp2((top - shift) * LOG2_E)
            # Spelled out, so that whether a target fuses the two changes nothing.
            weighed = tl.broadcast_to(weight[:, None], acc.shape)
            acc *= shrink[:, None]
            added = tl.fma(rows.to(tl.float32), weighed, acc)
            # A part without weight may hold anything.
            acc = tl.where((weighed > 0.0) | (weighed != weighed), added, acc)
            total = tl.fma(total, shrink, weight)
            top = new_top
    is_empty = total == 0.0
    total = tl.where(is_empty, 1.0, total)
    mean = tl.div_rn(acc, tl.broadcast_to(total[:, None], acc.shape))
    lse = tl.where(is_empty, float("-inf"), tl.fma(tl.log2(total), LN_2, top))
    return mean, lse
