"""Between which two logits a row's cut should lie, from a sample of the row and its tiles' sums.

The sample is single runs of WIDTH ids, evenly spread. What a tile without a larger logit weighs is
known exactly, so single large logits, which a sample misses, are never guessed at. A bracket may be
wrong: what is found in it is checked. Knows no request.
"""

import triton
import triton.language as tl

from syncline.model_ops_rocm.triton.kernels.dependent import await_inputs
from syncline.model_ops_rocm.triton.kernels.logits import NEG_INF
from syncline.model_ops_rocm.triton.kernels.logits_codes import code_of, value_of
from syncline.model_ops_rocm.triton.kernels.logits_cut import (
    INF,
    LOWEST,
    asked_of,
    least_of,
    row_facts,
    tile_bound,
    weight_bound,
)

# How many standard errors a bracket's ends lie off the guess.
MARGIN = tl.constexpr(5.0)


@triton.jit
def ask_for_sample(
    row_ptr, maxima_ptr, last_stride, num_real, is_whole, FEW: tl.constexpr, MANY: tl.constexpr,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A sample of at most a quarter of the row, in MANY parts, of which the first FEW are one, too.

    Of each part [LANES, GROUP] as stored, -inf where nothing is, and float32 [LANES], their tiles'
    largest; no more than the FEW unless `is_whole`. How many ids each stands for, of all and of the
    FEW. A thread has GROUP of a part, and adds them up itself.
    """
    RUNS: tl.constexpr = LANES * GROUP // WIDTH
    num_runs = num_real // WIDTH
    num_chunks = tl.maximum(tl.minimum(num_runs // 4, MANY * RUNS), 1)
    num_parts = (num_chunks + RUNS - 1) // RUNS
    # A row has at most 2^15 runs; one division for all of them.
    step = (num_runs << 10) // num_chunks
    lanes = tl.arange(0, LANES)
    groups, places = lanes // (WIDTH // GROUP), lanes % (WIDTH // GROUP) * GROUP
    in_group = tl.arange(0, GROUP)[None, :]
    parts, number, number_few = (), num_chunks, num_chunks * 0
    for part in tl.static_range(MANY):
        # Any part is spread over all of the row.
        chunks = groups * num_parts + part
        limit = tl.where(part < num_parts, tl.minimum(num_chunks, num_runs), 0)
        if part >= FEW:
            limit = tl.where(is_whole, limit, 0)
        else:
            number_few += tl.where(
                part < num_parts, (num_chunks - part + num_parts - 1) // num_parts, 0
            )
        firsts = tl.where(chunks < limit, (chunks * step) >> 10, 0) * WIDTH
        columns = (firsts + places)[:, None] + in_group
        at = row_ptr + columns.to(tl.int64) * last_stride
        x = tl.load(at, mask=(chunks < limit)[:, None], other=NEG_INF)
        tops = tl.load(maxima_ptr + firsts // TILE, mask=chunks < limit, other=NEG_INF)
        parts += ((x, tops),)  # type: ignore[assignment]  # tuples grow
    each = num_real.to(tl.float32) / (number * WIDTH).to(tl.float32)
    return parts, each, num_real.to(tl.float32) / (number_few * WIDTH).to(tl.float32)


@triton.jit
def weights_of(x, scale, offset, IS_CUDA: tl.constexpr):
    """float32: 2^(x * scale - offset), of a sample: not exact, and 0 for what is no normal number.

    On CUDA in PTX, since otherwise such numbers are scaled, and cost three instructions more.
    """
    powers = tl.fma(x, tl.broadcast_to(scale, x.shape), tl.broadcast_to(-offset, x.shape))
    if IS_CUDA:
        weights = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=r,r", [powers], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        weights = tl.exp2(powers)
    return weights


@triton.jit
def number_from(parts, value, FEW: tl.constexpr):
    """float32: how many of the first FEW parts reach a value."""
    number = tl.sum((parts[0][0].to(tl.float32) >= value).to(tl.float32), axis=1)
    for part in tl.static_range(1, FEW):
        number += tl.sum((parts[part][0].to(tl.float32) >= value).to(tl.float32), axis=1)
    return tl.sum(number, axis=0)


@triton.jit
def add_four(a_1, b_1, c_1, d_1, a_2, b_2, c_2, d_2):
    return a_1 + a_2, b_1 + b_2, c_1 + c_2, d_1 + d_2


@triton.jit
def sum_below(value, x, weights, tops):
    """float32 [LANES]: what lies below a value, in tiles that reach it."""
    return tl.where(tops >= value, tl.sum(tl.where(x < value, weights, 0.0), axis=1), 0.0)


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
def four_below(v_1, v_2, v_3, v_4, part, scale, offset, IS_CUDA: tl.constexpr):
    """See `sum_below`: of four values."""
    x, tops = part[0].to(tl.float32), part[1]
    weights = weights_of(x, scale, offset, IS_CUDA)
    s_1, s_2 = sum_below(v_1, x, weights, tops), sum_below(v_2, x, weights, tops)
    return s_1, s_2, sum_below(v_3, x, weights, tops), sum_below(v_4, x, weights, tops)


@triton.jit
def weight_ends(
    parts, each, num_real, maxima, worth, lowest, largest, scale, dropped, left,
    FEW: tl.constexpr, ROUNDS: tl.constexpr, IS_CUDA: tl.constexpr,
):  # fmt: skip
    """Values that the cut below which `dropped` lies is very probably between, and weights there.

    Of the first FEW parts; four values to a round, since what one takes are its sums over the
    block.
    """
    offset = largest * scale
    low, high = lowest, largest
    low_weight, high_weight = dropped * 0.25, left
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
        low, low_weight = last_under(low, low_weight, v_1, w_1, e_1, dropped)
        low, low_weight = last_under(low, low_weight, v_2, w_2, e_2, dropped)
        low, low_weight = last_under(low, low_weight, v_3, w_3, e_3, dropped)
        low, low_weight = last_under(low, low_weight, v_4, w_4, e_4, dropped)
        high, high_weight = first_over(high, high_weight, v_4, w_4, e_4, dropped)
        high, high_weight = first_over(high, high_weight, v_3, w_3, e_3, dropped)
        high, high_weight = first_over(high, high_weight, v_2, w_2, e_2, dropped)
        high, high_weight = first_over(high, high_weight, v_1, w_1, e_1, dropped)
    return low, low_weight, high, high_weight


@triton.jit
def last_under(low, low_weight, value, weight, variance, dropped):
    """Whether it is `value` that lies under the cut; so with what is below it."""
    gap = dropped - weight
    is_under = (gap >= 0.0) & (gap * gap >= variance * (MARGIN * MARGIN))
    return tl.where(is_under, value, low), tl.where(is_under, weight, low_weight)


@triton.jit
def first_over(high, high_weight, value, weight, variance, dropped):
    """Likewise over the cut."""
    gap = weight - dropped
    is_over = (gap > 0.0) & (gap * gap > variance * (MARGIN * MARGIN))
    return tl.where(is_over, value, high), tl.where(is_over, weight, high_weight)


@triton.jit
def between(weight, low, low_weight, high, high_weight):
    """The value at a weight: its logarithm is almost straight between two near ones."""
    start = tl.log2(tl.maximum(low_weight, 1e-37))
    whole = tl.log2(tl.maximum(high_weight, 1e-37)) - start
    share = (tl.log2(tl.maximum(weight, 1e-37)) - start) / tl.maximum(whole, 1e-6)
    return low + tl.minimum(tl.maximum(share, 0.0), 1.0) * (high - low)


@triton.jit
def three_below(low, guess, high, part, scale, offset, IS_CUDA: tl.constexpr):
    """See `sum_below`: of three values, and the squares of the second."""
    x, tops = part[0].to(tl.float32), part[1]
    weights = weights_of(x, scale, offset, IS_CUDA)
    parts = tl.where(x < guess, weights, 0.0)
    at_guess = tl.where(tops >= guess, tl.sum(parts, axis=1), 0.0)
    squares = tl.where(tops >= guess, tl.sum(parts * parts, axis=1), 0.0)
    at_low, at_high = sum_below(low, x, weights, tops), sum_below(high, x, weights, tops)
    return at_low, at_guess, squares, at_high


@triton.jit
def closer_ends(
    parts, each, num_real, maxima, worth, low, low_weight, high, high_weight, largest, scale,
    dropped, MANY: tl.constexpr, IS_CUDA: tl.constexpr,
):  # fmt: skip
    """Likewise by all parts, between two such values."""
    guess = between(dropped, low, low_weight, high, high_weight)
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
    less, more = dropped - MARGIN * error, dropped + MARGIN * error
    first = tl.where(
        less < weight,
        between(less, low, low_weight, guess, weight),
        between(less, guess, weight, high, high_weight),
    )
    second = tl.where(
        more < weight,
        between(more, low, low_weight, guess, weight),
        between(more, guess, weight, high, high_weight),
    )
    return first, second


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
    await_inputs(OVERLAP)
    is_bad = ((top_p != top_p) | (min_p != min_p)) & (temperature != 0.0)
    tl.store(cuts_ptr + row, tl.where(is_bad, float("nan"), NEG_INF))
    tl.store(lows_ptr + row, INF)
    if is_filtered == 0:
        return
    # 16 bytes.
    GROUP: tl.constexpr = 128 // logits_ptr.dtype.element_ty.primitive_bitwidth
    # The samples are asked for at once: they come from memory.
    row_ptr = logits_ptr + row.to(tl.int64) * row_stride
    ALL: tl.constexpr = MANY if HAS_TOP_P else FEW
    parts, each, each_few = ask_for_sample(
        row_ptr, maxima_ptr + row.to(tl.int64) * num_tiles, last_stride, num_real,
        (top_k <= 0) & (min_p <= 0.0), FEW, ALL, WIDTH, GROUP, LANES, TILE,
    )  # fmt: skip
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
            low, low_weight, upper, upper_weight = weight_ends(
                parts, each_few, num_real, maxima, known, lowest, largest, scale, dropped,
                left.to(tl.float32), FEW, ROUNDS, OVERLAP,
            )  # fmt: skip
            if number_from(parts, low, FEW) * each_few > MOST:
                low, upper = closer_ends(
                    parts, each, num_real, maxima, known, low, low_weight, upper, upper_weight,
                    largest, scale, dropped, MANY, OVERLAP,
                )  # fmt: skip
                high = tl.where(upper < largest, upper, INF)
            if SHIFT > 0:
                # The cut is a value that there is: one from `low` on at least, and what follows
                # `high` at most, both of which round towards zero.
                low = value_of(code_of(tl.maximum(low, LOWEST), SHIFT), SHIFT)
                high = tl.where(high < INF, value_of(code_of(high, SHIFT) + 1, SHIFT), INF)
    tl.store(lows_ptr + row, tl.where(row < num_collected, low, float("nan")))
    tl.store(highs_ptr + row, high)
