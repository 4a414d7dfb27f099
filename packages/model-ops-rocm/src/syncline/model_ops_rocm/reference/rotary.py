"""Rotary embedding in PyTorch, neox style; knows nothing of how the cache was filled.

Source: arXiv:2104.09864, rounded as transformers' Qwen3 does. q and k are rotated as one tensor:
at decode sizes a call costs its number of kernels, not its bytes.
"""

import torch

from syncline.model_ops_rocm.checks import (
    refuse,
    require_dtype,
    require_float,
    require_index,
    require_ndim,
    require_out,
)

_OP = "rotary_embedding"


def rotary_embedding(
    q_TNH: torch.Tensor,
    k_TKH: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    positions_T: torch.Tensor,
    *,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `contracts.RotaryEmbedding`."""
    _check(q_TNH, k_TKH, cos_sin_cache, positions_T)
    if out is not None:
        require_out(_OP, out[0], q_TNH.shape, q_TNH.dtype)
        require_out(_OP, out[1], k_TKH.shape, k_TKH.dtype)
    num_heads = q_TNH.shape[1]
    try:
        cos_sin = cos_sin_cache.index_select(0, positions_T).to(q_TNH.dtype).unsqueeze(1)
    except IndexError:
        refuse(_OP, "positions", f"be in [0, {cos_sin_cache.shape[0]})", "one outside")
    cos, sin = cos_sin.chunk(2, dim=-1)
    first, second = torch.cat((q_TNH, k_TKH), dim=1).chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    if out is None:
        return rotated[:, :num_heads], rotated[:, num_heads:]
    return out[0].copy_(rotated[:, :num_heads]), out[1].copy_(rotated[:, num_heads:])


def _check(
    q_TNH: torch.Tensor,
    k_TKH: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    positions_T: torch.Tensor,
) -> None:
    require_float(_OP, "q", q_TNH)
    require_ndim(_OP, "q", q_TNH, 3)
    require_dtype(_OP, "k", k_TKH, q_TNH.dtype)
    num_tokens, _, head_dim = q_TNH.shape
    if k_TKH.ndim != 3 or k_TKH.shape[0] != num_tokens or k_TKH.shape[2] != head_dim:
        refuse(_OP, "k", f"have shape [{num_tokens}, K, {head_dim}]", list(k_TKH.shape))
    if cos_sin_cache.ndim != 2 or cos_sin_cache.shape[1] != head_dim or head_dim % 2 != 0:
        refuse(
            _OP,
            "cos_sin_cache",
            f"have shape [P, head_dim] with the even head_dim {head_dim}",
            list(cos_sin_cache.shape),
        )
    require_float(_OP, "cos_sin_cache", cos_sin_cache)
    require_index(_OP, "positions", positions_T, num_tokens)
