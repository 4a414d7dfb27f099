"""What the kernels of the filters share: what a row asks for, and values that bound its cut.

A row's cut is a logit: what ranks above it stays, and of those equal to it the first few. Kernels
pass it on in a `low` per row, which says how the row's cut is found. Knows no request.
"""

import triton
import triton.language as tl

from syncline.model_ops_rocm.triton.kernels.dependent import read_ahead
from syncline.model_ops_rocm.triton.kernels.logits import (
    LOG2_E,
    NEG_INF,
    is_padding,
    load_stats,
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
def tile_bound(maxima, worth, lowest, least, largest, wanted):
    """A value that has as much as is wanted by the tiles' largest logits alone; else `lowest`."""
    low, high = least, largest
    for _ in range(8):
        middle = low + (high - low) * 0.5
        has = tl.sum(tl.where(maxima >= middle, worth, 0.0), axis=0) >= wanted
        low = tl.where(has, middle, low)
        high = tl.where(has, high, middle)
    has = tl.sum(worth, axis=0) >= wanted
    return tl.where(has, tl.maximum(low, lowest), lowest)


@triton.jit
def weight_bound(largest, temperature, left, wanted, num_real):
    """A value below top_p's cut: less lies below the cut than all ids of that weight would hold."""
    rest = tl.log(tl.maximum(left - wanted, 1e-30) / num_real).to(tl.float32)
    bound = largest + rest * temperature
    return tl.minimum(bound - tl.abs(bound) * 1e-6, largest)


@triton.jit
def load_or(ptr, default: tl.constexpr, IS_GIVEN: tl.constexpr):
    return read_ahead(ptr) if IS_GIVEN else tl.full((), default, tl.float32)


@triton.jit
def asked_of(
    row,
    temperature_ptr,
    marks_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    num_real,
    HAS_TEMPERATURE: tl.constexpr,
    HAS_MARKS: tl.constexpr,
    HAS_TOP_K: tl.constexpr,
    HAS_TOP_P: tl.constexpr,
    HAS_MIN_P: tl.constexpr,
):
    """A row's temperature, top_k (0: off), top_p and min_p, and whether it filters at all.

    A row whose top_p or min_p is NaN does not: it is failed. May be asked before the wait for the
    kernels ahead.
    """
    temperature = load_or(temperature_ptr + row, 1.0, HAS_TEMPERATURE)
    top_k = load_or(top_k_ptr + row, 0, HAS_TOP_K).to(tl.int64)
    top_k = tl.where((top_k > 0) & (top_k < num_real), top_k, 0)
    top_p = load_or(top_p_ptr + row, 1.0, HAS_TOP_P)
    top_p = tl.where(top_p < 0.0, 0.0, top_p)
    min_p = load_or(min_p_ptr + row, 0.0, HAS_MIN_P)
    filters = (top_k > 0) | (top_p < 1.0) | (min_p > 0.0)
    filters &= (temperature > 0.0) & (temperature < float("inf"))
    filters &= (top_p == top_p) & (min_p == min_p)
    is_here = is_padding(marks_ptr + row, HAS_MARKS) == 0
    return temperature, top_k, top_p, min_p, filters & is_here


@triton.jit
def least_of(maxima, largest):
    """The least of the tiles' largest logits, of tiles that have one."""
    return tl.min(tl.where(maxima == NEG_INF, largest, maxima), axis=0)


@triton.jit
def row_facts(
    row, maxima_ptr, sums_ptr, temperature, min_p, num_tiles, TILE_SLOTS: tl.constexpr
):  # fmt: skip
    """The tiles' largest logits, and `facts_of` them."""
    maxima, sums = load_stats(maxima_ptr, sums_ptr, row, num_tiles, TILE_SLOTS, "")
    largest, scale, worth, cut = facts_of(maxima, sums, temperature, min_p)
    return maxima, largest, scale, worth, cut


@triton.jit
def facts_of(maxima, sums, temperature, min_p):
    """The row's largest logit, the scale, the tiles' weights, and min_p's cut."""
    largest = tl.max(maxima, axis=0)
    scale = tl.div_rn(LOG2_E, temperature)
    cut = tl.full((), LOWEST, tl.float32)
    if (min_p > 0.0) & (largest > NEG_INF) & (largest < INF):
        cut = least_kept(largest, temperature, min_p)
    return largest, scale, tile_weights(maxima, sums, largest, scale), cut


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
def narrowed(
    low, high, at_low, at_high, count_low, count_high, beyond, first, second, wanted, is_count,
    count_1, weight_1, count_2, weight_2, smallest, below,
):  # fmt: skip
    """What two measured values leave of the range of the cut; and whether it lies between them."""
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
    return low, high, at_low, at_high, count_low, count_high, beyond, is_above, is_between


@triton.jit
def settled(low, largest, scale, wanted, at_high, beyond, is_count, quota, is_cut):
    """How many that equal the cut `low` stay, and the weight of all that do."""
    weight = tl.exp2((low - largest) * scale).to(tl.float64)
    missing = (wanted - beyond) * tl.exp2((largest - low) * scale).to(tl.float64)
    # What crosses top_p stays, and the likeliest of all whatever top_p is.
    missing = tl.maximum(tl.ceil(missing), 1.0)
    missing = tl.where(is_count, wanted - at_high, missing).to(tl.int64)
    quota = tl.where(is_cut & (is_count == 0), tl.minimum(quota, missing), missing)
    return quota, beyond + quota.to(tl.float64) * weight
