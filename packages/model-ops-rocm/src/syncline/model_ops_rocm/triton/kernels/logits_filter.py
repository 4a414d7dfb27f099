"""min_p, top_k and top_p of a row as one cut: a logit, and how many equal to it stay.

Every filter keeps what ranks highest, equal logits by lowest id; so what is left of a row is the
logits above a cut and the first `quota` that equal it. A step of the search reads the row, but for
the tiles below, and measures two values at once: how many logits are as large, and what they weigh.
It ends where one value is left. Knows no request.
"""

import triton
import triton.language as tl

from syncline.model_ops_rocm.triton.kernels.logits import (
    LOG2_E,
    NEG_INF,
    is_padding,
    load_stats,
    load_tiles,
    row_temperature,
    tile_weights,
)

INF = tl.constexpr(float("inf"))
LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def under(x):
    """The next float32 below a finite x."""
    bits = x.to(tl.int32, bitcast=True)
    below = tl.where(x > 0.0, bits - 1, tl.where(x == 0.0, -0x7FFFFFFF, bits + 1))
    return below.to(tl.float32, bitcast=True)


@triton.jit
def least_kept(largest, temperature, min_p):
    """The lowest float32 that min_p keeps, which is never above the largest logit."""
    least = largest.to(tl.float64) + temperature.to(tl.float64) * tl.log(min_p.to(tl.float64))
    rounded = least.to(tl.float32)
    above = -under(-rounded)
    return tl.minimum(tl.where(rounded.to(tl.float64) < least, above, rounded), largest)


@triton.jit
def measure(
    row_ptr,
    maxima_ptr,
    low,
    high,
    largest,
    scale,
    last_stride,
    num_columns,
    num_real,
    num_tiles,
    CHUNKS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
):
    """Of the logits from `low` and from `high` on: count and weight; and what lies between.

    Returned: both counts and float64 weights, the smallest logit from `low` on, and the largest
    below `high`.
    """
    PER_STEP: tl.constexpr = CHUNKS * WIDTH // TILE
    counts_low, counts_high = tl.full((WIDTH,), 0, tl.int32), tl.full((WIDTH,), 0, tl.int32)
    sums_low, sums_high = tl.full((WIDTH,), 0.0, tl.float32), tl.full((WIDTH,), 0.0, tl.float32)
    smallest, below = tl.full((WIDTH,), INF, tl.float32), tl.full((WIDTH,), NEG_INF, tl.float32)
    for tile in range(0, num_tiles, PER_STEP):
        tiles = tile + tl.arange(0, PER_STEP)
        maxima = tl.load(maxima_ptr + tiles, mask=tiles < num_tiles, other=NEG_INF)
        largest_here = tl.max(maxima, axis=0)
        if largest_here >= low:
            # Tiles in another shape, so that a thread adds up its own columns first.
            first = tile * TILE // WIDTH
            x = load_tiles(row_ptr, first, last_stride, num_columns, num_real, CHUNKS, WIDTH)
            weights = tl.exp2((x - largest) * scale)
            is_low, is_high = x >= low, x >= high
            sums_low += tl.sum(tl.where(is_low, weights, 0.0), axis=0)
            sums_high += tl.sum(tl.where(is_high, weights, 0.0), axis=0)
            counts_low += tl.sum(is_low.to(tl.int32), axis=0)
            counts_high += tl.sum(is_high.to(tl.int32), axis=0)
            smallest = tl.minimum(smallest, tl.min(tl.where(is_low, x, INF), axis=0))
            below = tl.maximum(below, tl.max(tl.where(is_high, NEG_INF, x), axis=0))
        else:
            below = tl.maximum(below, largest_here)
    return (
        tl.sum(counts_low, axis=0),
        tl.sum(sums_low.to(tl.float64), axis=0),
        tl.sum(counts_high, axis=0),
        tl.sum(sums_high.to(tl.float64), axis=0),
        tl.min(smallest, axis=0),
        tl.max(below, axis=0),
    )


@triton.jit
def pivots(low, high, at_low, at_high, wanted, inside, step, misses):
    """Two values in (low, high], about where the sum that is wanted should lie.

    The sum is almost straight over a narrow range, and single logits show in a narrower one: of a
    few, the outermost are tried. A guess that missed is made wider, and then thirds.
    """
    width = high - low
    whole = tl.maximum((at_low - at_high).to(tl.float32), 1e-37)
    share = (at_low - wanted).to(tl.float32) / whole
    part = tl.where(step == 1, 0.17, tl.where(step == 2, 0.05, 0.02))
    part = tl.maximum(part, 1.2 / tl.sqrt(tl.maximum(inside, 1).to(tl.float32)))
    part = tl.minimum(part, 0.34) * (1 << tl.minimum(misses, 2)).to(tl.float32)
    middle, off = low + share * width, part * width
    is_guess = misses < 3
    first = tl.where(is_guess, middle - off, low + width * 0.33)
    second = tl.where(is_guess, middle + off, high - width * 0.33)
    first = tl.where(inside <= 5, low, first)
    return first, tl.where(inside <= 5, high, second)


@triton.jit
def tile_bound(maxima, worth, lowest, least, largest, wanted):
    """A value that has as much as is wanted by the tiles' largest logits alone; else `lowest`."""
    low, high = least, largest
    for _ in range(10):
        middle = low + (high - low) * 0.5
        has = tl.sum(tl.where(maxima >= middle, worth, 0.0), axis=0) >= wanted
        low = tl.where(has, middle, low)
        high = tl.where(has, high, middle)
    has = tl.sum(worth, axis=0) >= wanted
    return tl.where(has, tl.maximum(low, lowest), lowest)


@triton.jit
def load_or(ptr, default: tl.constexpr, IS_GIVEN: tl.constexpr):
    return tl.load(ptr) if IS_GIVEN else tl.full((), default, tl.float32)


@triton.jit(do_not_specialize=["num_real", "num_tiles"])
def filter_kernel(  # noqa: PLR0915 - one row's search, in which no part is used twice
    logits_ptr,
    temperature_ptr,
    marks_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    maxima_ptr,
    sums_ptr,
    cuts_ptr,
    quotas_ptr,
    row_stride,
    last_stride,
    num_columns,
    num_real,
    num_tiles,
    HAS_TEMPERATURE: tl.constexpr,
    HAS_MARKS: tl.constexpr,
    HAS_TOP_K: tl.constexpr,
    HAS_TOP_P: tl.constexpr,
    HAS_MIN_P: tl.constexpr,
    CHUNKS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE_SLOTS: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0)
    if is_padding(marks_ptr + row, HAS_MARKS):
        return
    temperature = load_or(temperature_ptr + row, 1.0, HAS_TEMPERATURE)
    top_k = load_or(top_k_ptr + row, 0, HAS_TOP_K).to(tl.int64)
    top_k = tl.where((top_k > 0) & (top_k < num_real), top_k, 0)
    top_p = load_or(top_p_ptr + row, 1.0, HAS_TOP_P)
    min_p = load_or(min_p_ptr + row, 0.0, HAS_MIN_P)
    tl.store(cuts_ptr + row, NEG_INF)
    if (((top_k > 0) | (top_p < 1.0) | (min_p > 0.0)) & (temperature > 0.0)) == 0:
        return
    maxima, sums = load_stats(maxima_ptr, sums_ptr, row, num_tiles, TILE_SLOTS)
    largest = tl.max(maxima, axis=0)
    scale = tl.div_rn(LOG2_E, temperature)
    left = tl.sum(tile_weights(maxima, sums, largest, scale), axis=0)
    if ((largest > NEG_INF) & (left > 0.0) & (left < INF)) == 0:
        return
    row_ptr = logits_ptr + row.to(tl.int64) * row_stride
    maxima_ptr += row.to(tl.int64) * num_tiles
    cut = tl.full((), LOWEST, tl.float32)
    if min_p > 0.0:
        cut = least_kept(largest, temperature, min_p)
    quota = tl.full((), 2_147_483_647, tl.int64)  # of those at the cut, how many stay
    num_left = tl.full((), 0, tl.int32)
    if (min_p > 0.0) & ((top_k > 0) | (top_p < 1.0)):
        num_left, left, _count, _weight, _smallest, _below = measure(
            row_ptr, maxima_ptr, cut, cut, largest, scale,
            last_stride, num_columns, num_real, num_tiles, CHUNKS, WIDTH, TILE,
        )  # fmt: skip
    ones = (maxima > NEG_INF).to(tl.float32)
    tops = tl.exp2((maxima - largest) * scale)
    least_top = tl.min(tl.where(maxima == NEG_INF, largest, maxima), axis=0)
    for phase in range(2):
        is_count = phase == 0
        # What min_p left may be fewer than top_k already.
        has_step = (top_k > 0) & ((min_p <= 0.0) | (num_left > top_k)) & is_count
        if has_step | ((top_p < 1.0) & (is_count == 0)):
            wanted = tl.where(is_count, top_k.to(tl.float64), top_p.to(tl.float64) * left)
            low = tile_bound(
                maxima, tl.where(is_count, ones, tops), cut, least_top, largest, wanted
            )
            # Below the cut of top_p lies less than each id's weight at it, of at most all ids.
            rest = tl.log(tl.maximum(left - wanted, 1e-30) / num_real).to(tl.float32)
            bound = largest + rest * temperature
            bound = tl.minimum(bound - tl.abs(bound) * 1e-6, largest)
            low = tl.where(is_count, low, tl.maximum(low, bound))
            reach = tl.maximum(largest - least_top, 1e-3 * tl.abs(largest) + 1e-6)
            high, at_low, at_high = largest, wanted, tl.full((), 0.0, tl.float64)
            count_low, count_high = tl.full((), 2**30, tl.int32), tl.full((), 0, tl.int32)
            step, misses = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
            beyond = tl.full((), 0.0, tl.float64)
            while low < high:
                first, second = pivots(
                    low, high, at_low, at_high, wanted, count_low - count_high, step, misses
                )
                # Not measured at `low` yet: near it, or down from the tiles' largest if it is far.
                is_far = low < least_top - 64.0 * reach
                start = tl.where(is_far, least_top - reach, low + 0.17 * (high - low))
                first = tl.where(step == 0, start, first)
                start = tl.where(is_far, least_top - 0.25 * reach, low + 0.37 * (high - low))
                second = tl.where(step == 0, start, second)
                reach = tl.where(step == 0, reach * 8.0, reach)
                first = tl.maximum(first, low + tl.abs(low) * 1.2e-7 + 1e-37)
                first = tl.minimum(first, high)
                second = tl.minimum(tl.maximum(second, first), high)
                count_1, weight_1, count_2, weight_2, smallest, below = measure(
                    row_ptr, maxima_ptr, first, second, largest, scale,
                    last_stride, num_columns, num_real, num_tiles, CHUNKS, WIDTH, TILE,
                )  # fmt: skip
                at_1 = tl.where(is_count, count_1.to(tl.float64), weight_1)
                at_2 = tl.where(is_count, count_2.to(tl.float64), weight_2)
                is_above, is_between = at_2 >= wanted, (at_1 >= wanted) & (at_2 < wanted)
                # Above `low` lies what is wanted, above `high` less: `beyond` is its weight.
                beyond = tl.where(is_above, beyond, tl.where(is_between, weight_2, weight_1))
                at_high = tl.where(is_above, at_high, tl.where(is_between, at_2, at_1))
                count_high = tl.where(is_above, count_high, tl.where(is_between, count_2, count_1))
                at_low = tl.where(is_above, at_2, tl.where(is_between, at_1, at_low))
                count_low = tl.where(is_above, count_2, tl.where(is_between, count_1, count_low))
                # The ends are logits where the pivots have shown one.
                lower = tl.where(below < first, below, under(first))
                high = tl.where(is_above, high, tl.where(is_between, below, lower))
                low = tl.where(
                    is_above,
                    tl.maximum(second, tl.where(smallest < INF, smallest, second)),
                    tl.where(is_between, smallest, low),
                )
                has_missed = (is_between == 0) & (step > 0) & (misses < 3)
                misses = tl.where(has_missed, misses + 1, 0)
                step = tl.where((step > 0) | is_above | is_between, step + 1, 0)
            weight = tl.exp2((low - largest) * scale).to(tl.float64)
            missing = (wanted - beyond) * tl.exp2((largest - low) * scale).to(tl.float64)
            # What crosses top_p stays, and the likeliest of all whatever top_p is.
            missing = tl.maximum(tl.ceil(missing), 1.0)
            missing = tl.where(is_count, wanted - at_high, missing).to(tl.int64)
            quota = tl.where((low == cut) & (is_count == 0), tl.minimum(quota, missing), missing)
            left = beyond + quota.to(tl.float64) * weight
            cut = low
    tl.store(cuts_ptr + row, cut)
    tl.store(quotas_ptr + row, quota.to(tl.int32))


@triton.jit(do_not_specialize=["num_real", "num_tiles"])
def kept_kernel(
    logits_ptr,
    temperature_ptr,
    marks_ptr,
    maxima_ptr,
    sums_ptr,
    ties_ptr,
    cuts_ptr,
    row_stride,
    last_stride,
    num_columns,
    num_real,
    num_tiles,
    HAS_TEMPERATURE: tl.constexpr,
    HAS_MARKS: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Of each tile: the sum of what lies above the cut, and how many logits equal it."""
    row, first = tl.program_id(0), tl.program_id(1) * TILES
    if is_padding(marks_ptr + row, HAS_MARKS):
        return
    cut = tl.load(cuts_ptr + row)
    if cut == NEG_INF:
        return
    tiles = first + tl.arange(0, TILES)
    is_tile = tiles < num_tiles
    at = row.to(tl.int64) * num_tiles + tiles
    maxima = tl.load(maxima_ptr + at, mask=is_tile, other=NEG_INF)
    sums, ties = tl.full((TILES,), 0.0, tl.float32), tl.full((TILES,), 0, tl.int32)
    if tl.max(maxima, axis=0) >= cut:
        scale = tl.div_rn(LOG2_E, row_temperature(temperature_ptr, row, HAS_TEMPERATURE))
        row_ptr = logits_ptr + row.to(tl.int64) * row_stride
        x = load_tiles(row_ptr, first, last_stride, num_columns, num_real, TILES, TILE)
        base = tl.where(maxima == NEG_INF, 0.0, maxima)
        weights = tl.exp2((x - base[:, None]) * scale)
        sums = tl.sum(tl.where(x > cut, weights, 0.0), axis=1)
        ties = tl.sum((x == cut).to(tl.int32), axis=1)
    tl.store(sums_ptr + at, sums, mask=is_tile)
    tl.store(ties_ptr + at, ties, mask=is_tile)
