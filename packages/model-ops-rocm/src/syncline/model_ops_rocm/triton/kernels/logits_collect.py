"""What lies in a row's bracket, tile after tile, and of each tile what its filters keep.

A region is some tiles in a row, with room for CAPACITY logits: those found in the bracket, closed
up, in an order that does not depend on a race. Knows no request.
"""

import triton
import triton.language as tl

from syncline.model_ops_rocm.triton.kernels.dependent import await_inputs, await_turn
from syncline.model_ops_rocm.triton.kernels.logits import (
    LOG2_E,
    NEG_INF,
    ask_for_tile,
    is_padding,
    load_tile,
    only_real,
    row_temperature,
)
from syncline.model_ops_rocm.triton.kernels.logits_cut import INF, LOWEST


@triton.jit
def bits_of(mask, GROUP: tl.constexpr, LANES: tl.constexpr, TILE: tl.constexpr):
    """int32 [LANES]: a bit for each of a lane's logits, which are runs of GROUP; of bool [TILE]."""
    runs = tl.arange(0, TILE // LANES // GROUP)[:, None] * GROUP
    places = (runs + tl.arange(0, GROUP)[None, :])[:, None, :]
    bits = tl.full(places.shape, 1, tl.int32) << places
    of_lanes = mask.reshape(TILE // LANES // GROUP, LANES, GROUP)
    return tl.sum(tl.sum(tl.where(of_lanes, bits, 0), axis=2), axis=0)


@triton.jit
def number_of_bits(bits):
    """int32: how many bits of an int32 are set."""
    bits = bits.to(tl.uint32, bitcast=True)
    bits -= (bits >> 1) & 0x55555555
    bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F
    return ((bits * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def load_bit(row_ptr, first, bit, last_stride, GROUP: tl.constexpr, LANES: tl.constexpr):
    """float32 [LANES]: the logit that a lane's single bit tells of, in the tile from `first` on."""
    # Which bit it is: the exponent of its float32.
    exact = bit.to(tl.uint32, bitcast=True).to(tl.float32)
    place = (exact.to(tl.uint32, bitcast=True) >> 23) - 127
    column = (place // GROUP * (LANES * GROUP) + place % GROUP).to(tl.int32)
    column += first + tl.arange(0, LANES) * GROUP
    x = tl.load(row_ptr + column.to(tl.int64) * last_stride, mask=bit != 0, other=0.0)
    return x.to(tl.float32)


@triton.jit
def store_found(
    found_ptr, row_ptr, first, bits, last_stride, GROUP: tl.constexpr, LANES: tl.constexpr
):  # fmt: skip
    """What the lanes' `bits` tell of, one lane after another.

    They are few, and read again: to move a whole tile to where some of it goes costs far more.
    """
    counts = number_of_bits(bits)
    places = tl.cumsum(counts, axis=0) - counts
    # Two at a time: the second is asked for before the first is there.
    for _ in range(0, tl.max(counts, axis=0), 2):
        first_bit = bits & -bits
        bits ^= first_bit
        second_bit = bits & -bits
        bits ^= second_bit
        x = load_bit(row_ptr, first, first_bit, last_stride, GROUP, LANES)
        y = load_bit(row_ptr, first, second_bit, last_stride, GROUP, LANES)
        tl.store(found_ptr + places, x, mask=first_bit != 0)
        tl.store(found_ptr + places + 1, y, mask=second_bit != 0)
        places += 2


@triton.jit(do_not_specialize=["num_real", "num_tiles", "region_tiles"])
def collect_kernel(
    logits_ptr,
    temperature_ptr,
    maxima_ptr,
    lows_ptr,
    highs_ptr,
    found_ptr,
    ends_ptr,
    weights_ptr,
    row_stride,
    last_stride,
    num_columns,
    num_real,
    num_tiles,
    region_tiles,
    HAS_TEMPERATURE: tl.constexpr,
    REGIONS: tl.constexpr,
    CAPACITY: tl.constexpr,
    GROUP: tl.constexpr,
    LANES: tl.constexpr,  # each has TILE // LANES <= 32 logits
    TILE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Of each tile: where its logits end in its region, and what those above the bracket weigh."""
    await_turn(OVERLAP)
    # From the last tiles on: they were read last, and may be cached still.
    row, region = tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1)
    low, high = tl.load(lows_ptr + row), tl.load(highs_ptr + row)
    if (low < INF) == 0:
        return
    # What is -inf weighs nothing, and is what stands beyond the ids.
    low = tl.maximum(low, LOWEST)
    scale = tl.div_rn(LOG2_E, row_temperature(temperature_ptr, row, HAS_TEMPERATURE))
    row_ptr = logits_ptr + row.to(tl.int64) * row_stride
    found_ptr += (row * REGIONS + region).to(tl.int64) * CAPACITY
    at = row.to(tl.int64) * num_tiles
    end = tl.full((), 0, tl.int32)
    maxima_ptr += at
    tile = region * region_tiles
    stop = tl.minimum(tile + region_tiles, num_tiles)
    # The next tile is asked for, and the largest logit of the one after, before a tile is done.
    largest = tl.load(maxima_ptr + tile)
    next_largest = tl.load(maxima_ptr + tile + 1, mask=tile + 1 < stop, other=NEG_INF)
    loaded = ask_for_tile(row_ptr, tile, last_stride, num_columns, largest >= low, TILE, "")
    while tile < stop:
        x = loaded.to(tl.float32)
        after = tl.load(maxima_ptr + tile + 2, mask=tile + 2 < stop, other=NEG_INF)
        loaded = ask_for_tile(
            row_ptr, tile + 1, last_stride, num_columns, next_largest >= low, TILE, ""
        )
        weight = tl.full((), 0.0, tl.float32)
        if largest >= low:
            if (tile + 1) * TILE > num_real:
                x = only_real(x, tile, num_real, TILE)
            bits = bits_of(x >= low, GROUP, LANES, TILE)
            if largest >= high:
                is_high = x >= high
                bits &= ~bits_of(is_high, GROUP, LANES, TILE)
                weight = tl.sum(tl.where(is_high, tl.exp2((x - largest) * scale), 0.0), axis=0)
            start = found_ptr + end
            end += tl.sum(number_of_bits(bits), axis=0)
            if end <= CAPACITY:
                store_found(start, row_ptr, tile * TILE, bits, last_stride, GROUP, LANES)
        tl.store(ends_ptr + at + tile, end)
        tl.store(weights_ptr + at + tile, weight)
        tile += 1
        largest = next_largest
        next_largest = after


@triton.jit
def store_kept(
    maxima_ptr, weights_ptr, sums_ptr, ties_ptr, found_ptr, ends_ptr, first, stop, cut, scale,
    region_tiles, CAPACITY: tl.constexpr, TILES: tl.constexpr, DEEP: tl.constexpr,
    ACROSS: tl.constexpr,
):  # fmt: skip
    """Of TILES tiles, of what was collected: the sum above the cut, and how many logits equal it.

    DEEP x ACROSS logits of a tile at a time, of which a thread adds up its DEEP first.
    """
    tiles = first + tl.arange(0, TILES)
    is_tile = tiles < stop
    maxima = tl.load(maxima_ptr + tiles, mask=is_tile, other=NEG_INF)
    sums = tl.load(weights_ptr + tiles, mask=is_tile, other=0.0)
    ends = tl.load(ends_ptr + tiles, mask=is_tile, other=0)
    is_later = is_tile & (tiles % region_tiles > 0)
    starts = tl.load(ends_ptr + tiles - 1, mask=is_later, other=0)
    lists = (found_ptr + (tiles // region_tiles * CAPACITY + starts))[:, None, None]
    counts = (ends - starts)[:, None, None]
    base = tl.where(maxima == NEG_INF, 0.0, maxima)[:, None, None]
    ties = tl.full((TILES,), 0, tl.int32)
    # In this order of axes, since then a warp is laid out over ACROSS and the tiles.
    deep = tl.arange(0, DEEP)[None, :, None] * ACROSS + tl.arange(0, ACROSS)[None, None, :]
    for done in range(0, tl.max(ends - starts, axis=0), DEEP * ACROSS):
        x = tl.load(lists + (done + deep), mask=done + deep < counts, other=NEG_INF)
        parts = tl.where(x > cut, tl.exp2((x - base) * scale), 0.0)
        sums += tl.sum(tl.sum(parts, axis=1), axis=1)
        ties += tl.sum(tl.sum((x == cut).to(tl.int32), axis=1), axis=1)
    tl.store(sums_ptr + tiles, sums, mask=is_tile)
    tl.store(ties_ptr + tiles, ties, mask=is_tile)


@triton.jit(do_not_specialize=["num_real", "num_tiles", "tiles_each", "region_tiles"])
def kept_kernel(
    logits_ptr,
    temperature_ptr,
    marks_ptr,
    maxima_ptr,
    sums_ptr,
    ties_ptr,
    cuts_ptr,
    lows_ptr,
    found_ptr,
    ends_ptr,
    weights_ptr,
    row_stride,
    last_stride,
    num_columns,
    num_real,
    num_tiles,
    tiles_each,
    region_tiles,
    HAS_TEMPERATURE: tl.constexpr,
    HAS_MARKS: tl.constexpr,
    REGIONS: tl.constexpr,
    CAPACITY: tl.constexpr,
    TILES: tl.constexpr,  # see `store_kept`
    DEEP: tl.constexpr,
    ACROSS: tl.constexpr,
    TILE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Of each tile what its filters keep: of what was collected, or else of the row."""
    scale = tl.div_rn(LOG2_E, row_temperature(temperature_ptr, tl.program_id(0), HAS_TEMPERATURE))
    await_inputs(OVERLAP)
    row, first = tl.program_id(0), tl.program_id(1) * tiles_each
    if is_padding(marks_ptr + row, HAS_MARKS):
        return
    cut, low = tl.load(cuts_ptr + row), tl.load(lows_ptr + row)
    at = row.to(tl.int64) * num_tiles
    stop = tl.minimum(first + tiles_each, num_tiles)
    if low < INF:
        found_ptr += row.to(tl.int64) * (REGIONS * CAPACITY)
        for tile in range(first, stop, TILES):
            store_kept(
                maxima_ptr + at, weights_ptr + at, sums_ptr + at, ties_ptr + at, found_ptr,
                ends_ptr + at, tile, stop, cut, scale, region_tiles, CAPACITY, TILES, DEEP, ACROSS,
            )  # fmt: skip
        return
    # What has a NaN for its cut has failed.
    if cut == NEG_INF:
        return
    row_ptr = logits_ptr + row.to(tl.int64) * row_stride
    for tile in range(first, stop):
        largest = tl.load(maxima_ptr + at + tile)
        weight, ties = tl.full((), 0.0, tl.float32), tl.full((), 0, tl.int32)
        if largest >= cut:
            x = load_tile(row_ptr, tile, last_stride, num_columns, num_real, TILE)
            weight = tl.sum(tl.where(x > cut, tl.exp2((x - largest) * scale), 0.0), axis=0)
            ties = tl.sum((x == cut).to(tl.int32), axis=0)
        tl.store(sums_ptr + at + tile, weight)
        tl.store(ties_ptr + at + tile, ties)
