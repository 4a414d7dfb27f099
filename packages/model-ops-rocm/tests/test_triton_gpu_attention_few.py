"""Few decode rows, each of which a cluster of programs attends to, on a GPU that has clusters.

Mutants these tests kill: a page too many or too few at an edge; a value past the last token that is
NaN; a place that is asked for again before it was read; a piece that no program attended to, or
two did; a part that is read before it was sent; a window that is a token off; queries, a table, a
length, keys or values that are read before the kernel ahead has written them.
"""

from collections.abc import Callable
from collections.abc import Sequence as SequenceABC
from dataclasses import replace
from typing import cast

import pytest
import torch

from syncline.model_ops_rocm import (
    AttentionMetadata,
    detect_arch,
    prepare,
)
from syncline.model_ops_rocm.kv import KVOrder
from syncline.model_ops_rocm.testing import make_paged_kv
from syncline.model_ops_rocm.testing.decode_rows import (
    MAX_TOKENS,
    SCALE,
    TOLERANCE,
    Rows,
    Variant,
    all_lengths,
    attention_of,
)
from syncline.model_ops_rocm.testing.launches import launched_by
from syncline.model_ops_rocm.testing.parity import recorded
from syncline.model_ops_rocm.triton import sealed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="only sm_90 has rows for clusters",
    ),
]

# Rows, heads of KV, and tokens of the longest row: of each kind one or two.
SOME = (
    *((8, 8, MAX_TOKENS), (8, 8, 512), (5, 8, 512), (16, 2, MAX_TOKENS), (8, 4, 2_048)),
    *((3, 8, 512), (2, 8, MAX_TOKENS), (4, 4, 64), (1, 8, 4_096), (2, 4, MAX_TOKENS), (1, 4, 512)),
)


def assert_is_for_few(call: Callable[[], object]) -> None:
    """The call is the kernel of few rows, and nothing else."""
    assert launched_by(call) == ["few_decode_kernel"]


def checked(rows: Rows) -> None:
    assert_is_for_few(rows.run)
    for _ in range(3):
        rows.target[..., :128] = float("nan")
        rows.run()
        rows.assert_right()
    once = rows.out.clone()
    rows.run()
    assert torch.equal(rows.out, once)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("num_rows", "num_kv_heads", "max_tokens"), SOME)
def test_rows_around_the_edges_of_pages_agree_with_float64(
    num_rows: int, num_kv_heads: int, max_tokens: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(num_rows)
    for lengths in all_lengths(num_rows, max_tokens):
        kv = make_paged_kv(lengths, (num_kv_heads, 64, 128), dtype=dtype)
        checked(Rows(kv, Variant(), max_tokens=max_tokens))


@pytest.mark.parametrize(("num_rows", "num_kv_heads"), [(8, 8), (8, 4), (2, 8), (1, 8)])
@pytest.mark.parametrize(
    "variant",
    [
        Variant(window=1),
        Variant(window=100, has_sinks=True),
        Variant(window=257),
        Variant(has_sinks=True, order=KVOrder.NHD),
        Variant(q_len=2, window=65),
        Variant(q_len=2, has_sinks=True),
        Variant(q_len=2, order=KVOrder.NHD, window=128),
    ],
    ids=str,
)
def test_windows_sinks_orders_and_several_queries(
    variant: Variant, num_rows: int, num_kv_heads: int
) -> None:
    torch.manual_seed(0)
    for lengths in all_lengths(num_rows, MAX_TOKENS, variant.q_len):
        kv = make_paged_kv(lengths, (num_kv_heads, 64, 128), dtype=torch.bfloat16)
        checked(Rows(kv, variant))


@pytest.mark.parametrize("block_size", [128, 192, 256])
@pytest.mark.parametrize("order", [KVOrder.HND, KVOrder.NHD])
@pytest.mark.parametrize(("num_rows", "num_kv_heads"), [(8, 4), (7, 8), (1, 8)])
def test_blocks_of_several_pages(
    num_rows: int, num_kv_heads: int, order: KVOrder, block_size: int
) -> None:
    torch.manual_seed(0)
    for lengths in all_lengths(num_rows, MAX_TOKENS):
        kv = make_paged_kv(lengths, (num_kv_heads, block_size, 128), dtype=torch.bfloat16)
        checked(Rows(kv, Variant(order=order)))


@pytest.mark.parametrize("lengths", [(300, 1_000, 64, 0, 65, 129), (512, 447, 64, 0, 65, 129)])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "q_len"),
    [(8, 8, 1), (8, 8, 9), (24, 8, 5), (128, 8, 1), (64, 4, 1), (32, 2, 1), (8, 2, 4)],
)
def test_groups_and_queries_up_to_sixteen_together(
    num_heads: int, num_kv_heads: int, q_len: int, lengths: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    kv = make_paged_kv(lengths, (num_kv_heads, 64, 128), dtype=torch.float16)
    max_tokens = 512 if max(lengths) <= 512 else MAX_TOKENS
    checked(Rows(kv, Variant(q_len=q_len), num_heads, max_tokens))


@pytest.mark.parametrize(("num_rows", "num_kv_heads"), [(8, 8), (8, 4), (2, 8), (1, 8)])
def test_lengths_and_tables_of_64_bits_and_queries_that_lie_apart(
    num_rows: int, num_kv_heads: int
) -> None:
    torch.manual_seed(0)
    for lengths in all_lengths(num_rows, MAX_TOKENS)[:8]:
        kv = make_paged_kv(lengths, (num_kv_heads, 64, 128), dtype=torch.bfloat16)
        rows = Rows(kv, Variant())
        tables = rows.meta.block_tables.long()
        rows.meta = replace(rows.meta, seq_lens=rows.lengths.long(), block_tables=tables)
        apart = torch.randn(num_rows, 64, 136, dtype=rows.q.dtype, device="cuda")
        rows.q = apart[:, 1::2, 8:]
        checked(rows)


@pytest.mark.parametrize(("num_rows", "num_kv_heads"), [(8, 8), (4, 8), (2, 8), (1, 8)])
def test_a_recorded_step_is_replayed_with_other_lengths_and_tables(
    num_rows: int, num_kv_heads: int
) -> None:
    torch.manual_seed(0)
    shape = (num_kv_heads, 64, 128)
    first = make_paged_kv([MAX_TOKENS] * num_rows, shape, dtype=torch.bfloat16)
    rows = Rows(first, Variant())
    assert_is_for_few(rows.run)
    graph, _ = recorded(rows.run)
    for seed, lengths in enumerate(all_lengths(num_rows, MAX_TOKENS)):
        rows.kv = make_paged_kv(lengths, shape, dtype=torch.bfloat16, seed=seed)
        for cache, new in ((rows.k, rows.kv.k_cache), (rows.v, rows.kv.v_cache)):
            cache[: len(new)] = new.cuda()
        rows.meta.block_tables.fill_(2**30 if seed % 2 else -(2**20))
        rows.meta.block_tables[:, : rows.kv.block_tables.shape[1]] = rows.kv.block_tables.cuda()
        rows.lengths.copy_(torch.tensor(lengths, dtype=torch.int32))
        rows.q.normal_()
        rows.target[..., :128] = float("nan")
        graph.replay()
        rows.assert_right()


@pytest.mark.parametrize(("num_rows", "num_kv_heads"), [(8, 8), (4, 8), (2, 8), (1, 8)])
def test_queries_are_read_after_the_kernel_that_writes_them(
    num_rows: int, num_kv_heads: int
) -> None:
    torch.manual_seed(0)
    kv = make_paged_kv([500] * num_rows, (num_kv_heads, 64, 128), dtype=torch.bfloat16)
    rows = Rows(kv, Variant())
    results = [torch.empty_like(rows.q) for _ in range(12)]
    first, attend = rows.q, attention_of(torch.bfloat16)

    def chain(*, waits: bool = False) -> None:
        q = first
        for out in results:
            attend(
                *(q, rows.k, rows.v, rows.meta),
                scale=1.0,
                out=out,
            )
            q = out
            if waits:
                torch.cuda.synchronize()

    graph, _ = recorded(chain)
    for _ in range(20):
        first.normal_()
        graph.replay()
        got = [one.clone() for one in results]
        chain(waits=True)
        assert all(map(torch.equal, got, results))


@pytest.mark.parametrize("max_tokens", [64, 128, MAX_TOKENS])
def test_a_length_beyond_its_table_makes_nan_and_reads_nothing_beyond(max_tokens: int) -> None:
    torch.manual_seed(0)
    lengths = [min(length, max_tokens) for length in (64, 300, 64, 500)]
    kv = make_paged_kv(lengths, (8, 64, 128), dtype=torch.bfloat16)
    rows = Rows(kv, Variant(), max_tokens=max_tokens)
    rows.run()
    right = rows.out.clone()
    # Beyond the last row's entries lies what no block id is.
    width = rows.meta.block_tables.shape[1]
    wide = torch.full((5, width), 2**30, dtype=torch.int32, device="cuda")
    wide[:4] = rows.meta.block_tables
    wide[1], wide[3] = 0, 0
    rows.lengths[1], rows.lengths[3] = 100_000, 64 * width + 1
    rows.meta = replace(rows.meta, block_tables=wide[:4])
    assert_is_for_few(rows.run)
    rows.run()
    assert torch.equal(rows.out[::2], right[::2])
    assert rows.out[1::2].isnan().all()


def test_a_pool_of_more_than_2_31_elements_is_read_at_its_end() -> None:
    shape = (8, 64, 128)
    num_blocks = 2**31 // (8 * 64 * 128) + 2
    kv = make_paged_kv([300, 512, 64, 130], shape, dtype=torch.bfloat16)
    rows = Rows(kv, Variant())
    rows.run()
    near, num_used = rows.out.clone(), len(kv.k_cache)
    caches = torch.zeros((2, num_blocks, *shape), dtype=torch.bfloat16, device="cuda")
    caches[0, -num_used:], caches[1, -num_used:] = rows.k, rows.v
    rows.k, rows.v = caches[0], caches[1]
    rows.meta.block_tables.add_(num_blocks - num_used)
    assert_is_for_few(rows.run)
    rows.run()
    assert torch.equal(rows.out, near)


@pytest.mark.parametrize("max_tokens", [384, MAX_TOKENS])
def test_what_is_prepared_serves_fewer_rows_and_shorter_ones(max_tokens: int) -> None:
    torch.manual_seed(0)

    def call(num_rows: int, width: int, device: str) -> dict[str, object]:
        def numbers(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        pool = torch.zeros(9, 8, 64, 128, dtype=torch.bfloat16, device=device)
        return {
            "q_TNH": torch.zeros(num_rows, 56, 128, dtype=torch.bfloat16, device=device),
            "k_cache": pool,
            "v_cache": pool,
            "meta": AttentionMetadata(
                query_start_loc=numbers(num_rows + 1),
                seq_lens=numbers(num_rows) + 5,
                block_tables=numbers(num_rows, width),
                num_decode_rows=num_rows,
            ),
            "scale": SCALE,
        }

    dtype, arch = torch.bfloat16, detect_arch()
    example = call(9, max_tokens // 64, "meta")
    prepare("paged_attention", [example], backend="triton", arch=arch, dtype=dtype)
    attend = cast(Callable[..., torch.Tensor], attention_of(dtype))
    shapes: SequenceABC[tuple[int, int]] = (
        *((1, 1), (1, 6), (2, 6), (4, 5), (4, 6), (7, 6), (8, 5), (9, 6)),
        *((rows, max_tokens // 64) for rows in (1, 2, 3, 8)),
    )
    with sealed():
        for num_rows, width in shapes:
            result = attend(**call(num_rows, width, "cuda"))
            assert not result.any()
