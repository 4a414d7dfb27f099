"""Quantised activations and fused ops in PyTorch: their parts, one after another.

Unit: one call. Knows no order of storage.
"""

from typing import Final

import torch

from syncline.model_ops_rocm.arguments.attention import pool_of
from syncline.model_ops_rocm.arguments.dense import check_rms_norm, check_silu_and_mul
from syncline.model_ops_rocm.arguments.fused import (
    QK_NORM_ROPE_KV_WRITE,
    RMS_NORM_QUANT,
    SILU_AND_MUL_QUANT,
    check_encoded,
    check_heads,
    check_heads_apart,
    check_quantise,
    check_recipe,
    check_rotated,
    check_written,
    num_groups,
)
from syncline.model_ops_rocm.contracts import KVScales, NormStyle
from syncline.model_ops_rocm.formats.quantised import Quantised
from syncline.model_ops_rocm.formats.recipes import WEIGHT, WEIGHT_SCALE
from syncline.model_ops_rocm.kv import KVLayout
from syncline.model_ops_rocm.kv.support import KVSupport
from syncline.model_ops_rocm.quant.scheme import SCALE_DTYPES
from syncline.model_ops_rocm.reference.activation import silu_and_mul
from syncline.model_ops_rocm.reference.kv import kv_write
from syncline.model_ops_rocm.reference.norm import rms_norm
from syncline.model_ops_rocm.reference.rotary import rotary_embedding
from syncline.model_ops_rocm.regions import full_region

Encoded = tuple[torch.Tensor, torch.Tensor]
SUPPORT: Final = KVSupport(op=QK_NORM_ROPE_KV_WRITE, backend="torch")


def quantise_activation(
    x_TK: torch.Tensor,
    recipe: Quantised,
    *,
    scale: torch.Tensor | None = None,
    out: Encoded | None = None,
    nonfinite: torch.Tensor | None = None,
) -> Encoded:
    """See `contracts.QuantiseActivation`."""
    check_quantise(x_TK, recipe, scale=scale, out=out, nonfinite=nonfinite)
    return _quantised(x_TK, recipe, scale, out, nonfinite)


def rms_norm_quant(  # noqa: PLR0913 - the contract's keywords
    x_TH: torch.Tensor,
    weight_H: torch.Tensor,
    eps: float,
    recipe: Quantised,
    *,
    residual_TH: torch.Tensor | None = None,
    style: NormStyle = NormStyle.ROUND_THEN_WEIGHT,
    scale: torch.Tensor | None = None,
    out: Encoded | None = None,
    nonfinite: torch.Tensor | None = None,
) -> Encoded:
    """See `contracts.RMSNormQuant`."""
    check_rms_norm(
        x_TH, weight_H, eps, residual_TH=residual_TH, out=None, style=style, op=RMS_NORM_QUANT
    )
    check_recipe(RMS_NORM_QUANT, recipe, scale)
    check_encoded(
        *(RMS_NORM_QUANT, recipe, x_TH.shape, (scale, out), nonfinite),
        residual=residual_TH,
        x=x_TH,
        weight=weight_H,
    )
    normed = rms_norm(x_TH, weight_H, eps, residual_TH=residual_TH, style=style)
    return _quantised(normed, recipe, scale, out, nonfinite)


def silu_and_mul_quant(
    x_T2I: torch.Tensor,
    recipe: Quantised,
    *,
    scale: torch.Tensor | None = None,
    out: Encoded | None = None,
    nonfinite: torch.Tensor | None = None,
) -> Encoded:
    """See `contracts.SiluAndMulQuant`."""
    shape = check_silu_and_mul(x_T2I, out=None, op=SILU_AND_MUL_QUANT)
    check_recipe(SILU_AND_MUL_QUANT, recipe, scale)
    check_encoded(SILU_AND_MUL_QUANT, recipe, shape, (scale, out), nonfinite, x=x_T2I)
    return _quantised(silu_and_mul(x_T2I), recipe, scale, out, nonfinite)


class TorchQKNormRopeKVWrite:
    """See `contracts.QKNormRopeKVWrite`; takes every layout, and looks at slots on the host."""

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
        check_rotated(q_TNH, k_TKH, cos_sin_cache, positions_T, out)
        check_heads(q_TNH, k_TKH, v_TKH, norm_weights, eps, style)
        pool = pool_of(QK_NORM_ROPE_KV_WRITE, k_cache, v_cache, layout, kv_scales)
        check_written(k_TKH, slot_mapping, pool)
        check_heads_apart(
            (out, k_cache, v_cache),
            (q_TNH, k_TKH, v_TKH, cos_sin_cache, positions_T, slot_mapping),
            *(norm_weights, kv_scales, layout),
        )
        if norm_weights is not None:
            q_TNH = rms_norm(q_TNH, norm_weights[0], eps, style=style)
            k_TKH = rms_norm(k_TKH, norm_weights[1], eps, style=style)
        turned_q, turned_k = rotary_embedding(
            q_TNH, k_TKH, cos_sin_cache, positions_T, is_interleaved=is_interleaved
        )
        kv_write(
            *(turned_k, v_TKH, k_cache, v_cache, slot_mapping), layout=layout, kv_scales=kv_scales
        )
        return turned_q if out is None else out.copy_(turned_q)


qk_norm_rope_kv_write: Final = TorchQKNormRopeKVWrite()


def _quantised(
    x_TK: torch.Tensor,
    recipe: Quantised,
    scale: torch.Tensor | None,
    out: Encoded | None,
    nonfinite: torch.Tensor | None,
) -> Encoded:
    width = x_TK.shape[-1]
    rows = x_TK.reshape(-1, width)
    scale_shape = (*x_TK.shape[:-1], num_groups(recipe, width))
    if rows.shape[0] == 0:
        codes = rows.to(recipe.dtype)
        scales = torch.empty(scale_shape, dtype=SCALE_DTYPES[recipe.scale], device=rows.device)
    else:
        encoded = recipe.encode(
            rows,
            logical_shape=rows.shape,
            region=full_region(rows.shape),
            scales=None if scale is None else scale.reshape(1, 1),
        )
        codes, scales = encoded.tensors[WEIGHT], encoded.tensors[WEIGHT_SCALE]
        if nonfinite is not None and encoded.nonfinite is not None:
            nonfinite.bitwise_or_(encoded.nonfinite.to(nonfinite.dtype))
    codes = codes.reshape(x_TK.shape)
    if scale is not None:
        return (codes if out is None else out[0].copy_(codes)), scale
    scales = scales.reshape(scale_shape)
    return (codes, scales) if out is None else (out[0].copy_(codes), out[1].copy_(scales))
