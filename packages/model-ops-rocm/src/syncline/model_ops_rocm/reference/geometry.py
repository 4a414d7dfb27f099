"""The shape of a layer's cache, and the two orders of keys that this backend takes.

Unit: one layer's key and value tensors. Knows no step.

Keys are [NB, K, BS, D] by index. In storage they are that, contiguous, or `d-major`: stored as
[NB, K, D, BS] and passed as its `transpose(2, 3)`. Then the BS keys of a block that share a
dimension are neighbours, and scores are sums of stored rows, as outputs are: nothing is gathered.
"""

from dataclasses import dataclass

import torch

from syncline.model_ops_rocm.arguments import dense as arguments
from syncline.model_ops_rocm.checks import refuse, require_contiguous


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """What the indices of a step depend on besides its metadata."""

    num_blocks: int
    num_kv_heads: int
    group_size: int  # query heads per key/value head
    block_size: int
    head_dim: int
    sums_keys: bool  # scores are summed from stored rows, not multiplied from gathered keys

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads * self.group_size

    @property
    def index_dtype(self) -> torch.dtype:
        """int32, half the bytes to read, while it can number the rows of a cache."""
        longest = max(self.block_size, self.head_dim)
        num_rows = self.num_blocks * self.num_kv_heads * longest
        return torch.int32 if num_rows < 2**31 else torch.int64


def keys_are_d_major(k_cache: torch.Tensor) -> bool:
    return not k_cache.is_contiguous() and k_cache.transpose(2, 3).is_contiguous()


def stored_keys(k_cache: torch.Tensor) -> torch.Tensor:
    """The contiguous tensor whose elements the cache's are: itself, or [NB, K, D, BS]."""
    return k_cache if k_cache.is_contiguous() else k_cache.transpose(2, 3)


def check_caches(op: str, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
    """Two [NB, K, BS, D] of one floating dtype, in an order this backend takes.

    Anything else would be copied to be viewed, and writes to the copy would be lost.
    """
    arguments.check_caches(op, k_cache, v_cache)
    if not (k_cache.is_contiguous() or k_cache.transpose(2, 3).is_contiguous()):
        refuse(
            op,
            "k_cache",
            "be contiguous, or the transpose(2, 3) of a contiguous tensor",
            f"strides {k_cache.stride()}",
        )
    require_contiguous(op, "v_cache", v_cache)
