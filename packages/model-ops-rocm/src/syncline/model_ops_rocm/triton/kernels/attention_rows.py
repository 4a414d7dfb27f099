"""Rows of queries of an attention kernel: how they are read, scaled and stored.

Unit: one tile of rows, each a token and a head. Knows no cache and no grid.
"""

import triton
import triton.language as tl


@triton.jit
def query_places(
    q_ptr, strides, token, heads, is_row, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Pointers to the queries [M, BLOCK_D], and which of them there are."""
    dims = tl.arange(0, BLOCK_D)
    at = token.to(tl.int64) * strides[0] + heads * strides[1]
    mask = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    return q_ptr + at[:, None] + (dims * strides[2])[None, :], mask


@triton.jit
def store_rows(
    ptr, strides, token, heads, is_row, rows, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr
):
    dims = tl.arange(0, BLOCK_D)
    at = token.to(tl.int64) * strides[0] + heads * strides[1]
    mask = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    target = ptr + at[:, None] + (dims * strides[2])[None, :]
    tl.store(target, rows.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def held_length(lens_at, table_tokens):
    """(a row's tokens, at most what its table holds; what its scores are multiplied by).

    1, but NaN where there would be more: a length that no host has seen is not cut in silence.
    """
    seq_len = tl.load(lens_at).to(tl.int32)
    factor = tl.where(seq_len > table_tokens, float("nan"), 1.0)
    return tl.minimum(seq_len, table_tokens), factor


@triton.jit
def scale_of(scale_ptr, kv_head, PER: tl.constexpr):
    """What all of a head's numbers are multiplied by: PER 1 is one scale for the tensor, 2 one
    per head; 0 is none, and 3 one per token, which a tile multiplies by."""
    if PER == 1:
        return tl.load(scale_ptr)
    elif PER == 2:
        return tl.load(scale_ptr + kv_head)
    else:
        return 1.0
