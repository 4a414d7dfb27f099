"""Where a kernel finds an element of a KV cache and its scale, as compile-time numbers.

Unit: one layer's pool. Imports no Triton. `attention_tiles` and `kv` say how the numbers are read.
"""

from functools import lru_cache
from typing import Final, NamedTuple

from syncline.model_ops_rocm.kv.layout import KVOrder, KVScale
from syncline.model_ops_rocm.kv.pool import KVPool

# That kernels read and write, the one they were measured with first.
ORDERS: Final = (KVOrder.HND, *(order for order in KVOrder if order != KVOrder.HND))
# Strides of a block and of a head, then (split, outer, inner) of a slot and of a dimension.
Places = tuple[int, int, int, int, int, int, int, int]


class KVPlaces(NamedTuple):
    """The eight numbers of keys and of values, and the strides of a scale per token."""

    keys: Places
    values: Places
    scale_head: int
    scale_block: int
    scale_slot: int


@lru_cache(maxsize=256)
def places_of(pool: KVPool) -> KVPlaces:
    heads, size, dim = pool.num_kv_heads, pool.layout.kernel_block_size, pool.head_dim
    order, x = pool.layout.order, pool.layout.x
    block, head = heads * size * dim, size * dim
    plain: Places = (block, head, 1, dim, 0, 1, 1, 0)
    d_major: Places = (block, head, 1, 1, 0, 1, size, 0)
    keys = values = plain
    if order == KVOrder.NHD:
        keys = values = (block, dim, 1, heads * dim, 0, 1, 1, 0)
    elif order == KVOrder.HND_D_MAJOR_KEYS:
        keys = d_major
    elif order != KVOrder.HND:
        keys = (block, head, 1, x, 0, x, size * x, 1)
        values = d_major if order == KVOrder.AITER_X else (block, head, x, dim * x, 1, 1, x, 0)
    if order == KVOrder.NHD:
        scale = (1, size * heads, heads)
    elif order == KVOrder.AITER_X:
        scale = (pool.num_slots, size, 1)
    else:
        scale = (size, heads * size, 1)
    return KVPlaces(keys, values, *scale)


def scales_per(pool: KVPool) -> int:
    """What shares a scale, as kernels number it."""
    return {KVScale.NONE: 0, KVScale.TENSOR: 1, KVScale.HEAD: 2, KVScale.TOKEN: 3}[
        pool.layout.scale
    ]
