"""From float32 to the codes and scales of a quantised recipe: device functions, no kernel.

A scale is per row of a tile [rows, columns]: [rows] where it is made, [rows, 1] where it divides.
The bits are those of `formats.quantised` in PyTorch. CODE is a `CodeType`, e8m0's MODE an
`E8m0Mode`; NATIVE says that the target converts float32 to CODE itself, which the interpreter and
other targets do with integers: both give the same codes.
"""

import triton
import triton.language as tl
from triton import knobs

# The interpreter rounds the product of a fused multiply-add.
_FUSES = tl.constexpr(not knobs.runtime.interpret)


@triton.jit
def magnitude_bits(x):
    """The bits of |x| in int32: they compare as magnitudes do, with infinity and NaN on top."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def fp32_scales(amax_bits, CLAMP: tl.constexpr, ZERO_IS_ONE: tl.constexpr):
    """amax / CLAMP in float32; NaN, of one payload, where amax is not finite."""
    is_finite = amax_bits < 0x7F800000
    amax = tl.where(is_finite, amax_bits, 0).to(tl.float32, bitcast=True)
    scale = tl.div_rn(amax, 1.0 * CLAMP)
    if ZERO_IS_ONE:
        scale = tl.where(scale == 0.0, 1.0, scale)
    else:
        scale = tl.maximum(scale, 1.1754943508222875e-38)
    bits = tl.where(is_finite, scale.to(tl.int32, bitcast=True), 0x7FC00000)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def e8m0_scales(
    amax_bits,
    CLAMP: tl.constexpr,
    POWER: tl.constexpr,  # of the largest power of two in CLAMP
    MANTISSA: tl.constexpr,  # bits of the code's mantissa
    MODE: tl.constexpr,
    ZERO_IS_ONE: tl.constexpr,
):
    """The powers of two as int32 bytes; 255 where amax is not finite."""
    is_finite = amax_bits < 0x7F800000
    safe = tl.where(is_finite, amax_bits, 0)
    if MODE == 2:
        # In integers: adding may carry past the largest exponent, which as a float is infinity.
        exponent = ((safe + (1 << (22 - MANTISSA))) >> 23) - POWER
    else:
        divisor = 1.0 * CLAMP if MODE == 1 else 1.0 * (1 << POWER)
        quotient = tl.div_rn(safe.to(tl.float32, bitcast=True), divisor)
        bits = quotient.to(tl.int32, bitcast=True)
        exponent = bits >> 23
        if MODE != 0:
            exponent += tl.where((bits & 0x7FFFFF) != 0, 1, 0)
    exponent = tl.minimum(tl.maximum(exponent, 0), 254)
    if ZERO_IS_ONE:
        exponent = tl.where(safe == 0, 127, exponent)
    return tl.where(is_finite, exponent, 255)


@triton.jit
def e8m0_to_fp32(exponent):
    """int32 bytes -> float32, exact: 0 is the subnormal 2^-127, 255 is NaN."""
    bits = tl.where(exponent == 0, 1 << 22, exponent << 23)
    return tl.where(exponent == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def quotients(x, scale, BOUND: tl.constexpr):
    """x / scale for positive finite scales, as a correctly rounded division gives it.

    Or beyond +-BOUND, at most 2^10, something beyond it; and below 2^-12, something below, which is
    the code of zero in every type. A BOUND of 0 says that no quotient is beyond 2^20.

    In six operations per element where a division takes eighteen: the reciprocal is correctly
    rounded, so after one correction a quotient is off by less than a unit, its remainder is exact,
    and the next correction rounds correctly (Markstein 1990).
    """
    if _FUSES:
        # Scales near the ends of the range would lose bits of the remainder, or the reciprocal.
        up = tl.where(scale < 8.673617379884035e-19, 1.8446744073709552e19, 1.0)
        factor = tl.where(scale > 1.152921504606847e18, 5.421010862427522e-20, up)
        divisor = scale * factor
        reciprocal = tl.div_rn(1.0, divisor)
        scaled = x * factor
        if BOUND > 0:
            limit = 2.0 * BOUND * divisor
            scaled = tl.minimum(tl.maximum(scaled, -limit), limit)
        quotient = scaled * reciprocal
        quotient = tl.fma(tl.fma(quotient, -divisor, scaled), reciprocal, quotient)
        quotient = tl.fma(tl.fma(quotient, -divisor, scaled), reciprocal, quotient)
        # A correction of -0 is +0.
        sign = x.to(tl.int32, bitcast=True) & -0x80000000
        quotient = (quotient.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    else:
        quotient = tl.div_rn(x, scale)
    return quotient


@triton.jit
def clamped_quotients(x, scale, CLAMP: tl.constexpr, IS_OWN_SCALE: tl.constexpr):
    """x / scale, correctly rounded, within +-CLAMP; 0 where there is no such number.

    IS_OWN_SCALE says that the scale comes from these elements: it is NaN if one of them is not
    finite, which spares a look at each.
    """
    usable = (scale > 0.0) & (scale < float("inf"))
    safe = tl.where(usable, scale, 1.0)
    if not IS_OWN_SCALE:
        usable = usable & (magnitude_bits(x) < 0x7F800000)
    quotient = quotients(tl.where(usable, x, 0.0), safe, 0.0 if IS_OWN_SCALE else 1.0 * CLAMP)
    return tl.minimum(tl.maximum(quotient, -1.0 * CLAMP), 1.0 * CLAMP)


@triton.jit
def minifloat_codes(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr, SIGN_BIT: tl.constexpr):
    """Codes in int32, without sign, of float32 within the type's range; to nearest even.

    SIGN_BIT is that of the type: the second result is it where x is negative, -0 included.
    """
    DROP: tl.constexpr = 23 - MANTISSA
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # A carry out of the mantissa moves into the exponent, which is the right answer.
    rebias = ((1 << (DROP - 1)) - 1) - ((127 - BIAS) << 23)
    normal = (magnitude + rebias + ((magnitude >> DROP) & 1)) >> DROP
    # Below the smallest normal: the sum with 2^n has the type's smallest subnormal as its unit.
    unit_bits = tl.full((), (151 - BIAS - MANTISSA) << 23, tl.int32)
    moved = magnitude.to(tl.float32, bitcast=True) + unit_bits.to(tl.float32, bitcast=True)
    subnormal = moved.to(tl.int32, bitcast=True) - unit_bits
    codes = tl.where(magnitude < ((128 - BIAS) << 23), subnormal, normal)
    return codes, (bits >> 31) & SIGN_BIT


@triton.jit
def codes_of(x, CODE: tl.constexpr, NATIVE: tl.constexpr):
    """float32 within CODE's range, no NaN, -> codes: uint8 of e4m3fn, e4m3fnuz or e2m1, or int8.

    e2m1 is not packed.
    """
    if CODE == "e4m3fn":
        if NATIVE:
            codes = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        else:
            magnitude, sign = minifloat_codes(x, 3, 7, 0x80)
            codes = (magnitude | sign).to(tl.uint8)
    elif CODE == "e4m3fnuz":
        if NATIVE:
            codes = x.to(tl.float8e4b8).to(tl.uint8, bitcast=True)
            # Nothing here is NaN, which is what the byte of a negative zero means.
            codes = tl.where(codes == 0x80, 0, codes).to(tl.uint8)
        else:
            magnitude, sign = minifloat_codes(x, 3, 8, 0x80)
            codes = tl.where(magnitude == 0, 0, magnitude | sign).to(tl.uint8)
    elif CODE == "e2m1":
        magnitude, sign = minifloat_codes(x, 1, 1, 0x8)
        codes = (magnitude | sign).to(tl.uint8)
    else:
        tl.static_assert(CODE == "int8")
        # The sum with 1.5 * 2^23 has 1 as its unit.
        moved = (x + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
        codes = moved.to(tl.int8)
    return codes
