"""Tensors as AITER stores them, read by address: written apart from this package's layouts.

Unit: one stored tensor. P elements are 16 bytes.
"""

import torch


def unshuffled(weight: torch.Tensor, rows: int = 16) -> torch.Tensor:
    """[..., N, K] in logical order, from tiles of `rows` rows x 16 bytes."""
    *_, num_rows, num_columns = weight.shape
    chunk = 16 // weight.itemsize
    n = torch.arange(num_rows).unsqueeze(1)
    k = torch.arange(num_columns)
    tile = n // rows * (num_columns // chunk) + k // chunk
    address = (tile * rows + n % rows) * chunk + k % chunk
    raw = _raw(weight).reshape(-1, num_rows * num_columns)
    return raw[:, address].reshape(weight.shape).view(weight.dtype)


def keys_by_token(k_cache: torch.Tensor) -> torch.Tensor:
    """K [NB, kvh, hd / x, bs, x] as [NB * bs, kvh, hd]."""
    blocks, heads, chunks, size, x = k_cache.shape
    moved = _raw(k_cache).permute(0, 3, 1, 2, 4).reshape(blocks * size, heads, chunks * x)
    return moved.contiguous().view(k_cache.dtype)


def values_by_token(v_cache: torch.Tensor) -> torch.Tensor:
    """V [NB, kvh, hd, bs], or [NB, kvh, bs / x, hd, x], as [NB * bs, kvh, hd]."""
    raw = _raw(v_cache)
    if v_cache.ndim == 4:
        blocks, heads, head_dim, size = v_cache.shape
        moved = raw.permute(0, 3, 1, 2)
    else:
        blocks, heads, chunks, head_dim, x = v_cache.shape
        size = chunks * x
        moved = raw.permute(0, 2, 4, 1, 3)
    return moved.reshape(blocks * size, heads, head_dim).contiguous().view(v_cache.dtype)


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """The same storage as integers: PyTorch indexes no fp8."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.itemsize])
