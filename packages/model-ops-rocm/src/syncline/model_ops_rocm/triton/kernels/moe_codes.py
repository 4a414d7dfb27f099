"""The projections of mixture of experts by codes: those of x, or of what SwiGLU gave, and weights'.

Blocks of pairs are those of `moe_experts`. The weight is the left operand, so that few pairs are
the narrow side of a matrix instruction. Sums of fp8 products are promoted to float32 every 128 of
K; scales of blocks multiply such a part, those of rows the whole sum.
"""

import triton
import triton.language as tl

from syncline.model_ops_rocm.triton.kernels.moe_experts import (
    activated_of,
    scale_at,
    tile_of,
    weight_at,
)
from syncline.model_ops_rocm.triton.kernels.tiles import e4m3_to_float


@triton.jit
def _codes_at(at, mask, DECODE: tl.constexpr, FNUZ: tl.constexpr):
    """Codes as a product takes them; with DECODE they come as bytes, and become numbers."""
    if DECODE:
        return e4m3_to_float(tl.load(at, mask=mask, other=0), FNUZ)
    else:
        return tl.load(at, mask=mask, other=0.0)


@triton.jit
def _more(acc, weight, x, DECODE: tl.constexpr):
    """acc [N, M] and one step of K more."""
    if DECODE:
        return tl.dot(weight, tl.trans(x), acc, input_precision="ieee")
    else:
        return tl.dot(weight, tl.trans(x), acc, max_num_imprecise_acc=128)


@triton.jit
def _more_scaled(acc, weight, x, weight_scale, x_scale):
    part = tl.dot(weight, tl.trans(x), input_precision="ieee")
    return acc + part * weight_scale[:, None] * x_scale[None, :]


@triton.jit(do_not_specialize=["num_pairs", "num_blocks"])
def codes_gate_up_kernel(
    x_ptr,  # [T, H]
    x_scale_ptr,  # float32 [T, 1], or [T, ceil(H / 128)]
    weight_ptr,  # [E, 2I, H]
    scale_ptr,
    activated_ptr,  # [T * k, I]
    pairs_ptr,
    experts_ptr,  # of each block
    num_pairs,
    num_blocks,
    NUM_EXPERTS: tl.constexpr,
    HIDDEN: tl.constexpr,
    INTERMEDIATE: tl.constexpr,
    TOP_K: tl.constexpr,
    CHUNK: tl.constexpr,
    SCALE: tl.constexpr,  # 1: of a row, else of a block of so many rows and columns
    DECODE: tl.constexpr,
    FNUZ: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_BLOCKS: tl.constexpr,
):
    X_SCALES: tl.constexpr = 1 if SCALE == 1 else (HIDDEN + SCALE - 1) // SCALE
    tile, block = tile_of((INTERMEDIATE + BLOCK_N - 1) // BLOCK_N, num_blocks, GROUP_BLOCKS)
    expert = tl.load(experts_ptr + block)
    if (expert >= 0) & (expert < NUM_EXPERTS):
        pairs = tl.load(pairs_ptr + block * BLOCK_M + tl.arange(0, BLOCK_M))
        is_pair = pairs < num_pairs
        tokens = (pairs // TOP_K).to(tl.int64)
        rows = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        is_row = rows < INTERMEDIATE
        weight_ptr += expert.to(tl.int64) * (2 * INTERMEDIATE * HIDDEN)
        scale_ptr += expert.to(tl.int64) * (((2 * INTERMEDIATE + SCALE - 1) // SCALE) * X_SCALES)
        gate = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
        up = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
        for start in range(0, HIDDEN, BLOCK_K):
            columns = start + tl.arange(0, BLOCK_K)
            x_mask = is_pair[:, None]
            mask = is_row[:, None]
            if HIDDEN % BLOCK_K != 0:
                x_mask &= (columns < HIDDEN)[None, :]
                mask &= (columns < HIDDEN)[None, :]
            x = _codes_at(x_ptr + tokens[:, None] * HIDDEN + columns[None, :], x_mask, DECODE, FNUZ)
            at = weight_ptr + weight_at(rows, columns, HIDDEN, CHUNK)
            up_at = weight_ptr + weight_at(INTERMEDIATE + rows, columns, HIDDEN, CHUNK)
            gates = _codes_at(at, mask, DECODE, FNUZ)
            ups = _codes_at(up_at, mask, DECODE, FNUZ)
            if SCALE > 1:
                of_x = tl.load(
                    x_scale_ptr + tokens * X_SCALES + start // SCALE, mask=is_pair, other=0.0
                )
                of_gate = scale_at(scale_ptr, rows, start, 2 * INTERMEDIATE, HIDDEN, SCALE)
                of_up = scale_at(
                    scale_ptr, INTERMEDIATE + rows, start, 2 * INTERMEDIATE, HIDDEN, SCALE
                )
                gate = _more_scaled(gate, gates, x, of_gate, of_x)
                up = _more_scaled(up, ups, x, of_up, of_x)
            else:
                gate = _more(gate, gates, x, DECODE)
                up = _more(up, ups, x, DECODE)
        if SCALE == 1:
            scale = tl.load(x_scale_ptr + tokens, mask=is_pair, other=0.0)[None, :]
            gate *= scale * tl.load(scale_ptr + rows, mask=is_row, other=0.0)[:, None]
            up *= scale * tl.load(scale_ptr + INTERMEDIATE + rows, mask=is_row, other=0.0)[:, None]
        activated = tl.trans(activated_of(gate, up, activated_ptr.dtype.element_ty))
        at = pairs.to(tl.int64)[:, None] * INTERMEDIATE + rows[None, :]
        tl.store(activated_ptr + at, activated, mask=is_pair[:, None] & is_row[None, :])


@triton.jit(do_not_specialize=["num_pairs", "num_blocks"])
def codes_down_kernel(
    x_ptr,  # [T * k, I]
    x_scale_ptr,  # float32 [T * k, 1], or [T * k, ceil(I / 128)]
    weight_ptr,  # [E, H, I]
    scale_ptr,
    y_ptr,  # [T * k, H]
    pairs_ptr,
    experts_ptr,
    num_pairs,
    num_blocks,
    NUM_EXPERTS: tl.constexpr,
    HIDDEN: tl.constexpr,
    INTERMEDIATE: tl.constexpr,
    CHUNK: tl.constexpr,
    SCALE: tl.constexpr,
    DECODE: tl.constexpr,
    FNUZ: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_BLOCKS: tl.constexpr,
):
    X_SCALES: tl.constexpr = 1 if SCALE == 1 else (INTERMEDIATE + SCALE - 1) // SCALE
    tile, block = tile_of((HIDDEN + BLOCK_N - 1) // BLOCK_N, num_blocks, GROUP_BLOCKS)
    expert = tl.load(experts_ptr + block)
    if (expert >= 0) & (expert < NUM_EXPERTS):
        pairs = tl.load(pairs_ptr + block * BLOCK_M + tl.arange(0, BLOCK_M))
        is_pair = pairs < num_pairs
        inputs = pairs.to(tl.int64)
        rows = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        is_row = rows < HIDDEN
        weight_ptr += expert.to(tl.int64) * (HIDDEN * INTERMEDIATE)
        scale_ptr += expert.to(tl.int64) * (((HIDDEN + SCALE - 1) // SCALE) * X_SCALES)
        y = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
        for start in range(0, INTERMEDIATE, BLOCK_K):
            columns = start + tl.arange(0, BLOCK_K)
            x_mask = is_pair[:, None]
            mask = is_row[:, None]
            if INTERMEDIATE % BLOCK_K != 0:
                x_mask &= (columns < INTERMEDIATE)[None, :]
                mask &= (columns < INTERMEDIATE)[None, :]
            x = _codes_at(
                x_ptr + inputs[:, None] * INTERMEDIATE + columns[None, :], x_mask, DECODE, FNUZ
            )
            at = weight_ptr + weight_at(rows, columns, INTERMEDIATE, CHUNK)
            weight = _codes_at(at, mask, DECODE, FNUZ)
            if SCALE > 1:
                of_x = tl.load(
                    x_scale_ptr + inputs * X_SCALES + start // SCALE, mask=is_pair, other=0.0
                )
                of_row = scale_at(scale_ptr, rows, start, HIDDEN, INTERMEDIATE, SCALE)
                y = _more_scaled(y, weight, x, of_row, of_x)
            else:
                y = _more(y, weight, x, DECODE)
        if SCALE == 1:
            y *= tl.load(x_scale_ptr + inputs, mask=is_pair, other=0.0)[None, :]
            y *= tl.load(scale_ptr + rows, mask=is_row, other=0.0)[:, None]
        at = inputs[:, None] * HIDDEN + rows[None, :]
        mask = is_pair[:, None] & is_row[None, :]
        tl.store(y_ptr + at, tl.trans(y.to(y_ptr.dtype.element_ty)), mask=mask)
