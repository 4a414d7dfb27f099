"""Attention over parts of a context, merged by a launch of its own."""

import triton
import triton.language as tl

from syncline.model_ops_rocm.triton.kernels.attention_parts import merged
from syncline.model_ops_rocm.triton.kernels.dependent import await_turn


@triton.jit(
    do_not_specialize=[
        "num_parts",
        "part_part",
        "part_token",
        "part_head",
        "out_token",
        "out_head",
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
    part_part,  # this stride and the next four are counted in UNITs
    part_token,
    part_head,
    out_token,
    out_head,
    part_last,
    out_last,
    lse_part,
    lse_token,
    lse_head,
    out_lse_token,
    out_lse_head,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    UNIT: tl.constexpr,  # strides depend on how many parts and tokens there are, this does not
    AT_ONCE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Program (token; heads): the mean of the parts, each weighted by the exp of its lse."""
    await_turn(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1).to(tl.int64) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    dims = tl.arange(0, BLOCK_D).to(tl.int64)
    is_head = heads < NUM_HEADS
    at = (token * part_token + heads[:, None] * part_head) * UNIT
    at += (dims * part_last)[None, :]
    mean, lse = merged(
        parts_ptr + at,
        lse_ptr + token * lse_token + heads * lse_head,
        is_head,
        num_parts,
        tl.cast(part_part, tl.int64) * UNIT,
        lse_part,
        HEAD_DIM,
        BLOCK_D,
        AT_ONCE,
    )
    out_at = (token * out_token + heads[:, None] * out_head) * UNIT
    out_at += (dims * out_last)[None, :]
    is_result = is_head[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(out_ptr + out_at, mean.to(out_ptr.dtype.element_ty), mask=is_result)
    if out_lse_ptr is not None:
        tl.store(out_lse_ptr + token * out_lse_token + heads * out_lse_head, lse, mask=is_head)
