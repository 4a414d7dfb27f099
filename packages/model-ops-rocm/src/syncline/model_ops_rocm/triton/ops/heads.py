"""qk-norm, rotation and KV write by Triton, in one launch."""

from typing import Final

import torch

from syncline.model_ops_rocm.arguments.attention import pool_of, require_support
from syncline.model_ops_rocm.arguments.fused import (
    QK_NORM_ROPE_KV_WRITE,
    check_heads,
    check_heads_apart,
    check_rotated,
    check_written,
)
from syncline.model_ops_rocm.contracts import KVScales, NormStyle
from syncline.model_ops_rocm.kv import KVLayout, KVPool
from syncline.model_ops_rocm.kv.support import KVSupport
from syncline.model_ops_rocm.quant.per_token import FP8_MAX
from syncline.model_ops_rocm.quant.scheme import CODE_DTYPES, CodeType
from syncline.model_ops_rocm.triton.geometry import power_of_two
from syncline.model_ops_rocm.triton.kernels.heads import qk_norm_rope_kv_write_kernel
from syncline.model_ops_rocm.triton.kv_places import places_of, scales_per
from syncline.model_ops_rocm.triton.launch import (
    IS_INTERPRETED,
    LAUNCHER,
    overlaps,
    require_reachable,
)
from syncline.model_ops_rocm.triton.targets import casts_natively

SUPPORT: Final = KVSupport(op=QK_NORM_ROPE_KV_WRITE, backend="triton", max_head_dim=256)
_CODES: Final = {dtype: code for code, dtype in CODE_DTYPES.items()}


class TritonQKNormRopeKVWrite:
    """See `contracts.QKNormRopeKVWrite`."""

    __slots__ = ()

    @property
    def kv_support(self) -> KVSupport:
        return SUPPORT

    def __call__(  # noqa: PLR0913 - the contract's keywords
        self,
        q_TNH: torch.Tensor,
        k_TKH: torch.Tensor,
        v_TKH: torch.Tensor,
        cos_sin_cache: torch.Tensor,
        positions_T: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        *,
        layout: KVLayout,
        norm_weights: tuple[torch.Tensor, torch.Tensor] | None = None,
        eps: float = 1e-6,
        style: NormStyle = NormStyle.ROUND_THEN_WEIGHT,
        is_interleaved: bool = False,
        kv_scales: KVScales | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        op = QK_NORM_ROPE_KV_WRITE
        check_rotated(q_TNH, k_TKH, cos_sin_cache, positions_T, out)
        check_heads(q_TNH, k_TKH, v_TKH, norm_weights, eps, style)
        pool = pool_of(op, k_cache, v_cache, layout, kv_scales)
        check_written(k_TKH, slot_mapping, pool)
        check_heads_apart(
            (out, k_cache, v_cache),
            (q_TNH, k_TKH, v_TKH, cos_sin_cache, positions_T, slot_mapping),
            *(norm_weights, kv_scales, layout),
        )
        require_support(op, SUPPORT, pool)
        if out is None:
            out = torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
        weights = norm_weights if norm_weights is not None else (cos_sin_cache, cos_sin_cache)
        scales = kv_scales if kv_scales is not None else (None, None)
        require_reachable(op, q=q_TNH, k=k_TKH, v=v_TKH, out=out, positions=positions_T)
        require_reachable(op, cos_sin_cache=cos_sin_cache, k_cache=k_cache, v_cache=v_cache)
        require_reachable(op, slot_mapping=slot_mapping, k_scale=scales[0], v_scale=scales[1])
        require_reachable(op, q_weight=weights[0], k_weight=weights[1])
        num_tokens, num_heads, head_dim = q_TNH.shape
        if num_tokens == 0:
            return out
        chosen = LAUNCHER.config(op, q_TNH.dtype, head_dim)
        block_heads = chosen[1].constants["BLOCK_HEADS"]
        places = places_of(pool)
        LAUNCHER.launch(
            qk_norm_rope_kv_write_kernel,
            (num_tokens, -(-num_heads // block_heads) + -(-pool.num_kv_heads // block_heads)),
            chosen,
            (
                *(q_TNH, k_TKH, v_TKH, out, *weights, cos_sin_cache, positions_T),
                *(_bytes(k_cache), _bytes(v_cache), *scales, slot_mapping),
                *(cos_sin_cache.shape[0], pool.num_slots if k_cache.numel() else 0, eps),
                *(*q_TNH.stride(), *k_TKH.stride(), *v_TKH.stride(), *out.stride()),
                *(weights[0].stride(0), weights[1].stride(0), *cos_sin_cache.stride()),
                *(positions_T.stride(0), slot_mapping.stride(0), *places[2:]),
            ),
            {
                "NUM_Q_HEADS": num_heads,
                "NUM_K_HEADS": pool.num_kv_heads,
                "HEAD_DIM": head_dim,
                "ROTARY": cos_sin_cache.shape[1],
                "IS_INTERLEAVED": is_interleaved,
                "HAS_NORM": norm_weights is not None,
                "STYLE": str(style),
                "OVERLAP": overlaps(chosen[1]),
                "BLOCK_DIM": power_of_two(head_dim),
                "KEYS": places.keys,
                "VALUES": places.values,
                **_stored_constants(pool, chosen[0].arch),
            },
        )
        return out


qk_norm_rope_kv_write: Final = TritonQKNormRopeKVWrite()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Codes as bytes, anything else as it is."""
    return tensor.view(torch.uint8) if tensor.dtype in FP8_MAX else tensor


def _stored_constants(pool: KVPool, arch: str) -> dict[str, object]:
    code = _CODES.get(pool.layout.dtype, CodeType.E4M3FN)
    return {
        "BLOCK_SIZE": pool.layout.kernel_block_size,
        "SCALES_PER": scales_per(pool),
        "CODE": str(code),
        "CLAMP": FP8_MAX[CODE_DTYPES[code]],
        "NATIVE": not IS_INTERPRETED and casts_natively(arch, code),
    }
