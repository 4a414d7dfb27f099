"""How a tile of a weight is read and where its elements are stored: device functions, no kernel.

Unit: a tile of one matrix. A box is a range of rows or columns: origin of the tiles, start, stop,
end of the padding. FACTS is an `EncodeFacts`, PLACES a `PlaceFacts`.
"""

import triton
import triton.language as tl

from syncline.model_ops_rocm.triton.kernels.quant_cast import e8m0_to_fp32


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
def _decoded(codes, FACTS: tl.constexpr):
    """float32 of bytes of e4m3fn or e4m3fnuz, exact."""
    code = codes.to(tl.int32)
    magnitude = code & 0x7F
    # As the bits of a float32 it is off by a power of two alone, subnormal or not.
    value = (magnitude << 20).to(tl.float32, bitcast=True)
    if FACTS.source == "e4m3fn":
        value *= 1.329227995784916e36
        is_nan = magnitude == 0x7F
    else:
        value *= 6.64613997892458e35
        is_nan = code == 0x80
    bits = value.to(tl.int32, bitcast=True) | ((code & 0x80) << 24)
    return tl.where(is_nan, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def _source_scales(source, at, mask, FACTS: tl.constexpr):
    """float32 of the scales at some rows and columns of the source's own grid."""
    places = at[0].to(tl.int64)[:, None] * source[4] + at[1][None, :]
    if FACTS.source_is_e8m0:
        scale = e8m0_to_fp32(tl.load(source[3] + places, mask=mask, other=127).to(tl.int32))
    else:
        scale = tl.load(source[3] + places, mask=mask, other=1.0)
    return scale


@triton.jit
def _scaled(x, source, row, column, sizes, FACTS: tl.constexpr):
    """Numbers of codes times their scales.

    The tile's first row and column count from the source's corner, as its blocks do; `sizes` are
    the source's rows and columns.
    """
    ROWS: tl.constexpr = x.shape[0]
    COLUMNS: tl.constexpr = x.shape[1]
    SHARED: tl.constexpr = FACTS.source_share[0]
    ACROSS: tl.constexpr = FACTS.source_share[1]
    # Where no tile cuts a block that it is not within, a block has one scale; else an element.
    TALL: tl.constexpr = SHARED if SHARED > 0 and SHARED < ROWS else ROWS
    BROAD: tl.constexpr = ACROSS if ACROSS > 0 and ACROSS < COLUMNS else COLUMNS
    HIGH: tl.constexpr = TALL if FACTS.source_is_aligned else 1
    WIDE: tl.constexpr = BROAD if FACTS.source_is_aligned else 1
    R: tl.constexpr = ROWS // HIGH
    C: tl.constexpr = COLUMNS // WIDE
    rows, columns = row + tl.arange(0, R) * HIGH, column + tl.arange(0, C) * WIDE
    mask = ((rows >= 0) & (rows < sizes[0]))[:, None]
    mask = mask & ((columns >= 0) & (columns < sizes[1]))[None, :]
    grid_rows = rows // SHARED if SHARED > 0 else rows * 0
    grid_columns = columns // ACROSS if ACROSS > 0 else columns * 0
    scale = _source_scales(source, (grid_rows, grid_columns), mask, FACTS)
    blocks = tl.reshape(x, (R, HIGH, C, WIDE)) * scale[:, None, :, None]
    return tl.reshape(blocks, (ROWS, COLUMNS))


@triton.jit
def numbers(
    source,
    first_row,
    first_column,
    row_box,
    column_box,
    FACTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """float32 of a tile; 0 where the source has none.

    `source` is its pointer at the box's corner, its row and column stride, and for codes the
    pointer and the row stride of their scales.
    """
    UNIT: tl.constexpr = FACTS.unit
    rows = first_row + tl.arange(0, BLOCK_ROWS)
    columns = first_column + tl.arange(0, BLOCK_COLUMNS)
    strides = (source[1], source[2])
    at, is_read = tile_of_source(rows, columns, row_box, column_box, strides, UNIT)
    x = tl.load(source[0] + at, mask=is_read, other=0)
    if FACTS.source == "e4m3fn" or FACTS.source == "e4m3fnuz":
        start = column_box[1] * UNIT
        sizes = (row_box[2] - row_box[1], column_box[2] * UNIT - start)
        x = _decoded(x, FACTS)
        x = _scaled(x, source, first_row - row_box[1], first_column - start, sizes, FACTS)
    elif source[0].dtype.element_ty == tl.int16:
        # bfloat16, as the interpreter gets it: shifting is what the conversion does.
        x = (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def bf16_bits(x):
    """float32 -> the bits of bfloat16 in int16, to nearest even; a NaN keeps its sign alone."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    nan = ((bits >> 16) & 0x8000) | 0x7FC0
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, nan, rounded).to(tl.int16)


@triton.jit
def _raise_flag(bits, flag_ptr, FLAGS: tl.constexpr):
    """Of codes or scales that are copied, of the type FLAGS: whether one is no number."""
    if FLAGS == "float32":
        is_bad = ((bits > 0.0) & (bits < float("inf"))).to(tl.int32) == 0
    elif FLAGS == "e4m3fn":
        is_bad = (bits.to(tl.int32) & 0x7F) == 0x7F
    else:
        tl.static_assert(FLAGS == "e4m3fnuz" or FLAGS == "e8m0")
        is_bad = bits.to(tl.int32) == (0x80 if FLAGS == "e4m3fnuz" else 0xFF)
    num_bad = tl.max(tl.max(is_bad.to(tl.int32), axis=1), axis=0)
    tl.store(flag_ptr, 1, mask=num_bad > 0)


@triton.jit
def copied(
    source,
    weight_ptr,
    flag_ptr,
    first_row,
    first_column,
    row_box,
    column_box,
    FACTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """The source's elements without a scale: as they are, or rounded to nearest even."""
    if FACTS.code == "bits":
        UNIT: tl.constexpr = FACTS.unit
        rows = first_row + tl.arange(0, BLOCK_ROWS)
        columns = first_column + tl.arange(0, BLOCK_COLUMNS)
        strides = (source[1], source[2])
        at, is_read = tile_of_source(rows, columns, row_box, column_box, strides, UNIT)
        if FACTS.flags == "":
            codes = tl.load(source[0] + at, mask=is_read, other=0)
        else:
            # What is not read is a number, and where a scale is copied nothing is padded.
            FLAGS: tl.constexpr = FACTS.flags
            codes = tl.load(source[0] + at, mask=is_read, other=1)
            _raise_flag(codes, flag_ptr, FLAGS)
            codes = tl.where(is_read, codes, 0)
    else:
        codes = numbers(
            *(source, first_row, first_column, row_box, column_box),
            *(FACTS, BLOCK_ROWS, BLOCK_COLUMNS),
        )
        if FACTS.code == "bfloat16":
            codes = bf16_bits(codes)
        codes = codes.to(weight_ptr.dtype.element_ty)
    return codes


@triton.jit
def store_codes(
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
