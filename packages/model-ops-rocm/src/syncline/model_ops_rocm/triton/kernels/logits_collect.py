"""What lies in a row's bracket, in order of ids, and of each tile what its filters keep.

A region is some tiles in a row, with room for CAPACITY logits: those found in the bracket, closed
up. Knows no request.
"""

import triton
import triton.language as tl

from syncline.model_ops_rocm.triton.kernels.dependent import await_inputs
from syncline.model_ops_rocm.triton.kernels.logits import (
    LOG2_E,
    NEG_INF,
    is_padding,
    load_tile,
    row_temperature,
)
from syncline.model_ops_rocm.triton.kernels.logits_cut import INF


@triton.jit
def load_groups(
    row_ptr, tile, most, low, last_stride, num_columns, GROUP: tl.constexpr, TILE: tl.constexpr
):
    """[TILE // GROUP, GROUP] of a tile, if `most`, its largest, is not under `low`."""
    groups = tile * (TILE // GROUP) + tl.arange(0, TILE // GROUP)
    columns = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    at = row_ptr + columns.to(tl.int64) * last_stride
    is_read = tl.broadcast_to((most >= low).to(tl.int32), (TILE // GROUP, GROUP)) > 0
    return tl.load(at, mask=(columns < num_columns) & is_read, other=0.0)


@triton.jit
def only_real(x, tile, num_real, GROUP: tl.constexpr, TILE: tl.constexpr):
    """-inf beyond the `num_real` ids."""
    groups = tile * (TILE // GROUP) + tl.arange(0, TILE // GROUP)
    columns = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    return tl.where(columns < num_real, x, NEG_INF)


@triton.jit(do_not_specialize=["num_real", "num_tiles", "region_tiles"])
def collect_kernel(
    logits_ptr,
    temperature_ptr,
    maxima_ptr,
    lows_ptr,
    highs_ptr,
    found_ptr,
    ends_ptr,
    weights_ptr,
    row_stride,
    last_stride,
    num_columns,
    num_real,
    num_tiles,
    region_tiles,
    HAS_TEMPERATURE: tl.constexpr,
    REGIONS: tl.constexpr,
    CAPACITY: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Of each tile: where its logits end in its region, and what those above the bracket weigh."""
    await_inputs(OVERLAP)
    # From the last tiles on: they were read last, and may be cached still.
    row, region = tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1)
    low, high = tl.load(lows_ptr + row), tl.load(highs_ptr + row)
    if (low < INF) == 0:
        return
    scale = tl.div_rn(LOG2_E, row_temperature(temperature_ptr, row, HAS_TEMPERATURE))
    row_ptr = logits_ptr + row.to(tl.int64) * row_stride
    found_ptr += (row * REGIONS + region).to(tl.int64) * CAPACITY
    at = row.to(tl.int64) * num_tiles
    end = tl.full((), 0, tl.int32)
    maxima_ptr += at
    tile = region * region_tiles
    stop = tl.minimum(tile + region_tiles, num_tiles)
    # The next tile is asked for, and the largest logit of the one after, before a tile is done.
    largest = tl.load(maxima_ptr + tile)
    next_largest = tl.load(maxima_ptr + tile + 1, mask=tile + 1 < stop, other=NEG_INF)
    loaded = load_groups(row_ptr, tile, largest, low, last_stride, num_columns, GROUP, TILE)
    while tile < stop:
        x = loaded.to(tl.float32)
        after = tl.load(maxima_ptr + tile + 2, mask=tile + 2 < stop, other=NEG_INF)
        loaded = load_groups(
            row_ptr, tile + 1, next_largest, low, last_stride, num_columns, GROUP, TILE
        )
        weight = tl.full((), 0.0, tl.float32)
        if largest >= low:
            if (tile + 1) * TILE > num_real:
                x = only_real(x, tile, num_real, GROUP, TILE)
            is_found = (x >= low) & (x < high)
            ones = is_found.to(tl.int32)
            each = tl.sum(ones, axis=1)
            until = tl.cumsum(each, axis=0)
            places = (until - each + (end - 1))[:, None] + tl.cumsum(ones, axis=1)
            end += tl.sum(each, axis=0)
            if end <= CAPACITY:
                tl.store(found_ptr + places, x, mask=is_found)
            if largest >= high:
                parts = tl.where(x >= high, tl.exp2((x - largest) * scale), 0.0)
                weight = tl.sum(tl.sum(parts, axis=1), axis=0)
        tl.store(ends_ptr + at + tile, end)
        tl.store(weights_ptr + at + tile, weight)
        tile += 1
        largest = next_largest
        next_largest = after


@triton.jit(do_not_specialize=["num_real", "num_tiles"])
def kept_kernel(
    logits_ptr,
    temperature_ptr,
    marks_ptr,
    maxima_ptr,
    sums_ptr,
    ties_ptr,
    cuts_ptr,
    lows_ptr,
    row_stride,
    last_stride,
    num_columns,
    num_real,
    num_tiles,
    HAS_TEMPERATURE: tl.constexpr,
    HAS_MARKS: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Of each tile what its filters keep, where nothing was collected: see `store_kept`."""
    await_inputs(OVERLAP)
    row, first = tl.program_id(0), tl.program_id(1) * TILES
    if is_padding(marks_ptr + row, HAS_MARKS):
        return
    cut, low = tl.load(cuts_ptr + row), tl.load(lows_ptr + row)
    if (cut == NEG_INF) | (low < INF):
        return
    scale = tl.div_rn(LOG2_E, row_temperature(temperature_ptr, row, HAS_TEMPERATURE))
    row_ptr = logits_ptr + row.to(tl.int64) * row_stride
    at = row.to(tl.int64) * num_tiles
    for tile in range(first, tl.minimum(first + TILES, num_tiles)):
        largest = tl.load(maxima_ptr + at + tile)
        weight, ties = tl.full((), 0.0, tl.float32), tl.full((), 0, tl.int32)
        if largest >= cut:
            x = load_tile(row_ptr, tile, last_stride, num_columns, num_real, TILE)
            weight = tl.sum(tl.where(x > cut, tl.exp2((x - largest) * scale), 0.0), axis=0)
            ties = tl.sum((x == cut).to(tl.int32), axis=0)
        tl.store(sums_ptr + at + tile, weight)
        tl.store(ties_ptr + at + tile, ties)
