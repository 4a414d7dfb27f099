"""What lies around the encoding of a weight: maxima of its blocks, and the padding of its scales.

Unit: a tile of one matrix, or of its grid of scales. Maxima are int32 bits, so they combine by an
integer maximum, in whatever order programs come to it; the same holds for the counts.
"""

import triton
import triton.language as tl

from syncline.model_ops_rocm.triton.kernels.encode import amax_bits_of
from syncline.model_ops_rocm.triton.kernels.weight_tiles import (
    column_places,
    numbers,
    row_places,
)


@triton.jit
def _overlaps(first, box, NUM: tl.constexpr, SIZE: tl.constexpr):
    """int64 [NUM]: how many of SIZE neighbours from each start on lie in [box[0], box[1])."""
    starts = first + tl.arange(0, NUM) * SIZE
    stops = tl.minimum(starts + SIZE, box[1])
    return tl.maximum(stops - tl.maximum(starts, box[0]), 0).to(tl.int64)


@triton.jit
def amax_tile(
    source,  # see `numbers`
    pointers,  # maxima and counts of this matrix
    tile,  # row and column of the tile in the box
    row_box,
    column_box,
    grid_row,
    FACTS: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Add a tile to the maxima of its blocks, and to their counts."""
    UNIT: tl.constexpr = FACTS.unit
    HIGH: tl.constexpr = FACTS.share[0]
    WIDE: tl.constexpr = FACTS.share[1]
    # A block that is larger than a tile has its maximum from several programs.
    TILE_HIGH: tl.constexpr = HIGH if HIGH > 0 and HIGH < BLOCK_ROWS else BLOCK_ROWS
    TILE_WIDE: tl.constexpr = WIDE if WIDE > 0 and WIDE < BLOCK_COLUMNS else BLOCK_COLUMNS
    R: tl.constexpr = BLOCK_ROWS // TILE_HIGH
    C: tl.constexpr = BLOCK_COLUMNS // TILE_WIDE
    first_row = row_box[0] + tile[0] * BLOCK_ROWS
    first_column = column_box[0] * UNIT + tile[1] * BLOCK_COLUMNS
    x = numbers(
        *(source, first_row, first_column, row_box, column_box, FACTS, BLOCK_ROWS, BLOCK_COLUMNS)
    )
    bits = amax_bits_of(tl.reshape(x, (R, TILE_HIGH, C, TILE_WIDE)), FACTS)
    # One NaN for all that is not finite.
    bits = tl.where(bits >= 0x7F800000, 0x7FC00000, bits)
    high = _overlaps(first_row, (row_box[1], row_box[3]), R, TILE_HIGH)
    wide = _overlaps(first_column, (column_box[1] * UNIT, column_box[3] * UNIT), C, TILE_WIDE)
    counts = high[:, None] * wide[None, :]
    grid_rows = (first_row // HIGH if HIGH > 0 else 0) + tl.arange(0, R)
    grid_columns = (first_column // WIDE if WIDE > 0 else 0) + tl.arange(0, C)
    grid_at = grid_rows.to(tl.int64)[:, None] * grid_row + grid_columns[None, :]
    tl.atomic_max(pointers[0] + grid_at, bits, mask=counts > 0, sem="relaxed")
    if HAS_COUNTS:
        tl.atomic_add(pointers[1] + grid_at, counts, mask=counts > 0, sem="relaxed")


@triton.jit
def fill_tile(
    scale_ptr,  # of this matrix
    tile,  # row and column of the tile in the box
    row_box,  # start, stop, end
    column_box,
    axis,
    PLACES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Store the fill in all of the box that lies behind its stops."""
    rows = row_box[0] + tile[0] * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = column_box[0] + tile[1] * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    is_inside = (rows < row_box[2])[:, None] & (columns < column_box[2])[None, :]
    is_padding = (rows >= row_box[1])[:, None] | (columns >= column_box[1])[None, :]
    places = row_places(rows, axis, PLACES, 1)[:, None]
    places += column_places(columns, PLACES)[None, :]
    fill = tl.full((BLOCK_ROWS, BLOCK_COLUMNS), PLACES.fill, scale_ptr.dtype.element_ty)
    tl.store(scale_ptr + places, fill, mask=is_inside & is_padding)


@triton.jit(
    do_not_specialize=[
        *("row_origin", "row_start", "row_stop", "row_end"),
        *("column_origin", "column_start", "column_stop", "column_end", "source_matrix"),
        *("source_row", "first_matrix", "grid_matrix", "grid_row"),
        *("source_scale_matrix", "source_scale_row"),
    ]
)
def amax_kernel(
    source_ptr,
    source_scale_ptr,
    bits_ptr,
    counts_ptr,
    row_origin,
    row_start,
    row_stop,
    row_end,
    column_origin,
    column_start,
    column_stop,
    column_end,
    source_matrix,
    source_row,
    source_column,
    source_scale_matrix,
    source_scale_row,
    first_matrix,
    grid_matrix,
    grid_row,
    FACTS: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    matrix = tl.program_id(2).to(tl.int64)
    place = (matrix + first_matrix) * grid_matrix
    amax_tile(
        (
            source_ptr + matrix * source_matrix * FACTS.unit,
            source_row,
            source_column,
            source_scale_ptr + matrix * source_scale_matrix,
            source_scale_row,
        ),
        (bits_ptr + place, counts_ptr + place),
        (tl.program_id(1), tl.program_id(0)),
        (row_origin, row_start, row_stop, row_end),
        (column_origin, column_start, column_stop, column_end),
        grid_row,
        FACTS,
        HAS_COUNTS,
        BLOCK_ROWS,
        BLOCK_COLUMNS,
    )


@triton.jit(
    do_not_specialize=[
        *("row_start", "row_stop", "row_end", "column_start"),
        *("column_stop", "column_end", "first_matrix", "scale_matrix", "scale_stride"),
        *("scale_part", "scale_part_stride"),
    ]
)
def fill_scales_kernel(
    scale_ptr,
    row_start,
    row_stop,
    row_end,
    column_start,
    column_stop,
    column_end,
    first_matrix,
    scale_matrix,
    scale_stride,
    scale_part,
    scale_part_stride,
    PLACES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    matrix = tl.program_id(2).to(tl.int64)
    fill_tile(
        scale_ptr + (matrix + first_matrix) * scale_matrix,
        (tl.program_id(1), tl.program_id(0)),
        (row_start, row_stop, row_end),
        (column_start, column_stop, column_end),
        (scale_stride, scale_part, scale_part_stride),
        PLACES,
        BLOCK_ROWS,
        BLOCK_COLUMNS,
    )
