"""Writing and reading tokens of a pool in any layout, in PyTorch: the oracle for kernels.

Unit: tokens at slots. Reads the addresses of the layout, so that a kernel that agrees with it
agrees with the layout. Not made for speed, and it looks at the slots on the host.
"""

from collections.abc import Mapping
from typing import Final

import torch

from syncline.model_ops_rocm.checks import refuse, require_dtype, require_index, require_shape
from syncline.model_ops_rocm.kv.layout import KVScale, Side
from syncline.model_ops_rocm.kv.pool import KVPool
from syncline.model_ops_rocm.layouts.base import as_bits
from syncline.model_ops_rocm.quant import FP8_MAX, per_token_fp8_encode

_WRITE = "write_tokens"
_READ = "read_tokens"
_SIDES: Final[tuple[Side, Side]] = ("k", "v")


def write_tokens(
    pool: KVPool,
    tensors: Mapping[str, torch.Tensor],
    k_TKH: torch.Tensor,
    v_TKH: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Store k and v [T, K, D] at their slots; -1 writes nothing.

    Without scales they have the layout's dtype and are stored as they are. A scale per token is
    amax / max of its elements, 1 for zeros, and is stored with them; scales per tensor and per head
    are read from `tensors` and must be positive. Codes are x / scale, clamped. ValueError or
    LayoutError with nothing written.
    """
    pool.check(tensors)
    slots = _checked_slots(_WRITE, pool, slot_mapping)
    shape = (slots.shape[0], pool.num_kv_heads, pool.head_dim)
    sources = {"k": k_TKH, "v": v_TKH}
    for name, source in sources.items():
        require_shape(_WRITE, name, source, shape)
        if pool.layout.scale == KVScale.NONE:
            require_dtype(_WRITE, name, source, pool.layout.dtype)
        elif not source.is_floating_point() or source.itemsize < 2:
            refuse(_WRITE, name, "be of at least 16-bit floating point", source.dtype)
    _check_given_scales(pool, tensors)
    kept = (slots >= 0).nonzero().squeeze(1)
    slots = slots[kept]
    if bool((slots.sort().values.diff() == 0).any()):
        refuse(_WRITE, "slot_mapping", "name each slot once", slot_mapping.tolist())
    store_tokens(pool, tensors, {name: source[kept] for name, source in sources.items()}, slots)


def store_tokens(
    pool: KVPool,
    tensors: Mapping[str, torch.Tensor],
    sources: Mapping[str, torch.Tensor],
    slots: torch.Tensor,
) -> None:
    """`write_tokens` of checked arguments, none of them -1; reads no value on the host."""
    for side in _SIDES:
        codes = _encoded(pool, tensors, side, sources[side], slots)
        places = pool.addresses(side, slots)
        as_bits(tensors[side]).view(-1)[places] = as_bits(codes)


def read_tokens(
    pool: KVPool, tensors: Mapping[str, torch.Tensor], slots: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """k and v [T, K, D] at slots: as stored without scales, else float32 code * scale."""
    pool.check(tensors)
    wanted = _checked_slots(_READ, pool, slots)
    if bool((wanted < 0).any()):
        refuse(_READ, "slots", f"be in [0, {pool.num_slots})", -1)
    read = []
    for side in _SIDES:
        bits = as_bits(tensors[side]).view(-1)[pool.addresses(side, wanted)]
        codes = bits.view(pool.layout.dtype)
        if pool.layout.scale == KVScale.NONE:
            read.append(codes)
        else:
            read.append(codes.float() * _scales(pool, tensors, side, wanted))
    return read[0], read[1]


def logical_caches(
    pool: KVPool, tensors: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """All keys and values [NB, K, BS, D] as numbers, which the `torch` attention takes."""
    slots = torch.arange(pool.num_slots, device=tensors["k"].device)
    num_kernel_blocks, num_kv_heads, size, head_dim = pool.logical_shape
    k, v = (
        side.view(num_kernel_blocks, size, num_kv_heads, head_dim).transpose(1, 2).contiguous()
        for side in read_tokens(pool, tensors, slots)
    )
    return k, v


def _encoded(
    pool: KVPool,
    tensors: Mapping[str, torch.Tensor],
    side: Side,
    source: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """The elements to store; a scale per token is written on the way."""
    if pool.layout.scale == KVScale.NONE:
        return source
    if pool.layout.scale == KVScale.TOKEN:
        codes, scales = per_token_fp8_encode(source.float(), pool.layout.dtype)
        stored = _by_index(pool, tensors, side)
        size = pool.layout.kernel_block_size
        stored[slots // size, :, slots % size] = scales.squeeze(-1)
        return codes
    limit = FP8_MAX[pool.layout.dtype]
    scaled = source.float() / _scales(pool, tensors, side, slots)
    return scaled.clamp_(-limit, limit).to(pool.layout.dtype)


def _scales(
    pool: KVPool, tensors: Mapping[str, torch.Tensor], side: Side, slots: torch.Tensor
) -> torch.Tensor:
    """Of each token and head, [T, K, 1], or what broadcasts to it."""
    scale = tensors[f"{side}_scale"]
    if pool.layout.scale == KVScale.TOKEN:
        size = pool.layout.kernel_block_size
        return _by_index(pool, tensors, side)[slots // size, :, slots % size].unsqueeze(-1)
    return scale.view(1, -1, 1)


def _by_index(pool: KVPool, tensors: Mapping[str, torch.Tensor], side: Side) -> torch.Tensor:
    """The scales per token as [NB, K, BS], a view."""
    return pool.layout.scale_digits().in_logical_order(tensors[f"{side}_scale"], pool.scale_shape)


def _check_given_scales(pool: KVPool, tensors: Mapping[str, torch.Tensor]) -> None:
    """Scales that the caller set must be numbers to divide by."""
    if pool.layout.scale not in (KVScale.TENSOR, KVScale.HEAD):
        return
    for name in ("k_scale", "v_scale"):
        scale = tensors[name]
        if not bool((scale.isfinite() & (scale > 0)).all()):
            refuse(_WRITE, name, "be finite and positive", scale.tolist())


def _checked_slots(op: str, pool: KVPool, slots: torch.Tensor) -> torch.Tensor:
    require_index(op, "slots", slots, None)
    wide = slots.long()
    if wide.numel():
        lowest, highest = (int(bound) for bound in wide.aminmax())
        if lowest < -1 or highest >= pool.num_slots:
            limit = f"be -1 or in [0, {pool.num_slots})"
            refuse(op, "slots", limit, f"values from {lowest} to {highest}")
    return wide
