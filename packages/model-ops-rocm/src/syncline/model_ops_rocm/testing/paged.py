"""A paged cache made from dense sequences, poisoned wherever an op may not look, and the oracle.

Unit: sequences with their own keys and values. Knows no backend.
"""

from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass

import torch

from syncline.model_ops_rocm.contracts import AttentionMetadata


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PagedKV:
    """The same keys and values twice: dense per sequence, and scattered over blocks."""

    k_cache: torch.Tensor  # [NB, K, BS, D], NaN in every slot that no sequence owns
    v_cache: torch.Tensor
    block_tables: torch.Tensor  # int32[R, M], id -7 past the entries in use
    keys: tuple[torch.Tensor, ...]  # [length, K, D] per sequence
    values: tuple[torch.Tensor, ...]


def make_paged_kv(
    lengths: SequenceABC[int],
    shape: tuple[int, int, int],
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    d_major: bool = False,
) -> PagedKV:
    """Random sequences in random blocks; `shape` is (num_kv_heads, block_size, head_dim).

    `d_major` stores the keys as [NB, K, D, BS] and passes the transposed view.
    """
    num_kv_heads, block_size, head_dim = shape
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-length // block_size) for length in lengths]
    num_blocks = sum(counts) + 3  # some that nobody owns
    free = torch.randperm(num_blocks, generator=generator).tolist()
    cache_shape = (num_blocks, num_kv_heads, block_size, head_dim)
    k_cache = torch.full(cache_shape, float("nan"), dtype=dtype)
    v_cache = torch.full(cache_shape, float("nan"), dtype=dtype)
    tables = torch.full((len(lengths), max(counts, default=0) + 2), -7, dtype=torch.int32)
    keys, values = [], []
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        dense = torch.randn((2, length, num_kv_heads, head_dim), generator=generator).to(dtype)
        for index in range(count):
            block_id = free.pop()
            tables[row, index] = block_id
            part = dense[:, index * block_size : (index + 1) * block_size].transpose(1, 2)
            k_cache[block_id, :, : part.shape[2]] = part[0]
            v_cache[block_id, :, : part.shape[2]] = part[1]
        keys.append(dense[0])
        values.append(dense[1])
    return PagedKV(
        k_cache=as_d_major(k_cache) if d_major else k_cache,
        v_cache=v_cache,
        block_tables=tables,
        keys=tuple(keys),
        values=tuple(values),
    )


def as_d_major(k_cache: torch.Tensor) -> torch.Tensor:
    """The same keys by index, in the other storage order."""
    return k_cache.transpose(2, 3).contiguous().transpose(2, 3)


def make_metadata(
    query_lens: SequenceABC[int],
    seq_lens: SequenceABC[int],
    block_tables: torch.Tensor,
    *,
    num_decode_rows: int,
    with_lists: bool = True,
) -> AttentionMetadata:
    """Metadata of a step from plain numbers; `with_lists=False` leaves the host copies out."""
    starts = [0]
    for query_len in query_lens:
        starts.append(starts[-1] + query_len)
    return AttentionMetadata(
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.tensor(list(seq_lens), dtype=torch.int32),
        block_tables=block_tables,
        num_decode_rows=num_decode_rows,
        query_start_list=tuple(starts) if with_lists else None,
        seq_len_list=tuple(seq_lens) if with_lists else None,
    )


def naive_attention(
    q_TNH: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> torch.Tensor:
    """float64 [n, N, D]: causal attention of the last n tokens of one sequence, term by term."""
    return naive_states(q_TNH, keys, values, scale)[0]


def naive_states(
    q_TNH: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    *,
    window: int | None = None,
    sinks_N: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 `naive_attention`, and the logarithm of each softmax's divisor [n, N]."""
    num_queries, num_heads, _ = q_TNH.shape
    num_keys, num_kv_heads, _ = keys.shape
    result = torch.zeros(q_TNH.shape, dtype=torch.float64)
    lse = torch.full((num_queries, num_heads), float("-inf"), dtype=torch.float64)
    for query in range(num_queries):
        stop = num_keys - num_queries + query + 1
        start = 0 if window is None else max(stop - window, 0)
        for head in range(num_heads):
            kv_head = head // (num_heads // num_kv_heads)
            scores = keys[start:stop, kv_head].double() @ q_TNH[query, head].double() * scale
            every = scores if sinks_N is None else torch.cat((scores, sinks_N[head : head + 1]))
            lse[query, head] = torch.logsumexp(every.double(), dim=0)
            weights = torch.exp(scores - lse[query, head])
            result[query, head] = weights @ values[start:stop, kv_head].double()
    return result, lse
