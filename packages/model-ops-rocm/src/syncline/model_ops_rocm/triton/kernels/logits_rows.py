"""One program per row: its token, the logprob of a given one, its partials, or its likeliest ids.

What the pass over the tiles found is read, and single tiles of the row again. Knows no request.
"""

import triton
import triton.language as tl

from syncline.model_ops_rocm.triton.kernels.dependent import await_inputs, read_ahead
from syncline.model_ops_rocm.triton.kernels.logits import (
    NEG_INF,
    best_of,
    combine,
    first_above,
    first_of,
    is_good,
    kept,
    load_tile,
    logprob_of,
    quota_at,
    row_of,
    temperature_given,
    temperature_of,
    tile_weights,
    tiles_of,
)
from syncline.model_ops_rocm.triton.kernels.philox import uniform

# Neither the number of rows nor where a shard begins compiles anything.
_SIZES = ("num_rows", "num_real", "num_tiles", "first_id")


@triton.jit
def load_passing(
    row_ptr, weights, target, last_stride, num_columns, num_real, num_tiles,
    TILE_SLOTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The tile whose running weight passes `target`, that weight, and what is in it."""
    tile, until = first_above(weights, target, TILE_SLOTS)
    tile = tl.minimum(tl.maximum(tile, 0), num_tiles - 1)
    return tile, until, load_tile(row_ptr, tile, last_stride, num_columns, num_real, TILE)


@triton.jit(do_not_specialize=[*_SIZES, "shard", "num_shards"])
def sample_kernel(  # noqa: PLR0915 - one row, in which each operand is a line
    logits_ptr,
    temperature_ptr,
    seeds_ptr,
    samples_ptr,
    positions_ptr,
    maxima_ptr,
    sums_ptr,
    ties_ptr,
    cuts_ptr,
    quotas_ptr,
    partials_ptr,
    tokens_ptr,
    logprobs_ptr,
    row_stride,
    last_stride,
    num_rows,
    num_columns,
    num_real,
    num_tiles,
    first_id,
    shard,
    num_shards,
    PURPOSE: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
    IS_FILTERED: tl.constexpr,
    TILE_SLOTS: tl.constexpr,
    SHARD_SLOTS: tl.constexpr,
    TILE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0)
    position = read_ahead(positions_ptr + row)
    seed, sample = read_ahead(seeds_ptr + row), read_ahead(samples_ptr + row)
    given = temperature_given(row, temperature_ptr, HAS_TEMPERATURE)
    drawn = uniform(seed, sample, position, PURPOSE)
    await_inputs(OVERLAP)
    if position < 0:
        tl.store(tokens_ptr + row, -1)
        tl.store(logprobs_ptr + row, float("nan"))
        return
    row_ptr = logits_ptr + row.to(tl.int64) * row_stride
    given, scale, inverse, maxima, sums, cut, quotas = tiles_of(
        row, given, maxima_ptr, sums_ptr, ties_ptr, cuts_ptr, quotas_ptr, num_tiles,
        IS_FILTERED, TILE_SLOTS,
    )  # fmt: skip
    # The tile, then the id in it, whose running sum passes the target; the tile is read before all
    # that is to be known of the best one, which takes as long.
    is_greedy = given == 0.0
    if SHARD_SLOTS == 0:
        most, _ = tl.max(maxima, axis=0, return_indices=True)  # once: `best_of` asks for it, too
        weights = tile_weights(maxima, sums, most, scale)
        target = drawn * tl.sum(weights, axis=0)
        tile, until, x = load_passing(
            row_ptr, weights, target, last_stride, num_columns, num_real, num_tiles,
            TILE_SLOTS, TILE,
        )  # fmt: skip
    largest, best, others, weights, masses = best_of(
        row, row_ptr, maxima, sums, scale, inverse, cut, quotas, partials_ptr, num_rows,
        num_shards, last_stride, num_columns, num_real, num_tiles, first_id, IS_FILTERED,
        TILE_SLOTS, SHARD_SLOTS, TILE,
    )  # fmt: skip
    good = is_good(largest, others, given)
    best_column = best - first_id
    is_here = (best_column >= 0) & (best_column < num_real)
    if SHARD_SLOTS > 0:
        # Every shard finds the same one, from the same numbers.
        target = drawn * (1.0 + others)
        owner, until = first_above(masses, target, SHARD_SLOTS)
        is_here = tl.where(is_greedy, is_here, owner == shard)
        in_shard = tl.sum(tl.where(tl.arange(0, SHARD_SLOTS) == owner, masses, 0.0), axis=0)
        target -= until - in_shard
        tile, until, x = load_passing(
            row_ptr, weights, target, last_stride, num_columns, num_real, num_tiles,
            TILE_SLOTS, TILE,
        )  # fmt: skip
    at = row.to(tl.int64) * num_tiles + tile
    # In float32, relative to the tile's own largest logit, as its sum is.
    tile_largest, tile_sum = tl.load(maxima_ptr + at), tl.load(sums_ptr + at)
    quota = quota_at(quotas, tile, TILE_SLOTS)
    if IS_FILTERED:
        tile_sum += quota * tl.exp2(tl.where(quota > 0, cut - tile_largest, 0.0) * scale)
    in_tile = tl.exp2((x - tile_largest) * scale)
    if IS_FILTERED:
        in_tile = tl.where(kept(x, cut, quota), in_tile, 0.0)
    weight = tile_weights(tile_largest, tile_sum, largest, scale)
    share = ((target - (until - weight)) / tl.where(weight > 0.0, weight, 1.0)).to(tl.float32)
    column, _ = first_above(in_tile, share * tile_sum, TILE)
    chosen = tl.sum(tl.where(tl.arange(0, TILE) == column, x, 0.0), axis=0)
    token = (tile * TILE + column).to(tl.int64) + first_id
    is_best = is_greedy | (token == best)
    gap = tl.where(is_best, 0.0, (chosen.to(tl.float64) - largest) * inverse)
    logprob = tl.where(is_here, logprob_of(gap, others), NEG_INF)
    token = tl.where(is_here, tl.where(is_best, best, token), -1)
    tl.store(tokens_ptr + row, tl.where(good, token, -1))
    tl.store(logprobs_ptr + row, tl.where(good, logprob, float("nan")))


@triton.jit(do_not_specialize=[*_SIZES, "num_shards", "true_size"])
def token_logprobs_kernel(
    logits_ptr,
    temperature_ptr,
    ids_ptr,
    maxima_ptr,
    sums_ptr,
    ties_ptr,
    cuts_ptr,
    quotas_ptr,
    partials_ptr,
    logprobs_ptr,
    row_stride,
    last_stride,
    num_rows,
    num_columns,
    num_real,
    num_tiles,
    first_id,
    num_shards,
    true_size,  # of the whole vocabulary
    HAS_TEMPERATURE: tl.constexpr,
    IS_FILTERED: tl.constexpr,
    TILE_SLOTS: tl.constexpr,
    SHARD_SLOTS: tl.constexpr,
    TILE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0)
    token = read_ahead(ids_ptr + row).to(tl.int64)
    given = temperature_given(row, temperature_ptr, HAS_TEMPERATURE)
    await_inputs(OVERLAP)
    if token < 0:
        tl.store(logprobs_ptr + row, tl.where(token == -1, 0.0, float("nan")).to(tl.float64))
        return
    row_ptr = logits_ptr + row.to(tl.int64) * row_stride
    column = token - first_id
    is_here = (column >= 0) & (column < num_real)
    tile = (tl.where(is_here, column, 0) // TILE).to(tl.int32)
    x = load_tile(row_ptr, tile, last_stride, num_columns, num_real, TILE)
    given, inverse, largest, best, others, _, _, cut, quotas = row_of(
        row, row_ptr, given, maxima_ptr, sums_ptr, ties_ptr, cuts_ptr, quotas_ptr,
        partials_ptr, num_rows, num_shards, last_stride, num_columns, num_real, num_tiles,
        first_id, IS_FILTERED, TILE_SLOTS, SHARD_SLOTS, TILE,
    )  # fmt: skip
    if IS_FILTERED:
        quota = quota_at(quotas, tile, TILE_SLOTS)
        x = tl.where(kept(x, cut, quota), x, NEG_INF)
    is_token = tl.arange(0, TILE) == column - tile * TILE
    chosen = tl.max(tl.where(is_token, x, NEG_INF), axis=0)
    gap = tl.where(chosen == NEG_INF, NEG_INF, chosen.to(tl.float64) - largest) * inverse
    logprob = logprob_of(tl.where(token == best, 0.0, gap), others)
    logprob = tl.where(is_here, logprob, NEG_INF)
    good = is_good(largest, others, given) & (token < true_size)
    tl.store(logprobs_ptr + row, tl.where(good, logprob, float("nan")))


@triton.jit(do_not_specialize=[*_SIZES, "num_shards", "num_top"])
def top_logprobs_kernel(
    logits_ptr,
    temperature_ptr,
    maxima_ptr,
    sums_ptr,
    ties_ptr,
    cuts_ptr,
    quotas_ptr,
    partials_ptr,
    ids_ptr,
    logprobs_ptr,
    row_stride,
    last_stride,
    num_rows,
    num_columns,
    num_real,
    num_tiles,
    first_id,
    num_shards,
    num_top,
    HAS_TEMPERATURE: tl.constexpr,
    IS_FILTERED: tl.constexpr,
    TILE_SLOTS: tl.constexpr,
    SHARD_SLOTS: tl.constexpr,
    TILE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0)
    given = temperature_given(row, temperature_ptr, HAS_TEMPERATURE)
    await_inputs(OVERLAP)
    row_ptr = logits_ptr + row.to(tl.int64) * row_stride
    given, inverse, largest, best, others, tops, _, cut, quotas = row_of(
        row, row_ptr, given, maxima_ptr, sums_ptr, ties_ptr, cuts_ptr, quotas_ptr,
        partials_ptr, num_rows, num_shards, last_stride, num_columns, num_real, num_tiles,
        first_id, IS_FILTERED, TILE_SLOTS, SHARD_SLOTS, TILE,
    )  # fmt: skip
    good = is_good(largest, others, given)
    slots, columns = tl.arange(0, TILE_SLOTS), tl.arange(0, TILE)
    # Of each tile: the largest logit that is not listed yet, and the one listed last.
    listed = tl.full((TILE_SLOTS,), float("inf"), tl.float32)
    listed_at = tl.full((TILE_SLOTS,), -1, tl.int32)
    for rank in range(num_top):
        value = tl.max(tops, axis=0)
        tile = first_of(tops == value, TILE_SLOTS)
        tile = tl.where(tile < num_tiles, tile, 0)
        is_slot = slots == tile
        last = tl.max(tl.where(is_slot, listed, NEG_INF), axis=0)
        last_at = tl.max(tl.where(is_slot, listed_at, -1), axis=0)
        x = load_tile(row_ptr, tile, last_stride, num_columns, num_real, TILE)
        is_left = (x < last) | ((x == last) & (columns > last_at))
        column = first_of(is_left & (x == value), TILE)
        after = tl.max(tl.where(is_left & (columns != column), x, NEG_INF), axis=0)
        is_listed = good & (value > NEG_INF)
        if IS_FILTERED:
            quota = quota_at(quotas, tile, TILE_SLOTS)
            is_kept = kept(x, cut, quota) & (columns == column)
            is_listed &= tl.max(is_kept.to(tl.int32), axis=0) > 0
        token = (tile * TILE + column).to(tl.int64) + first_id
        gap = tl.where(token == best, 0.0, (value.to(tl.float64) - largest) * inverse)
        missing = tl.where(good, NEG_INF, float("nan"))
        at = row.to(tl.int64) * num_top + rank
        tl.store(ids_ptr + at, tl.where(is_listed, token, -1))
        tl.store(logprobs_ptr + at, tl.where(is_listed, logprob_of(gap, others), missing))
        tops = tl.where(is_slot, after, tops)
        listed = tl.where(is_slot, value, listed)
        listed_at = tl.where(is_slot, column, listed_at)


@triton.jit(do_not_specialize=[*_SIZES])
def partials_kernel(
    logits_ptr,
    temperature_ptr,
    maxima_ptr,
    sums_ptr,
    partials_ptr,
    row_stride,
    last_stride,
    num_rows,
    num_columns,
    num_real,
    num_tiles,
    first_id,
    HAS_TEMPERATURE: tl.constexpr,
    IS_FILTERED: tl.constexpr,
    TILE_SLOTS: tl.constexpr,
    SHARD_SLOTS: tl.constexpr,
    TILE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0)
    given = temperature_given(row, temperature_ptr, HAS_TEMPERATURE)
    await_inputs(OVERLAP)
    row_ptr = logits_ptr + row.to(tl.int64) * row_stride
    given, _, largest, best, others, _, weights, _, _ = row_of(
        row, row_ptr, given, maxima_ptr, sums_ptr, maxima_ptr, maxima_ptr, maxima_ptr,
        maxima_ptr,
        num_rows, 1, last_stride, num_columns, num_real, num_tiles, first_id,
        IS_FILTERED, TILE_SLOTS, SHARD_SLOTS, TILE,
    )  # fmt: skip
    # Without one possible id every tile is -inf and no sum is NaN.
    is_empty = (largest == NEG_INF) & (tl.sum(weights, axis=0) == 0.0) & (given >= 0.0)
    store_partials(partials_ptr, row, largest.to(tl.float64), others, best, is_empty,
                   is_good(largest, others, given))  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "num_shards"])
def combine_kernel(
    shards_ptr,
    temperature_ptr,
    partials_ptr,
    num_rows,
    num_shards,
    HAS_TEMPERATURE: tl.constexpr,
    SHARD_SLOTS: tl.constexpr,
):
    row = tl.program_id(0)
    given = temperature_given(row, temperature_ptr, HAS_TEMPERATURE)
    inverse = 1.0 / temperature_of(given).to(tl.float64)
    largest, others, best, masses = combine(
        shards_ptr, row, num_rows, num_shards, inverse, SHARD_SLOTS
    )
    is_empty = (largest == NEG_INF) & (tl.sum(masses, axis=0) == 0.0) & (given >= 0.0)
    good = is_good(largest, tl.sum(masses, axis=0), given)
    store_partials(partials_ptr, row, largest, others, best, is_empty, good)


@triton.jit
def store_partials(partials_ptr, row, largest, others, best, is_empty, good):
    at = partials_ptr + row.to(tl.int64) * 3
    is_number = good | is_empty
    tl.store(at, tl.where(is_number, largest, float("nan")))
    tl.store(at + 1, tl.where(good, others, tl.where(is_empty, 0.0, float("nan"))))
    tl.store(at + 2, tl.where(good, best.to(tl.float64), -1.0))
