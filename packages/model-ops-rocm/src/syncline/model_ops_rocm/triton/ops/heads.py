"""qk-norm, rotation and KV write by Triton, in one launch."""

from typing import Final

import torch

from syncline.model_ops_rocm.arguments_fused import (
    QK_NORM_ROPE_KV_WRITE,
    check_heads,
    check_pool,
    check_rotated,
)
from syncline.model_ops_rocm.contracts import NormStyle
from syncline.model_ops_rocm.errors import LayoutError
from syncline.model_ops_rocm.kv import KVLayout, KVOrder, KVPool, KVScale
from syncline.model_ops_rocm.quant.per_token import FP8_MAX
from syncline.model_ops_rocm.quant.scheme import CODE_DTYPES, CodeType
from syncline.model_ops_rocm.triton.geometry import power_of_two
from syncline.model_ops_rocm.triton.kernels.heads import qk_norm_rope_kv_write_kernel
from syncline.model_ops_rocm.triton.launch import IS_INTERPRETED, LAUNCHER, require_reachable
from syncline.model_ops_rocm.triton.targets import casts_natively

Pair = tuple[torch.Tensor, torch.Tensor]

ORDERS: Final = (KVOrder.HND, KVOrder.NHD, KVOrder.HND_D_MAJOR_KEYS)
_CODES: Final = {dtype: code for code, dtype in CODE_DTYPES.items()}


def qk_norm_rope_kv_write(  # noqa: PLR0913 - the contract's keywords
    q_TNH: torch.Tensor,
    k_TKH: torch.Tensor,
    v_TKH: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    positions_T: torch.Tensor,
    caches: Pair,
    slot_mapping: torch.Tensor,
    *,
    layout: KVLayout,
    norm_weights: Pair | None = None,
    eps: float = 1e-6,
    style: NormStyle = NormStyle.ROUND_THEN_WEIGHT,
    is_interleaved: bool = False,
    scales: Pair | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `contracts.QKNormRopeKVWrite`; takes the orders HND, NHD and HND with d-major keys."""
    op = QK_NORM_ROPE_KV_WRITE
    check_rotated(q_TNH, k_TKH, cos_sin_cache, positions_T, out)
    check_heads(q_TNH, k_TKH, v_TKH, norm_weights, eps)
    pool = check_pool(k_TKH, caches, slot_mapping, layout, scales)
    _check_order(layout)
    if out is None:
        out = torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
    weights = norm_weights if norm_weights is not None else (cos_sin_cache, cos_sin_cache)
    numbers = scales if scales is not None else caches
    require_reachable(op, q=q_TNH, k=k_TKH, v=v_TKH, out=out, positions=positions_T)
    require_reachable(op, cos_sin_cache=cos_sin_cache, k_cache=caches[0], v_cache=caches[1])
    require_reachable(op, slot_mapping=slot_mapping, k_scale=numbers[0], v_scale=numbers[1])
    require_reachable(op, q_weight=weights[0], k_weight=weights[1])
    num_tokens, num_heads, head_dim = q_TNH.shape
    if num_tokens == 0:
        return out
    chosen = LAUNCHER.config(op, q_TNH.dtype, head_dim)
    block_heads = chosen[1].constants["BLOCK_HEADS"]
    LAUNCHER.launch(
        qk_norm_rope_kv_write_kernel,
        (num_tokens, -(-num_heads // block_heads) + -(-k_TKH.shape[1] // block_heads)),
        chosen,
        (
            *(q_TNH, k_TKH, v_TKH, out, *weights, cos_sin_cache, positions_T),
            *(_bytes(caches[0]), _bytes(caches[1]), _bytes(numbers[0]), _bytes(numbers[1])),
            *(slot_mapping, cos_sin_cache.shape[0], pool.num_slots, eps),
            *(*q_TNH.stride(), *k_TKH.stride(), *v_TKH.stride(), *out.stride()),
            *(weights[0].stride(0), weights[1].stride(0), *cos_sin_cache.stride()),
            *(positions_T.stride(0), slot_mapping.stride(0)),
        ),
        {
            "NUM_Q_HEADS": num_heads,
            "NUM_K_HEADS": k_TKH.shape[1],
            "HEAD_DIM": head_dim,
            "ROTARY": cos_sin_cache.shape[1],
            "IS_INTERLEAVED": is_interleaved,
            "HAS_NORM": norm_weights is not None,
            "STYLE": str(style),
            "BLOCK_DIM": power_of_two(head_dim),
            **_pool_constants(pool, chosen[0].arch),
        },
    )
    return out


def _check_order(layout: KVLayout) -> None:
    if layout.order not in ORDERS:
        raise LayoutError(
            layout=layout.describe(),
            precondition=f"{QK_NORM_ROPE_KV_WRITE} to take its order: {', '.join(ORDERS)}",
            got=str(layout.order),
        )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Codes as bytes, anything else as it is."""
    return tensor.view(torch.uint8) if tensor.dtype in FP8_MAX else tensor


def _pool_constants(pool: KVPool, arch: str) -> dict[str, object]:
    """Strides of logical [NB, K, BS, D] and [NB, K, BS], and what is stored."""
    layout, head_dim = pool.layout, pool.head_dim
    heads, size = pool.num_kv_heads, layout.kernel_block_size
    head, slot = size * head_dim, head_dim
    scale_head, scale_slot = size, 1
    if layout.order is KVOrder.NHD:
        head, slot, scale_head, scale_slot = head_dim, heads * head_dim, 1, heads
    is_d_major = layout.order is KVOrder.HND_D_MAJOR_KEYS
    if layout.scale is not KVScale.TOKEN:
        scale_head, scale_slot = int(layout.scale is KVScale.HEAD), 0
    code = _CODES.get(layout.dtype, CodeType.E4M3FN)
    return {
        "BLOCK_SIZE": size,
        "CACHE_BLOCK": heads * size * head_dim,
        "K_HEAD": head,
        "K_SLOT": 1 if is_d_major else slot,
        "K_LAST": size if is_d_major else 1,
        "V_HEAD": head,
        "V_SLOT": slot,
        "V_LAST": 1,
        "SCALE_BLOCK": heads * size if layout.scale is KVScale.TOKEN else 0,
        "SCALE_HEAD": scale_head,
        "SCALE_SLOT": scale_slot,
        "SCALE": str(layout.scale),
        "CODE": str(code),
        "CLAMP": FP8_MAX[CODE_DTYPES[code]],
        "NATIVE": not IS_INTERPRETED and casts_natively(arch, code),
    }
