"""Weights to stored bytes: a tile is read once, scaled, converted and stored where it belongs.

Unit: a tile [BLOCK_ROWS, BLOCK_COLUMNS] of one matrix. Absolute rows and columns of the matrix say
which scale an element has and where a layout stores it; a region is a box of them. FACTS is an
`EncodeFacts`. The bits are those of `formats.quantised` in PyTorch.
"""

import triton
import triton.language as tl

from syncline.model_ops_rocm.triton.kernels.quant_cast import (
    codes_of,
    e8m0_scales,
    e8m0_to_fp32,
    fp32_scales,
    magnitude_bits,
)
from syncline.model_ops_rocm.triton.kernels.weight_tiles import (
    column_places,
    copied,
    numbers,
    row_places,
    store_codes,
)


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
def _rare_quotients(x, scale, LIMIT: tl.constexpr, IS_OWN: tl.constexpr):
    """x / scale by division, within +-LIMIT; 0 where there is no such number.

    For tiles that are not plain: a division is a call here, which costs the others no registers.
    """
    usable = (scale > 0.0) & (scale < float("inf"))
    safe = tl.where(usable, scale, 1.0)
    if not IS_OWN:
        usable = usable & (magnitude_bits(x) < 0x7F800000)
    quotient = tl.where(usable, tl.div_rn(tl.where(usable, x, 0.0), safe), 0.0)
    return tl.minimum(tl.maximum(quotient, -1.0 * LIMIT), 1.0 * LIMIT)


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
        quotient = _rare_quotients(blocks, scale, LIMIT, IS_OWN)
    return quotient


@triton.jit
def _grid_of(first_row, first_column, tile, row_box, column_box, FACTS: tl.constexpr):
    """Of a tile's scales: first row and column, those they stop at, and whether it stores them."""
    HIGH: tl.constexpr = FACTS.share[0]
    WIDE: tl.constexpr = FACTS.share[1]
    # A domain that is larger than a tile has its scale stored by the tile at its start.
    row, rows, stores = 0, 1, tile[0] == 0
    if HIGH > 0:
        row, rows = first_row // HIGH, (row_box[3] + HIGH - 1) // HIGH
        stores = first_row % HIGH == 0
    column, columns = 0, 1
    if WIDE > 0:
        UNIT: tl.constexpr = FACTS.unit
        column, columns = first_column // WIDE, (column_box[3] * UNIT + WIDE - 1) // WIDE
    else:
        stores = stores & (tile[1] == 0)
    return row, column, rows, columns, stores


@triton.jit
def _scales_of(
    x,
    pointers,  # scales to write, scales or maxima to read
    grid,  # as `_grid_of` says
    scale_axis,
    given_row,
    FACTS: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    """Scales [R, C] of a tile, stored; from `x`, whose magnitudes are its own, or read."""
    rows, columns = grid[0] + tl.arange(0, R), grid[1] + tl.arange(0, C)
    inside = (rows < grid[2])[:, None] & (columns < grid[3])[None, :]
    read_at = rows.to(tl.int64)[:, None] * given_row + columns[None, :]
    if FACTS.scales == "own":
        HIGH: tl.constexpr = x.shape[0] // R
        WIDE: tl.constexpr = x.shape[1] // C
        stored = _scale_bytes(amax_bits_of(tl.reshape(x, (R, HIGH, C, WIDE)), FACTS), FACTS)
    elif FACTS.scales == "amax":
        stored = _scale_bytes(tl.load(pointers[1] + read_at, mask=inside, other=0), FACTS)
    elif FACTS.is_e8m0:
        stored = tl.load(pointers[1] + read_at, mask=inside, other=127).to(tl.int32)
    else:
        stored = tl.load(pointers[1] + read_at, mask=inside, other=1.0)
    PLACES: tl.constexpr = FACTS.scale_places
    places = row_places(rows, scale_axis, PLACES, 1)[:, None]
    places += column_places(columns, PLACES)[None, :]
    at = pointers[0] + places
    tl.store(at, stored.to(pointers[0].dtype.element_ty), mask=inside & grid[4])
    return stored


@triton.jit
def _codes_of(
    x,
    stored,
    flag_ptr,
    FACTS: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    """Codes of a tile by its scales [R, C]; e2m1 packed."""
    HIGH: tl.constexpr = x.shape[0] // R
    WIDE: tl.constexpr = x.shape[1] // C
    largest = 0
    if FACTS.scales == "given":
        largest = tl.max(tl.max(magnitude_bits(x), axis=1), axis=0)
    quotients = _quotients(tl.reshape(x, (R, HIGH, C, WIDE)), stored, largest, flag_ptr, FACTS)
    CODE: tl.constexpr = FACTS.code
    IS_NATIVE: tl.constexpr = FACTS.is_native
    codes = codes_of(tl.reshape(quotients, (x.shape[0], x.shape[1])), CODE, IS_NATIVE)
    if FACTS.code == "e2m1":
        low, high = tl.split(tl.reshape(codes, (x.shape[0], x.shape[1] // 2, 2)))
        codes = (low | (high << 4)).to(tl.uint8)
    return codes


@triton.jit
def _larger_of(largest, x, FACTS: tl.constexpr):
    """Element by element, the larger magnitude; NaN is above all."""
    if FACTS.max_is_float:
        larger = _larger(largest, tl.abs(x))
    else:
        larger = tl.maximum(magnitude_bits(largest), magnitude_bits(x))
        larger = larger.to(tl.float32, bitcast=True)
    return larger


@triton.jit
def encode_tile(
    source,  # see `numbers`
    pointers,  # weight, scales to write, scales or maxima to read, flag; of this matrix
    tile,  # row and column of the tile in the box
    row_box,
    column_box,
    weight_axis,
    scale_axis,
    given_row,
    FACTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    ACROSS: tl.constexpr,  # blocks of a row whose scale is its own
):
    """Store one tile: a block, or the blocks of the domain of its own scale, where that is larger.

    Then they are read twice, of which the second time finds them in a cache.
    """
    IS_OWN: tl.constexpr = FACTS.scales == "own"
    SHARED: tl.constexpr = FACTS.share[0]
    HIGH: tl.constexpr = SHARED if SHARED > 0 and SHARED < BLOCK_ROWS else BLOCK_ROWS
    WIDE: tl.constexpr = FACTS.share[1] if FACTS.share[1] > 0 else BLOCK_COLUMNS
    R: tl.constexpr = BLOCK_ROWS // HIGH
    C: tl.constexpr = BLOCK_COLUMNS // WIDE
    DOWN: tl.constexpr = SHARED // BLOCK_ROWS if IS_OWN and SHARED > BLOCK_ROWS else 1
    STEPS: tl.constexpr = DOWN * ACROSS
    WIDTH: tl.constexpr = BLOCK_COLUMNS // 2 if FACTS.code == "e2m1" else BLOCK_COLUMNS
    weight_ptr, scale_ptr, read_ptr, flag_ptr = pointers
    first_row = row_box[0] + tile[0] * (BLOCK_ROWS * DOWN)
    first_column = column_box[0] * FACTS.unit + tile[1] * (BLOCK_COLUMNS * ACROSS)
    if FACTS.scales != "none":
        x = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
        for step in tl.static_range(STEPS):
            block = numbers(
                *(source, first_row + step // ACROSS * BLOCK_ROWS),
                *(first_column + step % ACROSS * BLOCK_COLUMNS, row_box, column_box),
                *(FACTS, BLOCK_ROWS, BLOCK_COLUMNS),
            )
            x = _larger_of(x, block, FACTS) if STEPS > 1 else block
        grid = _grid_of(first_row, first_column, tile, row_box, column_box, FACTS)
        stored = _scales_of(x, (scale_ptr, read_ptr), grid, scale_axis, given_row, FACTS, R, C)
    for step in range(STEPS):
        row = first_row + step // ACROSS * BLOCK_ROWS
        column = first_column + step % ACROSS * BLOCK_COLUMNS
        if FACTS.scales == "none":
            codes = copied(
                *(source, weight_ptr, flag_ptr, row, column, row_box, column_box),
                *(FACTS, BLOCK_ROWS, BLOCK_COLUMNS),
            )
        elif STEPS > 1:
            block = numbers(
                *(source, row, column, row_box, column_box, FACTS, BLOCK_ROWS, BLOCK_COLUMNS)
            )
            codes = _codes_of(block, stored, flag_ptr, FACTS, R, C)
        else:
            codes = _codes_of(x, stored, flag_ptr, FACTS, R, C)
        rows = row + tl.arange(0, BLOCK_ROWS)
        tile_column = tile[1] * ACROSS + step % ACROSS
        store_codes(
            *(weight_ptr, codes, rows, tile_column, row_box, column_box, weight_axis),
            *(FACTS, WIDTH),
        )


@triton.jit(
    do_not_specialize=[
        *("row_origin", "row_start", "row_stop", "row_end"),
        *("column_origin", "column_start", "column_stop", "column_end", "source_matrix"),
        *("source_row", "weight_matrix", "weight_stride", "weight_part", "weight_part_stride"),
        *("scale_matrix", "scale_stride", "scale_part", "scale_part_stride"),
        *("given_matrix", "given_row", "first_matrix", "source_scale_matrix", "source_scale_row"),
    ]
)
def encode_kernel(
    source_ptr,
    source_scale_ptr,
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
    source_scale_matrix,
    source_scale_row,
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
    ACROSS: tl.constexpr,
):
    # Matrix by matrix, row of tiles by row of tiles; backwards where another pass went before, of
    # which a cache still has the end.
    matrix, row = tl.program_id(2).to(tl.int64), tl.program_id(1)
    if FACTS.scales == "amax":
        matrix, row = tl.num_programs(2) - 1 - matrix, tl.num_programs(1) - 1 - row
    stored = matrix + first_matrix
    encode_tile(
        (
            source_ptr + matrix * source_matrix * FACTS.unit,
            source_row,
            source_column,
            source_scale_ptr + matrix * source_scale_matrix,
            source_scale_row,
        ),
        (
            weight_ptr + stored * weight_matrix * FACTS.stored_unit,
            scale_ptr + stored * scale_matrix,
            read_ptr + stored * given_matrix,
            flag_ptr,
        ),
        (row, tl.program_id(0)),
        (row_origin, row_start, row_stop, row_end),
        (column_origin, column_start, column_stop, column_end),
        (weight_stride, weight_part, weight_part_stride),
        (scale_stride, scale_part, scale_part_stride),
        given_row,
        FACTS,
        BLOCK_ROWS,
        BLOCK_COLUMNS,
        ACROSS,
    )
