"""Paged attention against the formula in float64, with NaN wherever it may not look.

Mutants these tests kill: padding indices that name slot 0 of the pool instead of the row's own
first slot; no mask; a mask off by one in either direction; the tail of the last block summed;
bucket order not undone; heads grouped h % K; prefill seeing one token more or less; a plan kept
for the next step.
"""

from collections.abc import Sequence as SequenceABC
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.model_ops_rocm import AttentionMetadata, select
from syncline.model_ops_rocm.reference.geometry import Geometry
from syncline.model_ops_rocm.testing import (
    HostSyncError,
    NoHostSync,
    PagedKV,
    as_d_major,
    make_metadata,
    make_paged_kv,
    naive_attention,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# float32: the limit the op promises. 16 bits: a rounding of the weights and one of the result.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
BS = 4
SHAPE = (2, BS, 8)  # kv heads, block size, head_dim
paged_attention = select("paged_attention", dtype=torch.float32)


either_order = pytest.mark.parametrize("d_major", [False, True])


def queries(query_lens: SequenceABC[int], num_heads: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    shape = (sum(query_lens), num_heads, SHAPE[2])
    return torch.randn(shape, generator=generator).to(dtype)


def check(
    kv: PagedKV,
    query_lens: SequenceABC[int],
    *,
    num_decode_rows: int,
    num_heads: int = 4,
    with_lists: bool = True,
) -> torch.Tensor:
    """Run the op on every sequence of `kv` and compare each row with the formula."""
    seq_lens = [keys.shape[0] for keys in kv.keys]
    meta = make_metadata(
        query_lens,
        seq_lens,
        kv.block_tables,
        num_decode_rows=num_decode_rows,
        with_lists=with_lists,
    )
    dtype = kv.k_cache.dtype
    q = queries(query_lens, num_heads, dtype)
    kept = q.clone(), kv.k_cache.clone(), kv.v_cache.clone()
    result = paged_attention(q, kv.k_cache, kv.v_cache, meta, scale=0.3)
    assert result.shape == q.shape
    assert result.dtype == dtype
    start = 0
    for query_len, keys, values in zip(query_lens, kv.keys, kv.values, strict=True):
        got = result[start : start + query_len].double()
        if keys.shape[0] == 0:
            assert torch.equal(got, torch.zeros_like(got))
        else:
            want = naive_attention(q[start : start + query_len], keys, values, 0.3)
            assert (got - want).abs().le(TOLERANCE[dtype]).all()
        start += query_len
    assert torch.equal(q, kept[0])
    for now, before in zip((kv.k_cache, kv.v_cache), kept[1:], strict=True):
        assert torch.equal(now.nan_to_num(), before.nan_to_num())
    return result


@either_order
@pytest.mark.parametrize("with_lists", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_at_every_length_around_the_block_edges(
    dtype: torch.dtype, with_lists: bool, d_major: bool
) -> None:
    lengths = list(range(1, 3 * BS + 2))
    kv = make_paged_kv(lengths, SHAPE, dtype=dtype, d_major=d_major)
    check(kv, [1] * len(lengths), num_decode_rows=len(lengths), with_lists=with_lists)


@either_order
@pytest.mark.parametrize("length", range(1, 2 * BS + 2))
@pytest.mark.parametrize("with_lists", [True, False])
def test_one_decode_row_alone(length: int, with_lists: bool, d_major: bool) -> None:
    kv = make_paged_kv([length], SHAPE, d_major=d_major)
    check(kv, [1], num_decode_rows=1, with_lists=with_lists)


@either_order
@pytest.mark.parametrize("dtype", DTYPES)
def test_prefill_with_every_split_between_cached_and_new(dtype: torch.dtype, d_major: bool) -> None:
    splits = [(new, cached) for new in range(1, 2 * BS + 2) for cached in (0, 1, 3, 4, 5, 9)]
    lengths = [new + cached for new, cached in splits]
    kv = make_paged_kv(lengths, SHAPE, dtype=dtype, d_major=d_major)
    check(kv, [new for new, _ in splits], num_decode_rows=0)


@either_order
@pytest.mark.parametrize("num_heads", [2, 4, 6, 16])
def test_query_heads_share_kv_heads_in_order(num_heads: int, d_major: bool) -> None:
    kv = make_paged_kv([9, 6, 7, 7], SHAPE, d_major=d_major)
    check(kv, [1, 1, 4, 7], num_decode_rows=2, num_heads=num_heads)


@given(
    decode_lens=st.lists(st.integers(0, 40), max_size=6),
    prefill=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 20)), max_size=4),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1000),
    d_major=st.booleans(),
)
@settings(max_examples=80, deadline=None)
def test_mixed_steps_of_any_lengths(
    decode_lens: list[int],
    prefill: list[tuple[int, int]],
    dtype: torch.dtype,
    seed: int,
    d_major: bool,
) -> None:
    lengths = decode_lens + [new + cached for new, cached in prefill]
    query_lens = [1] * len(decode_lens) + [new for new, _ in prefill]
    kv = make_paged_kv(lengths, SHAPE, dtype=dtype, seed=seed, d_major=d_major)
    check(kv, query_lens, num_decode_rows=len(decode_lens))


@either_order
def test_rows_of_very_different_lengths_come_back_in_their_order(d_major: bool) -> None:
    lengths = [3, 400, 2, 0, 150, 5, 399, 1, 0]
    kv = make_paged_kv(lengths, SHAPE, d_major=d_major)
    check(kv, [1] * len(lengths), num_decode_rows=len(lengths))
    check(kv, [1] * len(lengths), num_decode_rows=len(lengths), with_lists=False)


@either_order
def test_a_long_context_is_attended_in_several_gathers(d_major: bool) -> None:
    kv = make_paged_kv([6000, 5999, 6000, 5998, 6000], (2, 16, 8), d_major=d_major)
    check(kv, [1] * 5, num_decode_rows=5)


def test_equal_rows_beyond_one_group_are_all_attended() -> None:
    kv = make_paged_kv([6000] * 5, (1, 16, 8))
    check(kv, [2] * 5, num_decode_rows=0, num_heads=1)


def test_a_long_chunk_on_a_long_context() -> None:
    kv = make_paged_kv([1300], (1, 16, 8))
    q = queries([1100], 2, torch.float32)
    meta = make_metadata([1100], [1300], kv.block_tables, num_decode_rows=0)
    result = paged_attention(q, kv.k_cache, kv.v_cache, meta, scale=0.3)
    keys, values = kv.keys[0][:, 0], kv.values[0][:, 0]
    for query in (0, 1, 511, 512, 513, 1023, 1024, 1099):
        visible = 200 + query + 1
        weights = torch.softmax(q[query].double() @ keys[:visible].double().T * 0.3, dim=-1)
        assert (result[query] - weights @ values[:visible].double()).abs().max() < 1e-5


def test_a_row_does_not_depend_on_its_company_but_for_rounding() -> None:
    lengths = [17, 160, 33, 3]
    kv = make_paged_kv(lengths, SHAPE)
    together = check(kv, [1] * 4, num_decode_rows=4)
    q = queries([1] * 4, 4, torch.float32)
    for row, length in enumerate(lengths):
        meta = make_metadata([1], [length], kv.block_tables[row : row + 1], num_decode_rows=1)
        alone = paged_attention(q[row : row + 1], kv.k_cache, kv.v_cache, meta, scale=0.3)
        assert (alone - together[row]).abs().max() < 1e-6


def test_the_same_call_gives_the_same_bits() -> None:
    lengths = [17, 160, 33, 3, 9]
    kv = make_paged_kv(lengths, SHAPE)
    first = check(kv, [1, 1, 1, 2, 9], num_decode_rows=3)
    assert torch.equal(first, check(kv, [1, 1, 1, 2, 9], num_decode_rows=3))


def test_blocks_may_be_shared_between_rows() -> None:
    kv = make_paged_kv([11], SHAPE)
    tables = kv.block_tables.expand(3, -1).contiguous()
    shared = PagedKV(
        k_cache=kv.k_cache,
        v_cache=kv.v_cache,
        block_tables=tables,
        keys=(kv.keys[0][:9], kv.keys[0][:10], kv.keys[0]),
        values=(kv.values[0][:9], kv.values[0][:10], kv.values[0]),
    )
    check(shared, [1, 1, 3], num_decode_rows=2)


def test_inputs_may_be_views_and_tables_int64() -> None:
    kv = make_paged_kv([9, 5, 6], SHAPE)
    q = queries([1, 1, 3], 4, torch.float32)
    tables = torch.stack((kv.block_tables, kv.block_tables), dim=-1)[..., 0].long()
    meta = make_metadata([1, 1, 3], [9, 5, 6], tables, num_decode_rows=2)
    want = paged_attention(q, kv.k_cache, kv.v_cache, meta, scale=0.3)
    fused = torch.cat((q, torch.zeros(5, 3, 8)), dim=1)
    for view in (fused[:, :4], q.transpose(0, 1).contiguous().transpose(0, 1)):
        assert not view.is_contiguous()
        assert torch.equal(paged_attention(view, kv.k_cache, kv.v_cache, meta, scale=0.3), want)


def test_out_is_written_and_returned() -> None:
    kv = make_paged_kv([9, 0, 6, 0], SHAPE)
    q = queries([1, 1, 3, 2], 4, torch.float32)
    meta = make_metadata([1, 1, 3, 2], [9, 0, 6, 0], kv.block_tables, num_decode_rows=2)
    want = paged_attention(q, kv.k_cache, kv.v_cache, meta, scale=0.3)
    out = torch.full((7, 8, 8), float("nan"))[:, ::2]
    assert paged_attention(q, kv.k_cache, kv.v_cache, meta, scale=0.3, out=out) is out
    assert torch.equal(out, want)


def test_both_orders_of_keys_may_share_a_metadata() -> None:
    kv = make_paged_kv([9, 5, 30, 7], SHAPE)
    meta = make_metadata([1, 1, 1, 3], [9, 5, 30, 7], kv.block_tables, num_decode_rows=3)
    q = queries([1, 1, 1, 3], 4, torch.float32)
    keys = as_d_major(kv.k_cache)
    assert torch.equal(keys.nan_to_num(), kv.k_cache.nan_to_num())
    for _ in range(2):
        plain = paged_attention(q, kv.k_cache, kv.v_cache, meta, scale=0.3)
        summed = paged_attention(q, keys, kv.v_cache, meta, scale=0.3)
        assert (plain - summed).abs().max() < 1e-6


def test_indices_are_64_bit_only_when_a_cache_has_too_many_rows() -> None:
    small = Geometry(
        num_blocks=2**20, num_kv_heads=8, group_size=2, block_size=16, head_dim=128, sums_keys=True
    )
    assert small.index_dtype == torch.int32
    assert replace(small, num_blocks=2**21).index_dtype == torch.int64
    assert replace(small, num_blocks=2**21, head_dim=64).index_dtype == torch.int32


def test_no_token_gives_no_row() -> None:
    kv = make_paged_kv([], SHAPE)
    assert check(kv, [], num_decode_rows=0).shape == (0, 4, 8)
    assert check(kv, [], num_decode_rows=0, with_lists=False).shape == (0, 4, 8)
    check(make_paged_kv([3, 0], SHAPE), [0, 0], num_decode_rows=0)


def test_padding_rows_are_zero_whatever_their_table_says() -> None:
    kv = make_paged_kv([5], SHAPE)
    garbage = torch.full_like(kv.block_tables, 2**31 - 1)
    tables = torch.cat((garbage, kv.block_tables, -garbage))
    for with_lists in (True, False):
        meta = make_metadata([1, 1, 1], [0, 5, 0], tables, num_decode_rows=3, with_lists=with_lists)
        q = queries([1, 1, 1], 4, torch.float32)
        result = paged_attention(q, kv.k_cache, kv.v_cache, meta, scale=0.3)
        assert torch.equal(result[[0, 2]], torch.zeros(2, 4, 8))
        want = naive_attention(q[1:2], kv.keys[0], kv.values[0], 0.3)
        assert (result[1] - want[0]).abs().max() < 1e-5


def test_the_next_step_is_not_attended_with_the_last_steps_plan() -> None:
    first, second = make_paged_kv([9, 5], SHAPE), make_paged_kv([5, 9], SHAPE, seed=1)
    for kv in (first, second, first):
        check(kv, [1, 1], num_decode_rows=2)


def test_layers_of_another_shape_may_share_the_metadata() -> None:
    kv, wide = make_paged_kv([9, 5], SHAPE), make_paged_kv([9, 5], (4, BS, 8))
    meta = make_metadata([1, 1], [9, 5], kv.block_tables, num_decode_rows=2)
    q = queries([1, 1], 4, torch.float32)
    before = paged_attention(q, kv.k_cache, kv.v_cache, meta, scale=0.3)
    other = paged_attention(q, wide.k_cache, wide.v_cache, meta, scale=0.3)
    want = naive_attention(q[:1], wide.keys[0], wide.values[0], 0.3)
    assert (other[0] - want[0]).abs().max() < 1e-5
    assert torch.equal(paged_attention(q, kv.k_cache, kv.v_cache, meta, scale=0.3), before)


@either_order
def test_decode_without_host_lists_reads_no_value_on_the_host(d_major: bool) -> None:
    kv = make_paged_kv([9, 0, 5], SHAPE, d_major=d_major)
    q = queries([1, 1, 1], 4, torch.float32)
    meta = make_metadata([1, 1, 1], [9, 0, 5], kv.block_tables, num_decode_rows=3, with_lists=False)
    with NoHostSync():
        first = paged_attention(q, kv.k_cache, kv.v_cache, meta, scale=0.3)
    # The same object with other values: nothing derived from the first call is used.
    meta.seq_lens.copy_(torch.tensor([7, 3, 0]))
    meta.block_tables[1] = meta.block_tables[0]
    second = paged_attention(q, kv.k_cache, kv.v_cache, meta, scale=0.3)
    assert torch.equal(first[1], torch.zeros(4, 8))
    assert torch.equal(second[2], torch.zeros(4, 8))
    want = naive_attention(q[1:2], kv.keys[0][:3], kv.values[0][:3], 0.3)
    assert (second[1] - want[0]).abs().max() < 1e-5


def test_the_sync_detector_detects() -> None:
    with NoHostSync(), pytest.raises(HostSyncError, match=r"_local_scalar_dense"):
        int(torch.ones(1))


def test_attention_names_what_is_wrong() -> None:
    kv = make_paged_kv([9, 5], SHAPE)
    meta = make_metadata([1, 1], [9, 5], kv.block_tables, num_decode_rows=2)
    q = queries([1, 1], 4, torch.float32)
    k_cache, v_cache = kv.k_cache, kv.v_cache
    with pytest.raises(
        ValueError, match=r"paged_attention: q must have a multiple of 2 heads, got 3"
    ):
        paged_attention(q[:, :3], k_cache, v_cache, meta, scale=1.0)
    with pytest.raises(
        ValueError, match=r"paged_attention: q must have the cache's head_dim 8, got 4"
    ):
        paged_attention(q[:, :, :4], k_cache, v_cache, meta, scale=1.0)
    with pytest.raises(
        ValueError, match=r"paged_attention: q must have the 2 tokens of the metadata"
    ):
        paged_attention(q[:1], k_cache, v_cache, meta, scale=1.0)
    with pytest.raises(
        ValueError, match=r"paged_attention: q must be torch.float32, got torch.float16"
    ):
        paged_attention(q.half(), k_cache, v_cache, meta, scale=1.0)
    with pytest.raises(ValueError, match=r"paged_attention: out must have shape \[2, 4, 8\]"):
        paged_attention(q, k_cache, v_cache, meta, scale=1.0, out=q[:1])
    with pytest.raises(ValueError, match=r"k_cache must be contiguous, or the transpose\(2, 3\)"):
        paged_attention(q, k_cache[::2], v_cache[::2], meta, scale=1.0)
    with pytest.raises(ValueError, match=r"paged_attention: v_cache must be contiguous, got strid"):
        paged_attention(q, k_cache, as_d_major(v_cache), meta, scale=1.0)
    long = make_metadata([1, 1], [9, 21], kv.block_tables, num_decode_rows=2)
    with pytest.raises(
        ValueError, match=r"meta.seq_len_list of row 1 must be in \[0, 20\], got 21"
    ):
        paged_attention(q, k_cache, v_cache, long, scale=1.0)
    lost = make_metadata([1, 1], [9, 5], kv.block_tables + 100, num_decode_rows=2)
    with pytest.raises(ValueError, match=r"meta.block_tables must hold block ids in \[0, 8\)"):
        paged_attention(q, k_cache, v_cache, lost, scale=1.0)
    ahead = make_metadata([1, 6], [9, 5], kv.block_tables, num_decode_rows=1)
    q7 = queries([1, 6], 4, torch.float32)
    with pytest.raises(ValueError, match=r"of row 1 must give 0 to 5 query tokens, .* got 6"):
        paged_attention(q7, k_cache, v_cache, ahead, scale=1.0)


def test_metadata_refuses_what_does_not_fit_together() -> None:
    tables = torch.zeros((2, 3), dtype=torch.int32)
    starts, lens = torch.tensor([0, 1, 2]), torch.tensor([1, 1])

    def build(**changed: object) -> None:
        fields: dict[str, object] = {
            "query_start_loc": starts,
            "seq_lens": lens,
            "block_tables": tables,
            "num_decode_rows": 2,
        }
        AttentionMetadata(**{**fields, **changed})  # type: ignore[arg-type]  # wrong on purpose

    build()
    with pytest.raises(ValueError, match=r"block_tables must be \[2, M\]"):
        build(block_tables=tables[:1])
    with pytest.raises(ValueError, match=r"query_start_loc must be \[3\]"):
        build(query_start_loc=starts[:2])
    with pytest.raises(ValueError, match=r"num_decode_rows must be in \[0, 2\], got 3"):
        build(num_decode_rows=3)
    with pytest.raises(ValueError, match=r"go together, got one"):
        build(seq_len_list=(1, 1))
    with pytest.raises(ValueError, match=r"1 rows beyond num_decode_rows need"):
        build(num_decode_rows=1)
    with pytest.raises(ValueError, match=r"must have 3 and 2 entries, got 2 and 2"):
        build(query_start_list=(0, 1), seq_len_list=(1, 1))
    for wrong in ((0, 1, 3), (0, 2, 2), (1, 2, 3)):
        with pytest.raises(ValueError, match=r"num_decode_rows=2 rows one token each, got \["):
            build(query_start_list=wrong, seq_len_list=(1, 1))
    with pytest.raises(ValueError, match=r"query_start_list must not decrease, got \[0, 1, 0\]"):
        build(query_start_list=(0, 1, 0), seq_len_list=(1, 1), num_decode_rows=1)


def test_rows_without_a_token_give_no_row() -> None:
    kv_cache = torch.randn(4, 1, 16, 16)
    meta = AttentionMetadata(
        query_start_loc=torch.tensor([0, 0]),
        seq_lens=torch.tensor([5]),
        block_tables=torch.tensor([[0]]),
        num_decode_rows=0,
        max_query_len=1,
    )
    out = paged_attention(torch.zeros(0, 2, 16), kv_cache, kv_cache, meta, scale=1.0)
    assert out.shape == (0, 2, 16)
