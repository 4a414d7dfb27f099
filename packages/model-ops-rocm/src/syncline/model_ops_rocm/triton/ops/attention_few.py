"""Decode rows of paged attention that are few, where the tables have them: sm_90.

Which rows these are depends on capture-time numbers alone. The tensor memory accelerator reads the
cache by descriptors, which are made anew for each call and lie in the launch itself, so that a
recorded one replays them. What it cannot read stays with `attention_decode`, as all other rows do.
"""

from typing import Final

import torch

from syncline.model_ops_rocm.kv.layout import KVOrder, KVScale
from syncline.model_ops_rocm.kv.pool import KVPool
from syncline.model_ops_rocm.triton.configs.attention import few_kind, few_kinds
from syncline.model_ops_rocm.triton.geometry import power_of_two
from syncline.model_ops_rocm.triton.kernels.attention_few import few_decode_kernel
from syncline.model_ops_rocm.triton.kv_places import places_of
from syncline.model_ops_rocm.triton.launch import (
    IS_INTERPRETED,
    LAUNCHER,
    can_be_tiled,
    overlaps,
    tiled,
)
from syncline.model_ops_rocm.triton.ops.attention_step import Step, chosen_for, longest_of

_PAGE: Final = 64  # tokens that are read at once
_HEAD_DIM: Final = 128
_MIN_COLUMNS: Final = 8  # of an instruction
_MAX_COLUMNS: Final = 16  # heads of a group, times the queries of a row


def kinds_of(step: Step) -> list[str]:
    """The kind of row for the step's decode rows, if they are few, and can be read so.

    Where they are prepared: all that some number of rows may have.
    """
    if not _can_be_read(step):
        return []
    pool, num_columns = step.cache.pool, _num_columns(step)
    if LAUNCHER.is_preparing:
        return few_kinds(pool.num_kv_heads, num_columns)
    longest = longest_of(step.meta, pool.layout.kernel_block_size)
    kind = few_kind(step.meta.num_decode_rows, pool.num_kv_heads, longest, num_columns)
    return [] if kind is None else [kind]


def attend(step: Step, kind: str) -> None:
    """The decode rows of a step that are of this kind."""
    pool, meta, lse, sinks = step.cache.pool, step.meta, step.options.lse_TN, step.options.sinks_N
    chosen, places = chosen_for(step, kind), places_of(pool).keys
    num_ctas = chosen[1].num_ctas
    LAUNCHER.launch(
        few_decode_kernel,
        (meta.num_decode_rows * pool.num_kv_heads,),
        chosen,
        (
            *(_pages(cache, pool, num_ctas) for cache in (step.cache.k, step.cache.v)),
            *(step.q, step.out),
            # What is not read may be anything.
            *(step.q if lse is None else lse, step.q if sinks is None else sinks),
            *(meta.seq_lens, meta.block_tables, step.options.scale, step.cache.k.shape[0]),
            *step.q.stride(),
            *step.out.stride(),
            *((0, 0) if lse is None else lse.stride()),
            *meta.block_tables.stride(),
            meta.block_tables.shape[1] * pool.layout.kernel_block_size,
        ),
        {
            "NUM_CTAS": num_ctas,
            "NUM_KV_HEADS": pool.num_kv_heads,
            "GROUP": step.group,
            "Q_LEN": meta.decode_query_len,
            "HAS_LSE": lse is not None,
            "HAS_SINKS": sinks is not None,
            "OVERLAP": overlaps(chosen[1]),
            "WINDOW": step.options.window or 0,
            "SHAPE": (pool.layout.kernel_block_size, pool.head_dim),
            "PLACES": (places[0], places[1], places[3]),
            "COLUMNS": max(power_of_two(_num_columns(step)), _MIN_COLUMNS),
        },
    )


def _num_columns(step: Step) -> int:
    return step.group * step.meta.decode_query_len


def _can_be_read(step: Step) -> bool:
    if IS_INTERPRETED or LAUNCHER.arch != "sm_90":
        return False
    pool, dtype = step.cache.pool, step.cache.k.dtype
    return (
        dtype in (torch.bfloat16, torch.float16)
        and pool.layout.scale == KVScale.NONE
        and pool.layout.order in (KVOrder.HND, KVOrder.NHD)
        and pool.layout.kernel_block_size % _PAGE == 0
        and pool.head_dim == _HEAD_DIM
        and _num_columns(step) <= _MAX_COLUMNS
        and all(_is_readable(cache, pool) for cache in (step.cache.k, step.cache.v))
    )


def _is_readable(cache: torch.Tensor, pool: KVPool) -> bool:
    return (LAUNCHER.is_preparing or cache.numel() > 0) and can_be_tiled(cache, _width(pool))


def _pages(cache: torch.Tensor, pool: KVPool, num_ctas: int) -> object:
    """The cache as rows, of a head's slots or of a slot's heads, in tiles of a page of a head."""
    width = _width(pool)
    shape, tile = (cache.numel() // width, width), (_PAGE, pool.head_dim)
    return tiled(cache, shape, width, tile, num_ctas=num_ctas)


def _width(pool: KVPool) -> int:
    return pool.head_dim * (pool.num_kv_heads if pool.layout.order == KVOrder.NHD else 1)
