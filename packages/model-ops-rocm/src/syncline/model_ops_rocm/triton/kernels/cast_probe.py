"""The casts by themselves, for tests: no op launches these."""

import triton
import triton.language as tl

from syncline.model_ops_rocm.triton.kernels.quant_cast import (
    codes_of,
    e8m0_scales,
    e8m0_to_fp32,
    fp32_scales,
    magnitude_bits,
    quotients,
)


@triton.jit
def codes_kernel(
    x_ptr, codes_ptr, CODE: tl.constexpr, NATIVE: tl.constexpr, BLOCK_WIDTH: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    tl.store(codes_ptr + at, codes_of(tl.load(x_ptr + at), CODE, NATIVE))


@triton.jit
def fp32_scales_kernel(
    x_ptr, scales_ptr, CLAMP: tl.constexpr, ZERO_IS_ONE: tl.constexpr, BLOCK_WIDTH: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    bits = magnitude_bits(tl.load(x_ptr + at))
    tl.store(scales_ptr + at, fp32_scales(bits, CLAMP, ZERO_IS_ONE))


@triton.jit
def e8m0_scales_kernel(
    x_ptr,
    bytes_ptr,
    numbers_ptr,
    CLAMP: tl.constexpr,
    POWER: tl.constexpr,
    MANTISSA: tl.constexpr,
    MODE: tl.constexpr,
    ZERO_IS_ONE: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    bits = magnitude_bits(tl.load(x_ptr + at))
    exponent = e8m0_scales(bits, CLAMP, POWER, MANTISSA, MODE, ZERO_IS_ONE)
    tl.store(bytes_ptr + at, exponent.to(tl.uint8))
    tl.store(numbers_ptr + at, e8m0_to_fp32(exponent))


@triton.jit
def quotients_kernel(
    x_ptr, scale_ptr, out_ptr, exact_ptr, BOUND: tl.constexpr, BLOCK_WIDTH: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    x, scale = tl.load(x_ptr + at), tl.load(scale_ptr + at)
    tl.store(out_ptr + at, quotients(x, scale, BOUND))
    tl.store(exact_ptr + at, tl.div_rn(x, scale))
