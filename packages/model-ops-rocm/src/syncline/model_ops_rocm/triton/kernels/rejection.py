"""Speculative rejection sampling: what each place's logits weigh, which drafts hold, what follows.

Every tile of TILE ids leaves its largest logit and the sum of its weights relative to it; a program
per row then walks the row's drafts. What follows them is drawn by `residual`.
Sums over tiles are float64, in a fixed order; no atomics. A weight is exp((x - largest) / T).
Source: Leviathan et al., "Fast inference from transformers via speculative decoding" (ICML 2023).
"""

import triton
import triton.language as tl

from syncline.model_ops_rocm.triton.kernels.philox import uniform

LOG2_E = tl.constexpr(1.4426950408889634)
NEG_INF = tl.constexpr(float("-inf"))


@triton.jit
def load_tile(row_ptr, tile, last_stride, num_ids, TILE: tl.constexpr):
    """float32 [TILE]; -inf beyond the ids."""
    ids = tile * TILE + tl.arange(0, TILE)
    source = row_ptr + ids.to(tl.int64) * last_stride
    return tl.load(source, mask=ids < num_ids, other=NEG_INF).to(tl.float32)


@triton.jit
def temperature_of(temperature_ptr, row):
    """As given, and the divisor of the logits: 1 for a greedy row and for one that is wrong."""
    given = tl.full((), 1.0, tl.float32)
    if temperature_ptr is not None:
        given = tl.load(temperature_ptr + row)
    return given, tl.where(given > 0.0, given, 1.0)


@triton.jit
def first_of(mask, SLOTS: tl.constexpr):
    """The index of the first True, SLOTS if there is none."""
    return tl.min(tl.where(mask, tl.arange(0, SLOTS), SLOTS), axis=0)


@triton.jit
def load_stats(stats_ptr, place, inverse, num_tiles, TILE_SLOTS: tl.constexpr):
    """A place's tile maxima, their largest, and the float64 weights of whole tiles."""
    tiles = tl.arange(0, TILE_SLOTS)
    source = stats_ptr + place.to(tl.int64) * (2 * num_tiles) + tiles
    maxima = tl.load(source, mask=tiles < num_tiles, other=NEG_INF)
    sums = tl.load(source + num_tiles, mask=tiles < num_tiles, other=0.0)
    largest = tl.max(maxima, axis=0)
    # Without a finite logit there is nothing to subtract.
    base = tl.where(largest == NEG_INF, 0.0, largest).to(tl.float64)
    gaps = tl.where(maxima == NEG_INF, 0.0, maxima.to(tl.float64) - base)
    return maxima, largest, sums.to(tl.float64) * tl.exp(gaps * inverse)


@triton.jit
def is_number(largest, total):
    return (largest > NEG_INF) & (total > 0.0) & (total < float("inf"))


@triton.jit
def best_of(
    row_ptr, maxima, largest, last_stride, num_ids, SLOTS: tl.constexpr, TILE: tl.constexpr
):
    """The lowest id that has the largest logit."""
    tile = first_of(maxima == largest, SLOTS)
    tile = tl.where(tile < SLOTS, tile, 0)
    x = load_tile(row_ptr, tile, last_stride, num_ids, TILE)
    return tile * TILE + first_of(x == largest, TILE)


@triton.jit
def _probability(row_ptr, token, largest, total, inverse, last_stride, num_ids):
    """float64, of one id; 0 for one that does not exist, NaN where the logits are no numbers."""
    is_id = (token >= 0) & (token < num_ids)
    at = tl.where(is_id, token, 0) * last_stride
    x = tl.load(row_ptr + at, mask=is_id, other=NEG_INF).to(tl.float64)
    return tl.exp((x - largest) * inverse) / total


@triton.jit
def _row_of(starts_ptr, place, num_rows):
    """The last row that begins at or before the place."""
    low = tl.full((), 0, tl.int64)
    high = low + num_rows
    while high - low > 1:
        middle = (low + high) // 2
        is_below = tl.load(starts_ptr + middle) <= place
        low = tl.where(is_below, middle, low)
        high = tl.where(is_below, high, middle)
    return low


@triton.jit
def places_of(starts_ptr, row, num_places, NUM_DRAFTS: tl.constexpr):
    """A row's first place, and how many it has; 0 if they are not all there."""
    start = row * (NUM_DRAFTS + 1)
    stop = start + NUM_DRAFTS + 1
    if starts_ptr is not None:
        start = tl.load(starts_ptr + row).to(tl.int64)
        stop = tl.load(starts_ptr + row + 1).to(tl.int64)
    has_places = (start >= 0) & (stop > start) & (stop <= num_places)
    return tl.where(has_places, start, 0), tl.where(has_places, stop - start, 0)


@triton.jit(do_not_specialize=["first_place", "num_rows"])
def stats_kernel(
    logits_ptr,
    temperature_ptr,
    drafts_ptr,
    starts_ptr,  # or None: place p is number p % NUM_OF_ROW of row p // NUM_OF_ROW
    stats_ptr,  # float32 [places, 2, tiles]: largest logit, sum of weights
    first_place,  # where these logits' statistics begin
    num_rows,
    num_ids,
    num_tiles,
    row_stride,
    place_stride,
    last_stride,
    drafts_row,
    drafts_last,
    NUM_OF_ROW: tl.constexpr,
    FIRST_DRAFT: tl.constexpr,  # the number of the place that is there only if draft 0 is
    TILES: tl.constexpr,
    TILE: tl.constexpr,
):
    place, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILES
    row, number = place // NUM_OF_ROW, place % NUM_OF_ROW
    if starts_ptr is not None:
        # No place after the last row's is read.
        if place >= tl.load(starts_ptr + num_rows):
            return
        row = _row_of(starts_ptr, place, num_rows)
        source = logits_ptr + place * place_stride
    else:
        if number >= FIRST_DRAFT:
            draft = (number - FIRST_DRAFT) * drafts_last
            if tl.load(drafts_ptr + row * drafts_row + draft) < 0:
                return
        source = logits_ptr + row * row_stride + number * place_stride
    _, temperature = temperature_of(temperature_ptr, row)
    tiles = first + tl.arange(0, TILES)
    ids = tiles[:, None] * TILE + tl.arange(0, TILE)[None, :]
    x = tl.load(source + ids.to(tl.int64) * last_stride, mask=ids < num_ids, other=NEG_INF)
    x = x.to(tl.float32)
    maxima = tl.max(x, axis=1)
    base = tl.where(maxima == NEG_INF, 0.0, maxima)
    sums = tl.sum(tl.exp2((x - base[:, None]) * tl.div_rn(LOG2_E, temperature)), axis=1)
    target = stats_ptr + (first_place + place) * (2 * num_tiles) + tiles
    tl.store(target, maxima, mask=tiles < num_tiles)
    tl.store(target + num_tiles, sums, mask=tiles < num_tiles)


@triton.jit(do_not_specialize=["num_places"])
def accept_kernel(  # noqa: PLR0915 reason: one row's way along its drafts
    drafts_ptr,
    starts_ptr,  # or None
    logits_ptr,
    draft_logits_ptr,  # or None: each draft was certain
    temperature_ptr,  # or None
    seeds_ptr,
    samples_ptr,
    positions_ptr,
    stats_ptr,  # of the places, then of the drafter's
    facts_ptr,  # float64 [R, 4]: largest and total of target and draft, where a draft was refused
    tokens_ptr,
    accepted_ptr,
    num_places,
    num_ids,
    num_tiles,
    row_stride,
    place_stride,
    last_stride,
    draft_row,
    draft_place,
    draft_last,
    drafts_row,
    drafts_last,
    tokens_row,
    tokens_last,
    PURPOSE: tl.constexpr,
    NUM_DRAFTS: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    TILE_SLOTS: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start, count = places_of(starts_ptr, row, num_places, NUM_DRAFTS)
    position = tl.load(positions_ptr + row).to(tl.int64)
    count = tl.where(position >= 0, count, 0)
    seed, sample = tl.load(seeds_ptr + row), tl.load(samples_ptr + row)
    given, temperature = temperature_of(temperature_ptr, row)
    inverse = 1.0 / temperature.to(tl.float64)
    logits_at = row * row_stride
    if starts_ptr is not None:
        logits_at = start * place_stride
    # All of the row's at once: they do not depend on one another.
    numbers = tl.arange(0, BLOCK_QUERIES)
    u = uniform(seed, sample, position + numbers, PURPOSE)
    tokens_ptr += row * tokens_row
    tl.store(tokens_ptr + numbers * tokens_last, -1, mask=numbers <= NUM_DRAFTS)
    facts_ptr += 4 * row
    tl.store(facts_ptr + tl.arange(0, 4), (tl.arange(0, 4) % 2).to(tl.float64))
    drafts_ptr += row * drafts_row

    accepted = tl.where(count > 0, 0, -1).to(tl.int64)
    most = tl.minimum(count - 1, NUM_DRAFTS)
    goes_on = (most > 0) & (given >= 0.0) & (given < float("inf"))
    while goes_on:
        draft = tl.load(drafts_ptr + accepted * drafts_last).to(tl.int64)
        goes_on = draft >= 0
        if goes_on:
            source = logits_ptr + logits_at + accepted * place_stride
            maxima, largest, weights = load_stats(
                stats_ptr, start + accepted, inverse, num_tiles, TILE_SLOTS
            )
            total = tl.sum(weights, axis=0)
            p = _probability(source, draft, largest, total, inverse, last_stride, num_ids)
            q = tl.full((), 1.0, tl.float64)
            tl.store(facts_ptr, largest.to(tl.float64))
            tl.store(facts_ptr + 1, total)
            if draft_logits_ptr is not None:
                own = draft_logits_ptr + row * draft_row + accepted * draft_place
                place = num_places + row * NUM_DRAFTS + accepted
                _, highest, own_weights = load_stats(
                    stats_ptr, place, inverse, num_tiles, TILE_SLOTS
                )
                own_total = tl.sum(own_weights, axis=0)
                q = _probability(own, draft, highest, own_total, inverse, draft_last, num_ids)
                tl.store(facts_ptr + 2, highest.to(tl.float64))
                tl.store(facts_ptr + 3, own_total)
            goes_on = tl.sum(tl.where(numbers == accepted, u, 0.0), axis=0) * q < p
            if given == 0.0:
                best = best_of(source, maxima, largest, last_stride, num_ids, TILE_SLOTS, TILE)
                goes_on = (draft == best) & is_number(largest, total)
            if goes_on:
                tl.store(tokens_ptr + accepted * tokens_last, draft)
                accepted += 1
                goes_on = accepted < most
    tl.store(accepted_ptr + row, accepted)
