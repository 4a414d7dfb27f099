"""Counter-based random numbers: one draw is a pure function of its key and its counter.

No state exists, so a draw does not depend on who shares a batch, on preemption, or on the number of
draws made before. Works on int64 tensors of 32-bit words, on any device; knows nothing of tokens
but the order of the four counter words.
Source: Philox4x32-10, Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC11); checked
against the known-answer vectors of Random123 1.14.0.
"""

from typing import Final

import torch
from torch import Tensor

WORD_MASK: Final = 0xFFFFFFFF
PURPOSE_SAMPLE: Final = 0  # Counter word 2; each use of randomness for one position has its own.

_NUM_ROUNDS: Final = 10
_MULTIPLIER_0: Final = 0xD2511F53
_MULTIPLIER_1: Final = 0xCD9E8D57
_WEYL_0: Final = 0x9E3779B9
_WEYL_1: Final = 0xBB67AE85


def philox4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four random 32-bit words per element; all tensors int64 of one broadcastable shape."""
    word_0, word_1, word_2, word_3 = counter
    key_0, key_1 = key
    for _ in range(_NUM_ROUNDS):
        # The product wraps in int64; its bits are right all the same, and the mask after the
        # arithmetic shift removes the copies of the sign.
        product_0 = word_0 * _MULTIPLIER_0
        product_1 = word_2 * _MULTIPLIER_1
        word_0 = ((product_1 >> 32) & WORD_MASK) ^ word_1 ^ key_0
        word_2 = ((product_0 >> 32) & WORD_MASK) ^ word_3 ^ key_1
        word_1 = product_1 & WORD_MASK
        word_3 = product_0 & WORD_MASK
        key_0 = (key_0 + _WEYL_0) & WORD_MASK
        key_1 = (key_1 + _WEYL_1) & WORD_MASK
    return word_0, word_1, word_2, word_3


def split_seed(seed: int) -> tuple[int, int]:
    """A 64-bit seed as (low, high) 32-bit key words."""
    return seed & WORD_MASK, (seed >> 32) & WORD_MASK


def uniform(
    seed_lo: Tensor, seed_hi: Tensor, position: Tensor, sample_index: Tensor, purpose: int
) -> Tensor:
    """float64 in (0, 1), never 0 or 1, for the token at `position` of one sample of a request."""
    zero = torch.zeros_like(position)
    counter = (position, sample_index, zero + purpose, zero)
    word, _, _, _ = philox4x32(counter, (seed_lo, seed_hi))
    return ((word >> 8).to(torch.float64) + 0.5) * 2.0**-24
