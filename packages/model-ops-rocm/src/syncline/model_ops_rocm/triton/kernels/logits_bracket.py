"""Between which two logits a row's cut should lie, from a sample of the row and its tiles' sums.

The sample is single runs of WIDTH ids, evenly spread. What a tile without a larger logit weighs is
known exactly, so single large logits, which a sample misses, are never guessed at. A bracket may be
wrong: what is found in it is checked. Knows no request.
"""

import triton
import triton.language as tl

from syncline.model_ops_rocm.triton.kernels.dependent import await_inputs
from syncline.model_ops_rocm.triton.kernels.logits import NEG_INF
from syncline.model_ops_rocm.triton.kernels.logits_cut import (
    INF,
    asked_of,
    least_of,
    row_facts,
    tile_bound,
    weight_bound,
)

# How many standard errors a bracket's ends lie off the guess.
MARGIN = tl.constexpr(4.0)


@triton.jit
def load_sample(
    row_ptr,
    maxima_ptr,
    last_stride,
    num_real,
    start,
    TOTAL: tl.constexpr,
    CHUNKS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
):
    """CHUNKS runs from `start` on of a sample of TOTAL, which is at most a quarter of the row.

    float32 [CHUNKS, WIDTH], -inf where nothing is; [CHUNKS, 1], its tiles' largest; how many ids
    each of the whole sample stands for.
    """
    num_runs = num_real // WIDTH
    num_chunks = tl.maximum(tl.minimum(num_runs // 4, TOTAL), 1)
    chunks = start + tl.arange(0, CHUNKS)
    is_chunk = chunks < tl.minimum(num_chunks, num_runs)
    firsts = tl.where(is_chunk, chunks * num_runs // num_chunks, 0) * WIDTH
    columns = firsts[:, None] + tl.arange(0, WIDTH)[None, :]
    at = row_ptr + columns.to(tl.int64) * last_stride
    x = tl.load(at, mask=is_chunk[:, None], other=NEG_INF).to(tl.float32)
    tops = tl.load(maxima_ptr + firsts // TILE, mask=is_chunk, other=NEG_INF)
    each = num_real.to(tl.float32) / (num_chunks * WIDTH).to(tl.float32)
    return x, tops[:, None], each


@triton.jit
def number_of(is_one):
    """float32: how many of [CHUNKS, WIDTH]."""
    return tl.sum(tl.sum(is_one.to(tl.float32), axis=1), axis=0)


@triton.jit
def add_two(first_1, second_1, first_2, second_2):
    return first_1 + first_2, second_1 + second_2


@triton.jit
def add_four(a_1, b_1, c_1, d_1, a_2, b_2, c_2, d_2):
    return a_1 + a_2, b_1 + b_2, c_1 + c_2, d_1 + d_2


@triton.jit
def run_sums(first, second, x, weights, tops):
    """Of each run: what lies below either value, in tiles that reach it, and the squares of it."""
    parts_1 = tl.where((x < first) & (tops >= first), weights, 0.0)
    parts_2 = tl.where((x < second) & (tops >= second), weights, 0.0)
    return (
        tl.sum(parts_1, axis=1),
        tl.sum(parts_1 * parts_1, axis=1),
        tl.sum(parts_2, axis=1),
        tl.sum(parts_2 * parts_2, axis=1),
    )


@triton.jit
def below(first, second, sums, each, maxima, worth, largest, scale):
    """What the logits below each of two values weigh, and the standard errors of that."""
    known_1, known_2 = tl.reduce(
        (tl.where(maxima < first, worth, 0.0), tl.where(maxima < second, worth, 0.0)), 0, add_two
    )
    total_1, square_1, total_2, square_2 = tl.reduce(sums, 0, add_four)
    # With one more logit just below the value, in case that the sample has hardly any.
    near_1, near_2 = tl.exp2((first - largest) * scale), tl.exp2((second - largest) * scale)
    error_1 = tl.sqrt(square_1 + near_1 * near_1) * each
    error_2 = tl.sqrt(square_2 + near_2 * near_2) * each
    return known_1 + total_1 * each, error_1, known_2 + total_2 * each, error_2


@triton.jit
def below_more(
    first, second, row_ptr, maxima_ptr, last_stride, num_real, maxima, worth, largest, scale,
    FEW: tl.constexpr, MANY: tl.constexpr, UNROLL: tl.constexpr, WIDTH: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Likewise by a larger sample, read in parts."""
    a, b = tl.full((FEW,), 0.0, tl.float32), tl.full((FEW,), 0.0, tl.float32)
    c, d = tl.full((FEW,), 0.0, tl.float32), tl.full((FEW,), 0.0, tl.float32)
    each = tl.full((), 1.0, tl.float32)
    for start in tl.range(0, MANY, FEW, loop_unroll_factor=UNROLL):
        x, tops, each = load_sample(
            row_ptr, maxima_ptr, last_stride, num_real, start, MANY, FEW, WIDTH, TILE
        )
        weights = tl.exp2((x - largest) * scale)
        more_a, more_b, more_c, more_d = run_sums(first, second, x, weights, tops)
        a += more_a
        b += more_b
        c += more_c
        d += more_d
    return below(first, second, (a, b, c, d), each, maxima, worth, largest, scale)


@triton.jit
def count_bound(x, each, least, largest, wanted):
    """A value that very probably as many as `wanted` logits reach."""
    expected = wanted.to(tl.float32) / each
    rank = expected + MARGIN * tl.sqrt(expected) + 6.0
    reach = tl.maximum(largest - least, 1e-3 * tl.abs(largest) + 1e-6)
    low, high = least, largest
    found = number_of(x >= low)
    for _ in range(24):
        if found < rank:
            high = low
            low -= reach
            reach *= 4.0
            found = number_of(x >= low)
    for _ in range(8):
        middle = low + (high - low) * 0.5
        has = number_of(x >= middle) >= rank
        low = tl.where(has, middle, low)
        high = tl.where(has, high, middle)
    return tl.where(found >= rank, low, NEG_INF)


@triton.jit
def weight_ends(x, weights, tops, each, maxima, worth, lowest, largest, scale, dropped):
    """Values that the cut below which `dropped` lies is very probably between."""
    low_1, high_1, low_2, high_2 = lowest, largest, lowest, largest
    for _ in range(8):
        first, second = low_1 + (high_1 - low_1) * 0.5, low_2 + (high_2 - low_2) * 0.5
        weight_1, error_1, weight_2, error_2 = below(
            first, second, run_sums(first, second, x, weights, tops), each, maxima, worth,
            largest, scale,
        )  # fmt: skip
        is_under = weight_1 + MARGIN * error_1 <= dropped
        low_1 = tl.where(is_under, first, low_1)
        high_1 = tl.where(is_under, high_1, first)
        is_over = weight_2 - MARGIN * error_2 > dropped
        low_2 = tl.where(is_over, low_2, second)
        high_2 = tl.where(is_over, second, high_2)
    return low_1, high_2


@triton.jit
def between(weight, low, low_weight, high, high_weight):
    """The value at a weight: its logarithm is almost straight between two near ones."""
    start = tl.log2(tl.maximum(low_weight, 1e-37))
    whole = tl.log2(tl.maximum(high_weight, 1e-37)) - start
    share = (tl.log2(tl.maximum(weight, 1e-37)) - start) / tl.maximum(whole, 1e-6)
    return low + tl.minimum(tl.maximum(share, 0.0), 1.0) * (high - low)


@triton.jit
def closer_ends(
    row_ptr, maxima_ptr, last_stride, num_real, maxima, worth, low, high, largest, scale, dropped,
    FEW: tl.constexpr, MANY: tl.constexpr, UNROLL: tl.constexpr, WIDTH: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Likewise by a larger sample, between two such values."""
    low_weight, _, high_weight, _ = below_more(
        low, high, row_ptr, maxima_ptr, last_stride, num_real, maxima, worth, largest, scale,
        FEW, MANY, UNROLL, WIDTH, TILE,
    )  # fmt: skip
    guess = between(dropped, low, low_weight, high, high_weight)
    weight, error, _, _ = below_more(
        guess, guess, row_ptr, maxima_ptr, last_stride, num_real, maxima, worth, largest, scale,
        FEW, MANY, UNROLL, WIDTH, TILE,
    )  # fmt: skip
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
def bracket_kernel(
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
    FEW: tl.constexpr,  # runs of the small sample
    MANY: tl.constexpr,  # runs of the large one
    UNROLL: tl.constexpr,  # parts of it asked for at once
    WIDTH: tl.constexpr,
    MOST: tl.constexpr,  # logits that are collected without a bound from above
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
    row_ptr = logits_ptr + row.to(tl.int64) * row_stride
    maxima_ptr += row.to(tl.int64) * num_tiles
    x, tops, each = load_sample(
        row_ptr, maxima_ptr, last_stride, num_real, 0, FEW, FEW, WIDTH, TILE
    )
    low, high = cut, tl.full((), INF, tl.float32)
    if top_k > 0:
        least = least_of(maxima, largest)
        ones = (maxima > NEG_INF).to(tl.float32)
        wanted = top_k.to(tl.float64)
        low = tile_bound(maxima, ones, cut, least, largest, wanted)
        # By the tiles alone there may be no bound, or a poor one.
        if (low == cut) | (number_of(x >= low) * each > 0.25 * MOST):
            by_sample = count_bound(x, each, least, largest, wanted)
            low = tl.maximum(low, by_sample)
        low = tl.where(top_k > MOST, float("nan"), low)
    elif min_p <= 0.0:
        wanted = top_p.to(tl.float64) * left
        dropped = (left - wanted).to(tl.float32)
        lowest = weight_bound(largest, temperature, left, wanted, num_real)
        weights = tl.exp2((x - largest) * scale)
        known = worth.to(tl.float32)
        low, upper = weight_ends(
            x, weights, tops, each, maxima, known, lowest, largest, scale, dropped
        )
        if number_of(x >= low) * each > MOST:
            low, upper = closer_ends(
                row_ptr, maxima_ptr, last_stride, num_real, maxima, known, low, upper, largest,
                scale, dropped, FEW, MANY, UNROLL, WIDTH, TILE,
            )  # fmt: skip
            high = tl.where(upper < largest, upper, INF)
    tl.store(lows_ptr + row, tl.where(row < num_collected, low, float("nan")))
    tl.store(highs_ptr + row, high)
