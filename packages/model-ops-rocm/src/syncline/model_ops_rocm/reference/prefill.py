"""Attention of rows with many query tokens, on top of whatever is already cached.

Unit: a group of rows with the same query and KV length, which is one batched product: samples of
one prompt, prompts of equal length. Whole blocks are gathered, then cut to the KV length, so no
slot past it takes part. Knows nothing of decode rows.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from syncline.model_ops_rocm.checks import refuse
from syncline.model_ops_rocm.contracts.attention import AttentionMetadata
from syncline.model_ops_rocm.reference.geometry import Geometry, keys_are_d_major, stored_keys

# Bounds the mask and the score tile of a long chunk on a long context.
_QUERY_TOKENS = 512
# Bounds the gathered keys of one group.
_GROUP_TOKENS = 16_384


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PrefillGroup:
    """Rows with `query_len` query tokens each, the last of `seq_len` tokens of KV."""

    query_len: int
    seq_len: int
    starts: tuple[int, ...]  # first query token of each row
    pair_index: torch.Tensor  # int64[rows * K * blocks], (block, kv head) pairs


def plan_prefill(meta: AttentionMetadata, geometry: Geometry) -> tuple[PrefillGroup, ...]:
    """Groups of the rows beyond the decode rows that have something to attend."""
    starts, lens = meta.query_start_list, meta.seq_len_list
    if starts is None or lens is None:
        return ()
    alike: dict[tuple[int, int], list[int]] = {}
    for row in range(meta.num_decode_rows, len(lens)):
        query_len = starts[row + 1] - starts[row]
        if query_len == 0 or lens[row] == 0:
            continue
        if not 0 < query_len <= lens[row]:
            refuse(
                "paged_attention",
                f"meta.query_start_list of row {row}",
                f"give 0 to {lens[row]} query tokens, the row's seq_len",
                query_len,
            )
        alike.setdefault((query_len, lens[row]), []).append(row)
    groups = []
    for (query_len, seq_len), rows in alike.items():
        step = max(1, _GROUP_TOKENS // seq_len)
        for first in range(0, len(rows), step):
            some = rows[first : first + step]
            groups.append(
                PrefillGroup(
                    query_len=query_len,
                    seq_len=seq_len,
                    starts=tuple(starts[row] for row in some),
                    pair_index=_pairs(meta.block_tables, some, seq_len, geometry),
                )
            )
    return tuple(groups)


def _pairs(
    block_tables: torch.Tensor, rows: list[int], seq_len: int, geometry: Geometry
) -> torch.Tensor:
    num_blocks = -(-seq_len // geometry.block_size)
    device = block_tables.device
    ids = torch.tensor(rows, dtype=torch.int64, device=device)
    blocks = block_tables[:, :num_blocks].index_select(0, ids).long()
    heads = torch.arange(geometry.num_kv_heads, device=device).unsqueeze(1)
    return (blocks.unsqueeze(1) * geometry.num_kv_heads + heads).view(-1)


def prefill_attention(
    q_TND: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    group: PrefillGroup,
    *,
    scale: float,
    out: torch.Tensor,
) -> None:
    """Write the rows of one group into `out` [T, N, D]."""
    num_rows, query_len = len(group.starts), group.query_len
    keys = _gather(k_cache, group)
    values = _gather(v_cache, group)
    queries = torch.stack([q_TND[start : start + query_len] for start in group.starts])
    queries = queries.transpose(1, 2)  # [rows, N, query_len, D]
    is_grouped = queries.shape[1] != keys.shape[1]
    if query_len == group.seq_len:
        attended = F.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, scale=scale, enable_gqa=is_grouped
        )
    else:
        attended = torch.empty_like(queries)
        cached = group.seq_len - query_len
        for start in range(0, query_len, _QUERY_TOKENS):
            stop = min(start + _QUERY_TOKENS, query_len)
            visible = cached + stop
            attended[:, :, start:stop] = F.scaled_dot_product_attention(
                queries[:, :, start:stop],
                keys[:, :, :visible],
                values[:, :, :visible],
                attn_mask=_causal_mask(stop - start, visible, q_TND.device),
                scale=scale,
                enable_gqa=is_grouped,
            )
    rows = attended.transpose(1, 2)
    for row in range(num_rows):
        out[group.starts[row] : group.starts[row] + query_len] = rows[row]


def _gather(cache: torch.Tensor, group: PrefillGroup) -> torch.Tensor:
    """[rows, K, seq_len, D], cut from whole blocks."""
    _, num_kv_heads, block_size, head_dim = cache.shape
    stored = stored_keys(cache).view(-1, block_size * head_dim)
    blocks = stored.index_select(0, group.pair_index)
    if keys_are_d_major(cache):
        blocks = blocks.view(-1, head_dim, block_size).transpose(1, 2)
    tokens = blocks.reshape(len(group.starts), num_kv_heads, -1, head_dim)
    return tokens[:, :, : group.seq_len]


def _causal_mask(num_queries: int, num_keys: int, device: torch.device) -> torch.Tensor | None:
    """True where a query may look; the last query sees every key. None if all of them do."""
    if num_queries == 1:
        return None
    ones = torch.ones((num_queries, num_keys), dtype=torch.bool, device=device)
    return ones.tril_(num_keys - num_queries)
