"""Activations to codes and scales; knows groups of a row that share a scale, no model.

A tile is [groups, columns of one group], so a maximum is taken within a few lanes.
"""

import triton
import triton.language as tl

from syncline.model_ops_rocm.triton.kernels.dependent import await_inputs
from syncline.model_ops_rocm.triton.kernels.quant_cast import (
    clamped_quotients,
    codes_of,
    e8m0_scales,
    e8m0_to_fp32,
    fp32_scales,
    magnitude_bits,
)


@triton.jit
def encoded_tile(
    x,  # float32 [G, W]; what is no element of a group is zero
    scale_ptr,  # float32 [1], read if the scale is given
    CODE: tl.constexpr,
    CLAMP: tl.constexpr,
    POWER: tl.constexpr,
    MANTISSA: tl.constexpr,
    E8M0_MODE: tl.constexpr,  # -1: scales are float32
    ZERO_IS_ONE: tl.constexpr,
    IS_GIVEN: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """(codes [G, W], scales [G] as they are stored, 1 where something has no code [G])."""
    amax_bits = tl.max(magnitude_bits(x), axis=1)
    is_bad = (amax_bits >= 0x7F800000).to(tl.int32)
    if IS_GIVEN:
        given = tl.load(scale_ptr)
        scales = tl.zeros_like(amax_bits).to(tl.float32) + given
        is_bad = tl.where((scales > 0.0) & (scales < float("inf")), is_bad, 1)
        stored = scales
    elif E8M0_MODE < 0:
        scales = fp32_scales(amax_bits, CLAMP, ZERO_IS_ONE)
        stored = scales
    else:
        exponent = e8m0_scales(amax_bits, CLAMP, POWER, MANTISSA, E8M0_MODE, ZERO_IS_ONE)
        scales = e8m0_to_fp32(exponent)
        stored = exponent.to(tl.uint8)
    quotients = clamped_quotients(x, scales[:, None], CLAMP, not IS_GIVEN)
    return codes_of(quotients, CODE, NATIVE), stored, is_bad


@triton.jit
def store_scales(
    pointers,  # scales and flag
    scales,
    is_bad,
    at,
    mask,
    IS_GIVEN: tl.constexpr,
    HAS_FLAG: tl.constexpr,
):
    """Scales that were made to their places; the flag raised where something has no code."""
    if not IS_GIVEN:
        tl.store(pointers[0] + at, scales, mask=mask)
    if HAS_FLAG:
        is_bad = tl.where(mask, is_bad, 0)
        tl.store(pointers[1] + tl.zeros_like(is_bad), is_bad, mask=is_bad != 0)


@triton.jit
def groups_of_program(
    num_rows,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_ELEMENTS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    """Rows and groups [G] of a program, their columns [G, BLOCK_WIDTH], and which elements are."""
    BLOCK_GROUPS: tl.constexpr = max(BLOCK_ELEMENTS // BLOCK_WIDTH, 1)
    NUM_GROUPS: tl.constexpr = (WIDTH + GROUP - 1) // GROUP
    number = tl.program_id(0).to(tl.int64) * BLOCK_GROUPS + tl.arange(0, BLOCK_GROUPS)
    row, group = number // NUM_GROUPS, number % NUM_GROUPS
    within = tl.arange(0, BLOCK_WIDTH)
    columns = (group * GROUP)[:, None] + within[None, :]
    mask = (row < num_rows)[:, None] & (columns < WIDTH) & (within < GROUP)[None, :]
    return row, group, columns, mask


@triton.jit
def store_groups(
    x,  # float32 [G, BLOCK_WIDTH]
    pointers,  # codes, scales, flag
    place,  # outer and inner index of the row, and the group, each [G]
    columns,
    strides,  # outer, inner and last of codes, and of scales
    is_row,
    mask,
    HAS_FLAG: tl.constexpr,
    CODE: tl.constexpr,
    CLAMP: tl.constexpr,
    POWER: tl.constexpr,
    MANTISSA: tl.constexpr,
    E8M0_MODE: tl.constexpr,
    ZERO_IS_ONE: tl.constexpr,
    IS_GIVEN: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Groups of rows as codes and scales."""
    outer, inner, group = place
    codes, scales, is_bad = encoded_tile(
        x,
        pointers[1],
        CODE,
        CLAMP,
        POWER,
        MANTISSA,
        E8M0_MODE,
        ZERO_IS_ONE,
        IS_GIVEN,
        NATIVE,
    )
    codes_at = (outer * strides[0] + inner * strides[1])[:, None] + columns * strides[2]
    tl.store(pointers[0] + codes_at, codes, mask=mask)
    scales_at = outer * strides[3] + inner * strides[4] + group * strides[5]
    to_store = pointers[1], pointers[2]
    store_scales(to_store, scales, is_bad, scales_at, is_row, IS_GIVEN, HAS_FLAG)


@triton.jit(do_not_specialize=["num_rows"])
def quantise_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    nonfinite_ptr,
    num_rows,
    x_outer,
    x_inner,
    x_last,
    codes_outer,
    codes_inner,
    codes_last,
    scales_outer,
    scales_inner,
    scales_last,
    INNER: tl.constexpr,  # rows per outer index, as in the norm
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,  # columns that share a scale, or one piece of a row
    HAS_FLAG: tl.constexpr,
    CODE: tl.constexpr,
    CLAMP: tl.constexpr,
    POWER: tl.constexpr,
    MANTISSA: tl.constexpr,
    E8M0_MODE: tl.constexpr,
    ZERO_IS_ONE: tl.constexpr,
    IS_GIVEN: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_ELEMENTS: tl.constexpr,  # of one program, unless one group has more
    BLOCK_WIDTH: tl.constexpr,  # at least GROUP
    OVERLAP: tl.constexpr,  # CUDA: launched while the kernel before it ends
):
    await_inputs(OVERLAP)
    row, group, columns, mask = groups_of_program(
        num_rows, WIDTH, GROUP, BLOCK_ELEMENTS, BLOCK_WIDTH
    )
    outer, inner = row // INNER, row % INNER
    x_at = (outer * x_outer + inner * x_inner)[:, None] + columns * x_last
    x = tl.load(x_ptr + x_at, mask=mask, other=0.0).to(tl.float32)
    store_groups(
        x,
        (codes_ptr, scales_ptr, nonfinite_ptr),
        (outer, inner, group),
        columns,
        (codes_outer, codes_inner, codes_last, scales_outer, scales_inner, scales_last),
        row < num_rows,
        mask,
        HAS_FLAG,
        CODE,
        CLAMP,
        POWER,
        MANTISSA,
        E8M0_MODE,
        ZERO_IS_ONE,
        IS_GIVEN,
        NATIVE,
    )
