"""Many weights in one launch: a table on the device says where each is and how large.

Unit: a tile of some weight. Tiles are numbered through all rows of the table; a program takes TILES
of them in a row, looks up the row of the first and goes on from there. A row is int64, an
`encode_table.Entry`; every row has a tile. Pointers beside the table are those of one row, for the
types of all.
"""

import triton
import triton.language as tl

from syncline.model_ops_rocm.triton.encode_table import NUM_FIELDS, Entry
from syncline.model_ops_rocm.triton.kernels.encode import encode_tile
from syncline.model_ops_rocm.triton.kernels.scale_grid import amax_tile, fill_tile

_FIELDS = tl.constexpr(NUM_FIELDS)
_SOURCE = tl.constexpr(Entry._fields.index("source"))
_WEIGHT = tl.constexpr(Entry._fields.index("weight"))
_SCALE = tl.constexpr(Entry._fields.index("scale"))
_READ = tl.constexpr(Entry._fields.index("read"))
_SOURCE_SCALE = tl.constexpr(Entry._fields.index("source_scale"))
_ACROSS = tl.constexpr(Entry._fields.index("across"))
_TILES = tl.constexpr(Entry._fields.index("tiles"))
_ROWS = tl.constexpr(Entry._fields.index("row_origin"))
_COLUMNS = tl.constexpr(Entry._fields.index("column_origin"))
_SOURCE_MATRIX = tl.constexpr(Entry._fields.index("source_matrix"))
_SOURCE_ROW = tl.constexpr(Entry._fields.index("source_row"))
_SOURCE_COLUMN = tl.constexpr(Entry._fields.index("source_column"))
_SOURCE_SCALE_MATRIX = tl.constexpr(Entry._fields.index("source_scale_matrix"))
_SOURCE_SCALE_ROW = tl.constexpr(Entry._fields.index("source_scale_row"))
_FIRST_MATRIX = tl.constexpr(Entry._fields.index("first_matrix"))
_WEIGHT_MATRIX = tl.constexpr(Entry._fields.index("weight_matrix"))
_SCALE_MATRIX = tl.constexpr(Entry._fields.index("scale_matrix"))
_GRID_MATRIX = tl.constexpr(Entry._fields.index("grid_matrix"))
_GRID_ROW = tl.constexpr(Entry._fields.index("grid_row"))


@triton.jit
def _field(row_ptr, FIELD: tl.constexpr):
    return tl.load(row_ptr + FIELD)


@triton.jit
def _number(row_ptr, FIELD: tl.constexpr):
    return tl.load(row_ptr + FIELD).to(tl.int32)


@triton.jit
def _pointer(row_ptr, FIELD: tl.constexpr, like, IS_WIDE: tl.constexpr):
    """An address, of a pointer's type; of whole vectors where IS_WIDE says so."""
    pointer = tl.load(row_ptr + FIELD).to(like.dtype)
    if IS_WIDE:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _box(row_ptr, FIRST: tl.constexpr):
    """A `Box`: origin, start, stop and end."""
    origin, start = _number(row_ptr, FIRST), _number(row_ptr, FIRST + 1)
    return origin, start, _number(row_ptr, FIRST + 2), _number(row_ptr, FIRST + 3)


@triton.jit
def _axis(row_ptr, MATRIX: tl.constexpr):
    """Of an `Axis3`, all but what lies between matrices, which is its first field."""
    stride, part = _field(row_ptr, MATRIX + 1), _number(row_ptr, MATRIX + 2)
    return stride, part, _field(row_ptr, MATRIX + 3)


@triton.jit
def _job_of(table_ptr, tile, num_jobs):
    """The last job whose first tile is not behind `tile`."""
    low = tile * 0
    high = low + num_jobs
    while high - low > 1:
        middle = (low + high) // 2
        is_right = tl.load(table_ptr + middle * _FIELDS) <= tile
        low = tl.where(is_right, middle, low)
        high = tl.where(is_right, high, middle)
    return low


@triton.jit
def _next_job(table_ptr, job, number, num_jobs):
    """The job of a tile, if `job` is that of the tile before it, or of the tile itself."""
    if job + 1 < num_jobs:
        job += (tl.load(table_ptr + (job + 1) * _FIELDS) <= number).to(tl.int64)
    return job


@triton.jit
def _place_of(row_ptr, number):
    """Of a tile by its number: the matrix of its row, and the tile's row and column in it."""
    tile = (number - _field(row_ptr, 0)).to(tl.int32)
    across, tiles = _number(row_ptr, _ACROSS), _number(row_ptr, _TILES)
    matrix = (tile // tiles).to(tl.int64)
    tile = tile % tiles
    return matrix, tile // across, tile % across


@triton.jit
def _source_of(row_ptr, matrix, source_ptr, source_scale_ptr, FACTS: tl.constexpr):
    """As `numbers` takes it."""
    UNIT: tl.constexpr = FACTS.unit
    IS_WIDE: tl.constexpr = FACTS.unit > 1
    source = _pointer(row_ptr, _SOURCE, source_ptr, IS_WIDE)
    source += matrix * _field(row_ptr, _SOURCE_MATRIX) * UNIT
    row, column = _field(row_ptr, _SOURCE_ROW), _field(row_ptr, _SOURCE_COLUMN)
    # Numbers have no scales; nobody reads these.
    scale, scale_row = source, row
    if FACTS.source == "e4m3fn" or FACTS.source == "e4m3fnuz":
        scale = _pointer(row_ptr, _SOURCE_SCALE, source_scale_ptr, False)
        scale += matrix * _field(row_ptr, _SOURCE_SCALE_MATRIX)
        scale_row = _field(row_ptr, _SOURCE_SCALE_ROW)
    return source, row, column, scale, scale_row


@triton.jit(
    do_not_specialize=[
        *("source_ptr", "source_scale_ptr", "weight_ptr", "scale_ptr", "read_ptr", "flag_ptr"),
        *("num_jobs", "num_tiles"),
    ]
)
def encode_grouped_kernel(
    table_ptr,
    source_ptr,
    source_scale_ptr,
    weight_ptr,
    scale_ptr,
    read_ptr,
    flag_ptr,
    num_jobs,
    num_tiles,
    FACTS: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    ACROSS: tl.constexpr,
):
    WEIGHT_IS_WIDE: tl.constexpr = FACTS.stored_unit > 1
    STORED_UNIT: tl.constexpr = FACTS.stored_unit
    first = tl.program_id(0).to(tl.int64) * TILES
    job = _job_of(table_ptr, first, num_jobs)
    for number in range(first, tl.minimum(first + TILES, num_tiles)):
        job = _next_job(table_ptr, job, number, num_jobs)
        row_ptr = table_ptr + job * _FIELDS
        matrix, tile_row, tile_column = _place_of(row_ptr, number)
        stored = matrix + _field(row_ptr, _FIRST_MATRIX)
        weight = _pointer(row_ptr, _WEIGHT, weight_ptr, WEIGHT_IS_WIDE)
        scale = _pointer(row_ptr, _SCALE, scale_ptr, False)
        read = _pointer(row_ptr, _READ, read_ptr, False)
        encode_tile(
            _source_of(row_ptr, matrix, source_ptr, source_scale_ptr, FACTS),
            (
                weight + stored * _field(row_ptr, _WEIGHT_MATRIX) * STORED_UNIT,
                scale + stored * _field(row_ptr, _SCALE_MATRIX),
                read + stored * _field(row_ptr, _GRID_MATRIX),
                flag_ptr,
            ),
            (tile_row, tile_column),
            _box(row_ptr, _ROWS),
            _box(row_ptr, _COLUMNS),
            _axis(row_ptr, _WEIGHT_MATRIX),
            _axis(row_ptr, _SCALE_MATRIX),
            _field(row_ptr, _GRID_ROW),
            FACTS,
            BLOCK_ROWS,
            BLOCK_COLUMNS,
            ACROSS,
        )


@triton.jit(
    do_not_specialize=["source_ptr", "source_scale_ptr", "bits_ptr", "num_jobs", "num_tiles"]
)
def amax_grouped_kernel(
    table_ptr,
    source_ptr,
    source_scale_ptr,
    bits_ptr,
    num_jobs,
    num_tiles,
    FACTS: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * TILES
    job = _job_of(table_ptr, first, num_jobs)
    for number in range(first, tl.minimum(first + TILES, num_tiles)):
        job = _next_job(table_ptr, job, number, num_jobs)
        row_ptr = table_ptr + job * _FIELDS
        matrix, tile_row, tile_column = _place_of(row_ptr, number)
        stored = matrix + _field(row_ptr, _FIRST_MATRIX)
        bits = _pointer(row_ptr, _READ, bits_ptr, False)
        bits += stored * _field(row_ptr, _GRID_MATRIX)
        amax_tile(
            _source_of(row_ptr, matrix, source_ptr, source_scale_ptr, FACTS),
            (bits, bits),
            (tile_row, tile_column),
            _box(row_ptr, _ROWS),
            _box(row_ptr, _COLUMNS),
            _field(row_ptr, _GRID_ROW),
            FACTS,
            False,
            BLOCK_ROWS,
            BLOCK_COLUMNS,
        )


@triton.jit(do_not_specialize=["scale_ptr", "num_jobs", "num_tiles"])
def fill_grouped_kernel(
    table_ptr,
    scale_ptr,
    num_jobs,
    num_tiles,
    PLACES: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * TILES
    job = _job_of(table_ptr, first, num_jobs)
    for number in range(first, tl.minimum(first + TILES, num_tiles)):
        job = _next_job(table_ptr, job, number, num_jobs)
        row_ptr = table_ptr + job * _FIELDS
        matrix, tile_row, tile_column = _place_of(row_ptr, number)
        stored = matrix + _field(row_ptr, _FIRST_MATRIX)
        scale = _pointer(row_ptr, _SCALE, scale_ptr, False)
        rows, columns = _box(row_ptr, _ROWS), _box(row_ptr, _COLUMNS)
        fill_tile(
            scale + stored * _field(row_ptr, _SCALE_MATRIX),
            (tile_row, tile_column),
            (rows[1], rows[2], rows[3]),
            (columns[1], columns[2], columns[3]),
            _axis(row_ptr, _SCALE_MATRIX),
            PLACES,
            BLOCK_ROWS,
            BLOCK_COLUMNS,
        )
