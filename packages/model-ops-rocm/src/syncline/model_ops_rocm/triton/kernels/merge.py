"""Attention over parts of a context, merged: each part weighted by the exp of its lse."""

import triton
import triton.language as tl

from syncline.model_ops_rocm.triton.kernels.attention_tiles import LOG2_E
from syncline.model_ops_rocm.triton.kernels.dependent import await_turn


@triton.jit(
    do_not_specialize=[
        "num_parts",
        "lse_part",
        "lse_token",
        "lse_head",
        "out_lse_token",
        "out_lse_head",
    ],
    do_not_specialize_on_alignment=["lse_ptr", "out_lse_ptr"],
)
def merge_kernel(
    parts_ptr,
    lse_ptr,
    out_ptr,
    out_lse_ptr,  # or None
    num_parts,
    part_part,
    part_token,
    part_head,
    part_last,
    lse_part,
    lse_token,
    lse_head,
    out_token,
    out_head,
    out_last,
    out_lse_token,
    out_lse_head,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Program (token; heads): the mean of the parts, each weighted by the exp of its lse."""
    await_turn(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    parts = tl.arange(0, BLOCK_PARTS)
    dims = tl.arange(0, BLOCK_D)
    is_head = heads < NUM_HEADS
    mask = is_head[:, None] & (parts < num_parts)[None, :]
    at = token * lse_token + heads[:, None] * lse_head
    at += (parts.to(tl.int64) * lse_part)[None, :]
    lse = tl.load(lse_ptr + at, mask=mask, other=float("-inf"))
    top = tl.max(lse, 1)
    weights = tl.exp2((lse - tl.where(top == float("-inf"), 0.0, top)[:, None]) * LOG2_E)
    total = tl.sum(weights, 1)
    at = token * part_token + heads[:, None] * part_head
    at += (parts.to(tl.int64) * part_part)[None, :]
    # Asked for beside the logarithms, not after them.
    rows = tl.load(
        parts_ptr + at[:, :, None] + (dims * part_last)[None, None, :],
        mask=mask[:, :, None] & (dims < HEAD_DIM)[None, None, :],
        other=0.0,
    )
    # A part without weight may hold anything.
    used = (weights > 0.0) | (weights != weights)
    rows = tl.where(used[:, :, None], rows.to(tl.float32), 0.0)
    is_empty = total == 0.0
    total = tl.where(is_empty, 1.0, total)
    mean = tl.sum(rows * weights[:, :, None], 1) / total[:, None]
    out_at = token * out_token + heads[:, None] * out_head + (dims * out_last)[None, :]
    is_result = is_head[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(out_ptr + out_at, mean.to(out_ptr.dtype.element_ty), mask=is_result)
    if out_lse_ptr is not None:
        merged = tl.where(is_empty, float("-inf"), top + tl.log(total))
        tl.store(out_lse_ptr + token * out_lse_token + heads * out_lse_head, merged, mask=is_head)
