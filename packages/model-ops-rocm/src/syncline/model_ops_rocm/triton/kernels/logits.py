"""What is known of a row of logits: a pass over its tiles, and what one program makes of that.

A row is read once, in tiles of TILE ids; each leaves its largest logit and the sum of its weights
relative to that. One program per row then has the row's sum, and reads single tiles again. Sums
over tiles are float64, in a fixed order; no atomics. Draws nothing, knows no request.

exp((x - max) / T) is a logit's weight. A row is good if its largest logit is finite and no sum is
NaN; a NaN among the logits makes its tile's sum NaN, and so does +inf.
"""

import triton
import triton.language as tl

from syncline.model_ops_rocm.triton.kernels.dependent import await_turn, read_ahead

LOG2_E = tl.constexpr(1.4426950408889634)
NEG_INF = tl.constexpr(float("-inf"))


@triton.jit
def is_padding(mark_ptr, HAS_MARKS: tl.constexpr):
    """Whether a row's mark, if there is one, is negative."""
    return (read_ahead(mark_ptr) < 0) if HAS_MARKS else False


@triton.jit
def temperature_of(given):
    """The divisor of a row's logits: 1 for a greedy row."""
    return tl.where(given == 0.0, 1.0, given)


@triton.jit
def temperature_given(row, temperature_ptr, HAS_TEMPERATURE: tl.constexpr):
    return read_ahead(temperature_ptr + row) if HAS_TEMPERATURE else tl.full((), 1.0, tl.float32)


@triton.jit
def row_temperature(temperature_ptr, row, HAS_TEMPERATURE: tl.constexpr):
    """A row's divisor."""
    return temperature_of(temperature_given(row, temperature_ptr, HAS_TEMPERATURE))


@triton.jit
def log1p_of(x):
    """log(1 + x) of a float64 x >= 0, right to the last digits for small ones too."""
    rounded = 1.0 + x
    # What 1 + x lost to rounding is made good by the quotient.
    corrected = tl.log(rounded) * (x / tl.where(rounded == 1.0, 1.0, rounded - 1.0))
    return tl.where(rounded == 1.0, x, tl.where(x < float("inf"), corrected, x))


@triton.jit
def ask_for_tile(
    row_ptr, tile, last_stride, num_columns, is_read, TILE: tl.constexpr, EVICTION: tl.constexpr
):  # fmt: skip
    """[TILE] as stored, if it `is_read`; anything beyond the columns."""
    columns = tile * TILE + tl.arange(0, TILE)
    at = row_ptr + columns.to(tl.int64) * last_stride
    is_here = columns < tl.where(is_read, num_columns, 0)
    return tl.load(at, mask=is_here, other=0.0, eviction_policy=EVICTION)


@triton.jit
def only_real(x, tile, num_real, TILE: tl.constexpr):
    """float32 [TILE]: -inf beyond the `num_real` ids."""
    return tl.where(tile * TILE + tl.arange(0, TILE) < num_real, x, NEG_INF)


@triton.jit
def load_tile(row_ptr, tile, last_stride, num_columns, num_real, TILE: tl.constexpr):
    """float32 [TILE], -inf beyond the `num_real` ids."""
    loaded = ask_for_tile(row_ptr, tile, last_stride, num_columns, True, TILE, "")
    return only_real(loaded.to(tl.float32), tile, num_real, TILE)


@triton.jit(do_not_specialize=["num_real", "num_tiles", "tiles_each"])
def tile_stats_kernel(
    logits_ptr,
    temperature_ptr,
    marks_ptr,
    maxima_ptr,
    sums_ptr,
    row_stride,
    last_stride,
    num_columns,
    num_real,
    num_tiles,
    tiles_each,
    HAS_TEMPERATURE: tl.constexpr,
    HAS_MARKS: tl.constexpr,  # a negative one: a padding row
    IS_FILTERED: tl.constexpr,  # whether the row is read once more
    TILE: tl.constexpr,
    OVERLAP: tl.constexpr,  # CUDA: launched while the kernel before it ends
):
    # The next kernels may read what the call was given: they begin when this one has waited.
    await_turn(OVERLAP)
    row, tile = tl.program_id(0), tl.program_id(1) * tiles_each
    if is_padding(marks_ptr + row, HAS_MARKS):
        return
    EVICTION: tl.constexpr = "" if IS_FILTERED else "evict_first"
    row_ptr = logits_ptr + row.to(tl.int64) * row_stride
    stop = tl.minimum(tile + tiles_each, num_tiles)
    # Each tile is asked for before the one ahead of it is done.
    loaded = ask_for_tile(row_ptr, tile, last_stride, num_columns, tile < stop, TILE, EVICTION)
    scale = tl.div_rn(LOG2_E, row_temperature(temperature_ptr, row, HAS_TEMPERATURE))
    at = row.to(tl.int64) * num_tiles
    while tile < stop:
        x = loaded.to(tl.float32)
        loaded = ask_for_tile(
            row_ptr, tile + 1, last_stride, num_columns, tile + 1 < stop, TILE, EVICTION
        )
        if (tile + 1) * TILE > num_real:
            x = only_real(x, tile, num_real, TILE)
        largest = tl.max(x, axis=0)
        base = tl.where(largest == NEG_INF, 0.0, largest)
        tl.store(maxima_ptr + at + tile, largest)
        tl.store(sums_ptr + at + tile, tl.sum(tl.exp2((x - base) * scale), axis=0))
        tile += 1


@triton.jit
def load_stats(maxima_ptr, sums_ptr, row, num_tiles, TILE_SLOTS: tl.constexpr, CACHE: tl.constexpr):
    tiles = tl.arange(0, TILE_SLOTS)
    at = row.to(tl.int64) * num_tiles + tiles
    is_tile = tiles < num_tiles
    maxima = tl.load(maxima_ptr + at, mask=is_tile, other=NEG_INF, cache_modifier=CACHE)
    return maxima, tl.load(sums_ptr + at, mask=is_tile, other=0.0, cache_modifier=CACHE)


@triton.jit
def tile_weights(maxima, sums, largest, scale):
    """float64 weights of whole tiles, relative to a logit of `largest`; NaN where a sum is."""
    gaps = tl.where(maxima == NEG_INF, 0.0, maxima - largest)
    return (sums * tl.exp2(gaps * scale)).to(tl.float64)


@triton.jit
def weight_of(x, sums, is_other, largest, scale, inverse):
    """float64: the sum of `sums` * exp((x - largest) / T) over the others.

    Relative to the largest of them, so that what underflows float32 beside `largest` counts.
    """
    top = tl.max(tl.where(is_other, x, NEG_INF), axis=0)
    base = tl.where(top == NEG_INF, largest, top)
    part = tl.sum(tl.where(is_other, sums * tl.exp2((x - base) * scale), 0.0), axis=0)
    return part.to(tl.float64) * tl.exp((base.to(tl.float64) - largest) * inverse)


@triton.jit
def kept(x, cut, quota):
    """Whether a tile's logits pass a filter: above `cut`, or of the first `quota` equal to it."""
    is_tie = x == cut
    return (x > cut) | (is_tie & (tl.cumsum(is_tie.to(tl.int32), axis=0) <= quota))


@triton.jit
def quota_at(quotas, tile, TILE_SLOTS: tl.constexpr):
    """One tile's quota."""
    return tl.sum(tl.where(tl.arange(0, TILE_SLOTS) == tile, quotas, 0), axis=0)


@triton.jit
def load_kept(
    ties_ptr, quota_ptr, cut, row, num_tiles, maxima, sums, scale, TILE_SLOTS: tl.constexpr
):
    """Each tile's quota, the first tiles' ties before the others', and its sum with those.

    A row whose cut is -inf keeps everything, and has none.
    """
    tiles = tl.arange(0, TILE_SLOTS)
    is_cut = (tiles < num_tiles) & (cut + tiles * 0.0 > NEG_INF)
    ties = tl.load(ties_ptr + row.to(tl.int64) * num_tiles + tiles, mask=is_cut, other=0)
    before = tl.cumsum(ties, axis=0) - ties
    quotas = tl.minimum(tl.maximum(tl.load(quota_ptr + row) - before, 0), ties)
    gaps = tl.where(quotas > 0, cut - maxima, 0.0)
    return quotas, sums + quotas.to(tl.float32) * tl.exp2(gaps * scale)


@triton.jit
def first_of(mask, TILE: tl.constexpr):
    """The index of the first True, TILE if there is none."""
    return tl.min(tl.where(mask, tl.arange(0, TILE), TILE), axis=0)


@triton.jit
def last_of(mask, TILE: tl.constexpr):
    """The index of the last True, -1 if there is none."""
    return tl.max(tl.where(mask, tl.arange(0, TILE), -1), axis=0)


@triton.jit
def first_above(weights, target, SLOTS: tl.constexpr):
    """Where the running sum of `weights` passes `target`, and that sum.

    Only what has weight is ever chosen: the last of it where rounding keeps the sum at the target.
    """
    running = tl.cumsum(weights, axis=0)
    found = first_of((weights > 0.0) & (running > target), SLOTS)
    if found == SLOTS:
        found = last_of(weights > 0.0, SLOTS)
    until = tl.sum(tl.where(tl.arange(0, SLOTS) == found, running, 0.0), axis=0)
    return found, until


@triton.jit
def combine(partials_ptr, row, num_rows, num_shards, inverse, SHARD_SLOTS: tl.constexpr):
    """A row's partials over all shards, and each shard's mass relative to the largest logit."""
    shards = tl.arange(0, SHARD_SLOTS)
    at = partials_ptr + (shards.to(tl.int64) * num_rows + row) * 3
    is_shard = shards < num_shards
    maxima = tl.load(at, mask=is_shard, other=NEG_INF)
    others = tl.load(at + 1, mask=is_shard, other=0.0)
    ids = tl.load(at + 2, mask=is_shard, other=-1.0)
    largest = tl.max(maxima, axis=0)
    gaps = tl.where(maxima == NEG_INF, NEG_INF, maxima - largest)
    masses = (1.0 + others) * tl.exp(gaps * inverse)  # NaN where a row is no numbers
    is_winner = shards == first_of(maxima == largest, SHARD_SLOTS)
    best = tl.sum(tl.where(is_winner, ids, 0.0), axis=0)
    return largest, tl.sum(tl.where(is_winner, others, masses), axis=0), best, masses


@triton.jit
def summary(
    row_ptr,
    maxima,
    sums,
    weights,
    largest,
    winner,
    scale,
    inverse,
    cut,
    quotas,
    last_stride,
    num_columns,
    num_real,
    IS_FILTERED: tl.constexpr,
    TILE_SLOTS: tl.constexpr,
    TILE: tl.constexpr,
):
    """The first column that holds `largest`, of the tile `winner`, and the weight of all others."""
    x = load_tile(row_ptr, winner, last_stride, num_columns, num_real, TILE)
    at = first_of(x == largest, TILE)
    is_other = tl.arange(0, TILE) != at
    if IS_FILTERED:
        # NaN is below no cut: kept here, it spoils the row, as it does without a filter.
        is_other &= kept(x, cut, quota_at(quotas, winner, TILE_SLOTS)) | (x != x)
    is_other_tile = tl.arange(0, TILE_SLOTS) != winner
    in_tile = tl.where(is_other, tl.exp2((x - largest) * scale), 0.0)
    others = tl.sum(in_tile, axis=0).to(tl.float64)
    others += tl.sum(tl.where(is_other_tile, weights, 0.0), axis=0)
    if others < 1e-25:
        others = weight_of(x, 1.0, is_other, largest, scale, inverse)
        others += weight_of(maxima, sums, is_other_tile, largest, scale, inverse)
    return winner * TILE + at, others


@triton.jit
def tiles_of(
    row, given, maxima_ptr, sums_ptr, ties_ptr, cuts_ptr, quotas_ptr, num_tiles,
    IS_FILTERED: tl.constexpr, TILE_SLOTS: tl.constexpr,
):  # fmt: skip
    """What is known of a row before any of it is read again."""
    inverse = 1.0 / temperature_of(given).to(tl.float64)
    scale = tl.div_rn(LOG2_E, temperature_of(given))
    maxima, sums = load_stats(maxima_ptr, sums_ptr, row, num_tiles, TILE_SLOTS, "")
    cut, quotas = tl.full((), NEG_INF, tl.float32), tl.full((TILE_SLOTS,), 0, tl.int32)
    if IS_FILTERED:
        cut = tl.load(cuts_ptr + row)
        given = tl.where(cut == cut, given, float("nan"))
        quotas, sums = load_kept(
            ties_ptr, quotas_ptr, cut, row, num_tiles, maxima, sums, scale, TILE_SLOTS
        )
    return given, scale, inverse, maxima, sums, cut, quotas


@triton.jit
def best_of(
    row, row_ptr, maxima, sums, scale, inverse, cut, quotas, partials_ptr, num_rows, num_shards,
    last_stride, num_columns, num_real, num_tiles, first_id, IS_FILTERED: tl.constexpr,
    TILE_SLOTS: tl.constexpr, SHARD_SLOTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The largest logit, its id, what all others weigh; the weights of tiles and of shards."""
    if SHARD_SLOTS > 0:
        widest, others, at, masses = combine(
            partials_ptr, row, num_rows, num_shards, inverse, SHARD_SLOTS
        )
        largest, best = widest.to(tl.float32), at.to(tl.int64)
        weights = tile_weights(maxima, sums, largest, scale)
    else:
        largest, winner = tl.max(maxima, axis=0, return_indices=True)
        winner = tl.minimum(tl.maximum(winner, 0), num_tiles - 1)
        weights = tile_weights(maxima, sums, largest, scale)
        masses = weights
        column, others = summary(
            row_ptr, maxima, sums, weights, largest, winner, scale, inverse, cut, quotas,
            last_stride, num_columns, num_real, IS_FILTERED, TILE_SLOTS, TILE,
        )  # fmt: skip
        best = column.to(tl.int64) + first_id
    return largest, best, others, weights, masses


@triton.jit
def row_of(
    row, row_ptr, given, maxima_ptr, sums_ptr, ties_ptr, cuts_ptr, quotas_ptr,
    partials_ptr, num_rows, num_shards, last_stride, num_columns, num_real, num_tiles, first_id,
    IS_FILTERED: tl.constexpr, TILE_SLOTS: tl.constexpr,
    SHARD_SLOTS: tl.constexpr,  # 0: the columns are the whole vocabulary
    TILE: tl.constexpr,
):  # fmt: skip
    """What an op that draws nothing asks of a row; `weights` are of tiles."""
    given, scale, inverse, maxima, sums, cut, quotas = tiles_of(
        row, given, maxima_ptr, sums_ptr, ties_ptr, cuts_ptr, quotas_ptr, num_tiles,
        IS_FILTERED, TILE_SLOTS,
    )  # fmt: skip
    largest, best, others, weights, _ = best_of(
        row, row_ptr, maxima, sums, scale, inverse, cut, quotas, partials_ptr, num_rows,
        num_shards, last_stride, num_columns, num_real, num_tiles, first_id, IS_FILTERED,
        TILE_SLOTS, SHARD_SLOTS, TILE,
    )  # fmt: skip
    return given, inverse, largest, best, others, maxima, weights, cut, quotas


@triton.jit
def is_good(largest, others, given):
    """Whether a row is numbers, and its temperature one."""
    is_finite = (largest > NEG_INF) & (largest < float("inf"))
    return is_finite & (others < float("inf")) & (given >= 0.0) & (given < float("inf"))


@triton.jit
def logprob_of(gap, others):
    """float64, and at most the negative normal number nearest to zero."""
    return tl.minimum(gap - log1p_of(others), tl.full((), -2.2250738585072014e-308, tl.float64))
