"""Many weights in one launch: a table on the device says where each is and how large.

Unit: a tile of some weight. Tiles are numbered through all weights; a program takes TILES of them
in a row, looks up the weight of the first and goes on from there. The table is int64 [jobs, FIELDS]
in the order of `encode_table.Entry`; its first field is the number of the weight's first tile.
"""

import triton
import triton.language as tl

from syncline.model_ops_rocm.triton.kernels.encode import encode_tile


@triton.jit
def _field(table_ptr, job, FIELD: tl.constexpr, FIELDS: tl.constexpr):
    return tl.load(table_ptr + job * FIELDS + FIELD)


@triton.jit
def _number(table_ptr, job, FIELD: tl.constexpr, FIELDS: tl.constexpr):
    return tl.load(table_ptr + job * FIELDS + FIELD).to(tl.int32)


@triton.jit
def _pointer(
    table_ptr, job, FIELD: tl.constexpr, FIELDS: tl.constexpr, like, IS_WIDE: tl.constexpr
):
    """An address, of a pointer's type; of whole vectors where IS_WIDE says so."""
    pointer = tl.load(table_ptr + job * FIELDS + FIELD).to(like.dtype)
    if IS_WIDE:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _job_of(table_ptr, tile, num_jobs, FIELDS: tl.constexpr):
    """The last job whose first tile is not behind `tile`."""
    low = tile * 0
    high = low + num_jobs
    while high - low > 1:
        middle = (low + high) // 2
        is_right = tl.load(table_ptr + middle * FIELDS) <= tile
        low = tl.where(is_right, middle, low)
        high = tl.where(is_right, high, middle)
    return low


@triton.jit(do_not_specialize=["num_jobs", "num_tiles"])
def encode_grouped_kernel(
    table_ptr,
    source_ptr,  # one job's, for the types of all
    weight_ptr,
    scale_ptr,
    read_ptr,
    flag_ptr,
    num_jobs,
    num_tiles,
    FACTS: tl.constexpr,
    FIELDS: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    ACROSS: tl.constexpr,
):
    SOURCE_IS_WIDE: tl.constexpr = FACTS.unit > 1
    WEIGHT_IS_WIDE: tl.constexpr = FACTS.stored_unit > 1
    UNIT: tl.constexpr = FACTS.unit
    STORED_UNIT: tl.constexpr = FACTS.stored_unit
    first = tl.program_id(0).to(tl.int64) * TILES
    job = _job_of(table_ptr, first, num_jobs, FIELDS)
    for number in range(first, tl.minimum(first + TILES, num_tiles)):
        # Every job has a tile, so that the next one is the next job's at most.
        if job + 1 < num_jobs:
            job += (tl.load(table_ptr + (job + 1) * FIELDS) <= number).to(tl.int64)
        tile = (number - _field(table_ptr, job, 0, FIELDS)).to(tl.int32)
        across = _number(table_ptr, job, 5, FIELDS)
        tiles = _number(table_ptr, job, 6, FIELDS)
        matrix = (tile // tiles).to(tl.int64)
        tile = tile % tiles
        stored = matrix + _field(table_ptr, job, 18, FIELDS)
        source = _pointer(table_ptr, job, 1, FIELDS, source_ptr, SOURCE_IS_WIDE)
        weight = _pointer(table_ptr, job, 2, FIELDS, weight_ptr, WEIGHT_IS_WIDE)
        scale = _pointer(table_ptr, job, 3, FIELDS, scale_ptr, False)
        read = _pointer(table_ptr, job, 4, FIELDS, read_ptr, False)
        encode_tile(
            (
                source + matrix * _field(table_ptr, job, 15, FIELDS) * UNIT,
                _field(table_ptr, job, 16, FIELDS),
                _field(table_ptr, job, 17, FIELDS),
                source,  # no codes here, so no scales of theirs
                0,
            ),
            (
                weight + stored * _field(table_ptr, job, 19, FIELDS) * STORED_UNIT,
                scale + stored * _field(table_ptr, job, 23, FIELDS),
                read + stored * _field(table_ptr, job, 27, FIELDS),
                flag_ptr,
            ),
            (tile // across, tile % across),
            (
                _number(table_ptr, job, 7, FIELDS),
                _number(table_ptr, job, 8, FIELDS),
                _number(table_ptr, job, 9, FIELDS),
                _number(table_ptr, job, 10, FIELDS),
            ),
            (
                _number(table_ptr, job, 11, FIELDS),
                _number(table_ptr, job, 12, FIELDS),
                _number(table_ptr, job, 13, FIELDS),
                _number(table_ptr, job, 14, FIELDS),
            ),
            (
                _field(table_ptr, job, 20, FIELDS),
                _number(table_ptr, job, 21, FIELDS),
                _field(table_ptr, job, 22, FIELDS),
            ),
            (
                _field(table_ptr, job, 24, FIELDS),
                _number(table_ptr, job, 25, FIELDS),
                _field(table_ptr, job, 26, FIELDS),
            ),
            _field(table_ptr, job, 28, FIELDS),
            FACTS,
            BLOCK_ROWS,
            BLOCK_COLUMNS,
            ACROSS,
        )
