"""Decode rows of paged attention on a GPU, with what float64 makes of them."""

from dataclasses import dataclass

import torch

from syncline.model_ops_rocm import AttentionMetadata, PagedAttention, detect_arch, select
from syncline.model_ops_rocm.kv import KVLayout, KVOrder
from syncline.model_ops_rocm.testing.paged import PagedKV

SCALE = 0.1
NUM_HEADS = 32
MAX_TOKENS = 1_024
# Of the norm of a result: a rounding of the weights and one of the result.
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 5e-4}


def lengths_up_to(max_tokens: int) -> list[int]:
    """Around the edges of all pages, and some others."""
    pages = range(64, max_tokens, 64 if max_tokens <= MAX_TOKENS else 192)
    lengths = [length for page in pages for length in (page - 1, page, page + 1)]
    return [*lengths, 0, 1, 17, min(300, max_tokens), max_tokens - 1, max_tokens]


def all_lengths(num_rows: int, max_tokens: int, q_len: int = 1) -> list[list[int]]:
    """Every one of `lengths_up_to`, `num_rows` at a time; with a token for each query."""
    lengths = [max(length, q_len) if length else 0 for length in lengths_up_to(max_tokens)]
    lengths += [max_tokens] * (-len(lengths) % num_rows)
    return [lengths[start : start + num_rows] for start in range(0, len(lengths), num_rows)]


def attention_of(dtype: torch.dtype) -> PagedAttention:
    return select("paged_attention", backend="triton", arch=detect_arch(), dtype=dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """What else a step may have."""

    q_len: int = 1
    window: int | None = None
    has_sinks: bool = False
    order: KVOrder = KVOrder.HND


class Rows:
    """Decode rows of a step, on the device, with what they are given and what they make."""

    def __init__(
        self,
        kv: PagedKV,
        variant: Variant,
        num_heads: int = NUM_HEADS,
        max_tokens: int = MAX_TOKENS,
    ) -> None:
        num_rows, q_len = len(kv.keys), variant.q_len
        dtype, block_size = kv.k_cache.dtype, kv.k_cache.shape[2]
        caches = [kv.k_cache.cuda(), kv.v_cache.cuda()]
        if variant.order == KVOrder.NHD:
            caches = [one.transpose(1, 2).contiguous() for one in caches]
        self.kv, self.variant, self.k, self.v = kv, variant, *caches
        self.layout = KVLayout(order=variant.order, dtype=dtype, kernel_block_size=block_size)
        self.lengths = torch.tensor([len(keys) for keys in kv.keys], dtype=torch.int32).cuda()
        # As wide as its longest row may need, with entries that are no block's behind the last.
        width = max(-(-max_tokens // block_size), kv.block_tables.shape[1])
        tables = torch.full((num_rows, width), -(2**20), dtype=torch.int32)
        tables[:, : kv.block_tables.shape[1]] = kv.block_tables
        self.meta = AttentionMetadata(
            query_start_loc=torch.arange(num_rows + 1, dtype=torch.int32).cuda() * q_len,
            seq_lens=self.lengths,
            block_tables=tables.cuda(),
            num_decode_rows=num_rows,
            decode_query_len=q_len,
            max_query_len=q_len,
            max_seq_len=max_tokens,
        )
        self.q = torch.randn(num_rows * q_len, num_heads, 128, dtype=dtype, device="cuda")
        self.sinks = torch.randn(num_heads, device="cuda") if variant.has_sinks else None
        self.lse = torch.full((num_rows * q_len, num_heads), 7.0, device="cuda")
        self.target = torch.full((num_rows * q_len, num_heads, 136), 7.0, dtype=dtype).cuda()
        self.out = self.target[..., :128]

    def run(self) -> None:
        attention_of(self.q.dtype)(
            *(self.q, self.k, self.v, self.meta),
            scale=SCALE,
            layout=self.layout,
            window=self.variant.window,
            sinks_N=self.sinks,
            out=self.out,
            lse_TN=self.lse,
        )

    def assert_right(self) -> None:
        """What was made agrees with float64, and nothing beside it was written."""
        q_len, tolerance = self.variant.q_len, TOLERANCE[self.q.dtype]
        for row in range(len(self.kv.keys)):
            tokens = slice(row * q_len, (row + 1) * q_len)
            got, got_lse = self.out[tokens].double(), self.lse[tokens].double()
            if self.lengths[row] == 0:
                assert not got.any() and (got_lse == float("-inf")).all()
                continue
            want, want_lse = self._exact(row, self.q[tokens])
            assert (got - want).norm() < tolerance * want.norm(), row
            assert torch.allclose(got_lse, want_lse, rtol=0.0, atol=1e-4), row
        assert (self.target[..., 128:] == 7.0).all()

    def _exact(self, row: int, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(mean [n, N, D], lse [n, N]) of the row's queries."""
        keys, values = (one[row].cuda().double() for one in (self.kv.keys, self.kv.values))
        group = q.shape[1] // keys.shape[1]
        keys, values = (one.repeat_interleave(group, 1) for one in (keys, values))
        scores = torch.einsum("qnd,tnd->qnt", q.double(), keys) * SCALE
        token = torch.arange(len(keys), device="cuda")
        position = token[len(keys) - len(q) :, None]
        is_hidden = token > position
        if self.variant.window is not None:
            is_hidden |= token <= position - self.variant.window
        scores.masked_fill_(is_hidden[:, None], float("-inf"))
        every = scores
        if self.sinks is not None:
            sinks = self.sinks.double()[None, :, None].expand(len(q), -1, 1)
            every = torch.cat((scores, sinks), -1)
        lse = torch.logsumexp(every, -1)
        return torch.einsum("qnt,tnd->qnd", torch.exp(scores - lse[..., None]), values), lse
