"""The table of rotary angles: cosines and sines per position, computed once.

Source: `Qwen3RotaryEmbedding` of transformers 5.24, rope type "default": angles in float32, rounded
to the model's dtype at the end.
"""

import torch
from torch import Tensor


def fill_cos_sin(out_PD: Tensor, theta: float) -> None:
    """Row p becomes cos | sin of p times the D/2 inverse frequencies; D even."""
    num_positions, head_dim = out_PD.shape
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    inv_freq = 1.0 / theta**exponents
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * inv_freq
    out_PD.copy_(torch.cat((angles.cos(), angles.sin()), dim=-1))
