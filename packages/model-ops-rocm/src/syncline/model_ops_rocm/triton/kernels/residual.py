"""The token after a row's accepted drafts, drawn from what the target has over the drafter.

The residual of the place that refused a draft is summed by tile; a program per row then inverts it,
or the target's own weights where no draft was refused: first the tile that the draw falls in, then
the id in it.
"""

import triton
import triton.language as tl

from syncline.model_ops_rocm.triton.kernels.philox import uniform
from syncline.model_ops_rocm.triton.kernels.rejection import (
    LOG2_E,
    NEG_INF,
    best_of,
    first_of,
    is_number,
    load_stats,
    load_tile,
    places_of,
    temperature_of,
)


@triton.jit
def _first_above(weights, target, SLOTS: tl.constexpr):
    """Where the running sum passes `target`, and the sum before; float64.

    Only what has weight is chosen: the last of it where rounding keeps the sum at the target.
    """
    running = tl.cumsum(weights, axis=0)
    slots = tl.arange(0, SLOTS)
    has_weight = weights > 0.0
    found = first_of(has_weight & (running > target), SLOTS)
    last = tl.max(tl.where(has_weight, slots, 0), axis=0)
    found = tl.where(found < SLOTS, found, last)
    return found, tl.sum(tl.where(slots < found, weights, 0.0), axis=0)


@triton.jit
def _residual_of(x, y, facts_ptr, scale):
    """float32 max(p - q, 0) of ids with logits x and y; facts are of the row's refused place."""
    p = tl.exp2((x - tl.load(facts_ptr).to(tl.float32)) * scale)
    q = tl.exp2((y - tl.load(facts_ptr + 2).to(tl.float32)) * scale)
    p *= (1.0 / tl.load(facts_ptr + 1)).to(tl.float32)
    q *= (1.0 / tl.load(facts_ptr + 3)).to(tl.float32)
    # Propagates NaN, which a maximum would drop.
    return tl.where(p < q, 0.0, p - q)


@triton.jit
def _refused_draft(drafts_ptr, row, accepted, count, drafts_row, drafts_last, NUM_DRAFTS):
    """The draft that was refused; -1 if none was: the token that follows is a bonus."""
    has_draft = (accepted >= 0) & (accepted < NUM_DRAFTS) & (accepted < count - 1)
    at = row * drafts_row + tl.where(has_draft, accepted, 0) * drafts_last
    return tl.load(drafts_ptr + at, mask=has_draft, other=-1).to(tl.int64)


@triton.jit(do_not_specialize=["num_places"])
def residual_kernel(
    drafts_ptr,
    starts_ptr,  # or None
    logits_ptr,
    draft_logits_ptr,
    temperature_ptr,  # or None
    accepted_ptr,
    facts_ptr,
    residuals_ptr,  # float32 [R, tiles]
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
    NUM_DRAFTS: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
):
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILES
    start, count = places_of(starts_ptr, row, num_places, NUM_DRAFTS)
    accepted = tl.load(accepted_ptr + row).to(tl.int64)
    refused = _refused_draft(drafts_ptr, row, accepted, count, drafts_row, drafts_last, NUM_DRAFTS)
    given, temperature = temperature_of(temperature_ptr, row)
    # What follows a bonus place, or a greedy one, needs no residual.
    if (refused < 0) | (given == 0.0):
        return
    logits_at = row * row_stride
    if starts_ptr is not None:
        logits_at = start * place_stride
    source = logits_ptr + logits_at + accepted * place_stride
    own = draft_logits_ptr + row * draft_row + accepted * draft_place
    tiles = first + tl.arange(0, TILES)
    ids = (tiles[:, None] * TILE + tl.arange(0, TILE)[None, :]).to(tl.int64)
    mask = ids < num_ids
    x = tl.load(source + ids * last_stride, mask=mask, other=NEG_INF).to(tl.float32)
    y = tl.load(own + ids * draft_last, mask=mask, other=NEG_INF).to(tl.float32)
    scale = tl.div_rn(LOG2_E, temperature)
    sums = tl.sum(_residual_of(x, y, facts_ptr + 4 * row, scale), axis=1)
    tl.store(residuals_ptr + row * num_tiles + tiles, sums, mask=tiles < num_tiles)


@triton.jit(do_not_specialize=["num_places"])
def follow_kernel(  # noqa: PLR0915 reason: one row's way from its weights to an id
    drafts_ptr,
    starts_ptr,  # or None
    logits_ptr,
    draft_logits_ptr,  # or None
    temperature_ptr,  # or None
    seeds_ptr,
    samples_ptr,
    positions_ptr,
    stats_ptr,
    facts_ptr,
    residuals_ptr,
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
    TILE_SLOTS: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start, count = places_of(starts_ptr, row, num_places, NUM_DRAFTS)
    accepted = tl.load(accepted_ptr + row).to(tl.int64)
    if accepted < 0:
        return
    refused = _refused_draft(drafts_ptr, row, accepted, count, drafts_row, drafts_last, NUM_DRAFTS)
    given, temperature = temperature_of(temperature_ptr, row)
    inverse = 1.0 / temperature.to(tl.float64)
    logits_at = row * row_stride
    if starts_ptr is not None:
        logits_at = start * place_stride
    source = logits_ptr + logits_at + accepted * place_stride
    maxima, largest, plain = load_stats(stats_ptr, start + accepted, inverse, num_tiles, TILE_SLOTS)
    tiles = tl.arange(0, TILE_SLOTS)
    weights = plain
    is_good = is_number(largest, tl.sum(plain, axis=0)) & (given >= 0.0)
    # Without a draft, or where rounding left nothing of the residual, the target's own weights.
    has_residual = refused >= 0
    refused_tile = tl.where(has_residual, refused // TILE, -1)
    if draft_logits_ptr is not None:
        at = residuals_ptr + row * num_tiles + tiles
        residual = tl.load(at, mask=has_residual & (tiles < num_tiles), other=0.0).to(tl.float64)
        mass = tl.sum(residual, axis=0)
        is_good = is_good & ((has_residual == 0) | (given == 0.0) | (mass >= 0.0))
        has_residual = has_residual & (mass > 0.0)
        weights = tl.where(has_residual, residual, plain)
    else:
        # All but the draft: its tile is summed anew without it.
        x = load_tile(source, tl.maximum(refused_tile, 0), last_stride, num_ids, TILE)
        without = tl.exp((x.to(tl.float64) - largest) * inverse)
        ids = refused_tile * TILE + tl.arange(0, TILE)
        without = tl.sum(tl.where(ids == refused, 0.0, without), axis=0)
        less = tl.where(tiles == refused_tile, without, plain)
        has_residual = has_residual & (tl.sum(less, axis=0) > 0.0)
        weights = tl.where(has_residual, less, plain)
    seed, sample = tl.load(seeds_ptr + row), tl.load(samples_ptr + row)
    position = tl.load(positions_ptr + row).to(tl.int64) + accepted
    target = uniform(seed, sample, position, PURPOSE) * tl.sum(weights, axis=0)
    tile, before = _first_above(weights, target, TILE_SLOTS)
    tile = tl.where(is_good, tile, 0)
    x = load_tile(source, tile, last_stride, num_ids, TILE)
    in_tile = tl.exp((x.to(tl.float64) - largest) * inverse)
    ids = tile * TILE + tl.arange(0, TILE)
    if draft_logits_ptr is not None:
        own = draft_logits_ptr + row * draft_row + tl.where(refused >= 0, accepted, 0) * draft_place
        y = load_tile(own, tile, draft_last, tl.where(refused >= 0, num_ids, 0), TILE)
        scale = tl.div_rn(LOG2_E, temperature)
        residual = _residual_of(x, y, facts_ptr + 4 * row, scale).to(tl.float64)
        in_tile = tl.where(has_residual, residual, in_tile)
    else:
        in_tile = tl.where(has_residual & (ids == refused), 0.0, in_tile)
    found, _ = _first_above(in_tile, target - before, TILE)
    token = (tile * TILE + found).to(tl.int64)
    if given == 0.0:
        token = best_of(source, maxima, largest, last_stride, num_ids, TILE_SLOTS, TILE).to(
            tl.int64
        )
    at = tokens_ptr + row * tokens_row + accepted * tokens_last
    tl.store(at, tl.where(is_good, token, -1))
