"""What a kernel reads of one of many weights: a row of a table on the device; imports no Triton.

Unit: one part of one weight, in one launch. A kernel finds its fields by their places here.
"""

from typing import Final, NamedTuple

from syncline.model_ops_rocm.triton.encode_plan import Axis3, Box, Part


class Entry(NamedTuple):
    """One row, int64 each; a number that a kernel has no use for is 0."""

    first_tile: int  # tiles are numbered through all rows of a launch
    source: int  # addresses
    weight: int
    scale: int
    read: int  # scales, or maxima, to be read; in the pass that makes maxima, to be written
    source_scale: int
    across: int  # tiles in a row of tiles
    tiles: int  # of one matrix
    row_origin: int
    row_start: int
    row_stop: int
    row_end: int
    column_origin: int
    column_start: int
    column_stop: int
    column_end: int
    source_matrix: int
    source_row: int
    source_column: int
    source_scale_matrix: int
    source_scale_row: int
    first_matrix: int
    weight_matrix: int
    weight_stride: int
    weight_part: int
    weight_part_stride: int
    scale_matrix: int
    scale_stride: int
    scale_part: int
    scale_part_stride: int
    grid_matrix: int
    grid_row: int


NUM_FIELDS: Final = len(Entry._fields)
ROW_BYTES: Final = 8 * NUM_FIELDS
# Those behind the addresses, which the rows of weights that differ in their addresses share.
Numbers = tuple[int, ...]
_NOTHING: Final = Axis3(0, 0, 0, 0)


def numbers_of_part(
    part: Part, tiles: tuple[int, int], scale: Axis3, grid: tuple[int, int]
) -> Numbers:
    """Of a region that is read; `tiles` across and down one matrix, `grid` of a matrix's scales."""
    return (
        *(tiles[0], tiles[0] * tiles[1], *part.rows, *part.columns),
        *(*part.source_strides, *part.scale_strides, part.first),
        *(*part.weight, *scale, grid[0] * grid[1], grid[1]),
    )


def numbers_of_padding(
    boxes: tuple[Box, Box], tiles: tuple[int, int], first: int, scale: Axis3
) -> Numbers:
    """Of a region of scales that nothing is read for."""
    rows, columns = boxes
    return (
        *(tiles[0], tiles[0] * tiles[1], *rows, *columns),
        *(0, 0, 0, 0, 0, first, *_NOTHING, *scale, 0, 0),
    )
