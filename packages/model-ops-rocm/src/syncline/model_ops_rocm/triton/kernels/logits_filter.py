"""min_p, top_k and top_p of a row as one cut: a logit, and how many equal to it stay.

Every filter keeps what ranks highest, equal logits by lowest id; so what is left of a row is the
logits above a cut and the first `quota` that equal it. A step of the search measures two values at
once: how many logits are as large, and what they weigh. It ends where one value is left. Here it
reads the row, but for the tiles below: what is left to do where a bracket failed. Knows no request.
"""

import triton
import triton.language as tl

from syncline.model_ops_rocm.triton.kernels.dependent import await_inputs
from syncline.model_ops_rocm.triton.kernels.logits import NEG_INF
from syncline.model_ops_rocm.triton.kernels.logits_cut import (
    INF,
    asked_of,
    least_of,
    narrowed,
    pivots,
    row_facts,
    settled,
    tile_bound,
    weight_bound,
)


@triton.jit
def load_tiles(
    row_ptr, first, last_stride, num_columns, num_real, TILES: tl.constexpr, TILE: tl.constexpr
):
    """float32 [TILES, TILE] from tile `first` on; -inf beyond the `num_real` ids."""
    columns = (first + tl.arange(0, TILES))[:, None] * TILE + tl.arange(0, TILE)[None, :]
    at = row_ptr + columns.to(tl.int64) * last_stride
    if (first + TILES) * TILE <= num_real:
        x = tl.load(at).to(tl.float32)
    else:
        # The bound of the load is a width that Triton knows to be even; the one of ids may be odd,
        # and would make every load two bytes wide.
        x = tl.load(at, mask=columns < num_columns, other=0.0).to(tl.float32)
        x = tl.where(columns < num_real, x, NEG_INF)
    return x


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
def read_cut(
    row_ptr,
    maxima_ptr,
    maxima,
    largest,
    temperature,
    scale,
    top_k,
    top_p,
    min_p,
    left,
    cut,
    last_stride,
    num_columns,
    num_real,
    num_tiles,
    CHUNKS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
):
    """The cut and its quota, of a row that is read at every step."""
    quota = tl.full((), 2_147_483_647, tl.int64)  # of those at the cut, how many stay
    num_left = tl.full((), 0, tl.int32)
    if min_p > 0.0:
        num_left, left, _count, _weight, _smallest, _below = measure(
            row_ptr, maxima_ptr, cut, cut, largest, scale,
            last_stride, num_columns, num_real, num_tiles, CHUNKS, WIDTH, TILE,
        )  # fmt: skip
    ones = (maxima > NEG_INF).to(tl.float32)
    tops = tl.exp2((maxima - largest) * scale)
    least_top = least_of(maxima, largest)
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
            bound = weight_bound(largest, temperature, left, wanted, num_real)
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
                low, high, at_low, at_high, count_low, count_high, beyond, is_above, is_between = (
                    narrowed(
                        low, high, at_low, at_high, count_low, count_high, beyond, first, second,
                        wanted, is_count, count_1, weight_1, count_2, weight_2, smallest, below,
                    )
                )  # fmt: skip
                has_missed = (is_between == 0) & (step > 0) & (misses < 3)
                misses = tl.where(has_missed, misses + 1, 0)
                step = tl.where((step > 0) | is_above | is_between, step + 1, 0)
            quota, left = settled(
                low, largest, scale, wanted, at_high, beyond, is_count, quota, low == cut
            )
            cut = low
    return cut, quota


@triton.jit(do_not_specialize=["num_real", "num_tiles"])
def filter_kernel(
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
    lows_ptr,
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
    OVERLAP: tl.constexpr,
):
    """Finds the cut of each row whose `low` is NaN, and leaves that +inf."""
    await_inputs(OVERLAP)
    row = tl.program_id(0)
    low = tl.load(lows_ptr + row)
    if low == low:
        return
    temperature, top_k, top_p, min_p, _ = asked_of(
        row, temperature_ptr, marks_ptr, top_k_ptr, top_p_ptr, min_p_ptr, num_real,
        HAS_TEMPERATURE, HAS_MARKS, HAS_TOP_K, HAS_TOP_P, HAS_MIN_P,
    )  # fmt: skip
    maxima, largest, scale, worth, cut = row_facts(
        row, maxima_ptr, sums_ptr, temperature, min_p, num_tiles, TILE_SLOTS
    )
    row_ptr = logits_ptr + row.to(tl.int64) * row_stride
    maxima_ptr += row.to(tl.int64) * num_tiles
    left = tl.sum(worth, axis=0)
    cut, quota = read_cut(
        row_ptr, maxima_ptr, maxima, largest, temperature, scale, top_k, top_p, min_p, left,
        cut, last_stride, num_columns, num_real, num_tiles, CHUNKS, WIDTH, TILE,
    )  # fmt: skip
    tl.store(cuts_ptr + row, cut)
    tl.store(quotas_ptr + row, quota.to(tl.int32))
    tl.store(lows_ptr + row, INF)
