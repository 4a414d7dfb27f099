"""What the ops that quantise or fuse refuse, on every backend; see `arguments`.

Cheap on purpose: shapes, dtypes and strides are read, no value on the device is. Knows no backend.
"""

from collections.abc import Sequence as SequenceABC
from typing import Final

import torch

from syncline.model_ops_rocm.arguments.dense import check_rotary_embedding, require_style
from syncline.model_ops_rocm.checks import (
    refuse,
    require_apart,
    require_dtype,
    require_float,
    require_index,
    require_kind,
    require_out,
    require_positive,
    require_shape,
    require_tensors,
)
from syncline.model_ops_rocm.contracts.attention import KVScales
from syncline.model_ops_rocm.contracts.dense import NormStyle
from syncline.model_ops_rocm.formats.quantised import Quantised
from syncline.model_ops_rocm.kv.layout import KVLayout, KVScale
from syncline.model_ops_rocm.kv.pool import KVPool
from syncline.model_ops_rocm.memory import address_of
from syncline.model_ops_rocm.quant.scheme import (
    SCALE_DTYPES,
    CodeType,
    Granularity,
    ScaleType,
)

QUANTISE: Final = "quantise_activation"
RMS_NORM_QUANT: Final = "rms_norm_quant"
SILU_AND_MUL_QUANT: Final = "silu_and_mul_quant"
QK_NORM_ROPE_KV_WRITE: Final = "qk_norm_rope_kv_write"
_CODES: Final = (CodeType.E4M3FN, CodeType.E4M3FNUZ)
# Columns that share a scale; None is all of a row, or of all rows.
GROUPS: Final[dict[Granularity, int | None]] = {
    Granularity.TENSOR: None,
    Granularity.TOKEN: None,
    Granularity.BLOCK_1X128: 128,
    Granularity.BLOCK_1X32: 32,
}


def check_recipe(op: str, recipe: Quantised, scale: torch.Tensor | None) -> None:
    """A recipe for activations, with a scale exactly if it does not make its own."""
    require_kind(op, "recipe", recipe, Quantised)
    if recipe.code not in _CODES:
        refuse(op, "recipe", "have codes of e4m3fn or e4m3fnuz", recipe.describe())
    if recipe.granularity not in GROUPS:
        refuse(op, "recipe", "be per token, 1x128, 1x32 or per tensor", recipe.describe())
    if recipe.granularity is not Granularity.TENSOR:
        if scale is not None:
            refuse(op, "scale", f"be None for {recipe.describe()}", list(scale.shape))
        return
    if recipe.scale is not ScaleType.FP32:
        refuse(op, "recipe", "have an fp32 scale per tensor", recipe.describe())
    if scale is None:
        refuse(op, "scale", "be given for a recipe per tensor", None)
    if scale.dtype is not torch.float32 or scale.numel() != 1:
        refuse(op, "scale", "be float32 with one entry", f"{scale.dtype} {list(scale.shape)}")


def num_groups(recipe: Quantised, width: int) -> int:
    """Scales of one row of activations."""
    group = GROUPS[recipe.granularity]
    return 1 if group is None else -(-width // group)


def check_encoded(
    op: str,
    recipe: Quantised,
    shape: SequenceABC[int],
    given: tuple[torch.Tensor | None, tuple[torch.Tensor, torch.Tensor] | None],
    nonfinite: torch.Tensor | None,
    *,
    residual: torch.Tensor | None = None,
    **inputs: torch.Tensor | None,
) -> None:
    """What is written, `given` being scale and out: of quantising `shape`, and all beside it."""
    if not shape or shape[-1] < 1:
        refuse(op, "x", "have a last dimension of at least 1", list(shape))
    scale, out = given
    if nonfinite is not None:
        require_dtype(op, "nonfinite", nonfinite, torch.int32)
        require_shape(op, "nonfinite", nonfinite, (1,))
    written = {"nonfinite": nonfinite, "residual": residual}
    if out is not None:
        require_tensors(op, "out", out)
        codes, scales = out
        require_shape(op, "out[0]", codes, tuple(shape))
        require_dtype(op, "out[0]", codes, recipe.dtype)
        written["out[0]"] = codes
        if scale is None:
            wanted = (*shape[:-1], num_groups(recipe, shape[-1]))
            require_shape(op, "out[1]", scales, wanted)
            require_dtype(op, "out[1]", scales, SCALE_DTYPES[recipe.scale])
            written["out[1]"] = scales
        elif (
            address_of(scales) != address_of(scale)
            or scales.dtype is not scale.dtype
            or scales.numel() != 1
        ):
            refuse(op, "out[1]", "be the given scale", "another tensor")
    require_apart(op, written, inputs | {"scale": scale})


def check_quantise(
    x_TK: torch.Tensor,
    recipe: Quantised,
    *,
    scale: torch.Tensor | None,
    out: tuple[torch.Tensor, torch.Tensor] | None,
    nonfinite: torch.Tensor | None,
) -> None:
    require_float(QUANTISE, "x", x_TK)
    check_recipe(QUANTISE, recipe, scale)
    check_encoded(QUANTISE, recipe, x_TK.shape, (scale, out), nonfinite, x=x_TK)


def check_heads(
    q_TNH: torch.Tensor,
    k_TKH: torch.Tensor,
    v_TKH: torch.Tensor,
    norm_weights: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    style: NormStyle,
) -> None:
    """What `check_rotary_embedding` leaves open of a layer's q, k and v."""
    op, head_dim = QK_NORM_ROPE_KV_WRITE, q_TNH.shape[-1]
    require_style(op, style)
    require_shape(op, "v", v_TKH, k_TKH.shape)
    require_dtype(op, "v", v_TKH, q_TNH.dtype)
    require_positive(op, "eps", eps)
    if norm_weights is not None:
        require_tensors(op, "norm_weights", norm_weights)
    for name, weight in zip(("q", "k"), norm_weights or (), strict=False):
        require_shape(op, f"norm_weights of {name}", weight, (head_dim,))
        require_dtype(op, f"norm_weights of {name}", weight, q_TNH.dtype)


def check_rotated(
    q_TNH: torch.Tensor,
    k_TKH: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    positions_T: torch.Tensor,
    out: torch.Tensor | None,
) -> None:
    op = QK_NORM_ROPE_KV_WRITE
    check_rotary_embedding(q_TNH, k_TKH, cos_sin_cache, positions_T, out=None, op=op)
    if out is not None:
        require_out(op, out, q_TNH.shape, q_TNH.dtype)


def check_written(k_TKH: torch.Tensor, slot_mapping: torch.Tensor, pool: KVPool) -> None:
    """k and v are what the pool stores, or what it encodes."""
    op = QK_NORM_ROPE_KV_WRITE
    num_tokens = k_TKH.shape[0]
    require_shape(op, "k", k_TKH, (num_tokens, pool.num_kv_heads, pool.head_dim))
    if pool.layout.scale is KVScale.NONE:
        require_dtype(op, "k", k_TKH, pool.layout.dtype)
    require_index(op, "slot_mapping", slot_mapping, num_tokens)


def check_heads_apart(
    results: tuple[torch.Tensor | None, torch.Tensor, torch.Tensor],
    inputs: tuple[torch.Tensor, ...],
    norm_weights: tuple[torch.Tensor, torch.Tensor] | None,
    kv_scales: KVScales | None,
    layout: KVLayout,
) -> None:
    """`results` are out and the caches; `inputs` q, k, v, cos_sin_cache, positions and slots."""
    written = dict(zip(("out", "k_cache", "v_cache"), results, strict=True))
    names = ("q", "k", "v", "cos_sin_cache", "positions", "slot_mapping")
    read = dict(zip(names, inputs, strict=True))
    scales = written if layout.scale is KVScale.TOKEN else read
    scales.update(zip(("k_scale", "v_scale"), kv_scales or (), strict=False))
    read |= zip(("norm_weights of q", "norm_weights of k"), norm_weights or (), strict=False)
    require_apart(QK_NORM_ROPE_KV_WRITE, written, read)
