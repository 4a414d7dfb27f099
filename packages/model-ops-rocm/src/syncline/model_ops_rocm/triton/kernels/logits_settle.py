"""A row's cut, of what was collected in its bracket.

The regions' logits are closed up to one list, of SLOTS entries at most, which is held and searched.
Knows no request.
"""

import triton
import triton.language as tl

from syncline.model_ops_rocm.triton.kernels.dependent import await_inputs, read_ahead
from syncline.model_ops_rocm.triton.kernels.logits import NEG_INF, load_stats, tile_weights
from syncline.model_ops_rocm.triton.kernels.logits_codes import (
    ask_for_found,
    code_of,
    count_some,
    counted_cut,
    number_of_codes,
)
from syncline.model_ops_rocm.triton.kernels.logits_cut import (
    INF,
    LOWEST,
    asked_of,
    facts_of,
    narrowed,
    pivots,
    settled,
)


@triton.jit
def join(
    counts_1, low_1, high_1, smallest_1, below_1, counts_2, low_2, high_2, smallest_2, below_2
):
    smallest, below = tl.minimum(smallest_1, smallest_2), tl.maximum(below_1, below_2)
    return counts_1 + counts_2, low_1 + low_2, high_1 + high_2, smallest, below


@triton.jit
def join_tiles(above_1, number_1, most_1, above_2, number_2, most_2):
    return above_1 + above_2, number_1 + number_2, tl.maximum(most_1, most_2)


@triton.jit
def measure_held(x, weights, low, high, weight_above):
    """As `measure`, of what was collected, and of what lies above all of that."""
    is_low, is_high = x >= low, x >= high
    # Both counts at once: a list has less than 2^15 entries.
    counts, weight_low, weight_high, smallest, below = tl.reduce(
        (
            tl.sum(is_low.to(tl.int32) + (is_high.to(tl.int32) << 16), axis=0),
            tl.sum(tl.where(is_low, weights, 0.0), axis=0),
            tl.sum(tl.where(is_high, weights, 0.0), axis=0),
            tl.min(tl.where(is_low, x, INF), axis=0),
            tl.max(tl.where(is_high, NEG_INF, x), axis=0),
        ),
        0,
        join,
    )
    weight_low = weight_low.to(tl.float64) + weight_above
    weight_high = weight_high.to(tl.float64) + weight_above
    return counts & 0xFFFF, weight_low, counts >> 16, weight_high, smallest, below


@triton.jit
def load_found(
    found_ptr,
    ends_ptr,
    number,
    num_tiles,
    region_tiles,
    CAPACITY: tl.constexpr,
    ACROSS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """[SLOTS // ACROSS, ACROSS]: what a row's regions hold, one after another; -inf beyond."""
    slots = tl.arange(0, SLOTS)
    shifts = slots * 0
    start = tl.full((), 0, tl.int32)
    num_regions = (num_tiles + region_tiles - 1) // region_tiles
    for region in tl.range(0, num_regions, loop_unroll_factor=6):
        last = tl.minimum((region + 1) * region_tiles, num_tiles) - 1
        shifts = tl.where(slots >= start, region * CAPACITY - start, shifts)
        start += tl.load(ends_ptr + last)
    x = tl.load(found_ptr + slots + shifts, mask=slots < number, other=NEG_INF)
    # Read as a list and reshaped, so that threads have whole columns, whatever the compiler: it
    # lays out a matrix whose order it does not know now one way and now the other.
    return x.reshape(SLOTS // ACROSS, ACROSS)


@triton.jit
def held_cut(x, weights, weight_above, largest, scale, top_k, top_p, left, cut):
    """The cut and its quota, of what was collected and known to hold it."""
    quota = tl.full((), 2_147_483_647, tl.int64)
    for phase in range(2):
        is_count = phase == 0
        count_low, weight_low, _c, _w, low, _b = measure_held(x, weights, cut, cut, weight_above)
        has_step = tl.where(is_count, (top_k > 0) & (count_low >= top_k), top_p < 1.0)
        if has_step:
            wanted = tl.where(is_count, top_k.to(tl.float64), top_p.to(tl.float64) * left)
            high = tl.max(tl.max(x, axis=0), axis=0)
            at_low = tl.where(is_count, count_low.to(tl.float64), weight_low)
            at_low = tl.maximum(at_low, wanted)
            beyond = tl.full((), 0.0, tl.float64) + weight_above
            # Nothing lies above the bracket of a row with a top_k.
            at_high = tl.where(is_count, 0.0, beyond)
            count_high, misses = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
            step = tl.full((), 3, tl.int32)  # both ends are measured
            while low < high:
                first, second = pivots(
                    low, high, at_low, at_high, wanted, count_low - count_high, step, misses
                )
                first = tl.maximum(first, low + tl.abs(low) * 1.2e-7 + 1e-37)
                first = tl.minimum(first, high)
                second = tl.minimum(tl.maximum(second, first), high)
                count_1, weight_1, count_2, weight_2, smallest, below = measure_held(
                    x, weights, first, second, weight_above
                )
                low, high, at_low, at_high, count_low, count_high, beyond, _a, is_between = (
                    narrowed(
                        low, high, at_low, at_high, count_low, count_high, beyond, first, second,
                        wanted, is_count, count_1, weight_1, count_2, weight_2, smallest, below,
                    )
                )  # fmt: skip
                misses = tl.where((is_between == 0) & (misses < 3), misses + 1, 0)
            quota, left = settled(
                low, largest, scale, wanted, at_high, beyond, is_count, quota, low == cut
            )
            cut = low
    return cut, quota


@triton.jit
def settle(
    found_ptr, ends_ptr, number, weight_above, largest, scale, top_k, top_p, min_p,
    left, low, cut, num_tiles, region_tiles, CAPACITY: tl.constexpr, ACROSS: tl.constexpr,
    SLOTS: tl.constexpr,
):  # fmt: skip
    """The cut, its quota and whether it is seen to be right."""
    x = load_found(found_ptr, ends_ptr, number, num_tiles, region_tiles, CAPACITY, ACROSS, SLOTS)
    weights = tl.exp2((x - largest) * scale)
    weight = tl.sum(tl.sum(weights, axis=0), axis=0).to(tl.float64) + weight_above
    wanted = top_p.to(tl.float64) * left
    # What is wanted is reached in the bracket, or at min_p's cut, which is its lower end.
    reached = tl.where(top_k > 0, number >= top_k, weight >= wanted) | (low == cut)
    # Of a top_p of 0 nothing is wanted, and the likeliest stays.
    is_below = (weight_above < wanted) | (weight_above == 0.0)
    is_settled = reached & ((top_k > 0) | (min_p > 0.0) | is_below)
    quota = tl.full((), 0, tl.int64)
    if is_settled:
        left = tl.where((top_k > 0) | (min_p > 0.0), weight, left)
        cut, quota = held_cut(x, weights, weight_above, largest, scale, top_k, top_p, left, cut)
    return cut, quota, is_settled


@triton.jit
def settle_list(
    found_ptr, ends_ptr, weights_ptr, maxima, largest, scale, top_k, top_p, min_p, left, low, cut,
    num_tiles, region_tiles, CAPACITY: tl.constexpr, ACROSS: tl.constexpr, SMALL: tl.constexpr,
    MEDIUM: tl.constexpr, LARGE: tl.constexpr, TILE_SLOTS: tl.constexpr,
):  # fmt: skip
    """See `settle`: by a list that is long enough."""
    tiles = tl.arange(0, TILE_SLOTS)
    above = tl.load(weights_ptr + tiles, mask=tiles < num_tiles, other=0.0)
    is_last = ((tiles + 1) % region_tiles == 0) | (tiles == num_tiles - 1)
    ends = tl.load(ends_ptr + tiles, mask=(tiles < num_tiles) & is_last, other=0)
    weight_above, number, most = tl.reduce(
        (tile_weights(maxima, above, largest, scale), ends, ends), 0, join_tiles
    )
    # No list is long enough for what is not all there, or nothing.
    number = tl.where((most <= CAPACITY) & (number > 0), number, LARGE + 1)
    quota, is_settled = tl.full((), 0, tl.int64), tl.full((), 0, tl.int1)
    if number <= SMALL:
        cut, quota, is_settled = settle(
            found_ptr, ends_ptr, number, weight_above, largest, scale, top_k, top_p, min_p,
            left, low, cut, num_tiles, region_tiles, CAPACITY, ACROSS, SMALL,
        )  # fmt: skip
    elif number <= MEDIUM:
        cut, quota, is_settled = settle(
            found_ptr, ends_ptr, number, weight_above, largest, scale, top_k, top_p, min_p,
            left, low, cut, num_tiles, region_tiles, CAPACITY, ACROSS, MEDIUM,
        )  # fmt: skip
    elif number <= LARGE:
        cut, quota, is_settled = settle(
            found_ptr, ends_ptr, number, weight_above, largest, scale, top_k, top_p, min_p,
            left, low, cut, num_tiles, region_tiles, CAPACITY, ACROSS, LARGE,
        )  # fmt: skip
    return cut, quota, is_settled


@triton.jit
def settle_counts(
    found_ptr, ends_ptr, weights_ptr, maxima, top, largest, scale, wanted, num_tiles,
    region_tiles, SHIFT: tl.constexpr, BINS: tl.constexpr, CAPACITY: tl.constexpr,
    REGIONS: tl.constexpr, COUNTED: tl.constexpr, MORE: tl.constexpr, TILE_SLOTS: tl.constexpr,
):  # fmt: skip
    """See `settle`: by how often each value from `top` down was found."""
    x = ask_for_found(found_ptr, 0, True, CAPACITY, REGIONS, COUNTED)
    regions = tl.arange(0, REGIONS)
    lasts = tl.minimum((regions + 1) * region_tiles, num_tiles) - 1
    ends = tl.load(ends_ptr + lasts, mask=regions * region_tiles < num_tiles, other=0)
    tiles = tl.arange(0, TILE_SLOTS)
    above = tl.load(weights_ptr + tiles, mask=tiles < num_tiles, other=0.0)
    top_code = code_of(top, SHIFT)
    counts = count_some(x, ends, 0, top_code, SHIFT, BINS)
    most = tl.max(ends, axis=0)
    for done in range(COUNTED, tl.minimum(most, CAPACITY), MORE):
        rest = ask_for_found(found_ptr, done, True, CAPACITY, REGIONS, MORE)
        counts += count_some(rest, ends, done, top_code, SHIFT, BINS)
    # Only now, so that the compiler asks for all of the above before it waits for any.
    weight_above = tl.sum(tile_weights(maxima, above, largest, scale), axis=0)
    cut, quota, is_inside = counted_cut(
        counts, top_code, weight_above, largest, scale, wanted, SHIFT, BINS
    )
    return cut, quota, is_inside & (most <= CAPACITY) & (most > 0)


@triton.jit(do_not_specialize=["num_real", "num_tiles", "region_tiles", "num_collected"])
def settle_kernel(
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
    highs_ptr,
    found_ptr,
    ends_ptr,
    weights_ptr,
    num_real,
    num_tiles,
    region_tiles,
    num_collected,  # rows for which there is room to collect
    HAS_TEMPERATURE: tl.constexpr,
    HAS_MARKS: tl.constexpr,
    HAS_TOP_K: tl.constexpr,
    HAS_TOP_P: tl.constexpr,
    HAS_MIN_P: tl.constexpr,
    REGIONS: tl.constexpr,
    CAPACITY: tl.constexpr,
    ACROSS: tl.constexpr,
    SMALL: tl.constexpr,  # entries of a list, in three sizes
    MEDIUM: tl.constexpr,
    LARGE: tl.constexpr,
    SHIFT: tl.constexpr,  # see `code_of`; 0: of float32
    BINS: tl.constexpr,  # values of a bracket that are counted instead
    COUNTED: tl.constexpr,  # of a region's logits, at once
    MORE: tl.constexpr,  # and then at a time
    TILE_SLOTS: tl.constexpr,
    TILE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Finds the cut of each row of which something was collected; `low` is NaN where it cannot."""
    row = tl.program_id(0)
    temperature, top_k, top_p, min_p, is_filtered = asked_of(
        row, temperature_ptr, marks_ptr, top_k_ptr, top_p_ptr, min_p_ptr, num_real,
        HAS_TEMPERATURE, HAS_MARKS, HAS_TOP_K, HAS_TOP_P, HAS_MIN_P,
    )  # fmt: skip
    IS_COUNTED: tl.constexpr = SHIFT > 0 and HAS_TOP_P
    # What the pass over the logits and the bracket left: both have ended, since the kernel ahead
    # waited for them before it let this one begin.
    low, high = read_ahead(lows_ptr + row), read_ahead(highs_ptr + row)
    maxima, sums = load_stats(maxima_ptr, sums_ptr, row, num_tiles, TILE_SLOTS, ".cg")
    # NaN is below nothing.
    if (is_filtered == 0) | ((low < INF) == 0):
        # All the same, since the next kernel relies on it.
        await_inputs(OVERLAP)
        return
    largest, scale, worth, cut = facts_of(maxima, sums, temperature, min_p)
    left = tl.sum(worth, axis=0)
    # A cut by weight alone, between few values.
    top = tl.minimum(high, largest)
    is_counted = tl.full((), 0, tl.int1)
    if IS_COUNTED:
        is_counted = number_of_codes(tl.maximum(low, LOWEST), top, SHIFT) < BINS
        is_counted &= (top_k <= 0) & (min_p <= 0.0) & (row < num_collected)
    await_inputs(OVERLAP)
    at = row.to(tl.int64) * num_tiles
    found_ptr += row.to(tl.int64) * (REGIONS * CAPACITY)
    quota, is_settled = tl.full((), 0, tl.int64), tl.full((), 0, tl.int1)
    if is_counted:
        if IS_COUNTED:
            cut, quota, is_settled = settle_counts(
                found_ptr, ends_ptr + at, weights_ptr + at, maxima, top, largest, scale,
                top_p.to(tl.float64) * left, num_tiles, region_tiles, SHIFT, BINS, CAPACITY,
                REGIONS, COUNTED, MORE, TILE_SLOTS,
            )  # fmt: skip
    else:
        cut, quota, is_settled = settle_list(
            found_ptr, ends_ptr + at, weights_ptr + at, maxima, largest, scale, top_k, top_p,
            min_p, left, low, cut, num_tiles, region_tiles, CAPACITY, ACROSS, SMALL, MEDIUM, LARGE,
            TILE_SLOTS,
        )  # fmt: skip
    tl.store(cuts_ptr + row, cut)
    tl.store(quotas_ptr + row, quota.to(tl.int32))
    if is_settled == 0:
        tl.store(lows_ptr + row, float("nan"))
