"""Paged attention with all that the contract has, in PyTorch: every KV layout, window, sinks, LSE.

Unit: some rows of a step, padded to one number of queries and of KV blocks. No value is read on the
host, so that a recorded step can be replayed with others. Made to be read, not for speed: `decode`
and `prefill` are what a CPU runs for a plain call.
"""

from collections.abc import Iterator
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass

import torch

from syncline.model_ops_rocm.arguments.attention import AttentionOptions
from syncline.model_ops_rocm.contracts.attention import AttentionMetadata, KVScales
from syncline.model_ops_rocm.kv.layout import KVScale, Side
from syncline.model_ops_rocm.kv.pool import KVPool
from syncline.model_ops_rocm.layouts.base import as_bits

# Of the batch-invariant variant: queries and tokens of a tile, both at absolute multiples.
_TILE_QUERIES = 16
_TILE_TOKENS = 64


_LOWEST = -1.0e30
# Keys and values [S, K, D] and the scales of both [S, K].
Numbers = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredKV:
    """One layer's cache as it is stored."""

    pool: KVPool
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    scales: KVScales | None
    query_dtype: torch.dtype

    def numbers(self, slots: torch.Tensor, exists: torch.Tensor) -> Numbers:
        """float32 of int64 slots [S], as stored, and their scales; zeros where nothing exists."""
        keys, values = self._side("k", slots, exists), self._side("v", slots, exists)
        return keys[0], values[0], keys[1], values[1]

    def _side(
        self, side: Side, slots: torch.Tensor, exists: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cache = self.k_cache if side == "k" else self.v_cache
        bits = as_bits(cache).view(-1)[self.pool.addresses(side, slots)]
        numbers = bits.view(cache.dtype).float()
        # Of a slot that no token has, nothing may remain, NaN included.
        numbers = torch.where(exists.view(-1, 1, 1), numbers, 0.0)
        return numbers, torch.where(exists.view(-1, 1), self._scale(side, slots), 0.0)

    def _scale(self, side: Side, slots: torch.Tensor) -> torch.Tensor:
        """float32 [S, K]."""
        shape = (slots.shape[0], self.pool.num_kv_heads)
        if self.scales is None:
            return torch.ones(shape, device=slots.device)
        scale = self.scales[0 if side == "k" else 1]
        if self.pool.layout.scale != KVScale.TOKEN:
            return scale.view(1, -1).expand(shape)
        size = self.pool.layout.kernel_block_size
        digits = self.pool.layout.scale_digits()
        logical = digits.in_logical_order(scale, self.pool.scale_shape)
        return logical[slots // size, :, slots % size]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """Rows of a step; each has at most `query_len` queries and `num_blocks` blocks."""

    starts: torch.Tensor  # int64[R], first query
    query_lens: torch.Tensor  # int64[R]
    seq_lens: torch.Tensor  # int64[R]
    block_tables: torch.Tensor  # int64[R, >= num_blocks]
    query_len: int
    num_blocks: int

    def each(self) -> Iterator["Rows"]:
        """The rows one by one."""
        for row in range(self.starts.shape[0]):
            chosen = slice(row, row + 1)
            yield Rows(
                starts=self.starts[chosen],
                query_lens=self.query_lens[chosen],
                seq_lens=self.seq_lens[chosen],
                block_tables=self.block_tables[chosen],
                query_len=self.query_len,
                num_blocks=self.num_blocks,
            )

    def slots(self, block_size: int) -> torch.Tensor:
        """int64[R, num_blocks * block_size]; 0 for tokens past a row's last."""
        positions = torch.arange(self.num_blocks * block_size, device=self.starts.device)
        blocks = self.block_tables[:, : self.num_blocks].repeat_interleave(block_size, dim=1)
        slots = blocks * block_size + positions % block_size
        return torch.where(positions < self.seq_lens.unsqueeze(1), slots, 0)


def rows_of(meta: AttentionMetadata, block_size: int) -> list[Rows]:
    """The rows of a step in groups: the decode rows, and the others, each alone if lists are."""
    starts, num_decode = meta.query_start_loc.long(), meta.num_decode_rows
    widest = meta.block_tables.shape[1]
    if meta.max_seq_len is not None:
        widest = min(widest, -(-meta.max_seq_len // block_size))
    query_lens, seq_lens = starts.diff(), meta.seq_lens.long()
    groups: list[tuple[slice, int, int]] = []
    if meta.seq_len_list is None or meta.query_start_list is None:
        if num_decode:
            groups.append((slice(0, num_decode), meta.decode_query_len, widest))
        if num_decode < seq_lens.shape[0]:
            groups.append((slice(num_decode, None), meta.max_query_len or 1, widest))
    else:
        listed = meta.query_start_list
        for row, length in enumerate(meta.seq_len_list):
            query_len = listed[row + 1] - listed[row]
            groups.append((slice(row, row + 1), query_len, -(-length // block_size)))
    return [
        Rows(
            starts=starts[:-1][chosen],
            query_lens=query_lens[chosen],
            seq_lens=seq_lens[chosen],
            block_tables=meta.block_tables[chosen].long(),
            query_len=query_len,
            num_blocks=num_blocks,
        )
        for chosen, query_len, num_blocks in groups
        if query_len and num_blocks
    ]


def full_attention(
    q_TNH: torch.Tensor,
    cache: StoredKV,
    meta: AttentionMetadata,
    options: AttentionOptions,
    out: torch.Tensor,
) -> None:
    """Write all of `out` [T, N, D], and the lse if it is asked for."""
    num_tokens, num_heads, head_dim = q_TNH.shape
    # One row more than there are tokens: what no token asked for goes there.
    results = torch.zeros((num_tokens + 1, num_heads, head_dim), device=q_TNH.device)
    lse = torch.full((num_tokens + 1, num_heads), float("-inf"), device=q_TNH.device)
    attend = _attend_in_tiles if options.batch_invariant else _attend
    for rows in rows_of(meta, cache.pool.layout.kernel_block_size):
        for one in rows.each() if options.batch_invariant else (rows,):
            attend(q_TNH, cache, one, options, results, lse)
    out.copy_(results[:num_tokens])
    if options.lse_TN is not None:
        options.lse_TN.copy_(lse[:num_tokens])


def _attend(
    q_TNH: torch.Tensor,
    cache: StoredKV,
    rows: Rows,
    options: AttentionOptions,
    results: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """All queries of the rows against all of their tokens."""
    slots = rows.slots(cache.pool.layout.kernel_block_size)
    num_rows, width = slots.shape
    num_heads = cache.pool.num_kv_heads
    tokens = torch.arange(width, device=slots.device)
    offsets = torch.arange(rows.query_len, device=slots.device)
    places = _places(rows, offsets, q_TNH.shape[0])
    positions = (rows.seq_lens - rows.query_lens).unsqueeze(1) + offsets
    exists = (tokens < rows.seq_lens.unsqueeze(1)).view(-1)
    keys, values, k_scale, v_scale = (
        part.view(num_rows, width, *part.shape[1:])
        for part in cache.numbers(slots.view(-1), exists)
    )
    queries = q_TNH[places.clamp(max=q_TNH.shape[0] - 1)].float()
    queries = queries.view(*places.shape, num_heads, -1, q_TNH.shape[2])
    scores = torch.einsum("rlkgd,rtkd->rkglt", queries, keys) * options.scale
    scores *= k_scale.permute(0, 2, 1)[:, :, None, None]
    is_seen = exists.view(num_rows, 1, width) & (tokens <= positions.unsqueeze(2))
    if options.window is not None:
        is_seen &= tokens > positions.unsqueeze(2) - options.window
    scores = scores.masked_fill(~is_seen[:, None, None], float("-inf"))
    sinks = _sinks(options, cache).expand(*scores.shape[:4], 1)
    total = torch.logsumexp(torch.cat((scores, sinks), dim=-1), dim=-1, keepdim=True)
    # A row that sees nothing weighs nothing: -inf - -inf is no weight.
    weights = torch.exp(scores - torch.where(total == float("-inf"), 0.0, total))
    per_value, per_head = _split_scale(cache, v_scale)
    weights = (weights * per_value.permute(0, 2, 1)[:, :, None, None]).to(q_TNH.dtype).float()
    means = torch.einsum("rkglt,rtkd->rlkgd", weights, values) * per_head[:, :1, :, None, None]
    results[places.view(-1)] = means.flatten(2, 3).flatten(0, 1)
    lse[places.view(-1)] = total.squeeze(-1).permute(0, 3, 1, 2).flatten(2, 3).flatten(0, 1)


def _attend_in_tiles(
    q_TNH: torch.Tensor,
    cache: StoredKV,
    rows: Rows,
    options: AttentionOptions,
    results: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """One row, in products of one shape, each token of the sequence at its own place in them.

    Which tokens are computed in this step changes what else a tile holds, never the tile.
    """
    slots = rows.slots(cache.pool.layout.kernel_block_size).view(-1)
    slots = torch.nn.functional.pad(slots, (0, -slots.shape[0] % _TILE_TOKENS))
    exists = torch.arange(slots.shape[0], device=slots.device) < rows.seq_lens
    tiles = [
        cache.numbers(*part)
        for part in zip(slots.view(-1, _TILE_TOKENS), exists.view(-1, _TILE_TOKENS), strict=True)
    ]
    cached = rows.seq_lens - rows.query_lens
    for number in range((rows.query_len + _TILE_QUERIES - 2) // _TILE_QUERIES + 1):
        first = (cached // _TILE_QUERIES + number) * _TILE_QUERIES
        positions = first + torch.arange(_TILE_QUERIES, device=slots.device)
        places = _places(rows, positions - cached, q_TNH.shape[0]).view(-1)
        is_query = (places < q_TNH.shape[0]).view(-1, 1, 1)
        queries = q_TNH[places.clamp(max=q_TNH.shape[0] - 1)]
        queries = torch.where(is_query, queries.float(), 0.0)
        means, total = _walk(queries, cache, tiles, positions, options)
        results[places], lse[places] = means, total


def _walk(
    q_LNH: torch.Tensor,
    cache: StoredKV,
    tiles: SequenceABC[Numbers],
    positions: torch.Tensor,
    options: AttentionOptions,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The online softmax of a tile of queries over tiles of tokens, in their order."""
    num_heads = cache.pool.num_kv_heads
    group = q_LNH.shape[1] // num_heads
    queries = q_LNH.reshape(_TILE_QUERIES, num_heads, group, -1).permute(1, 2, 0, 3).flatten(1, 2)
    top = _sinks(options, cache).expand(num_heads, group, _TILE_QUERIES, 1).flatten(1, 2)
    has_sink = top > float("-inf")
    top, total = top.clamp(min=_LOWEST), has_sink.float()
    means = torch.zeros_like(queries)
    for number, (keys, values, k_scale, v_scale) in enumerate(tiles):
        tokens = number * _TILE_TOKENS + torch.arange(_TILE_TOKENS, device=keys.device)
        is_seen = tokens <= positions.unsqueeze(1)
        if options.window is not None:
            is_seen &= tokens > positions.unsqueeze(1) - options.window
        scores = torch.bmm(queries, keys.permute(1, 2, 0).contiguous()) * options.scale
        scores = scores * k_scale.T.unsqueeze(1)
        scores = scores.masked_fill(~is_seen.repeat(group, 1), float("-inf"))
        new_top = torch.maximum(top, scores.amax(dim=-1, keepdim=True))
        weights, shrink = torch.exp(scores - new_top), torch.exp(top - new_top)
        total = total * shrink + weights.sum(dim=-1, keepdim=True)
        per_value, _ = _split_scale(cache, v_scale)
        weights = (weights * per_value.T.unsqueeze(1)).to(cache.query_dtype).float()
        means = means * shrink + torch.bmm(weights, values.transpose(0, 1).contiguous())
        top = new_top
    is_empty = total == 0
    _, per_head = _split_scale(cache, tiles[0][3])
    means = means / torch.where(is_empty, 1.0, total) * per_head[:1].T.unsqueeze(2)
    lse = torch.where(is_empty, float("-inf"), top + total.log())
    back = (num_heads, group, _TILE_QUERIES)
    means = means.view(*back, -1).permute(2, 0, 1, 3).flatten(1, 2)
    return means, lse.view(back).permute(2, 0, 1).flatten(1, 2)


def _places(rows: Rows, offsets: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Query tokens [R, len(offsets)] of the rows; num_tokens where a row has no such query."""
    is_query = (offsets >= 0) & (offsets < rows.query_lens.unsqueeze(1))
    is_query &= (rows.seq_lens > 0).unsqueeze(1)
    return torch.where(is_query, rows.starts.unsqueeze(1) + offsets, num_tokens)


def _sinks(options: AttentionOptions, cache: StoredKV) -> torch.Tensor:
    """float32 [K, G, 1, 1], or [1, 1, 1, 1]."""
    if options.sinks_N is None:
        return torch.full((1, 1, 1, 1), float("-inf"), device=cache.k_cache.device)
    return options.sinks_N.float().view(cache.pool.num_kv_heads, -1, 1, 1)


def _split_scale(cache: StoredKV, v_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The scale of values as the factor of each weight and the factor of the result."""
    one = torch.ones_like(v_scale)
    is_per_token = cache.pool.layout.scale == KVScale.TOKEN
    return (v_scale, one) if is_per_token else (one, v_scale)
