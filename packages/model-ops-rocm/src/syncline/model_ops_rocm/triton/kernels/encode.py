"""Weights to stored bytes: a tile is read once, scaled, converted and stored where it belongs.

Unit: a tile [BLOCK_ROWS, BLOCK_COLUMNS] of one matrix. Absolute rows and columns of the matrix say
which scale an element has and where a layout stores it; a region is a box of them. FACTS is an
`EncodeFacts`. The bits are those of `formats.quantised` in PyTorch.
"""

import triton
import triton.language as tl

from syncline.model_ops_rocm.triton.kernels.quant_cast import (
    clamped_quotients,
    codes_of,
    e8m0_scales,
    e8m0_to_fp32,
    fp32_scales,
    magnitude_bits,
)


@triton.jit
def row_places(rows, axis, PLACES: tl.constexpr, UNIT: tl.constexpr):
    """int64: what absolute rows add to a place; axis is (stride, part_size, part_stride).

    Strides come divided by UNIT, which the product shows to whoever looks for aligned addresses.
    """
    rest = rows
    places = (rows * 0).to(tl.int64)
    if PLACES.row_inner[0] > 1:
        places += rest % PLACES.row_inner[0] * PLACES.row_inner[1]
        rest = rest // PLACES.row_inner[0]
    if PLACES.row_inner[2] > 1:
        places += rest % PLACES.row_inner[2] * PLACES.row_inner[3]
        rest = rest // PLACES.row_inner[2]
    if PLACES.has_row_parts:
        places += (rest // axis[1]).to(tl.int64) * axis[2] * UNIT
        rest = rest % axis[1]
    return places + rest.to(tl.int64) * axis[0] * UNIT


@triton.jit
def column_places(columns, PLACES: tl.constexpr):
    """int32: what absolute columns add to a place."""
    rest = columns
    places = columns * 0
    if PLACES.column_inner[0] > 1:
        places += rest % PLACES.column_inner[0] * PLACES.column_inner[1]
        rest = rest // PLACES.column_inner[0]
    if PLACES.column_inner[2] > 1:
        places += rest % PLACES.column_inner[2] * PLACES.column_inner[3]
        rest = rest // PLACES.column_inner[2]
    if PLACES.column_outer[1] > 0:
        places += rest // PLACES.column_outer[1] * PLACES.column_outer[2]
        rest = rest % PLACES.column_outer[1]
    return places + rest * PLACES.column_outer[0]


@triton.jit
def numbers(source_ptr, at, mask, FACTS: tl.constexpr):
    """float32 of the source's elements; 0 where the mask is false."""
    x = tl.load(source_ptr + at, mask=mask, other=0)
    if source_ptr.dtype.element_ty == tl.int16:
        # bfloat16, as the interpreter gets it: shifting is what the conversion does.
        x = (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def tile_of_source(rows, columns, row_box, column_box, strides, UNIT: tl.constexpr):
    """Offsets of a tile's elements from those of the box's corner, and which are in the source."""
    start = column_box[1] * UNIT
    is_read = ((rows >= row_box[1]) & (rows < row_box[2]))[:, None]
    is_read = is_read & ((columns >= start) & (columns < column_box[2] * UNIT))[None, :]
    row_at = (rows - row_box[1]).to(tl.int64) * strides[0] * UNIT
    column_at = columns - start
    if UNIT == 1:
        column_at = column_at.to(tl.int64) * strides[1]
    return row_at[:, None] + column_at[None, :], is_read


@triton.jit
def exact_quotients(x, scale):
    """x / scale, correctly rounded, of scales in [2^-80, 2^100] and quotients under 2^120.

    Products with the correctly rounded reciprocal, twice corrected by exact remainders (Markstein's
    theorem). A quotient under 2^-20 may be off by a rounding; no code distinguishes it from 0. The
    remainders have the sign that leaves -0 what it is.
    """
    # Minus signs as products: 0 - x, which they are otherwise, loses that of 0.
    reciprocal = tl.div_rn(1.0, scale)
    minus_reciprocal, minus_x = reciprocal * -1.0, x * -1.0
    quotient = x * reciprocal
    excess = tl.fma(quotient, scale, minus_x)
    quotient = tl.fma(excess, minus_reciprocal, quotient)
    excess = tl.fma(quotient, scale, minus_x)
    return tl.fma(excess, minus_reciprocal, quotient)


@triton.jit
def _scale_bytes(amax_bits, FACTS: tl.constexpr):
    """Scales as they are stored: float32, or bytes in int32."""
    # Named, since a value of FACTS itself is no argument of a function in Triton 3.6.
    LIMIT: tl.constexpr = FACTS.limit
    ZERO_IS_ONE: tl.constexpr = FACTS.zero_is_one
    if FACTS.is_e8m0:
        POWER: tl.constexpr = FACTS.power
        MANTISSA: tl.constexpr = FACTS.mantissa
        MODE: tl.constexpr = FACTS.mode
        stored = e8m0_scales(amax_bits, LIMIT, POWER, MANTISSA, MODE, ZERO_IS_ONE)
    else:
        stored = fp32_scales(amax_bits, LIMIT, ZERO_IS_ONE)
    return stored


@triton.jit
def _bf16_bits(x):
    """float32 -> the bits of bfloat16 in int16, to nearest even; a NaN keeps its sign alone."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    nan = ((bits >> 16) & 0x8000) | 0x7FC0
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, nan, rounded).to(tl.int16)


@triton.jit
def _larger(one, other):
    return tl.maximum(one, other, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def amax_bits_of(blocks, FACTS: tl.constexpr):
    """int32 [R, C] of [R, rows of a block, C, columns of a block]; NaN and infinity on top."""
    if FACTS.max_is_float:
        amax = tl.reduce(tl.reduce(tl.abs(blocks), 3, _larger), 1, _larger)
        bits = magnitude_bits(amax)
    else:
        bits = tl.max(tl.max(magnitude_bits(blocks), axis=3), axis=1)
    return bits


@triton.jit
def _quotients(blocks, stored, largest, flag_ptr, FACTS: tl.constexpr):
    """x / scale of tiles [R, rows of a block, C, columns of a block], clamped where FACTS says so.

    `stored` are the scales [R, C], `largest` is the tile's magnitude in bits, looked at where the
    scales are not its own. The flag is raised for what has no code: then that is 0.
    """
    IS_OWN: tl.constexpr = FACTS.scales != "given"
    LIMIT: tl.constexpr = FACTS.limit
    if FACTS.is_e8m0:
        scale = e8m0_to_fp32(stored)
        is_plain = stored < 255
    else:
        scale = stored
        is_plain = (scale >= 8.271806125530277e-25) & (scale <= 1.2676506002282294e30)
    is_usable = (scale > 0.0) & (scale < float("inf"))
    scale = scale[:, None, :, None]
    # One look at all scales decides how the whole tile is divided.
    plain = tl.min(tl.min(is_plain.to(tl.int32), axis=1), axis=0) > 0
    if not IS_OWN:
        plain = plain & (largest < 0x53800000)
    if plain:
        if FACTS.is_e8m0:
            # A power of two: the product with its reciprocal is the quotient.
            inverse = tl.where(stored == 254, 1 << 22, (254 - stored) << 23)
            quotient = blocks * inverse.to(tl.float32, bitcast=True)[:, None, :, None]
        elif FACTS.has_fma:
            quotient = exact_quotients(blocks, scale)
        else:
            quotient = tl.div_rn(blocks, scale)
        if FACTS.clamps:
            quotient = tl.minimum(tl.maximum(quotient, -1.0 * LIMIT), 1.0 * LIMIT)
    else:
        is_bad = tl.min(tl.min(is_usable.to(tl.int32), axis=1), axis=0) == 0
        if not IS_OWN:
            is_bad = is_bad | (largest >= 0x7F800000)
        tl.store(flag_ptr, 1, mask=is_bad)
        quotient = clamped_quotients(blocks, scale, LIMIT, IS_OWN)
    return quotient


@triton.jit
def _store_scales(scale_ptr, stored, grid, mask, axis, FACTS: tl.constexpr):
    """Scales [R, C] to their places."""
    PLACES: tl.constexpr = FACTS.scale_places
    places = row_places(grid[0], axis, PLACES, 1)[:, None]
    places += column_places(grid[1], PLACES)[None, :]
    tl.store(scale_ptr + places, stored.to(scale_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _scaled_codes(
    x,
    pointers,  # scales to write, scales or maxima to read, flag
    scale_box,  # of the grid: first row, first column, stop row, stop column, stores
    scale_axis,
    given_row,
    FACTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Codes of a tile; stores its scales and raises the flag for what has none."""
    HIGH: tl.constexpr = FACTS.share[0] if FACTS.share[0] > 0 else BLOCK_ROWS
    WIDE: tl.constexpr = FACTS.share[1] if FACTS.share[1] > 0 else BLOCK_COLUMNS
    R: tl.constexpr = BLOCK_ROWS // HIGH
    C: tl.constexpr = BLOCK_COLUMNS // WIDE
    scale_ptr, read_ptr, flag_ptr = pointers
    blocks = tl.reshape(x, (R, HIGH, C, WIDE))
    rows, columns = scale_box[0] + tl.arange(0, R), scale_box[1] + tl.arange(0, C)
    inside = (rows < scale_box[2])[:, None] & (columns < scale_box[3])[None, :]
    read_at = rows.to(tl.int64)[:, None] * given_row + columns[None, :]
    largest = 0
    if FACTS.scales == "own":
        stored = _scale_bytes(amax_bits_of(blocks, FACTS), FACTS)
    elif FACTS.scales == "amax":
        stored = _scale_bytes(tl.load(read_ptr + read_at, mask=inside, other=0), FACTS)
    else:
        largest = tl.max(tl.max(magnitude_bits(x), axis=1), axis=0)
        if FACTS.is_e8m0:
            stored = tl.load(read_ptr + read_at, mask=inside, other=127).to(tl.int32)
        else:
            stored = tl.load(read_ptr + read_at, mask=inside, other=1.0)
    mask = inside & scale_box[4]
    _store_scales(scale_ptr, stored, (rows, columns), mask, scale_axis, FACTS)
    quotients = _quotients(blocks, stored, largest, flag_ptr, FACTS)
    quotients = tl.reshape(quotients, (BLOCK_ROWS, BLOCK_COLUMNS))
    CODE: tl.constexpr = FACTS.code
    IS_NATIVE: tl.constexpr = FACTS.is_native
    codes = codes_of(quotients, CODE, IS_NATIVE)
    if FACTS.code == "e2m1":
        low, high = tl.split(tl.reshape(codes, (BLOCK_ROWS, BLOCK_COLUMNS // 2, 2)))
        codes = (low | (high << 4)).to(tl.uint8)
    return codes


@triton.jit
def _store_codes(
    weight_ptr,
    codes,
    rows,
    tile_column,
    row_box,
    column_box,
    axis,
    FACTS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Codes [rows, WIDTH], two of e2m1 in each byte, to their places."""
    PER_BYTE: tl.constexpr = 2 if FACTS.code == "e2m1" else 1
    # Where columns are unaligned they are still whole bytes: no region cuts one.
    UNIT: tl.constexpr = FACTS.unit // PER_BYTE if FACTS.unit > 1 else 1
    DIVISOR: tl.constexpr = 1 if FACTS.unit > 1 else PER_BYTE
    columns = column_box[0] // DIVISOR * UNIT + tile_column * WIDTH + tl.arange(0, WIDTH)
    is_column = columns >= column_box[1] // DIVISOR * UNIT
    is_column = is_column & (columns < column_box[3] // DIVISOR * UNIT)
    is_row = (rows >= row_box[1]) & (rows < row_box[3])
    PLACES: tl.constexpr = FACTS.weight
    STORED_UNIT: tl.constexpr = FACTS.stored_unit
    places = row_places(rows, axis, PLACES, STORED_UNIT)[:, None]
    places += column_places(columns, PLACES)[None, :]
    tl.store(weight_ptr + places, codes, mask=is_row[:, None] & is_column[None, :])


@triton.jit
def encode_tile(
    pointers,  # source, weight, scales to write, scales or maxima to read, flag
    tile,  # row and column of the tile in the box
    row_box,  # origin, start, stop, end of the padding
    column_box,
    source_strides,  # row, column
    weight_axis,
    scale_axis,
    given_row,
    FACTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Store one tile; `pointers` are those of its matrix, the source's that of the box's corner."""
    UNIT: tl.constexpr = FACTS.unit
    source_ptr, weight_ptr, scale_ptr, read_ptr, flag_ptr = pointers
    first_row = row_box[0] + tile[0] * BLOCK_ROWS
    first_column = column_box[0] * UNIT + tile[1] * BLOCK_COLUMNS
    rows = first_row + tl.arange(0, BLOCK_ROWS)
    columns = first_column + tl.arange(0, BLOCK_COLUMNS)
    at, is_read = tile_of_source(rows, columns, row_box, column_box, source_strides, UNIT)
    if FACTS.scales != "none":
        HIGH: tl.constexpr = FACTS.share[0]
        WIDE: tl.constexpr = FACTS.share[1]
        # A domain that is larger than a tile has its scale stored by one tile.
        grid_row, grid_rows, stores = 0, 1, tile[0] == 0
        if HIGH > 0:
            grid_row, grid_rows = first_row // HIGH, (row_box[3] + HIGH - 1) // HIGH
            stores = first_row >= 0
        grid_column, grid_columns = 0, 1
        if WIDE > 0:
            grid_column = first_column // WIDE
            grid_columns = (column_box[3] * UNIT + WIDE - 1) // WIDE
        else:
            stores = stores & (tile[1] == 0)
        codes = _scaled_codes(
            *(numbers(source_ptr, at, is_read, FACTS), (scale_ptr, read_ptr, flag_ptr)),
            *((grid_row, grid_column, grid_rows, grid_columns, stores), scale_axis, given_row),
            *(FACTS, BLOCK_ROWS, BLOCK_COLUMNS),
        )
    elif FACTS.code == "bits":
        codes = tl.load(source_ptr + at, mask=is_read, other=0)
    else:
        codes = numbers(source_ptr, at, is_read, FACTS)
        if FACTS.code == "bfloat16":
            codes = _bf16_bits(codes)
        codes = codes.to(weight_ptr.dtype.element_ty)
    WIDTH: tl.constexpr = BLOCK_COLUMNS // 2 if FACTS.code == "e2m1" else BLOCK_COLUMNS
    _store_codes(weight_ptr, codes, rows, tile[1], row_box, column_box, weight_axis, FACTS, WIDTH)


@triton.jit(
    do_not_specialize=[
        *("row_origin", "row_start", "row_stop", "row_end"),
        *("column_origin", "column_start", "column_stop", "column_end", "source_matrix"),
        *("source_row", "weight_matrix", "weight_stride", "weight_part", "weight_part_stride"),
        *("scale_matrix", "scale_stride", "scale_part", "scale_part_stride"),
        *("given_matrix", "given_row", "first_matrix"),
    ]
)
def encode_kernel(
    source_ptr,
    weight_ptr,
    scale_ptr,
    read_ptr,
    flag_ptr,
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
    first_matrix,
    weight_matrix,
    weight_stride,
    weight_part,
    weight_part_stride,
    scale_matrix,
    scale_stride,
    scale_part,
    scale_part_stride,
    given_matrix,
    given_row,
    FACTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    # Matrix by matrix, row of tiles by row of tiles.
    matrix = tl.program_id(2).to(tl.int64)
    stored = matrix + first_matrix
    encode_tile(
        (
            source_ptr + matrix * source_matrix * FACTS.unit,
            weight_ptr + stored * weight_matrix * FACTS.stored_unit,
            scale_ptr + stored * scale_matrix,
            read_ptr + stored * given_matrix,
            flag_ptr,
        ),
        (tl.program_id(1), tl.program_id(0)),
        (row_origin, row_start, row_stop, row_end),
        (column_origin, column_start, column_stop, column_end),
        (source_row, source_column),
        (weight_stride, weight_part, weight_part_stride),
        (scale_stride, scale_part, scale_part_stride),
        given_row,
        FACTS,
        BLOCK_ROWS,
        BLOCK_COLUMNS,
    )
