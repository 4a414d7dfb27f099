"""What the contract of paged attention has beyond a plain call, in PyTorch, against the formula.

Mutants these tests kill: a window of one token more or less; a sink that has a value, or is left
out of the logarithm; drafts that see later drafts; a scale of values taken from keys; a token past
the last row that keeps what was there; a tile of queries that starts where the chunk does.
"""

from collections.abc import Sequence as SequenceABC
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from syncline.model_ops_rocm import AttentionMetadata, select
from syncline.model_ops_rocm.kv import KVLayout, KVOrder, KVPool, KVScale, read_tokens, write_tokens
from syncline.model_ops_rocm.testing import (
    NoHostSync,
    PagedKV,
    make_metadata,
    make_paged_kv,
    naive_states,
)

SHAPE = (2, 4, 8)  # kv heads, block size, head_dim
HEADS = 4
SCALE = 0.3
paged_attention = select("paged_attention", dtype=torch.float32)
merge_states = select("merge_states", dtype=torch.float32)


def queries(num_tokens: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn((num_tokens, HEADS, SHAPE[2]), generator=generator)


def expected(
    kv: PagedKV,
    q: torch.Tensor,
    query_lens: SequenceABC[int],
    *,
    window: int | None = None,
    sinks_N: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """float64, zero and -inf for tokens of no row."""
    result = torch.zeros(q.shape, dtype=torch.float64)
    lse = torch.full(q.shape[:2], float("-inf"), dtype=torch.float64)
    start = 0
    for query_len, keys, values in zip(query_lens, kv.keys, kv.values, strict=True):
        stop = start + query_len
        if len(keys):
            result[start:stop], lse[start:stop] = naive_states(
                q[start:stop], keys, values, SCALE, window=window, sinks_N=sinks_N
            )
        start = stop
    return result, lse


def replayed(
    query_lens: SequenceABC[int],
    kv: PagedKV,
    *,
    num_decode_rows: int = 0,
    decode_query_len: int = 1,
) -> AttentionMetadata:
    """Metadata without host copies."""
    starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
    lengths = torch.tensor([len(keys) for keys in kv.keys], dtype=torch.int32)
    return AttentionMetadata(
        query_start_loc=starts,
        seq_lens=lengths,
        block_tables=kv.block_tables,
        num_decode_rows=num_decode_rows,
        decode_query_len=decode_query_len,
        max_query_len=max(query_lens),
    )


def assert_near(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got.double(), want, rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 1, 3, 4, 6, 50])
def test_windows_sinks_and_the_logarithm(
    window: int | None, has_sinks: bool, batch_invariant: bool
) -> None:
    lengths, query_lens = [1, 5, 30, 0, 9, 21], [1, 1, 1, 1, 9, 6]
    kv = make_paged_kv(lengths, SHAPE)
    q = queries(sum(query_lens))
    sinks = torch.tensor([-1.0, 0.5, 3.0, 9.0]) if has_sinks else None
    meta = make_metadata(query_lens, lengths, kv.block_tables, num_decode_rows=4)
    lse = torch.full(q.shape[:2], float("nan"))
    result = paged_attention(
        *(q, kv.k_cache, kv.v_cache, meta),
        scale=SCALE,
        window=window,
        sinks_N=sinks,
        batch_invariant=batch_invariant,
        lse_TN=lse,
    )
    want, want_lse = expected(kv, q, query_lens, window=window, sinks_N=sinks)
    assert_near(result, want)
    assert_near(lse, want_lse)


@pytest.mark.parametrize("with_lists", [True, False])
@pytest.mark.parametrize("decode_query_len", [2, 3, 5])
def test_a_draft_sees_what_is_before_it(decode_query_len: int, with_lists: bool) -> None:
    lengths = [5, 0, 12, 33]
    query_lens = [decode_query_len] * 4
    kv = make_paged_kv(lengths, SHAPE)
    q = queries(sum(query_lens))
    meta = replayed(query_lens, kv, num_decode_rows=4, decode_query_len=decode_query_len)
    if with_lists:
        meta = AttentionMetadata(
            query_start_loc=meta.query_start_loc,
            seq_lens=meta.seq_lens,
            block_tables=meta.block_tables,
            num_decode_rows=4,
            query_start_list=meta.query_start_loc.tolist(),
            seq_len_list=lengths,
            decode_query_len=decode_query_len,
        )
    result = paged_attention(q, kv.k_cache, kv.v_cache, meta, scale=SCALE)
    assert_near(result, expected(kv, q, query_lens)[0])


def test_rows_without_host_copies_are_read_from_the_tensors_and_spare_tokens_are_zero() -> None:
    lengths, query_lens = [5, 30, 9, 0, 6], [1, 1, 9, 2, 0]
    kv = make_paged_kv(lengths, SHAPE)
    meta = replayed(query_lens, kv, num_decode_rows=2)
    q = queries(sum(query_lens) + 3)
    out = torch.full_like(q, float("nan"))
    with NoHostSync():
        paged_attention(q, kv.k_cache, kv.v_cache, meta, scale=SCALE, out=out)
    assert_near(out, expected(kv, q, query_lens)[0])
    assert not out[-3:].any()
    meta.query_start_loc.copy_(torch.tensor([0, 1, 2, 4, 4, 8]))
    meta.seq_lens.copy_(torch.tensor([3, 17, 8, 0, 6]))
    shorter = PagedKV(
        k_cache=kv.k_cache,
        v_cache=kv.v_cache,
        block_tables=kv.block_tables,
        keys=tuple(kv.keys[row][:length] for row, length in enumerate((3, 17, 8, 0, 6))),
        values=tuple(kv.values[row][:length] for row, length in enumerate((3, 17, 8, 0, 6))),
    )
    again = paged_attention(q, kv.k_cache, kv.v_cache, meta, scale=SCALE)
    assert_near(again, expected(shorter, q, [1, 1, 2, 0, 4])[0])


def pool_of(layout: KVLayout) -> tuple[KVPool, dict[str, torch.Tensor]]:
    size = layout.kernel_block_size
    pool = KVPool(layout=layout, num_blocks=5, block_size=size, num_kv_heads=2, head_dim=32)
    cache = {name: torch.empty(spec.shape, dtype=spec.dtype) for name, spec in pool.specs().items()}
    for name in ("k_scale", "v_scale"):
        if name in cache:
            cache[name] = torch.rand_like(cache[name]) * 0.02 + 0.01
    return pool, cache


CODES = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
LAYOUTS = [
    KVLayout(order=order, dtype=dtype, kernel_block_size=16, scale=scale)
    for order in KVOrder
    for dtype, scale in (
        (torch.float32, KVScale.NONE),
        *((code, scale) for code in CODES for scale in KVScale),
    )
]


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS, ids=KVLayout.describe)
def test_every_layout_is_attended_where_it_says(layout: KVLayout, batch_invariant: bool) -> None:
    pool, cache = pool_of(layout)
    generator = torch.Generator().manual_seed(3)
    tables = torch.tensor([[3, 1], [4, 0]], dtype=torch.int32)
    slots = (tables.long().unsqueeze(2) * 16 + torch.arange(16)).view(2, 32)[:, :21]
    k, v = torch.randn((2, 42, 2, 32), generator=generator)
    if layout.scale == KVScale.NONE:
        k, v = k.to(layout.dtype), v.to(layout.dtype)
    write_tokens(pool, cache, k, v, slots.reshape(-1))
    q = torch.randn((5, 4, 32), generator=generator)
    meta = make_metadata([1, 4], [21, 21], tables, num_decode_rows=1)
    result = paged_attention(
        *(q, cache["k"], cache["v"], meta),
        scale=SCALE,
        layout=layout,
        kv_scales=(cache["k_scale"], cache["v_scale"]) if "k_scale" in cache else None,
        batch_invariant=batch_invariant,
    )
    for row, tokens in ((0, slice(0, 1)), (1, slice(1, 5))):
        keys, values = read_tokens(pool, cache, slots[row])
        assert_near(result[tokens], naive_states(q[tokens], keys, values, SCALE)[0])


def test_merging_the_parts_of_a_context_is_attending_all_of_it() -> None:
    kv = make_paged_kv([40], SHAPE)
    q = queries(1)
    want, want_lse = naive_states(q, kv.keys[0], kv.values[0], SCALE)
    cuts = (0, 7, 8, 40)
    parts, logs = zip(
        *(
            naive_states(q, kv.keys[0][start:stop], kv.values[0][start:stop], SCALE)
            for start, stop in pairwise(cuts)
        ),
        strict=True,
    )
    nothing = torch.full((1, HEADS), float("-inf"))
    logs_PTN = torch.stack([*(one.float() for one in logs), nothing])
    parts_PTNH = torch.stack([*(one.float() for one in parts), torch.full_like(q, float("nan"))])
    lse = torch.empty(1, HEADS)
    assert_near(merge_states(parts_PTNH, logs_PTN, lse_TN=lse), want)
    assert_near(lse, want_lse)
    empty = merge_states(parts_PTNH[3:], logs_PTN[3:], lse_TN=lse)
    assert not empty.any()
    assert (lse == float("-inf")).all()


@pytest.mark.parametrize("window", [None, 5])
def test_a_token_has_the_same_bits_whatever_shares_the_step_and_however_it_was_chunked(
    window: int | None,
) -> None:
    lengths = [70, 33]
    kv = make_paged_kv(lengths, SHAPE)
    q = queries(sum(lengths))

    def run(spans: SequenceABC[tuple[int, int, int]]) -> list[torch.Tensor]:
        """Tokens [start, stop) of some rows, as one step."""
        rows = [row for row, _, _ in spans]
        tokens = torch.cat([q[70 * row + start : 70 * row + stop] for row, start, stop in spans])
        meta = make_metadata(
            [stop - start for _, start, stop in spans],
            [stop for _, _, stop in spans],
            kv.block_tables[rows],
            num_decode_rows=sum(stop - start == 1 for _, start, stop in spans),
        )
        result = paged_attention(
            *(tokens, kv.k_cache, kv.v_cache, meta),
            scale=SCALE,
            window=window,
            batch_invariant=True,
        )
        return list(torch.split(result, [stop - start for _, start, stop in spans]))

    whole = run([(0, 0, 70)])[0]
    assert_near(whole, naive_states(q[:70], kv.keys[0], kv.values[0], SCALE, window=window)[0])
    for cut in (1, 15, 16, 40, 69):
        assert torch.equal(torch.cat([run([(0, 0, cut)])[0], run([(0, cut, 70)])[0]]), whole)
    alone = [run([(0, token, token + 1)])[0] for token in range(0, 70, 9)]
    assert torch.equal(torch.cat(alone), whole[::9])
    decoded, other = run([(0, 69, 70), (1, 0, 33)])
    assert torch.equal(decoded, whole[69:])
    assert torch.equal(other, run([(1, 0, 33)])[0])


def test_what_does_not_fit_is_refused_by_name() -> None:
    kv = make_paged_kv([9], SHAPE)
    meta = make_metadata([1], [9], kv.block_tables, num_decode_rows=1)
    q = queries(1)
    call = (q, kv.k_cache, kv.v_cache, meta)
    with pytest.raises(ValueError, match=r"paged_attention: scale must be positive and finite"):
        paged_attention(*call, scale=0.0)
    with pytest.raises(
        ValueError, match=r"paged_attention: window must be None or positive and whole, got"
    ):
        paged_attention(*call, scale=1.0, window=0)
    with pytest.raises(ValueError, match=r"paged_attention: sinks must have shape \[4\]"):
        paged_attention(*call, scale=1.0, sinks_N=torch.zeros(3))
    with pytest.raises(ValueError, match=r"paged_attention: lse must be torch.float32"):
        paged_attention(*call, scale=1.0, lse_TN=torch.zeros(1, 4).double())
    with pytest.raises(
        ValueError, match=r"meta.seq_lens must be int64 or int32, got torch.float32"
    ):
        floats = replace(meta, seq_lens=meta.seq_lens.float())
        paged_attention(q, kv.k_cache, kv.v_cache, floats, scale=1.0)
    with pytest.raises(
        ValueError, match=r"meta.block_tables must be int64 or int32, got torch.int16"
    ):
        shorts = replace(meta, block_tables=meta.block_tables.short())
        paged_attention(q, kv.k_cache, kv.v_cache, shorts, scale=1.0)
    strided = make_metadata([1, 1], [9, 9], kv.block_tables[[0, 0]], num_decode_rows=2)
    strided = replace(strided, seq_lens=torch.tensor([[9, 0], [9, 0]], dtype=torch.int32)[:, 0])
    with pytest.raises(ValueError, match=r"meta.seq_lens must be contiguous, got strides \(2,\)"):
        paged_attention(queries(2), kv.k_cache, kv.v_cache, strided, scale=1.0)
    code = KVLayout(
        order=KVOrder.NHD,
        dtype=torch.float8_e4m3fn,
        kernel_block_size=4,
        scale=KVScale.HEAD,
    )
    with pytest.raises(ValueError, match=r"k_cache must be torch.float8_e4m3fn, got torch.float32"):
        paged_attention(*call, scale=1.0, layout=code)
    cache = torch.zeros(5, 4, 2, 8).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"kv_scales must be two tensors for nhd/float8_e4m3fn/4"):
        paged_attention(q, cache, cache, meta, scale=1.0, layout=code)
    with pytest.raises(ValueError, match=r"k_scale must have shape \[2\], got \[1\]"):
        paged_attention(
            *(q, cache, cache, meta), scale=1.0, layout=code, kv_scales=(torch.ones(1),) * 2
        )
    with pytest.raises(ValueError, match=r"k_cache must have the shape of keys in nhd/float8_e4m"):
        paged_attention(q, cache.flatten(0, 1), cache, meta, scale=1.0, layout=code)
    with pytest.raises(ValueError, match=r"AttentionMetadata: max_seq_len must be positive, got 0"):
        AttentionMetadata(
            query_start_loc=meta.query_start_loc,
            seq_lens=meta.seq_lens,
            block_tables=meta.block_tables,
            num_decode_rows=1,
            max_seq_len=0,
        )
    with pytest.raises(ValueError, match=r"merge_states: lse must have shape \[1, 1, 4\]"):
        merge_states(q.unsqueeze(0), torch.zeros(1, 4))
