"""Rotary embedding in PyTorch; knows nothing of how the cache was filled.

Source: arXiv:2104.09864, rounded as transformers' Qwen3 does. q and k are rotated as one tensor:
at decode sizes a call costs its number of kernels, not its bytes.
"""

import torch

from syncline.model_ops_rocm.arguments.dense import ROTARY, check_rotary_embedding
from syncline.model_ops_rocm.checks import refuse


def rotary_embedding(
    q_TNH: torch.Tensor,
    k_TKH: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    positions_T: torch.Tensor,
    *,
    is_interleaved: bool = False,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `contracts.RotaryEmbedding`."""
    check_rotary_embedding(q_TNH, k_TKH, cos_sin_cache, positions_T, out=out)
    num_heads, width = q_TNH.shape[1], cos_sin_cache.shape[1]
    try:
        cos_sin = cos_sin_cache.index_select(0, positions_T).to(q_TNH.dtype).unsqueeze(1)
    except IndexError:
        refuse(ROTARY, "positions", f"be in [0, {cos_sin_cache.shape[0]})", "one outside")
    cos, sin = cos_sin.chunk(2, dim=-1)
    heads = torch.cat((q_TNH, k_TKH), dim=1)
    rest = heads[..., width:]
    if is_interleaved:
        first, second = heads[..., 0:width:2], heads[..., 1:width:2]
        pairs = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1)
        rotated = torch.cat((pairs.flatten(-2), rest), dim=-1)
    else:
        first, second = heads[..., :width].chunk(2, dim=-1)
        rotated = torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)
    if out is None:
        return rotated[:, :num_heads], rotated[:, num_heads:]
    return out[0].copy_(rotated[:, :num_heads]), out[1].copy_(rotated[:, num_heads:])
