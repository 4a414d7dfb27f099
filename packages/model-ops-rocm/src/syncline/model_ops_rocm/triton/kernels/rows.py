"""Rows of a table by index: embedding, one vocabulary shard's part of it, and row gather.

Copies bits. An index outside the table never reads; what its row becomes is the caller's choice.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["first", "num_rows"])
def gather_rows_kernel(
    ids_ptr,
    table_ptr,
    out_ptr,
    first,  # the id of the table's row 0
    num_rows,
    ids_stride,
    table_row,
    table_last,
    out_row,
    out_last,
    WIDTH: tl.constexpr,
    OUTSIDE_IS_ZERO: tl.constexpr,  # else NaN
    MINUS_ONE_IS_ZERO: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    given = tl.load(ids_ptr + token * ids_stride).to(tl.int64)
    row = given - first
    is_inside = (row >= 0) & (row < num_rows)
    missing = 0.0 if OUTSIDE_IS_ZERO else float("nan")
    fill = tl.full((BLOCK_WIDTH,), missing, tl.float32)
    if MINUS_ONE_IS_ZERO:
        fill = tl.where(given == -1, 0.0, fill)
    source = table_ptr + tl.where(is_inside, row, 0) * table_row + columns * table_last
    mask = columns < WIDTH
    values = tl.load(source, mask=mask & is_inside, other=0.0)
    values = tl.where(is_inside, values, fill.to(values.dtype))
    tl.store(out_ptr + token * out_row + columns * out_last, values, mask=mask)
