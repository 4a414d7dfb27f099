"""Asks the L2 cache for the first tiles of KV while the kernels before are still running.

Unit: one program's first tiles. A hint and nothing more: the length and the block ids that it goes
by may be those of a step before, so they choose lines of the cache to fetch and reach no result;
what is attended is read after the wait. sm_90 alone.
"""

import triton
import triton.language as tl

from syncline.model_ops_rocm.triton.kernels.attention_tiles import along, blocks_of


@triton.jit
def _fetch(at, num_bytes, is_wanted):
    """Ask for runs of `num_bytes`, a multiple of 16, at pointers `at`; returns at once."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $3, 0;"
        " @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r,r",
        [at.to(tl.int64), num_bytes, is_wanted.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _fetch_tile(head_ptr, block, slots, is_wanted, PLACES: tl.constexpr, SHAPE: tl.constexpr):
    """The rows of a head that lie in slots of blocks; where a row is not one run, nothing."""
    NUM_BYTES: tl.constexpr = SHAPE[1] * head_ptr.dtype.element_ty.primitive_bitwidth // 8
    if (PLACES[5] == 1) & (PLACES[6] == 1) & (NUM_BYTES % 16 == 0):
        at = block.to(tl.int64) * PLACES[0] + along(slots, PLACES[2], PLACES[3], PLACES[4])
        _fetch(head_ptr + at, tl.full(slots.shape, NUM_BYTES, tl.int32), is_wanted)


@triton.jit
def ask_ahead(
    lens_at,
    table,
    tiles,
    cache,
    num_blocks,
    SHAPE: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Asks for the first COUNT of the tiles (first, stop, step), of those in blocks that exist."""
    if COUNT > 0:
        seq_len = tl.load(lens_at, cache_modifier=".cg").to(tl.int32)
        for index in tl.static_range(COUNT):
            tile = tiles[0] + index * tiles[2]
            start = tile * BLOCK_N
            tokens = start + tl.arange(0, BLOCK_N)
            is_entry = tile < tiles[1]
            block = blocks_of(table, start, is_entry, seq_len, SHAPE[0], BLOCK_N, ".cg")
            is_wanted = is_entry & (tokens < seq_len) & (block >= 0) & (block < num_blocks)
            slots = tokens % SHAPE[0]
            _fetch_tile(cache[0], block, slots, is_wanted, KEYS, SHAPE)
            _fetch_tile(cache[1], block, slots, is_wanted, VALUES, SHAPE)
