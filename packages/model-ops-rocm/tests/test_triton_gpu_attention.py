"""Paged attention on a GPU: every length around the edges, a huge pool, and the same bits.

Mutants these tests kill: a tile too many or too few at a block's edge; block offsets in 32 bits;
parts that a split did not write; a lone program that reads past its row's table; a token whose
tile depends on where its chunk starts; a part that is merged before it is seen.
"""

from collections.abc import Sequence as SequenceABC
from dataclasses import replace
from typing import cast

import pytest
import torch

from syncline.model_ops_rocm import (
    AttentionMetadata,
    NotPreparedError,
    PagedAttention,
    detect_arch,
    prepare,
    select,
)
from syncline.model_ops_rocm.testing import PagedKV, make_paged_kv
from syncline.model_ops_rocm.testing.bits import flat_bits
from syncline.model_ops_rocm.triton import sealed

pytestmark = pytest.mark.gpu

SCALE = 0.2
# A rounding of the weights and one of the result.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def op(dtype: torch.dtype) -> PagedAttention:
    return select("paged_attention", backend="triton", arch=detect_arch(), dtype=dtype)


def on_gpu(
    kv: PagedKV, query_lens: SequenceABC[int], num_decode: int
) -> tuple[torch.Tensor, torch.Tensor, AttentionMetadata]:
    starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
    lengths = torch.tensor([len(keys) for keys in kv.keys], dtype=torch.int32)
    meta = AttentionMetadata(
        query_start_loc=starts.cuda(),
        seq_lens=lengths.cuda(),
        block_tables=kv.block_tables.cuda(),
        num_decode_rows=num_decode,
        max_query_len=max(query_lens),
    )
    return kv.k_cache.cuda(), kv.v_cache.cuda(), meta


def dense(q_TNH: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """float32 attention of the last tokens of one sequence."""
    num_queries, num_heads, _ = q_TNH.shape
    groups = num_heads // keys.shape[1]
    k, v = (one.float().repeat_interleave(groups, dim=1) for one in (keys, values))
    scores = torch.einsum("lnd,tnd->nlt", q_TNH.float(), k) * SCALE
    tokens = torch.arange(len(keys), device=q_TNH.device)
    positions = tokens[len(keys) - num_queries :]
    scores.masked_fill_(tokens > positions.unsqueeze(1), float("-inf"))
    return torch.einsum("nlt,tnd->lnd", torch.softmax(scores, dim=-1), v)


def check(
    kv: PagedKV, query_lens: SequenceABC[int], num_decode: int, num_heads: int
) -> torch.Tensor:
    dtype = kv.k_cache.dtype
    k_cache, v_cache, meta = on_gpu(kv, query_lens, num_decode)
    generator = torch.Generator().manual_seed(7)
    shape = (sum(query_lens), num_heads, k_cache.shape[3])
    q = torch.randn(shape, generator=generator).to(dtype).cuda()
    out = torch.full_like(q, float("nan"))
    op(dtype)(q, k_cache, v_cache, meta, scale=SCALE, out=out)
    start = 0
    for query_len, keys, values in zip(query_lens, kv.keys, kv.values, strict=True):
        got = out[start : start + query_len].float()
        want = torch.zeros_like(got)
        if len(keys):
            want = dense(q[start : start + query_len], keys.cuda(), values.cuda())
        torch.testing.assert_close(got, want, rtol=0.0, atol=TOLERANCE[dtype])
        start += query_len
    return out


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("block_size", [16, 64])
def test_decode_at_every_length_up_to_1025(dtype: torch.dtype, block_size: int) -> None:
    lengths = list(range(1, 1_026))
    kv = make_paged_kv(lengths, (2, block_size, 64), dtype=dtype)
    check(kv, [1] * len(lengths), len(lengths), 8)


@pytest.mark.parametrize("block_size", [16, 24, 32, 64, 128, 256])
def test_prefill_of_lengths_around_the_edges_on_all_kinds_of_context(block_size: int) -> None:
    splits = [
        (new, cached)
        for new in (1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 257)
        for cached in (0, 1, 63, 64, 65, 255, 256)
    ]
    kv = make_paged_kv(
        [new + cached for new, cached in splits], (1, block_size, 64), dtype=torch.bfloat16
    )
    check(kv, [new for new, _ in splits], 0, 4)


@pytest.mark.parametrize("head_dim", [16, 24, 40, 64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("num_heads", [2, 7, 32])
def test_head_dims_and_groups(head_dim: int, num_heads: int) -> None:
    num_kv_heads = 2 if num_heads % 2 == 0 else 1
    kv = make_paged_kv([5, 300, 0, 70, 129], (num_kv_heads, 64, head_dim), dtype=torch.bfloat16)
    check(kv, [1, 1, 1, 70, 65], 3, num_heads)


def test_partial_last_pages_of_16() -> None:
    lengths = list(range(241, 256))
    kv = make_paged_kv(lengths, (4, 16, 128), dtype=torch.bfloat16)
    check(kv, [1] * len(lengths), len(lengths), 16)
    check(kv, lengths, 0, 16)


@pytest.mark.parametrize("num_rows", [1, 2, 40])
def test_130_pages_with_a_partial_last_one_split_and_whole(num_rows: int) -> None:
    lengths = [129 * 64 + 1 + row for row in range(num_rows)]
    kv = make_paged_kv(lengths, (2, 64, 128), dtype=torch.bfloat16)
    check(kv, [1] * num_rows, num_rows, 8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "lengths", [[512] * 8, [512, 1, 0, 300, 64, 65, 511, 63], [2_048]], ids=str
)
def test_parts_merged_in_their_launch_have_the_bits_of_those_merged_after_it(
    lengths: list[int], dtype: torch.dtype
) -> None:
    num_rows, num_heads = len(lengths), 32
    kv = make_paged_kv(lengths, (8, 64, 128), dtype=dtype)
    k_cache, v_cache, meta = on_gpu(kv, [1] * num_rows, num_rows)
    q = torch.randn(num_rows, num_heads, 128, dtype=dtype, device="cuda")
    attend = op(dtype)
    counters = torch.zeros(attend.counters_size(q, k_cache, meta), dtype=torch.int32, device="cuda")
    out, lse = torch.empty_like(q), torch.zeros(num_rows, num_heads, device="cuda")
    num_bytes = attend.workspace_bytes(q, k_cache, meta)
    workspace = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    assert num_bytes and counters.numel()

    def run(counters: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        workspace.fill_(0xFF)
        attend(
            *(q, k_cache, v_cache, meta),
            scale=SCALE,
            out=out,
            lse_TN=lse,
            workspace=workspace,
            counters=counters,
        )
        return flat_bits(out).clone(), flat_bits(lse).clone()

    expected = run(None)
    for _ in range(200):
        got = run(counters)
        assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))
    assert not counters.any()


def test_a_length_beyond_its_table_makes_nan_and_reads_nothing_beyond() -> None:
    dtype = torch.bfloat16
    kv = make_paged_kv([64, 64, 700, 64], (2, 64, 64), dtype=dtype)
    k_cache, v_cache, meta = on_gpu(kv, [1, 1, 1, 2], 3)
    # Beyond the last row's entries lies what no block id is.
    wide = torch.full((5, meta.block_tables.shape[1]), 2**30, dtype=torch.int32, device="cuda")
    wide[:4] = meta.block_tables
    lengths = meta.seq_lens.clone()
    lengths[1], lengths[3] = 100_000, 64 * wide.shape[1] + 1
    q = torch.randn(5, 4, 64, dtype=dtype, device="cuda")
    right = op(dtype)(q, k_cache, v_cache, meta, scale=SCALE)
    wrong = replace(meta, seq_lens=lengths, block_tables=wide[:4])
    wrong.block_tables[1], wrong.block_tables[3] = 0, 0
    got = op(dtype)(q, k_cache, v_cache, wrong, scale=SCALE)
    assert torch.equal(got[::2][:2], right[::2][:2])
    assert got[1].isnan().all() and got[3:].isnan().all()


def test_a_pool_of_more_than_2_31_elements_is_read_at_its_end() -> None:
    shape = (8, 64, 128)
    num_blocks = 2**31 // (8 * 64 * 128) + 2
    caches = torch.zeros((2, num_blocks, *shape), dtype=torch.bfloat16, device="cuda")
    last = torch.randn(2, 3, *shape, dtype=torch.bfloat16, device="cuda")
    caches[:, -3:] = last
    assert caches[0].numel() > 2**31
    tables = torch.tensor([[2, 0, 1]], dtype=torch.int32, device="cuda")
    q = torch.randn(41, 16, 128, dtype=torch.bfloat16, device="cuda")

    def metadata(block_tables: torch.Tensor) -> AttentionMetadata:
        return AttentionMetadata(
            query_start_loc=torch.tensor([0, 1, 41], dtype=torch.int32, device="cuda"),
            seq_lens=torch.tensor([190, 131], dtype=torch.int32, device="cuda"),
            block_tables=block_tables.expand(2, -1).contiguous(),
            num_decode_rows=1,
            max_query_len=40,
        )

    attend = op(torch.bfloat16)
    far = attend(q, caches[0], caches[1], metadata(tables + num_blocks - 3), scale=SCALE)
    near = attend(q, last[0], last[1], metadata(tables), scale=SCALE)
    assert torch.equal(far, near)


def test_the_same_bits_whatever_shares_the_step_and_however_a_prompt_is_divided() -> None:
    length, dtype = 700, torch.bfloat16
    kv = make_paged_kv([length, 333], (8, 64, 128), dtype=dtype)
    k_cache, v_cache, _ = on_gpu(kv, [1, 1], 2)
    tables = kv.block_tables.cuda()
    q = torch.randn(length + 333, 32, 128, dtype=dtype, device="cuda")

    def run(spans: SequenceABC[tuple[int, int, int]]) -> list[torch.Tensor]:
        rows = torch.tensor([row for row, _, _ in spans])
        sizes = [stop - start for _, start, stop in spans]
        meta = AttentionMetadata(
            query_start_loc=torch.tensor([0, *sizes]).cumsum(0).to(torch.int32).cuda(),
            seq_lens=torch.tensor([stop for _, _, stop in spans], dtype=torch.int32).cuda(),
            block_tables=tables[rows.cuda()],
            num_decode_rows=sum(size == 1 for size in sizes),
            max_query_len=max(sizes),
        )
        tokens = torch.cat(
            [q[length * row + start : length * row + stop] for row, start, stop in spans]
        )
        result = op(dtype)(
            tokens, k_cache, v_cache, meta, scale=SCALE, window=400, batch_invariant=True
        )
        return list(torch.split(result, sizes))

    whole = run([(0, 0, length)])[0]
    for cut in (1, 17, 64, 100, 333, 699):
        assert torch.equal(torch.cat([*run([(0, 0, cut)]), *run([(0, cut, length)])]), whole)
    alone = run([(0, token, token + 1) for token in range(0, length, 3)])
    assert torch.equal(torch.cat(alone), whole[::3])
    decoded, other = run([(0, 699, 700), (1, 0, 333)])
    assert torch.equal(decoded, whole[699:])
    assert torch.equal(other, run([(1, 0, 333)])[0])


def test_what_was_prepared_runs_with_any_number_of_rows_and_nothing_else_does() -> None:
    dtype, arch = torch.bfloat16, detect_arch()

    def call(num_rows: int, head_dim: int, device: str) -> dict[str, object]:
        make = {"dtype": torch.int32, "device": device}
        pool = torch.zeros(9, 2, 64, head_dim, dtype=dtype, device=device)
        return {
            "q_TNH": torch.zeros(num_rows, 8, head_dim, dtype=dtype, device=device),
            "k_cache": pool,
            "v_cache": pool,
            "meta": AttentionMetadata(
                query_start_loc=torch.arange(num_rows + 1, **make),  # type: ignore[call-overload]  # dtype and device
                seq_lens=torch.full((num_rows,), 5, **make),  # type: ignore[call-overload]  # as above
                block_tables=torch.zeros(num_rows, 64, **make),  # type: ignore[call-overload]  # as above
                num_decode_rows=num_rows,
            ),
            "scale": SCALE,
        }

    example = call(3, 112, "meta")
    prepare("paged_attention", [example], backend="triton", arch=arch, dtype=dtype)
    attend = op(dtype)
    with sealed():
        for num_rows in (1, 2, 16, 70, 513):
            attend(**call(num_rows, 112, "cuda"))  # type: ignore[arg-type]  # keywords of the op
        with pytest.raises(NotPreparedError):
            attend(**call(3, 104, "cuda"))  # type: ignore[arg-type]  # as above
    assert cast(torch.Tensor, example["q_TNH"]).is_meta
