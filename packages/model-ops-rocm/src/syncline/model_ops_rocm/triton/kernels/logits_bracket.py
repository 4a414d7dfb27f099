"""Between which two logits a row's cut should lie, from a sample of the row and its tiles' sums.

A few of the sample say about where, all of it how near. A bracket may be wrong: what is found in it
is checked. Knows no request.
"""

import triton
import triton.language as tl

from syncline.model_ops_rocm.triton.kernels.dependent import await_inputs
from syncline.model_ops_rocm.triton.kernels.logits import NEG_INF
from syncline.model_ops_rocm.triton.kernels.logits_codes import code_up_to, value_of
from syncline.model_ops_rocm.triton.kernels.logits_cut import (
    INF,
    LOWEST,
    asked_of,
    least_of,
    row_facts,
    tile_bound,
    weight_bound,
)
from syncline.model_ops_rocm.triton.kernels.logits_sample import (
    add_four,
    ask_for_sample,
    four_below,
    number_from,
    three_below,
    with_tops,
)

# How many standard errors a bracket's ends lie off the guess.
MARGIN = tl.constexpr(4.5)
# And of the small sample, the values by which the large one is read.
FAR = tl.constexpr(6.0)
# Of a logarithm of weights, in units of a weight's own: a flatter one is as good as straight.
LEAST_SLOPE = tl.constexpr(1e-3)


@triton.jit
def four_known(first, second, third, fourth, maxima, worth):
    """What the tiles without a larger logit weigh, for each of four values."""
    return tl.reduce(
        (
            tl.where(maxima < first, worth, 0.0),
            tl.where(maxima < second, worth, 0.0),
            tl.where(maxima < third, worth, 0.0),
            tl.where(maxima < fourth, worth, 0.0),
        ),
        0,
        add_four,
    )


@triton.jit
def estimate(known, total, square, near, each, share):
    """What the logits below a value weigh, and the variance of that.

    `near`: what one more logit just below the value would weigh, in case that the sample has hardly
    any; `share`: one of all that were sampled.
    """
    variance = tl.maximum(square - total * total * share, 0.0) + near * near
    return known + total * each, variance * (each * each)


@triton.jit
def count_bound(parts, each, least, largest, wanted, FEW: tl.constexpr):
    """A value that very probably as many as `wanted` logits reach."""
    expected = wanted.to(tl.float32) / each
    rank = expected + MARGIN * tl.sqrt(expected) + 6.0
    reach = tl.maximum(largest - least, 1e-3 * tl.abs(largest) + 1e-6)
    low, high = least, largest
    found = number_from(parts, low, FEW)
    for _ in range(24):
        if found < rank:
            high = low
            low -= reach
            reach *= 4.0
            found = number_from(parts, low, FEW)
    for _ in range(8):
        middle = low + (high - low) * 0.5
        has = number_from(parts, middle, FEW) >= rank
        low = tl.where(has, middle, low)
        high = tl.where(has, high, middle)
    return tl.where(found >= rank, low, NEG_INF)


@triton.jit
def gap_of(low_weight, high_weight):
    """Between the binary logarithms of two weights, of which none need be positive."""
    return tl.log2(tl.maximum(high_weight, 1e-37)) - tl.log2(tl.maximum(low_weight, 1e-37))


@triton.jit
def slope_of(low, low_weight, high, high_weight):
    """How fast the logarithm of what lies below a value grows from `low` to `high`."""
    return gap_of(low_weight, high_weight) / tl.maximum(high - low, 1e-30)


@triton.jit
def last_under(low, low_weight, floor, value, weight, variance, dropped):
    """Whether it is `value` that seems to lie under the cut; and, with great certainty, does."""
    is_under = weight <= dropped
    gap = dropped - weight
    is_sure = is_under & (gap * gap >= variance * (MARGIN * MARGIN))
    low, low_weight = tl.where(is_under, value, low), tl.where(is_under, weight, low_weight)
    return low, low_weight, tl.where(is_sure, tl.maximum(floor, value), floor)


@triton.jit
def first_over(low, high, high_weight, error, ceiling, value, weight, variance, dropped):
    """Likewise over the cut; `error` is the variance there."""
    # What is known of a tile is exact only above its largest logit: sums may fall.
    is_over = (weight > dropped) & (value > low)
    gap = weight - dropped
    is_sure = is_over & (gap * gap > variance * (MARGIN * MARGIN))
    high, high_weight = tl.where(is_over, value, high), tl.where(is_over, weight, high_weight)
    ceiling = tl.where(is_sure, tl.minimum(ceiling, value), ceiling)
    return high, high_weight, tl.where(is_over, variance, error), ceiling


@triton.jit
def weight_ends(
    parts, each, num_real, maxima, worth, lowest, largest, scale, dropped, left,
    FEW: tl.constexpr, ROUNDS: tl.constexpr, IS_CUDA: tl.constexpr,
):  # fmt: skip
    """(low, guess, high, floor, ceiling): about where the cut is below which `dropped` lies.

    Of the first FEW parts; four values to a round, since what one takes are its sums over the
    block. A larger sample's guess should lie well between `low` and `high`; the cut itself lies
    between `floor` and `ceiling`, with great certainty.
    """
    offset = largest * scale
    low, high, floor, ceiling = lowest, largest, lowest, largest
    low_weight, high_weight, error = dropped * 0.25, left, left * left
    share = each / num_real
    for _ in range(ROUNDS):
        step = (high - low) * 0.2
        v_1, v_2, v_3, v_4 = low + step, low + step * 2.0, high - step * 2.0, high - step
        s_1, s_2, s_3, s_4 = four_below(v_1, v_2, v_3, v_4, parts[0], scale, offset, IS_CUDA)
        for part in tl.static_range(1, FEW):
            t_1, t_2, t_3, t_4 = four_below(v_1, v_2, v_3, v_4, parts[part], scale, offset, IS_CUDA)
            s_1 += t_1
            s_2 += t_2
            s_3 += t_3
            s_4 += t_4
        s_1, s_2, s_3, s_4 = tl.reduce((s_1, s_2, s_3, s_4), 0, add_four)
        k_1, k_2, k_3, k_4 = four_known(v_1, v_2, v_3, v_4, maxima, worth)
        near, more = tl.exp2((v_1 - largest) * scale), tl.exp2(step * scale)
        # Squares are at most as much as if all of a sum weighed as much as its value.
        w_1, e_1 = estimate(k_1, s_1, s_1 * near, near, each, share)
        near *= more
        w_2, e_2 = estimate(k_2, s_2, s_2 * near, near, each, share)
        near *= more
        w_3, e_3 = estimate(k_3, s_3, s_3 * near, near, each, share)
        near *= more
        w_4, e_4 = estimate(k_4, s_4, s_4 * near, near, each, share)
        low, low_weight, floor = last_under(low, low_weight, floor, v_1, w_1, e_1, dropped)
        low, low_weight, floor = last_under(low, low_weight, floor, v_2, w_2, e_2, dropped)
        low, low_weight, floor = last_under(low, low_weight, floor, v_3, w_3, e_3, dropped)
        low, low_weight, floor = last_under(low, low_weight, floor, v_4, w_4, e_4, dropped)
        high, high_weight, error, ceiling = first_over(
            low, high, high_weight, error, ceiling, v_4, w_4, e_4, dropped
        )
        high, high_weight, error, ceiling = first_over(
            low, high, high_weight, error, ceiling, v_3, w_3, e_3, dropped
        )
        high, high_weight, error, ceiling = first_over(
            low, high, high_weight, error, ceiling, v_2, w_2, e_2, dropped
        )
        high, high_weight, error, ceiling = first_over(
            low, high, high_weight, error, ceiling, v_1, w_1, e_1, dropped
        )
    guess = between(dropped, low, low_weight, high, high_weight)
    slope = tl.maximum(slope_of(low, low_weight, high, high_weight), scale * LEAST_SLOPE)
    # The sample's error, of what is dropped.
    off = tl.sqrt(error) * FAR / tl.maximum(dropped, 1e-37)
    under = guess + tl.log2(tl.maximum(1.0 - off, 0.02)) / slope
    over = guess + tl.log2(1.0 + off) / slope
    is_poor = off > 1.0
    low = tl.where(is_poor, floor, tl.minimum(tl.maximum(under, floor), low))
    high = tl.where(is_poor, ceiling, tl.maximum(tl.minimum(over, ceiling), high))
    return low, guess, high, floor, ceiling


@triton.jit
def between(weight, low, low_weight, high, high_weight):
    """The value at a weight: its logarithm is almost straight between two near ones."""
    whole = tl.maximum(gap_of(low_weight, high_weight), 1e-6)
    share = gap_of(low_weight, weight) / whole
    return low + tl.minimum(tl.maximum(share, 0.0), 1.0) * (high - low)


@triton.jit
def closer_ends(
    parts, each, num_real, maxima, worth, ends, largest, scale, dropped, MANY: tl.constexpr,
    SHIFT: tl.constexpr, IS_CUDA: tl.constexpr,
):  # fmt: skip
    """Values that the cut is very probably between, by all parts and what `weight_ends` gave."""
    low, guess, high, floor, ceiling = ends
    if SHIFT > 0:
        # Values that logits can have: below one between two of those lies what lies below the next,
        # so that it would seem to be reached too soon.
        low = value_of(code_up_to(low, SHIFT) - 1, SHIFT)
        guess = value_of(code_up_to(guess, SHIFT), SHIFT)
        high = value_of(code_up_to(high, SHIFT) + 1, SHIFT)
    offset = largest * scale
    a, b, c, d = three_below(low, guess, high, parts[0], scale, offset, IS_CUDA)
    for part in tl.static_range(1, MANY):
        more_a, more_b, more_c, more_d = three_below(
            low, guess, high, parts[part], scale, offset, IS_CUDA
        )
        a += more_a
        b += more_b
        c += more_c
        d += more_d
    a, b, c, d = tl.reduce((a, b, c, d), 0, add_four)
    known_low, known_guess, known_high, _ = four_known(low, guess, high, high, maxima, worth)
    near = tl.exp2((guess - largest) * scale)
    weight, variance = estimate(known_guess, b, c, near, each, each / num_real)
    error = tl.sqrt(variance)
    low_weight, high_weight = known_low + a * each, known_high + d * each
    less, more = dropped - error * MARGIN, dropped + error * MARGIN
    # The logarithm of what lies below a value bends downwards: chords lie under it between their
    # ends and over it beyond, so that the lower end goes by a steeper line above the guess, by a
    # flatter one below it, and by the chord itself below `low`.
    least = scale * LEAST_SLOPE
    before = tl.maximum(slope_of(low, low_weight, guess, weight), least)
    after = tl.maximum(slope_of(guess, weight, high, high_weight), least)
    # From where hardly anything lies below, a chord says nothing of how steep it is at the guess.
    held = slope_of(low, tl.maximum(low_weight, weight * 0.0625), guess, weight)
    flatter = tl.sqrt(tl.maximum(held, least) * after)
    slope = tl.where(less < weight, flatter, tl.maximum(before, after))
    first = tl.where(
        less < low_weight,
        tl.maximum(low + gap_of(low_weight, less) / before, floor),
        tl.maximum(guess + gap_of(weight, less) / slope, low),
    )
    second = tl.where(
        more < weight,
        between(more, low, low_weight, guess, weight),
        between(more, guess, weight, high, high_weight),
    )
    beyond = tl.minimum(high + 2.0 * gap_of(high_weight, more) / after, ceiling)
    return first, tl.where(more > high_weight, beyond, second)


@triton.jit(do_not_specialize=["num_real", "num_tiles", "num_collected"])
def bracket_kernel(  # noqa: PLR0915 - what each filter asks for, one after another
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
    highs_ptr,
    row_stride,
    last_stride,
    num_columns,
    num_real,
    num_tiles,
    num_collected,  # rows for which there is room to collect
    HAS_TEMPERATURE: tl.constexpr,
    HAS_MARKS: tl.constexpr,
    HAS_TOP_K: tl.constexpr,
    HAS_TOP_P: tl.constexpr,
    HAS_MIN_P: tl.constexpr,
    FEW: tl.constexpr,  # parts of the small sample
    ROUNDS: tl.constexpr,  # in which it is searched
    MANY: tl.constexpr,  # parts of the large one
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,  # see `ask_for_sample`
    MOST: tl.constexpr,  # logits that are collected without a bound from above
    SHIFT: tl.constexpr,  # see `code_of`; 0: of float32
    TILE_SLOTS: tl.constexpr,
    TILE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Leaves each row's `low`: NaN to search the row itself, +inf where its cut is known.

    The cut of a row that fails is NaN.
    """
    row = tl.program_id(0)
    temperature, top_k, top_p, min_p, is_filtered = asked_of(
        row, temperature_ptr, marks_ptr, top_k_ptr, top_p_ptr, min_p_ptr, num_real,
        HAS_TEMPERATURE, HAS_MARKS, HAS_TOP_K, HAS_TOP_P, HAS_MIN_P,
    )  # fmt: skip
    # 16 bytes.
    GROUP: tl.constexpr = 128 // logits_ptr.dtype.element_ty.primitive_bitwidth
    # The samples are asked for at once: they come from memory. And before the wait, so that they
    # come while the pass over the logits ends.
    row_ptr = logits_ptr + row.to(tl.int64) * row_stride
    ALL: tl.constexpr = MANY if HAS_TOP_P else FEW
    asked, each, each_few = ask_for_sample(
        row_ptr, last_stride, num_real, is_filtered, (top_k <= 0) & (min_p <= 0.0), FEW, ALL,
        WIDTH, GROUP, LANES, TILE,
    )  # fmt: skip
    await_inputs(OVERLAP)
    is_bad = ((top_p != top_p) | (min_p != min_p)) & (temperature != 0.0)
    tl.store(cuts_ptr + row, tl.where(is_bad, float("nan"), NEG_INF))
    tl.store(lows_ptr + row, INF)
    if is_filtered == 0:
        return
    parts = with_tops(asked, maxima_ptr + row.to(tl.int64) * num_tiles, ALL)
    maxima, largest, scale, worth, cut = row_facts(
        row, maxima_ptr, sums_ptr, temperature, min_p, num_tiles, TILE_SLOTS
    )
    left = tl.sum(worth, axis=0)
    if ((largest > NEG_INF) & (left > 0.0) & (left < INF)) == 0:
        return
    if (top_k <= 0) & (top_p >= 1.0):
        tl.store(cuts_ptr + row, cut)
        tl.store(quotas_ptr + row, 2_147_483_647)
        return
    low, high = cut, tl.full((), INF, tl.float32)
    if top_k > 0:
        least = least_of(maxima, largest)
        ones = (maxima > NEG_INF).to(tl.float32)
        wanted = top_k.to(tl.float64)
        low = tile_bound(maxima, ones, cut, least, largest, wanted)
        # By the tiles alone there may be no bound, or a poor one.
        if (low == cut) | (number_from(parts, low, FEW) * each_few > 0.25 * MOST):
            low = tl.maximum(low, count_bound(parts, each_few, least, largest, wanted, FEW))
        low = tl.where(top_k > MOST, float("nan"), low)
    if HAS_TOP_P:  # noqa: SIM102 - which is known when this is compiled
        if (top_k <= 0) & (min_p <= 0.0):
            wanted = top_p.to(tl.float64) * left
            dropped = (left - wanted).to(tl.float32)
            lowest = weight_bound(largest, temperature, left, wanted, num_real)
            known = worth.to(tl.float32)
            ends = weight_ends(
                parts, each_few, num_real, maxima, known, lowest, largest, scale, dropped,
                left.to(tl.float32), FEW, ROUNDS, OVERLAP,
            )  # fmt: skip
            low = ends[0]
            if number_from(parts, low, FEW) * each_few > MOST:
                low, upper = closer_ends(
                    parts, each, num_real, maxima, known, ends, largest, scale, dropped, MANY,
                    SHIFT, OVERLAP,
                )  # fmt: skip
                high = tl.where(upper < largest, upper, INF)
            if SHIFT > 0:
                # The cut is a value that there is: no less than the last up to `low`, and less
                # than what follows the last up to `high`.
                low = value_of(code_up_to(tl.maximum(low, LOWEST), SHIFT), SHIFT)
                high = tl.where(high < INF, value_of(code_up_to(high, SHIFT) + 1, SHIFT), INF)
    tl.store(lows_ptr + row, tl.where(row < num_collected, low, float("nan")))
    tl.store(highs_ptr + row, high)
