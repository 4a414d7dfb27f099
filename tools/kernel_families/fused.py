"""The launches of the ops that quantise activations or fuse several steps."""

from collections.abc import Iterator, Mapping
from typing import Final

import torch

from kernel_families.base import Arguments, Calls, Rules, empty, ids, pools, width_of
from syncline.model_ops_rocm.formats.quantised import Quantised
from syncline.model_ops_rocm.kv import KVLayout, KVOrder, KVScale
from syncline.model_ops_rocm.quant import CodeType, E8m0Mode, Granularity, ScaleType
from syncline.model_ops_rocm.triton.configs.base import ConfigKey
from syncline.model_ops_rocm.triton.targets import casts_natively


def _recipe(key: ConfigKey, granularity: Granularity) -> Quantised:
    """With the codes that the target converts to."""
    is_fnuz = casts_natively(key.arch, CodeType.E4M3FNUZ)
    is_mx = granularity is Granularity.BLOCK_1X32
    return Quantised(
        granularity=granularity,
        code=CodeType.E4M3FNUZ if is_fnuz else CodeType.E4M3FN,
        scale=ScaleType.E8M0 if is_mx else ScaleType.FP32,
        e8m0_mode=E8m0Mode.ROUND_UP if is_mx else None,
    )


def _recipes(key: ConfigKey) -> Iterator[tuple[str, Arguments]]:
    """All in bfloat16; the other dtypes differ in how they are loaded."""
    if key.kind == "rows":
        granularities: tuple[Granularity, ...] = (Granularity.TOKEN,)
    elif key.dtype is torch.bfloat16:
        granularities = (Granularity.BLOCK_1X128, Granularity.BLOCK_1X32, Granularity.TENSOR)
    else:
        granularities = (Granularity.BLOCK_1X128,)
    for granularity in granularities:
        recipe = _recipe(key, granularity)
        is_given = granularity is Granularity.TENSOR
        scale: Arguments = {"scale": torch.empty(1, device="meta")} if is_given else {}
        yield recipe.describe(), {"recipe": recipe, **scale}


def _width_of(key: ConfigKey) -> int:
    """Rows that are one tile are as wide as their bucket, which has a bound."""
    return key.up_to if key.kind == "rows" else width_of(key)


def _quantisations(key: ConfigKey, num_tokens: int) -> Iterator[tuple[str, Arguments]]:
    for variant, arguments in _recipes(key):
        yield variant, {"x_TK": empty(key, num_tokens, _width_of(key)), **arguments}


def _activations(key: ConfigKey, num_tokens: int) -> Iterator[tuple[str, Arguments]]:
    for variant, arguments in _recipes(key):
        yield variant, {"x_T2I": empty(key, num_tokens, 2 * _width_of(key)), **arguments}


def _norms(key: ConfigKey, num_tokens: int) -> Iterator[tuple[str, Arguments]]:
    width = min(key.up_to, 8_192)
    is_token = key.dtype is torch.bfloat16
    recipe = _recipe(key, Granularity.TOKEN if is_token else Granularity.BLOCK_1X128)
    yield (
        recipe.describe(),
        {
            "x_TH": empty(key, num_tokens, width),
            "weight_H": empty(key, width),
            "eps": 1e-6,
            "residual_TH": empty(key, num_tokens, width),
            "recipe": recipe,
        },
    )


def _heads(key: ConfigKey, num_tokens: int) -> Iterator[tuple[str, Arguments]]:
    head_dim = min(key.up_to, 128)
    fused = empty(key, num_tokens, 48, head_dim)
    weight = empty(key, head_dim)
    code = _recipe(key, Granularity.TOKEN).dtype
    scales = (KVScale.NONE, KVScale.TOKEN) if key.dtype is torch.bfloat16 else (KVScale.NONE,)
    for scale in scales:
        is_plain = scale is KVScale.NONE
        for variant, num_blocks in pools(key, 8 * 64 * head_dim):
            if key.dtype is not torch.bfloat16 and num_blocks > 8:
                continue
            layout = KVLayout(
                order=KVOrder.HND,
                dtype=key.dtype if is_plain else code,
                kernel_block_size=64,
                scale=scale,
            )
            pool = torch.empty(num_blocks, 8, 64, head_dim, dtype=layout.dtype, device="meta")
            numbers = torch.empty(num_blocks, 8, 64, device="meta")
            yield (
                f"{variant}-{layout.describe()}",
                {
                    "q_TNH": fused[:, :32],
                    "k_TKH": fused[:, 32:40],
                    "v_TKH": fused[:, 40:],
                    "cos_sin_cache": torch.empty(4_096, head_dim, device="meta"),
                    "positions_T": ids(num_tokens),
                    "k_cache": pool,
                    "v_cache": pool,
                    "slot_mapping": torch.empty(num_tokens, dtype=torch.int32, device="meta"),
                    "layout": layout,
                    "norm_weights": (weight, weight),
                    "kv_scales": None if is_plain else (numbers, numbers),
                },
            )


CALLS: Final[Mapping[str, Calls]] = {
    "quantise_activation": _quantisations,
    "rms_norm_quant": _norms,
    "silu_and_mul_quant": _activations,
    "qk_norm_rope_kv_write": _heads,
}
# Narrow: a given scale; the norm's weight; a position, a slot, and what all heads share: cos, sin
# and weights. Narrow stores: a scale.
RULES: Final[Mapping[str, Rules]] = {
    "quantise_activation": Rules(max_narrow_loads=1, max_narrow_stores=2),
    "rms_norm_quant": Rules(max_narrow_loads=1, max_narrow_stores=2),
    "silu_and_mul_quant": Rules(max_narrow_loads=1, max_narrow_stores=2),
    "qk_norm_rope_kv_write": Rules(max_narrow_loads=12, max_narrow_stores=2),
}
