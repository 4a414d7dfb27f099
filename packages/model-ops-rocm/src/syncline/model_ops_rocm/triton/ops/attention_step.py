"""One call of paged attention by Triton, its arguments checked: what all of its launches are told.

Knows no grid.
"""

from typing import Final, NamedTuple

import torch

from syncline.model_ops_rocm.arguments.attention import PAGED_ATTENTION, AttentionOptions
from syncline.model_ops_rocm.contracts.attention import AttentionMetadata, KVScales
from syncline.model_ops_rocm.kv.pool import KVPool
from syncline.model_ops_rocm.quant import CodeType
from syncline.model_ops_rocm.triton.geometry import power_of_two
from syncline.model_ops_rocm.triton.kv_places import places_of, scales_per
from syncline.model_ops_rocm.triton.launch import IS_INTERPRETED, LAUNCHER, Chosen
from syncline.model_ops_rocm.triton.targets import casts_natively

MIN_BLOCK: Final = 16  # of a matrix instruction
# The code, and how a kernel decodes it: by an instruction, by integers.
_CODES: Final = {
    torch.float8_e4m3fn: (CodeType.E4M3FN, 1, 3),
    torch.float8_e4m3fnuz: (CodeType.E4M3FNUZ, 2, 4),
}


class Cache(NamedTuple):
    pool: KVPool
    k: torch.Tensor
    v: torch.Tensor
    scales: KVScales | None


class Step(NamedTuple):
    """One call, its arguments checked."""

    q: torch.Tensor
    cache: Cache
    meta: AttentionMetadata
    options: AttentionOptions
    out: torch.Tensor

    @property
    def group(self) -> int:
        return self.q.shape[1] // self.cache.pool.num_kv_heads


def longest_of(meta: AttentionMetadata, block_size: int) -> int:
    """Tokens of KV that a row has at most."""
    held = meta.block_tables.shape[1] * block_size
    return min(held, meta.max_seq_len or held)


def chosen_for(step: Step, kind: str) -> Chosen:
    dtype = step.q.dtype
    if step.cache.k.dtype in _CODES and dtype.itemsize == 2 and kind != "invariant":
        # Both kinds of queries become float16.
        kind, dtype = f"{kind}_fp8", torch.bfloat16
    return LAUNCHER.config(PAGED_ATTENTION, dtype, step.q.shape[2], kind)


def _stored(cache: Cache, arch: str) -> tuple[torch.Tensor, torch.Tensor, int]:
    """The caches as a kernel takes them, and how it decodes an element."""
    if cache.k.dtype not in _CODES:
        return cache.k, cache.v, 0
    code, native, integer = _CODES[cache.k.dtype]
    is_native = casts_natively(arch, code) and not IS_INTERPRETED
    k, v = cache.k.view(torch.uint8), cache.v.view(torch.uint8)
    return k, v, native if is_native else integer


def cache_pointers(step: Step, chosen: Chosen, *results: torch.Tensor | None) -> tuple[object, ...]:
    k, v, _ = _stored(step.cache, chosen[0].arch)
    scales = step.cache.scales or (None, None)
    return (step.q, k, v, *results, *scales, step.options.sinks_N)


def constants_of(step: Step, chosen: Chosen) -> dict[str, object]:
    pool = step.cache.pool
    places = places_of(pool)
    block_dim = max(power_of_two(pool.head_dim), MIN_BLOCK)
    return {
        "NUM_KV_HEADS": pool.num_kv_heads,
        "GROUP": step.group,
        "WINDOW": step.options.window or 0,
        "SHAPE": (pool.layout.kernel_block_size, pool.head_dim, block_dim),
        "KEYS": places.keys,
        "VALUES": places.values,
        "CODE": _stored(step.cache, chosen[0].arch)[2],
        "SCALES_PER": scales_per(pool),
    }
