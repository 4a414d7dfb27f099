"""Philox4x32-10 on the device, with the integers of `reference.philox`; knows no tokens.

One uniform per row is what these are for: drawn per element, they cost more than the logits do.
Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC11).
"""

import triton
import triton.language as tl


@triton.jit
def random_words(seed, sample_index, position, purpose):
    """Four uint32: the key is `seed` (int64), the counter (position, sample, purpose, 0)."""
    key_0, key_1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    word_0, word_1 = position.to(tl.uint32), sample_index.to(tl.uint32)
    word_3 = word_0 * 0
    word_2 = word_3 + purpose
    for _ in tl.static_range(10):
        product_0 = word_0.to(tl.uint64) * 0xD2511F53
        product_1 = word_2.to(tl.uint64) * 0xCD9E8D57
        word_0 = (product_1 >> 32).to(tl.uint32) ^ word_1 ^ key_0
        word_2 = (product_0 >> 32).to(tl.uint32) ^ word_3 ^ key_1
        word_1 = product_1.to(tl.uint32)
        word_3 = product_0.to(tl.uint32)
        key_0 = (key_0.to(tl.uint64) + 0x9E3779B9).to(tl.uint32)
        key_1 = (key_1.to(tl.uint64) + 0xBB67AE85).to(tl.uint32)
    return word_0, word_1, word_2, word_3


@triton.jit
def uniform(seed, sample_index, position, purpose):
    """((x >> 8) + 0.5) * 2^-24 of the first word x: float64, exact, never 0 or 1."""
    word, _, _, _ = random_words(seed, sample_index, position, purpose)
    return ((word >> 8).to(tl.float64) + 0.5) * 5.9604644775390625e-8


@triton.jit
def draws_kernel(
    seeds_ptr,
    samples_ptr,
    positions_ptr,
    words_ptr,
    uniforms_ptr,
    PURPOSE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # For tests alone: no op launches it.
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    seed, sample = tl.load(seeds_ptr + at), tl.load(samples_ptr + at)
    position = tl.load(positions_ptr + at)
    word_0, word_1, word_2, word_3 = random_words(seed, sample, position, PURPOSE)
    tl.store(words_ptr + 4 * at, word_0.to(tl.int64))
    tl.store(words_ptr + 4 * at + 1, word_1.to(tl.int64))
    tl.store(words_ptr + 4 * at + 2, word_2.to(tl.int64))
    tl.store(words_ptr + 4 * at + 3, word_3.to(tl.int64))
    tl.store(uniforms_ptr + at, uniform(seed, sample, position, PURPOSE))
