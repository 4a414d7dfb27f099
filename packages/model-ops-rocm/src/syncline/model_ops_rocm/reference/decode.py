"""Decode attention in PyTorch: one query token per row, rows in buckets of similar length.

Unit: a bucket of rows, padded to a whole number of blocks. Values are not gathered: `embedding_bag`
sums weight * row over slot indices, one bag per (row, head), reading each value once from memory.
Scores come from `scores`, in the same way if keys are stored d-major.

What cannot leak: an index beyond a row's length names the row's own first block or slot, so nothing
in an unused block or in the last block's tail is ever summed, and scores of it are overwritten.
"""

from dataclasses import dataclass

import torch

from syncline.model_ops_rocm.contracts.attention import AttentionMetadata
from syncline.model_ops_rocm.reference.buckets import bucket_rows
from syncline.model_ops_rocm.reference.geometry import Geometry
from syncline.model_ops_rocm.reference.scores import gathered_scores, summed_scores


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bags:
    """Rows of a cache to sum: bag i is index[starts[i]:starts[i + 1]]."""

    index: torch.Tensor  # int32 or int64
    starts: torch.Tensor  # the same dtype


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecodeBucket:
    """The indices of some rows, in tokens padded to `width`."""

    num_rows: int
    width: int
    key_bags: Bags | None  # of D rows each, one per (row, head, block); None: keys are gathered
    pair_index: torch.Tensor  # int[num_rows, K * width / BS], (block, kv head) pairs
    value_bags: Bags  # of `width` rows each, one per (row, head)
    masked_from: int  # every row attends all of [0, masked_from)
    mask: torch.Tensor | None  # bool[num_rows, 1, width - masked_from], True where not attended


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecodePlan:
    """All decode rows of a step; the buckets hold the rows of `order`, or all of them if None."""

    num_rows: int
    buckets: tuple[DecodeBucket, ...]
    order: torch.Tensor | None  # int64, the rows of the buckets in turn; other rows are zero
    is_padding: torch.Tensor | None  # bool[num_rows, 1, 1], rows to zero after the fact


def plan_decode(meta: AttentionMetadata, geometry: Geometry) -> DecodePlan:
    """The indices of a step's decode rows, from its host lists if it has them."""
    num_rows = meta.num_decode_rows
    tables = meta.block_tables[:num_rows].to(geometry.index_dtype)
    lengths = meta.seq_lens[:num_rows].to(geometry.index_dtype)
    if meta.seq_len_list is None:
        return _plan_whole_width(tables, lengths, geometry)
    block_size = geometry.block_size
    lens = [meta.seq_len_list[row] for row in range(num_rows)]
    row_buckets = bucket_rows([-(-length // block_size) for length in lens])
    order = None
    if len(row_buckets) != 1 or len(row_buckets[0].rows) != num_rows:
        ids = [row for bucket in row_buckets for row in bucket.rows]
        order = torch.tensor(ids, dtype=torch.int64, device=tables.device)
        tables, lengths = tables.index_select(0, order), lengths.index_select(0, order)
    buckets = []
    start = 0
    for bucket in row_buckets:
        stop = start + len(bucket.rows)
        buckets.append(
            _plan_bucket(
                tables[start:stop, : bucket.num_blocks],
                lengths[start:stop],
                geometry,
                shortest=min(lens[row] for row in bucket.rows),
            )
        )
        start = stop
    return DecodePlan(num_rows=num_rows, buckets=tuple(buckets), order=order, is_padding=None)


def _plan_whole_width(
    tables: torch.Tensor, lengths: torch.Tensor, geometry: Geometry
) -> DecodePlan:
    """Without a look at any value: a replay with other lengths runs the same kernels."""
    num_rows, max_blocks = tables.shape
    is_padding = lengths == 0
    # The first entry stands in for unattended slots, and a padding row's may be anything.
    tables = torch.cat((tables[:, :1].masked_fill(is_padding.unsqueeze(1), 0), tables[:, 1:]), 1)
    buckets: tuple[DecodeBucket, ...] = ()
    if num_rows and max_blocks:
        buckets = (_plan_bucket(tables, lengths, geometry, shortest=0),)
    return DecodePlan(
        num_rows=num_rows, buckets=buckets, order=None, is_padding=is_padding.view(-1, 1, 1)
    )


def _plan_bucket(
    tables: torch.Tensor, lengths: torch.Tensor, geometry: Geometry, *, shortest: int
) -> DecodeBucket:
    """Indices for block ids [rows, blocks] and lengths [rows]; `shortest` is a lower bound."""
    num_rows, num_blocks = tables.shape
    num_kv_heads, block_size = geometry.num_kv_heads, geometry.block_size
    width = num_blocks * block_size
    positions = torch.arange(width, dtype=tables.dtype, device=tables.device)
    attended = positions < lengths.unsqueeze(1)  # bool[rows, width]
    # A block is used if its first token is attended.
    blocks = torch.where(attended[:, ::block_size], tables, tables[:, :1])
    heads = torch.arange(num_kv_heads, dtype=tables.dtype, device=tables.device).unsqueeze(1)
    pairs = blocks.unsqueeze(1) * num_kv_heads + heads  # [rows, K, blocks]
    slots = (pairs * block_size).unsqueeze(3) + positions[:block_size]
    slots = slots.view(num_rows, num_kv_heads, width)
    if shortest < width:
        slots = torch.where(attended.unsqueeze(1), slots, slots[..., :1])
    key_bags = None
    if geometry.sums_keys:
        dims = torch.arange(geometry.head_dim, dtype=tables.dtype, device=tables.device)
        rows = (pairs * geometry.head_dim).unsqueeze(3) + dims
        key_bags = _bags(rows.view(num_rows, num_kv_heads, -1), geometry, geometry.head_dim)
    return DecodeBucket(
        num_rows=num_rows,
        width=width,
        key_bags=key_bags,
        pair_index=pairs.view(num_rows, num_kv_heads * num_blocks),
        value_bags=_bags(slots, geometry, width),
        masked_from=shortest,
        mask=~attended[:, shortest:].unsqueeze(1) if shortest < width else None,
    )


def _bags(index: torch.Tensor, geometry: Geometry, bag_size: int) -> Bags:
    """Bags over [rows, K, ...], once per query head of each key/value head."""
    num_rows, num_kv_heads, length = index.shape
    shape = (num_rows, num_kv_heads, geometry.group_size, length)
    flat = index.unsqueeze(2).expand(shape).reshape(-1)
    starts = torch.arange(0, flat.shape[0], bag_size, dtype=index.dtype, device=index.device)
    return Bags(index=flat, starts=starts)


def decode_attention(
    q_RND: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    plan: DecodePlan,
    scale: float,
) -> torch.Tensor:
    """Attention of q [R, N, D], one token per row; a new [R, N, D] of q's dtype."""
    shape = q_RND.shape
    if not plan.buckets:
        return torch.zeros(shape, dtype=q_RND.dtype, device=q_RND.device)
    ordered = q_RND if plan.order is None else q_RND.index_select(0, plan.order)
    scaled = (ordered.float() * scale).contiguous()
    parts = []
    start = 0
    for bucket in plan.buckets:
        stop = start + bucket.num_rows
        parts.append(_attend(scaled[start:stop], k_cache, v_cache, bucket))
        start = stop
    result = parts[0] if len(parts) == 1 else torch.cat(parts)
    if plan.order is not None:
        zeros = torch.zeros(shape, dtype=q_RND.dtype, device=q_RND.device)
        return zeros.index_copy_(0, plan.order, result)
    return result if plan.is_padding is None else result.masked_fill_(plan.is_padding, 0.0)


def _attend(
    q_RND: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, bucket: DecodeBucket
) -> torch.Tensor:
    """One bucket; q is float32, scaled and contiguous."""
    if bucket.key_bags is None:
        scores = gathered_scores(q_RND, k_cache, bucket.pair_index)
    else:
        scores = summed_scores(q_RND, k_cache, bucket.key_bags.index, bucket.key_bags.starts)
    if bucket.mask is not None:
        scores[:, :, bucket.masked_from :].masked_fill_(bucket.mask, float("-inf"))
    weights = torch.softmax(scores, dim=-1).to(v_cache.dtype)
    summed = torch.embedding_bag(
        v_cache.view(-1, v_cache.shape[3]),
        bucket.value_bags.index,
        bucket.value_bags.starts,
        per_sample_weights=weights.view(-1),
    )[0]
    return summed.view(q_RND.shape)
