"""As `logits_collect`, of 16-bit logits that are taken two at a time, on NVIDIA.

What is read is kept as whole words until it is compared, and a tile is compared in PTX, in fewer
than half of the instructions that the compiler makes of it. Knows no request.
"""

import triton
import triton.language as tl

from syncline.model_ops_rocm.triton.kernels.dependent import await_turn
from syncline.model_ops_rocm.triton.kernels.logits import (
    LOG2_E,
    NEG_INF,
    load_tile,
    row_temperature,
)
from syncline.model_ops_rocm.triton.kernels.logits_collect import (
    bits_of,
    number_of_bits,
    store_found,
)
from syncline.model_ops_rocm.triton.kernels.logits_cut import INF, LOWEST

# A word's two logits, as they are stored, in float32 registers x and y. In PTX, since the compiler
# makes of the comparisons below twice as many instructions.
_HEAD = """{
    .reg .pred p, q, r, s;
    .reg .b16 i, j;
    .reg .b32 e, f;
    .reg .f32 x, y, v, w;
"""
_UNPACK_BF16 = "shl.b32 e, $%d, 16;\nand.b32 f, $%d, 0xffff0000;\n"
_UNPACK_BF16 += "mov.b32 x, e;\nmov.b32 y, f;\n"
_UNPACK_FP16 = "mov.b32 {i, j}, $%d;\ncvt.f32.f16 x, i;\ncvt.f32.f16 y, j;\n"
# $0: bits of what reaches `low` ($2), of the bits $3 and $4 that stand for the two.
_BITS = """
    setp.ge.f32 p, x, $2;
    setp.ge.f32 q, y, $2;
    selp.b32 e, $3, 0, p;
    @q or.b32 e, e, $4;
    mov.b32 $0, e;
}"""
# $0: bits of what lies from `low` ($3) on and below `high` ($4); $1: the weights of what reaches
# `high`, relative to 2^$8, with $7 the scale.
_BITS_AND_WEIGHTS = """
    setp.ge.f32 p, x, $4;
    setp.ge.f32 q, y, $4;
    setp.ge.and.f32 r, x, $3, !p;
    setp.ge.and.f32 s, y, $3, !q;
    selp.b32 e, $5, 0, r;
    @s or.b32 e, e, $6;
    mov.b32 $0, e;
    fma.rn.f32 v, x, $7, $8;
    fma.rn.f32 w, y, $7, $8;
    ex2.approx.ftz.f32 v, v;
    ex2.approx.ftz.f32 w, w;
    selp.f32 v, v, 0f00000000, p;
    @q add.f32 v, v, w;
    mov.b32 $1, v;
}"""
_BF16_BITS = tl.constexpr(_HEAD + _UNPACK_BF16 % (1, 1) + _BITS)
_FP16_BITS = tl.constexpr(_HEAD + _UNPACK_FP16 % 1 + _BITS)
_BF16_BOTH = tl.constexpr(_HEAD + _UNPACK_BF16 % (2, 2) + _BITS_AND_WEIGHTS)
_FP16_BOTH = tl.constexpr(_HEAD + _UNPACK_FP16 % 2 + _BITS_AND_WEIGHTS)


@triton.jit
def pair_bits(GROUP: tl.constexpr, LANES: tl.constexpr, TILE: tl.constexpr):
    """int32 [TILE // 2]: of each pair, the bit that stands for the first: see `bits_of`."""
    HALF: tl.constexpr = GROUP // 2
    words = tl.arange(0, TILE // 2)
    places = words // (LANES * HALF) * GROUP + words % HALF * 2
    return tl.full((TILE // 2,), 1, tl.int32) << places


@triton.jit
def lane_sums(bits, GROUP: tl.constexpr, LANES: tl.constexpr, TILE: tl.constexpr):
    """int32 [LANES]: the bits of a lane's pairs together; of int32 [TILE // 2]."""
    HALF: tl.constexpr = GROUP // 2
    of_lanes = bits.reshape(TILE // 2 // LANES // HALF, LANES, HALF)
    return tl.sum(tl.sum(of_lanes, axis=2), axis=0)


@triton.jit
def ask_for_pairs(pairs_ptr, tile, num_columns, is_read, TILE: tl.constexpr):
    """int32 [TILE // 2]: a tile's logits, two to a word, if it `is_read`; else anything.

    `num_columns` is even, and each row begins at a multiple of 16 bytes.
    """
    HALF: tl.constexpr = TILE // 2
    words = tl.arange(0, HALF)
    num_words = tl.where(is_read, num_columns // 2 - tile * HALF, 0)
    return tl.load(pairs_ptr + tile * HALF + words, mask=words < num_words)


@triton.jit
def found_in_pairs(
    words, low, high, largest, scale, DTYPE: tl.constexpr, GROUP: tl.constexpr,
    LANES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Of a whole tile: the bits of what lies in the bracket, the weight of what lies above it."""
    first_bits = pair_bits(GROUP, LANES, TILE)
    second_bits = first_bits << 1
    weight = tl.full((), 0.0, tl.float32)
    if largest >= high:
        # As exact as of (x - largest) * scale: what the rounded product is off is made good.
        product = largest * scale
        bits, parts = tl.inline_asm_elementwise(
            _BF16_BOTH if tl.bfloat16 == DTYPE else _FP16_BOTH,
            "=r,=r,r,r,r,r,r,r,r",
            [words, low, high, first_bits, second_bits, scale, -product],
            dtype=(tl.int32, tl.float32),
            is_pure=True,
            pack=1,
        )
        weight = tl.sum(parts, axis=0) * tl.exp2(-tl.fma(largest, scale, -product))
        bits = lane_sums(bits, GROUP, LANES, TILE)
    else:
        bits = tl.inline_asm_elementwise(
            _BF16_BITS if tl.bfloat16 == DTYPE else _FP16_BITS,
            "=r,r,r,r,r",
            [words, low, first_bits, second_bits],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
        bits = lane_sums(bits, GROUP, LANES, TILE)
    return bits, weight


@triton.jit
def found_in_part(
    row_ptr, tile, low, high, largest, scale, num_columns, num_real, GROUP: tl.constexpr,
    LANES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Likewise of a tile that the ids do not fill, which is read anew."""
    x = load_tile(row_ptr, tile, 1, num_columns, num_real, TILE)
    bits = bits_of((x >= low) & (x < high), GROUP, LANES, TILE)
    weight = tl.sum(tl.where(x >= high, tl.exp2((x - largest) * scale), 0.0), axis=0)
    return bits, weight


@triton.jit(do_not_specialize=["num_real", "num_tiles", "region_tiles"])
def collect_pairs_kernel(
    logits_ptr,
    pairs_ptr,  # int32: the same logits
    temperature_ptr,
    maxima_ptr,
    lows_ptr,
    highs_ptr,
    found_ptr,
    ends_ptr,
    weights_ptr,
    row_stride,
    num_columns,
    num_real,
    num_tiles,
    region_tiles,
    HAS_TEMPERATURE: tl.constexpr,
    REGIONS: tl.constexpr,
    CAPACITY: tl.constexpr,
    GROUP: tl.constexpr,
    LANES: tl.constexpr,  # each has TILE // LANES <= 32 logits
    TILE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """See `collect_kernel`."""
    await_turn(OVERLAP)
    # From the last tiles on: they were read last, and may be cached still.
    row, region = tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1)
    low, high = tl.load(lows_ptr + row), tl.load(highs_ptr + row)
    if (low < INF) == 0:
        return
    # What is -inf weighs nothing, and is what stands beyond the ids.
    low = tl.maximum(low, LOWEST)
    scale = tl.div_rn(LOG2_E, row_temperature(temperature_ptr, row, HAS_TEMPERATURE))
    row_ptr = logits_ptr + row.to(tl.int64) * row_stride
    pairs_ptr += row.to(tl.int64) * (row_stride // 2)
    found_ptr += (row * REGIONS + region).to(tl.int64) * CAPACITY
    at = row.to(tl.int64) * num_tiles
    maxima_ptr += at
    tile = region * region_tiles
    stop = tl.minimum(tile + region_tiles, num_tiles)
    end = tl.full((), 0, tl.int32)
    largest = tl.load(maxima_ptr + tile)
    next_largest = tl.load(maxima_ptr + tile + 1, mask=tile + 1 < stop, other=NEG_INF)
    words = ask_for_pairs(pairs_ptr, tile, num_columns, largest >= low, TILE)
    while tile < stop:
        after = tl.load(maxima_ptr + tile + 2, mask=tile + 2 < stop, other=NEG_INF)
        weight, bits = tl.full((), 0.0, tl.float32), tl.full((LANES,), 0, tl.int32)
        if largest >= low:
            if (tile + 1) * TILE > num_real:
                bits, weight = found_in_part(
                    row_ptr, tile, low, high, largest, scale, num_columns, num_real, GROUP,
                    LANES, TILE,
                )  # fmt: skip
            else:
                bits, weight = found_in_pairs(
                    words, low, high, largest, scale, logits_ptr.dtype.element_ty, GROUP, LANES,
                    TILE,
                )  # fmt: skip
        # Only now, so that it takes the registers of the one before.
        words = ask_for_pairs(pairs_ptr, tile + 1, num_columns, next_largest >= low, TILE)
        if largest >= low:
            start = found_ptr + end
            end += tl.sum(number_of_bits(bits), axis=0)
            if end <= CAPACITY:
                store_found(start, row_ptr, tile * TILE, bits, 1, GROUP, LANES)
        tl.store(ends_ptr + at + tile, end)
        tl.store(weights_ptr + at + tile, weight)
        tile += 1
        largest = next_largest
        next_largest = after
