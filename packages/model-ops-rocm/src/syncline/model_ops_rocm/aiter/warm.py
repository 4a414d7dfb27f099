"""Calls on scratch memory, so that AITER builds what it builds at a first call; knows no op.

Unit: one example of a call. AITER compiles a C++ module when a function of it is first called,
which may take minutes, and has no way to ask for that alone.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import torch

from syncline.model_ops_rocm.contracts import AttentionMetadata

_CACHES: Final = ("k_cache", "v_cache")


def scratch_call(example: Mapping[str, object], device: torch.device) -> dict[str, object]:
    """The same call on zeros: every tensor new, of the example's shape and dtype.

    Of a KV cache one block is enough, where everything then is.
    """
    return {
        name: _scratch(value, device, 1 if name in _CACHES else None)
        for name, value in example.items()
    }


def _scratch(value: object, device: torch.device, num_blocks: int | None = None) -> object:
    if isinstance(value, torch.Tensor):
        shape = list(value.shape)
        if num_blocks is not None:
            shape[0] = min(shape[0], num_blocks)
        return torch.zeros(shape, dtype=value.dtype, device=device)
    if isinstance(value, AttentionMetadata):
        return replace(
            value,
            query_start_loc=_zeros(value.query_start_loc, device),
            seq_lens=_zeros(value.seq_lens, device),
            block_tables=_zeros(value.block_tables, device),
        )
    if type(value) is tuple:
        return tuple(_scratch(one, device) for one in value)
    return value


def _zeros(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
