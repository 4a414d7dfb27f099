"""The stand-in's writes of the KV cache, by the address of each element."""

import torch

from syncline.model_ops_rocm.testing.fake_aiter.checks import Functions, abort_unless, need_dense

_HALVES = (torch.bfloat16, torch.float16)


def functions() -> Functions:
    return {
        "reshape_and_cache": reshape_and_cache,
        "reshape_and_cache_flash": reshape_and_cache_flash,
    }


def reshape_and_cache(
    k: torch.Tensor,
    v: torch.Tensor,
    kc: torch.Tensor,
    vc: torch.Tensor,
    slots: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    asm_layout: bool = False,
) -> None:
    """K [NB, kvh, hd / x, bs, x]; V [NB, kvh, hd, bs], or [NB, kvh, bs / x, hd, x] for assembly."""
    _check(k, v, kc, vc, slots, kv_cache_dtype)
    num_blocks, num_heads, _, size, x = kc.shape
    head_dim = k.shape[-1]
    abort_unless(x == 16 // kc.itemsize, "keys are not in chunks of 16 bytes")
    abort_unless(kc.numel() == num_blocks * size * num_heads * head_dim, "keys do not fit")
    abort_unless(vc.numel() == kc.numel(), "values do not fit")
    abort_unless(vc.ndim == (5 if asm_layout else 4), "values are in the other order")
    block, offset, head, dim = _indices(k, slots, size, num_blocks)
    row = block * num_heads + head  # [T, heads, 1]
    key_at = ((row * (head_dim // x) + dim // x) * size + offset) * x + dim % x
    if asm_layout:
        value_at = ((row * (size // x) + offset // x) * head_dim + dim) * x + offset % x
    else:
        value_at = (row * head_dim + dim) * size + offset
    kept = slots >= 0
    kc.view(-1)[key_at[kept]] = k[kept]
    vc.view(-1)[value_at[kept]] = v[kept]


def reshape_and_cache_flash(
    k: torch.Tensor,
    v: torch.Tensor,
    kc: torch.Tensor,
    vc: torch.Tensor,
    slots: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
) -> None:
    """K and V [NB, bs, kvh, hd]; the scales are demanded, whatever the type."""
    _check(k, v, kc, vc, slots, kv_cache_dtype)
    for scale in (k_scale, v_scale):
        need_dense("scale", scale, (torch.float32,))
    num_blocks, size, num_heads, head_dim = kc.shape
    abort_unless(k.shape[1:] == (num_heads, head_dim), "keys do not fit")
    block, offset, head, dim = _indices(k, slots, size, num_blocks)
    at = ((block * size + offset) * num_heads + head) * head_dim + dim
    kept = slots >= 0
    kc.view(-1)[at[kept]] = k[kept]
    vc.view(-1)[at[kept]] = v[kept]


def _check(
    k: torch.Tensor,
    v: torch.Tensor,
    kc: torch.Tensor,
    vc: torch.Tensor,
    slots: torch.Tensor,
    kv_cache_dtype: str,
) -> None:
    abort_unless(kv_cache_dtype == "auto", "this stand-in stores what it is given")
    for name, tensor in (("k", k), ("v", v), ("kc", kc), ("vc", vc)):
        need_dense(name, tensor, _HALVES)
        abort_unless(tensor.dtype == k.dtype, f"{name} has another dtype than k")
    abort_unless(k.shape == v.shape and k.ndim == 3, "k and v are not tokens, heads, dim")
    abort_unless(slots.shape == k.shape[:1] and slots.dtype == torch.int64, "slots are not int64")


def _indices(
    k: torch.Tensor, slots: torch.Tensor, size: int, num_blocks: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Block, offset, head and dimension of every element, to be broadcast together."""
    abort_unless(bool((slots < num_blocks * size).all()), "a write behind the cache")
    slot = slots.clamp(min=0).view(-1, 1, 1)
    head = torch.arange(k.shape[1]).view(1, -1, 1)
    dim = torch.arange(k.shape[2]).view(1, 1, -1)
    return slot // size, slot % size, head, dim
