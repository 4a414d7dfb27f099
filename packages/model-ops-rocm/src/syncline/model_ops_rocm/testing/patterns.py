"""Bit patterns of float32 to try a cast on; knows no cast."""

import torch

NUM_BF16 = 1 << 16
_STRIDE = 2_654_435_761  # odd: the multiples are distinct, and spread over all patterns


def fp32_patterns(count: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """`count` patterns, of which the first 65,536 are all of bfloat16; NaNs are among them."""
    if count < NUM_BF16:
        raise ValueError(f"fp32_patterns: count must be at least {NUM_BF16}, got {count}")
    every_bf16 = torch.arange(NUM_BF16, device=device) << 16
    spread = torch.arange(count - NUM_BF16, device=device) * _STRIDE
    bits = torch.cat((every_bf16, spread)) & 0xFFFF_FFFF
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)
