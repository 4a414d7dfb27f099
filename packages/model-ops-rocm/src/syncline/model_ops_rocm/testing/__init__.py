"""Helpers for tests of ops, here and in packages that use them; no part of any computation."""

from syncline.model_ops_rocm.testing.paged import (
    PagedKV,
    as_d_major,
    make_metadata,
    make_paged_kv,
    naive_attention,
    naive_states,
)
from syncline.model_ops_rocm.testing.stored import (
    SOME_RECIPES,
    Stored,
    allocate,
    block_of,
    encode_whole,
    every_recipe,
    part_of,
    uneven,
)
from syncline.model_ops_rocm.testing.syncs import HostSyncError, NoHostSync

__all__ = [
    "SOME_RECIPES",
    "HostSyncError",
    "NoHostSync",
    "PagedKV",
    "Stored",
    "allocate",
    "as_d_major",
    "block_of",
    "encode_whole",
    "every_recipe",
    "make_metadata",
    "make_paged_kv",
    "naive_attention",
    "naive_states",
    "part_of",
    "uneven",
]
