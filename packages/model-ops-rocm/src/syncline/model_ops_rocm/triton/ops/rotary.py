"""Rotary embedding by Triton: queries and keys in one launch."""

import torch

from syncline.model_ops_rocm.arguments.dense import ROTARY, check_rotary_embedding
from syncline.model_ops_rocm.triton.geometry import power_of_two
from syncline.model_ops_rocm.triton.kernels.rotary import rotary_kernel
from syncline.model_ops_rocm.triton.launch import LAUNCHER, overlaps, require_reachable


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
    if out is None:
        out_q = torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
        out_k = torch.empty(k_TKH.shape, dtype=k_TKH.dtype, device=k_TKH.device)
    else:
        out_q, out_k = out
    reached = {"cos_sin_cache": cos_sin_cache, "positions": positions_T, "out": out_q}
    require_reachable(ROTARY, q=q_TNH, k=k_TKH, **reached)
    require_reachable(ROTARY, out=out_k)
    num_tokens, num_heads, head_dim = q_TNH.shape
    num_kv_heads = k_TKH.shape[1]
    if num_tokens == 0 or num_heads + num_kv_heads == 0 or head_dim == 0:
        return out_q, out_k
    chosen = LAUNCHER.config(ROTARY, q_TNH.dtype, head_dim)
    block_heads = chosen[1].constants["BLOCK_HEADS"]
    LAUNCHER.launch(
        rotary_kernel,
        (num_tokens, -(-num_heads // block_heads) + -(-num_kv_heads // block_heads)),
        chosen,
        (
            *(q_TNH, k_TKH, cos_sin_cache, positions_T, out_q, out_k, cos_sin_cache.shape[0]),
            *q_TNH.stride(),
            *k_TKH.stride(),
            *out_q.stride(),
            *out_k.stride(),
            *cos_sin_cache.stride(),
            positions_T.stride(0),
        ),
        {
            "NUM_Q_HEADS": num_heads,
            "NUM_K_HEADS": num_kv_heads,
            "HEAD_DIM": head_dim,
            "ROTARY": cos_sin_cache.shape[1],
            "IS_INTERLEAVED": is_interleaved,
            "OVERLAP": overlaps(chosen[1]),
            "BLOCK_DIM": power_of_two(head_dim),
        },
    )
    return out_q, out_k
