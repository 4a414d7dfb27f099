"""What each op refuses, on every backend: the argument rules of `contracts`, in one place.

A backend adds what it alone cannot take. Cheap on purpose: shapes, dtypes and strides are read, no
value on the device is. Knows no backend.
"""

from collections.abc import Sequence as SequenceABC
from numbers import Integral

import torch

from syncline.model_ops_rocm.checks import (
    is_whole,
    refuse,
    require_apart,
    require_dtype,
    require_float,
    require_index,
    require_ndim,
    require_out,
    require_positive,
    require_shape,
    require_tensors,
)
from syncline.model_ops_rocm.contracts.attention import KVScales
from syncline.model_ops_rocm.contracts.dense import NormStyle
from syncline.model_ops_rocm.kv.layout import KVLayout, KVScale

RMS_NORM = "rms_norm"
ROTARY = "rotary_embedding"
SILU_AND_MUL = "silu_and_mul"
EMBEDDING = "embedding"
GATHER_ROWS = "gather_rows"
KV_WRITE = "kv_write"
KV_COPY = "kv_copy_blocks"


def require_style(op: str, style: NormStyle) -> None:
    """A string would pass for its style in one comparison and not in another."""
    if not isinstance(style, NormStyle):
        refuse(op, "style", f"be one of {', '.join(map(str, NormStyle))} as a NormStyle", style)


def check_rms_norm(  # noqa: PLR0913 - what the contract has
    x_TH: torch.Tensor,
    weight_H: torch.Tensor,
    eps: float,
    *,
    residual_TH: torch.Tensor | None,
    out: torch.Tensor | None,
    style: NormStyle,
    op: str = RMS_NORM,
) -> None:
    require_style(op, style)
    require_float(op, "x", x_TH)
    if x_TH.ndim == 0:
        refuse(op, "x", "have a last dimension to normalise", "a scalar")
    require_shape(op, "weight", weight_H, x_TH.shape[-1:])
    require_dtype(op, "weight", weight_H, x_TH.dtype)
    require_positive(op, "eps", eps)
    if out is not None:
        require_out(op, out, x_TH.shape, x_TH.dtype)
    if residual_TH is not None:
        require_shape(op, "residual", residual_TH, x_TH.shape)
        require_dtype(op, "residual", residual_TH, x_TH.dtype)
    require_apart(op, {"out": out, "residual": residual_TH}, {"x": x_TH, "weight": weight_H})


def check_rotary_embedding(
    q_TNH: torch.Tensor,
    k_TKH: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    positions_T: torch.Tensor,
    *,
    out: tuple[torch.Tensor, torch.Tensor] | None,
    op: str = ROTARY,
) -> None:
    require_float(op, "q", q_TNH)
    require_ndim(op, "q", q_TNH, 3)
    require_dtype(op, "k", k_TKH, q_TNH.dtype)
    num_tokens, _, head_dim = q_TNH.shape
    if k_TKH.ndim != 3 or k_TKH.shape[0] != num_tokens or k_TKH.shape[2] != head_dim:
        refuse(op, "k", f"have shape [{num_tokens}, K, {head_dim}]", list(k_TKH.shape))
    width = cos_sin_cache.shape[1] if cos_sin_cache.ndim == 2 else 0
    if not 2 <= width <= head_dim or width % 2 != 0:
        limit = f"have shape [P, D_rot] with an even D_rot from 2 to head_dim {head_dim}"
        refuse(op, "cos_sin_cache", limit, list(cos_sin_cache.shape))
    require_float(op, "cos_sin_cache", cos_sin_cache)
    require_index(op, "positions", positions_T, num_tokens)
    if num_tokens and not cos_sin_cache.shape[0]:
        refuse(op, "cos_sin_cache", "have a position", list(cos_sin_cache.shape))
    if out is not None:
        require_tensors(op, "out", out)
        require_out(op, out[0], q_TNH.shape, q_TNH.dtype)
        require_out(op, out[1], k_TKH.shape, k_TKH.dtype)
        inputs = {"q": q_TNH, "k": k_TKH, "cos_sin_cache": cos_sin_cache, "positions": positions_T}
        require_apart(op, {"out[0]": out[0], "out[1]": out[1]}, inputs)


def check_silu_and_mul(
    x_T2I: torch.Tensor, *, out: torch.Tensor | None, op: str = SILU_AND_MUL
) -> tuple[int, ...]:
    """Returns the shape of the result."""
    require_float(op, "x", x_T2I)
    if x_T2I.ndim == 0 or x_T2I.shape[-1] % 2 != 0:
        refuse(op, "x", "have an even last dimension", list(x_T2I.shape))
    shape = (*x_T2I.shape[:-1], x_T2I.shape[-1] // 2)
    if out is not None:
        require_out(op, out, shape, x_T2I.dtype)
        require_apart(op, {"out": out}, {"x": x_T2I})
    return shape


def check_embedding(
    ids_T: torch.Tensor,
    weight_VH: torch.Tensor,
    *,
    first_id: int | None,
    out: torch.Tensor | None,
) -> None:
    _check_rows(EMBEDDING, ("weight", weight_VH), ("ids", ids_T), out)
    if first_id is not None and not (is_whole(first_id) and first_id >= 0):
        refuse(EMBEDDING, "first_id", "be None or non-negative and whole", first_id)
    if first_id is None and ids_T.shape[0] and not weight_VH.shape[0]:
        refuse(EMBEDDING, "weight", "have a row, unless it is a shard", list(weight_VH.shape))


def check_gather_rows(
    x_TH: torch.Tensor, rows_R: torch.Tensor, *, out: torch.Tensor | None
) -> None:
    _check_rows(GATHER_ROWS, ("x", x_TH), ("rows", rows_R), out)


def check_caches(op: str, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
    """Two [NB, K, BS, D] of one floating dtype. In which order of storage, a backend says."""
    require_float(op, "k_cache", k_cache)
    require_ndim(op, "k_cache", k_cache, 4)
    require_dtype(op, "v_cache", v_cache, k_cache.dtype)
    require_shape(op, "v_cache", v_cache, k_cache.shape)


def require_no_scales(op: str, kv_scales: object) -> None:
    """What a call without a layout says: a layout would say what they mean."""
    if kv_scales is not None:
        refuse(op, "kv_scales", "be None without a layout", repr(kv_scales))


def check_kv_write(
    k_TKH: torch.Tensor,
    v_TKH: torch.Tensor,
    k_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> int:
    """Returns the number of tokens; `check_caches` comes first."""
    _, num_kv_heads, _, head_dim = k_cache.shape
    num_tokens = k_TKH.shape[0] if k_TKH.ndim else 0
    for name, tensor in (("k", k_TKH), ("v", v_TKH)):
        require_shape(KV_WRITE, name, tensor, (num_tokens, num_kv_heads, head_dim))
        require_dtype(KV_WRITE, name, tensor, k_cache.dtype)
    require_index(KV_WRITE, "slot_mapping", slot_mapping, num_tokens)
    return num_tokens


def check_kv_apart(
    caches: tuple[torch.Tensor, torch.Tensor],
    k_TKH: torch.Tensor,
    v_TKH: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_scales: KVScales | None,
    layout: KVLayout | None,
) -> None:
    if layout is None:
        require_no_scales(KV_WRITE, kv_scales)
    scales = {} if kv_scales is None else dict(zip(("k_scale", "v_scale"), kv_scales, strict=True))
    written = dict(zip(("k_cache", "v_cache"), caches, strict=True))
    read = {"k": k_TKH, "v": v_TKH, "slot_mapping": slot_mapping}
    if layout is not None and layout.scale is KVScale.TOKEN:
        require_apart(KV_WRITE, written | scales, read)
    else:
        require_apart(KV_WRITE, written, read | scales)


def check_copies_apart(
    k_cache: torch.Tensor, v_cache: torch.Tensor, pairs: torch.Tensor | None
) -> None:
    """A cache that is both would be copied twice, the second time from what the first left."""
    require_apart(KV_COPY, {"k_cache": k_cache, "v_cache": v_cache}, {"pairs": pairs})


def check_host_pairs(num_blocks: int, pairs: SequenceABC[tuple[int, int]]) -> None:
    """(source, destination) block ids that are on the host."""
    if not isinstance(pairs, SequenceABC):
        refuse(KV_COPY, "pairs", "be a tensor, or a sequence of (source, destination)", repr(pairs))
    for pair in pairs:
        if not _are_ids(pair, num_blocks):
            refuse(KV_COPY, "pairs", f"have block ids in [0, {num_blocks})", pair)
    if len({destination for _, destination in pairs}) != len(pairs):
        refuse(KV_COPY, "pairs", "name each destination once", list(pairs))


def _are_ids(pair: object, num_blocks: int) -> bool:
    if not isinstance(pair, SequenceABC) or len(pair) != 2:
        return False
    return all(_is_id(one, num_blocks) for one in pair)


def _is_id(value: object, num_blocks: int) -> bool:
    """Of NumPy too; a truth value is none."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        return False
    return 0 <= int(value) < num_blocks


def _check_rows(
    op: str,
    table: tuple[str, torch.Tensor],
    index: tuple[str, torch.Tensor],
    out: torch.Tensor | None,
) -> None:
    require_float(op, *table)
    require_ndim(op, *table, 2)
    require_index(op, *index, None)
    if out is not None:
        require_out(op, out, (index[1].shape[0], table[1].shape[1]), table[1].dtype)
        require_apart(op, {"out": out}, dict((table, index)))
