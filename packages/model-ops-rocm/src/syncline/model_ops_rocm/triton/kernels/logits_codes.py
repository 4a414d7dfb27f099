"""A row's cut, of 16-bit logits whose bracket has few values: how often each occurs says it.

Values are numbered in their order: `code_of`. Bins are codes from the bracket's highest one down,
so that a running sum over them is what lies from a value on. Knows no request.
"""

import triton
import triton.language as tl

from syncline.model_ops_rocm.triton.kernels.logits import NEG_INF


@triton.jit
def code_of(x, SHIFT: tl.constexpr):
    """int32: one more from each value of a float type to the next.

    Of a float32 that is none of them, the one towards zero. SHIFT is how many bits float32 has
    more, at its end. -0 counts as 0.
    """
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF) >> SHIFT


@triton.jit
def value_of(code, SHIFT: tl.constexpr):
    """float32: the value of a code."""
    REST: tl.constexpr = (1 << SHIFT) - 1
    bits = tl.where(code >= 0, code << SHIFT, ((code << SHIFT) | REST) ^ 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def code_up_to(x, SHIFT: tl.constexpr):
    """int32: that of the largest value up to x."""
    code = code_of(x, SHIFT)
    return tl.where(value_of(code, SHIFT) > x, code - 1, code)


@triton.jit
def number_of_codes(low, top, SHIFT: tl.constexpr):
    """How many values there are from `low` to `top`."""
    return code_of(top, SHIFT) - code_of(low, SHIFT) + 1


@triton.jit
def ask_for_found(
    found_ptr, done, is_read, CAPACITY: tl.constexpr, REGIONS: tl.constexpr, WIDTH: tl.constexpr
):
    """float32 [REGIONS, WIDTH]: of each region so many from `done` on, or what lies beyond them.

    How many there are need not be known to ask.
    """
    slots = done + tl.arange(0, WIDTH)[None, :]
    at = found_ptr + tl.arange(0, REGIONS)[:, None] * CAPACITY + slots
    return tl.load(at, mask=slots < tl.where(is_read, CAPACITY, 0), other=NEG_INF)


@triton.jit
def count_some(x, ends, done, top, SHIFT: tl.constexpr, BINS: tl.constexpr):
    """int32 [BINS]: how many of each code there are in what `ask_for_found` gave; the last: others.

    `ends`: how many logits each region has.
    """
    is_found = done + tl.arange(0, x.shape[1])[None, :] < ends[:, None]
    # Not by a mask: the compiler may reorder both, each in its own way.
    bins = tl.where(is_found, top - code_of(x, SHIFT), BINS - 1)
    return tl.histogram(bins.reshape(x.shape[0] * x.shape[1]), BINS)


@triton.jit
def counted_cut(
    counts, top, weight_above, largest, scale, wanted, SHIFT: tl.constexpr, BINS: tl.constexpr
):
    """The cut below which what is wanted is left, its quota, and whether it is in the bracket."""
    bins = tl.arange(0, BINS)
    counts = tl.where(bins < BINS - 1, counts, 0)
    weights = tl.exp2((value_of(top - bins, SHIFT) - largest) * scale).to(tl.float64)
    parts = tl.where(counts > 0, counts.to(tl.float64) * weights, 0.0)
    running = tl.cumsum(parts, axis=0) + weight_above
    at = tl.min(tl.where((counts > 0) & (running >= wanted), bins, BINS), axis=0)
    beyond = tl.max(tl.where(bins < at, running, weight_above), axis=0)
    cut = value_of(top - at, SHIFT)
    missing = (wanted - beyond) * tl.exp2((largest - cut) * scale).to(tl.float64)
    # What crosses top_p stays.
    quota = tl.maximum(tl.ceil(missing), 1.0).to(tl.int64)
    return cut, quota, (at < BINS) & ((weight_above < wanted) | (weight_above == 0.0))
