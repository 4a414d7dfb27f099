"""Helpers for tests of ops, here and in packages that use them; no part of any computation."""

from syncline.model_ops_rocm.testing.paged import (
    PagedKV,
    as_d_major,
    make_metadata,
    make_paged_kv,
    naive_attention,
)
from syncline.model_ops_rocm.testing.syncs import HostSyncError, NoHostSync

__all__ = [
    "HostSyncError",
    "NoHostSync",
    "PagedKV",
    "as_d_major",
    "make_metadata",
    "make_paged_kv",
    "naive_attention",
]
