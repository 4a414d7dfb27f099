"""AITER's KV write and paged attention on the stand-in, which reads pages as they are stored.

It reads whole block tables, ends on rows without tokens, and has the fault that is on record, so
that a call which AITER is not on record to survive, or to answer rightly, fails here.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import cast

import pytest
import torch

from syncline.model_ops_rocm import LayoutError
from syncline.model_ops_rocm.aiter import BACKEND
from syncline.model_ops_rocm.aiter.detect import detect
from syncline.model_ops_rocm.aiter.interface import KNOWN_FAULTS, PARTIAL_16_PAGES, KnownFault
from syncline.model_ops_rocm.aiter.ops.attention import SUPPORT, AiterPagedAttention
from syncline.model_ops_rocm.aiter.ops.families import implementations
from syncline.model_ops_rocm.aiter.ops.kv import SUPPORT as WRITE_SUPPORT
from syncline.model_ops_rocm.aiter.ops.kv import AiterKVWrite
from syncline.model_ops_rocm.contracts import AttentionMetadata
from syncline.model_ops_rocm.kv import KVLayout, KVOrder, KVPool, KVScale, write_tokens
from syncline.model_ops_rocm.kv.support import require_agreement
from syncline.model_ops_rocm.testing import make_metadata, naive_attention
from syncline.model_ops_rocm.testing.bits import flat_bits
from syncline.model_ops_rocm.testing.fake_aiter import FakeAiter

InstallAiter = Callable[..., FakeAiter]
Tensors = dict[str, torch.Tensor]
HALVES = (torch.bfloat16, torch.float16)
ORDERS = (KVOrder.AITER_X_SHUFFLED_V, KVOrder.AITER_X, KVOrder.NHD)


def ops(*known_faults: KnownFault) -> tuple[AiterKVWrite, AiterPagedAttention]:
    aiter = detect(
        "0.1.22",
        device_type="cpu",
        arch=lambda device: "gfx942",
        known_faults=known_faults or KNOWN_FAULTS,
    )
    found = implementations(aiter)
    return cast(AiterKVWrite, found["kv_write"]), cast(
        AiterPagedAttention, found["paged_attention"]
    )


def pool_of(
    order: KVOrder,
    dtype: torch.dtype = torch.bfloat16,
    *,
    block_size: int | None = None,
    head_dim: int = 128,
    num_blocks: int = 40,
    num_kv_heads: int = 2,
) -> KVPool:
    size = block_size or (128 if order == KVOrder.NHD else 16)
    return KVPool(
        layout=KVLayout(order=order, dtype=dtype, kernel_block_size=size),
        num_blocks=num_blocks,
        block_size=size,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
    )


def poisoned(pool: KVPool) -> Tensors:
    return {
        name: torch.full(spec.shape, float("nan")).to(spec.dtype)
        for name, spec in pool.specs().items()
    }


class Step:
    """Rows of given lengths in random blocks of a pool; ids past a row's blocks are none."""

    def __init__(self, pool: KVPool, lengths: list[int], *, num_heads: int = 4) -> None:
        generator = torch.Generator().manual_seed(len(lengths))
        size, dtype = pool.layout.kernel_block_size, pool.layout.dtype
        counts = [-(-length // size) for length in lengths]
        free = torch.randperm(pool.num_kernel_blocks, generator=generator).tolist()
        self.pool, self.cache = pool, poisoned(pool)
        self.tables = torch.full((len(lengths), max(counts) + 1), -7, dtype=torch.int32)
        self.keys, self.values = [], []
        for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            self.tables[row, :count] = torch.tensor([free.pop() for _ in range(count)])
            shape = (2, length, pool.num_kv_heads, pool.head_dim)
            k, v = torch.randn(shape, generator=generator).to(dtype)
            token = torch.arange(length)
            slots = self.tables[row].long()[token // size] * size + token % size
            write_tokens(pool, self.cache, k, v, slots)
            self.keys.append(k)
            self.values.append(v)
        self.shape = (num_heads, pool.head_dim)

    def queries(self, count: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(count)
        return torch.randn((count, *self.shape), generator=generator).to(self.pool.layout.dtype)

    def expected(self, q: torch.Tensor, query_lens: list[int], window: int | None) -> torch.Tensor:
        parts, start, scale = [torch.zeros((0, *self.shape)).double()], 0, self.shape[1] ** -0.5
        for count, keys, values in zip(query_lens, self.keys, self.values, strict=True):
            mine = q[start : start + count]
            start += count
            if len(keys) == 0:
                parts.append(torch.zeros(mine.shape, dtype=torch.float64))
                continue
            for index in range(count):
                stop = len(keys) - count + index + 1
                first = 0 if window is None else max(stop - window, 0)
                seen = keys[first:stop], values[first:stop]
                parts.append(naive_attention(mine[index : index + 1], *seen, scale))
        return torch.cat(parts)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("num_tokens", [0, 1, 9])
def test_a_write_stores_what_the_layout_says(
    install_aiter: InstallAiter, order: KVOrder, dtype: torch.dtype, num_tokens: int
) -> None:
    install_aiter()
    pool = pool_of(order, dtype, num_blocks=3, head_dim=64)
    fused = torch.randn(num_tokens, 2, 2 * 64 + 8).to(dtype)
    k, v = fused[..., :64], fused[..., 64:128]
    slots = torch.randperm(pool.num_slots)[:num_tokens].to(torch.int32)
    slots[2::4] = -1
    ours, expected = poisoned(pool), poisoned(pool)
    write, _ = ops()
    write(k, v, ours["k"], ours["v"], slots, layout=pool.layout)
    write_tokens(pool, expected, k, v, slots)
    assert all(torch.equal(flat_bits(ours[name]), flat_bits(expected[name])) for name in ours)


@pytest.mark.parametrize("slot", [48, -2])
def test_a_slot_outside_is_refused_before_aiter_writes_it(
    install_aiter: InstallAiter, slot: int
) -> None:
    fake = install_aiter()
    pool = pool_of(KVOrder.AITER_X, num_blocks=3)
    cache, token = poisoned(pool), torch.ones(1, 2, 128).bfloat16()
    with pytest.raises(ValueError, match=r"kv_write: slot_mapping must be -1 or in \[0, 48\)"):
        ops()[0](*(token, token, cache["k"], cache["v"], torch.tensor([slot])), layout=pool.layout)
    assert fake.calls == []


LENGTHS = [1, 15, 16, 17, 240, 256, 257, 500]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("with_lists", [True, False])
def test_decode_reads_pages_in_aiters_order(
    install_aiter: InstallAiter, dtype: torch.dtype, with_lists: bool
) -> None:
    fake = install_aiter()
    lengths = [0, *LENGTHS, 0] if with_lists else [0, 1, 15, 16, 17, 224, 240]
    step = Step(pool_of(KVOrder.AITER_X_SHUFFLED_V, dtype, num_blocks=120), lengths)
    meta = make_metadata(
        *([1] * len(lengths), lengths, step.tables),
        num_decode_rows=len(lengths),
        with_lists=with_lists,
    )
    if not with_lists:
        # The table is as wide as the longest row's, and one more: the limit must be given.
        meta = replace(
            meta,
            max_seq_len=240,
            seq_lens=meta.seq_lens.long(),
            query_start_loc=meta.query_start_loc.long(),
            block_tables=meta.block_tables.long(),
        )
    q = step.queries(len(lengths))
    got = ops()[1](
        *(q, step.cache["k"], step.cache["v"], meta), scale=128**-0.5, layout=step.pool.layout
    )
    expected = step.expected(q, [1] * len(lengths), None)
    torch.testing.assert_close(got.double(), expected, rtol=2**-6, atol=2**-6)
    assert not got[0].any()
    assert fake.calls == ["pa_fwd_asm"]


@pytest.mark.parametrize("window", [None, 1, 100])
def test_flash_reads_nhd_pages_in_every_mode(
    install_aiter: InstallAiter, window: int | None
) -> None:
    install_aiter()
    lengths, query_lens = [0, 130, 1, 128, 300, 0], [1, 1, 1, 128, 44, 3]
    step = Step(pool_of(KVOrder.NHD, head_dim=64), lengths)
    meta = make_metadata(*(query_lens, lengths, step.tables), num_decode_rows=3)
    q = step.queries(sum(query_lens))
    out = torch.full((len(q), 4, 65), float("nan")).bfloat16()[..., :64]
    attend = ops()[1]
    num_bytes = attend.workspace_bytes(q, step.cache["k"], meta, layout=step.pool.layout)
    got = attend(
        *(q, step.cache["k"], step.cache["v"], meta),
        scale=64**-0.5,
        layout=step.pool.layout,
        window=window,
        out=out,
        workspace=torch.full((num_bytes,), 255, dtype=torch.uint8),
    )
    assert got is out
    expected = step.expected(q, query_lens, window)
    torch.testing.assert_close(got.double(), expected, rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("order", [KVOrder.AITER_X_SHUFFLED_V, KVOrder.NHD])
def test_a_step_of_padding_alone_is_zero(install_aiter: InstallAiter, order: KVOrder) -> None:
    install_aiter()
    step = Step(pool_of(order), [0, 0])
    meta = make_metadata([1, 1], [0, 0], step.tables, num_decode_rows=2)
    out = torch.full((2, 4, 128), float("nan")).bfloat16()
    ops()[1](
        *(step.queries(2), step.cache["k"], step.cache["v"], meta),
        scale=128**-0.5,
        layout=step.pool.layout,
        out=out,
    )
    assert not out.any()


def test_preparing_needs_one_block_of_the_pool(install_aiter: InstallAiter) -> None:
    """The caches of an example may be as large as the pool, on the meta device."""
    fake = install_aiter()
    pool = pool_of(KVOrder.AITER_X_SHUFFLED_V, num_blocks=2**30)
    k_cache, v_cache = (
        torch.empty(pool.specs()[name].shape, dtype=torch.bfloat16, device="meta")
        for name in ("k", "v")
    )
    tables = torch.full((3, 9), 2**30 - 1, dtype=torch.int32)
    example = {
        "q_TNH": torch.empty(3, 4, 128, dtype=torch.bfloat16, device="meta"),
        "k_cache": k_cache,
        "v_cache": v_cache,
        "meta": make_metadata([1] * 3, [100] * 3, tables, num_decode_rows=3),
        "scale": 128**-0.5,
        "layout": pool.layout,
    }
    write, attend = ops()
    BACKEND.prepare(attend, [example])
    token = torch.empty(5, 2, 128, dtype=torch.bfloat16, device="meta")
    slots = torch.empty(5, dtype=torch.int64, device="meta")
    cached = {"k_cache": k_cache, "v_cache": v_cache, "layout": pool.layout}
    BACKEND.prepare(write, [{"k_TKH": token, "v_TKH": token, "slot_mapping": slots, **cached}])
    assert fake.calls == ["pa_fwd_asm", "reshape_and_cache"]


def test_tokens_of_no_row_are_zero(install_aiter: InstallAiter) -> None:
    """A recorded step has room for more tokens than its rows have."""
    install_aiter()
    step = Step(pool_of(KVOrder.NHD, head_dim=64), [5, 200])
    meta = AttentionMetadata(
        query_start_loc=torch.tensor([0, 2, 5], dtype=torch.int32),
        seq_lens=torch.tensor([5, 200], dtype=torch.int32),
        block_tables=step.tables,
        num_decode_rows=0,
        max_query_len=8,
    )
    q = step.queries(9)
    got = ops()[1](
        *(q, step.cache["k"], step.cache["v"], meta), scale=64**-0.5, layout=step.pool.layout
    )
    expected = step.expected(q[:5], [2, 3], None)
    torch.testing.assert_close(got[:5].double(), expected, rtol=2**-6, atol=2**-6)
    assert not got[5:].any()


@pytest.mark.parametrize("length", [241, 250, 255])
def test_the_lengths_that_aiter_gets_wrong_are_refused(
    install_aiter: InstallAiter, length: int
) -> None:
    fake = install_aiter()
    step = Step(pool_of(KVOrder.AITER_X_SHUFFLED_V), [16, length])
    q, layout = step.queries(2), step.pool.layout
    call = (q, step.cache["k"], step.cache["v"])
    meta = make_metadata([1, 1], [16, length], step.tables, num_decode_rows=2)
    with pytest.raises(ValueError, match=rf"row 1 must be outside of \[241, 255\].*got {length}"):
        ops()[1](*call, meta, scale=128**-0.5, layout=layout)
    unseen = make_metadata([1, 1], [16, length], step.tables, num_decode_rows=2, with_lists=False)
    with pytest.raises(ValueError, match=r"pa_fwd_asm of amd-aiter 0.1.22 is wrong, got None"):
        ops()[1](*call, unseen, scale=128**-0.5, layout=layout)
    assert fake.calls == []


def test_a_version_known_to_be_right_is_asked(install_aiter: InstallAiter) -> None:
    """The stand-in has the fault, and loses a page: what the refusal is good for."""
    for is_right in (True, False):
        install_aiter(is_right=is_right)
        fixed = replace(PARTIAL_16_PAGES, fixed_in=(0, 1, 22))
        step = Step(pool_of(KVOrder.AITER_X_SHUFFLED_V), [250])
        meta = make_metadata([1], [250], step.tables, num_decode_rows=1, with_lists=False)
        q = step.queries(1)
        got = ops(fixed)[1](
            *(q, step.cache["k"], step.cache["v"], meta), scale=128**-0.5, layout=step.pool.layout
        )
        expected = step.expected(q, [1], None)
        assert torch.allclose(got.double(), expected, rtol=2**-6, atol=2**-6) == is_right


REFUSED: dict[str, tuple[dict[str, object], str]] = {
    "scale": ({"scale": 0.1}, "scale must be 0.0883"),
    "window": ({"window": 4}, "window must be None in aiter_x_shuffled_v"),
    "sinks": ({"sinks_N": torch.zeros(4)}, "sinks must be None for AITER"),
    "lse": ({"lse_TN": torch.zeros(2, 4)}, "lse must be None for AITER"),
    "batch": ({"batch_invariant": True}, "batch_invariant must be False for AITER"),
    "layout": ({"layout": None}, "layout must be one of aiter_x_shuffled_v, nhd for AITER"),
    "workspace": ({"workspace": torch.zeros(8).byte()}, "workspace must be contiguous uint8"),
    "out": ({"out": torch.zeros(2, 4, 128)}, "out must be torch.bfloat16"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_decode_that_aiter_does_not_take_is_refused(
    install_aiter: InstallAiter, name: str
) -> None:
    fake = install_aiter()
    step = Step(pool_of(KVOrder.AITER_X_SHUFFLED_V), [16, 30])
    meta = make_metadata([1, 1], [16, 30], step.tables, num_decode_rows=2)
    change, match = REFUSED[name]
    keywords: dict[str, object] = {"scale": 128**-0.5, "layout": step.pool.layout, **change}
    attend = cast(Callable[..., torch.Tensor], ops()[1])
    with pytest.raises(ValueError, match=match):
        attend(*(step.queries(2), step.cache["k"], step.cache["v"], meta), **keywords)
    assert fake.calls == []


def test_rows_and_heads_that_the_assembly_lacks_are_refused(install_aiter: InstallAiter) -> None:
    fake = install_aiter()
    pool = pool_of(KVOrder.AITER_X_SHUFFLED_V, num_kv_heads=1)
    attend, layout = ops()[1], pool.layout
    wide = Step(pool, [30], num_heads=17)
    meta = make_metadata([1], [30], wide.tables, num_decode_rows=1)
    call = (wide.cache["k"], wide.cache["v"])
    with pytest.raises(ValueError, match=r"q must have at most 16 heads per KV head .*got 17"):
        attend(wide.queries(1), *call, meta, scale=128**-0.5, layout=layout)
    prefill = make_metadata([2], [30], wide.tables, num_decode_rows=0)
    with pytest.raises(ValueError, match=r"meta must have decode rows of one token alone"):
        attend(wide.queries(2), *call, prefill, scale=128**-0.5, layout=layout)
    real = replace(meta, block_tables=meta.block_tables.float())
    with pytest.raises(ValueError, match=r"meta.block_tables must be int64 or int32"):
        attend(wide.queries(1), *call, real, scale=128**-0.5, layout=layout)
    assert fake.calls == []


@pytest.mark.parametrize(
    ("layout", "head_dim", "match"),
    [
        (KVLayout(order=KVOrder.HND, dtype=torch.bfloat16, kernel_block_size=16), 128, "an order"),
        (
            KVLayout(order=KVOrder.AITER_X, dtype=torch.bfloat16, kernel_block_size=16),
            *(128, "an order of aiter_x_shuffled_v, nhd"),
        ),
        (
            KVLayout(order=KVOrder.AITER_X_SHUFFLED_V, dtype=torch.bfloat16, kernel_block_size=32),
            *(128, "a kernel_block_size of 16"),
        ),
        (
            KVLayout(order=KVOrder.AITER_X_SHUFFLED_V, dtype=torch.bfloat16, kernel_block_size=16),
            *(64, "a head_dim of 128"),
        ),
        (
            KVLayout(order=KVOrder.NHD, dtype=torch.bfloat16, kernel_block_size=64),
            *(64, "a kernel_block_size that is a multiple of 128"),
        ),
        (
            KVLayout(
                order=KVOrder.NHD,
                dtype=torch.float8_e4m3fn,
                kernel_block_size=128,
                scale=KVScale.TOKEN,
            ),
            *(64, "a dtype of torch.bfloat16"),
        ),
    ],
)
def test_a_pool_that_one_op_does_not_take_is_refused_when_it_is_agreed_on(
    layout: KVLayout, head_dim: int, match: str
) -> None:
    with pytest.raises(LayoutError, match=match):
        require_agreement(layout, head_dim, (WRITE_SUPPORT, SUPPORT))


def test_two_layouts_are_agreed_on() -> None:
    for order, size in ((KVOrder.AITER_X_SHUFFLED_V, 16), (KVOrder.NHD, 256)):
        layout = KVLayout(order=order, dtype=torch.bfloat16, kernel_block_size=size)
        require_agreement(layout, 128, (WRITE_SUPPORT, SUPPORT))
