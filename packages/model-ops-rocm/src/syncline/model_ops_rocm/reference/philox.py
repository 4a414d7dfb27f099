"""Counter-based random numbers: a draw is a pure function of its key and its counter.

Philox4x32-10. Key: the request's seed, low word first. Counter: (position, sample index, purpose,
0). There is no state, so a draw does not depend on who shares a batch, on preemption or on how many
were made before. Knows nothing of tokens but the order of the counter.
Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC11).
"""

from typing import Final

import torch

# Counter word 2: each use of randomness at one position has its own.
PURPOSE_SAMPLE: Final = 0  # the token of a position
PURPOSE_ACCEPT: Final = 1  # whether a draft is accepted
PURPOSE_RECOVER: Final = 2  # the token in the place of a rejected draft

_WORD_MASK: Final = 0xFFFF_FFFF
_NUM_ROUNDS: Final = 10
_MULTIPLIER_0: Final = 0xD251_1F53
_MULTIPLIER_1: Final = 0xCD9E_8D57
_WEYL_0: Final = 0x9E37_79B9
_WEYL_1: Final = 0xBB67_AE85

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox4x32(counter: Words, key: tuple[torch.Tensor, torch.Tensor]) -> Words:
    """Four random words per element; all are int64 tensors of 32-bit words, broadcast."""
    word_0, word_1, word_2, word_3 = counter
    key_0, key_1 = key
    for _ in range(_NUM_ROUNDS):
        # The product wraps in int64; its bits are right all the same, and the mask after the
        # arithmetic shift removes the copies of the sign.
        product_0 = word_0 * _MULTIPLIER_0
        product_1 = word_2 * _MULTIPLIER_1
        word_0 = ((product_1 >> 32) & _WORD_MASK) ^ word_1 ^ key_0
        word_2 = ((product_0 >> 32) & _WORD_MASK) ^ word_3 ^ key_1
        word_1 = product_1 & _WORD_MASK
        word_3 = product_0 & _WORD_MASK
        key_0 = (key_0 + _WEYL_0) & _WORD_MASK
        key_1 = (key_1 + _WEYL_1) & _WORD_MASK
    return word_0, word_1, word_2, word_3


def seed_to_int64(seed: int) -> int:
    """A seed in [0, 2^64) as the int64 of the same bits, which is how a tensor holds it."""
    if not 0 <= seed < 1 << 64:
        raise ValueError(f"seed must be in [0, 2**64), got {seed}")
    return seed - (1 << 64) if seed >= 1 << 63 else seed


def random_words(
    seeds: torch.Tensor, sample_index: torch.Tensor, positions: torch.Tensor, purpose: int
) -> Words:
    """The four words of each element's counter; integer tensors, broadcast, `seeds` int64."""
    seeds = seeds.to(torch.int64)
    # Words are the low 32 bits of what they are made from, as an unsigned cast makes them.
    position = positions.to(torch.int64) & _WORD_MASK
    sample = sample_index.to(torch.int64) & _WORD_MASK
    zero = torch.zeros_like(position)
    key = (seeds & _WORD_MASK, (seeds >> 32) & _WORD_MASK)
    return philox4x32((position, sample, zero + purpose, zero), key)


def uniforms(
    seeds: torch.Tensor, sample_index: torch.Tensor, positions: torch.Tensor, purpose: int
) -> torch.Tensor:
    """((x >> 8) + 0.5) * 2^-24 of the first word x: float64, exact, never 0 or 1.

    float32 would not do: it rounds the largest of these to 1.
    """
    word, _, _, _ = random_words(seeds, sample_index, positions, purpose)
    return ((word >> 8).to(torch.float64) + 0.5) * 2.0**-24
