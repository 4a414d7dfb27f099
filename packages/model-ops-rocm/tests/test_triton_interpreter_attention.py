"""Paged attention by Triton, interpreted: lengths around edges, its workspace, what it refuses.

Mutants these tests kill: a split whose tiles overlap another's, or that leaves one out; a part
that is merged though nothing wrote it; a workspace or counters counted too small; parts merged in
the launch in another order than by one of its own; a counter that stays where it was.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import cast

import pytest
import torch

from syncline.model_ops_rocm import (
    KVWrite,
    LayoutError,
    PagedAttention,
    QKNormRopeKVWrite,
    select,
)
from syncline.model_ops_rocm.kv import KVLayout, KVOrder, KVScale, require_agreement
from syncline.model_ops_rocm.testing import (
    PagedKV,
    make_metadata,
    make_paged_kv,
    naive_states,
)
from syncline.model_ops_rocm.testing.bits import flat_bits

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
SCALE = 0.3


@pytest.fixture
def attend(kernels: Mapping[str, object]) -> PagedAttention:
    return cast(PagedAttention, kernels["paged_attention"])


def decoded(
    attend: PagedAttention, kv: PagedKV, num_heads: int, window: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """One query per row against the formula, in a workspace of just the bytes it asks for."""
    lengths = [len(keys) for keys in kv.keys]
    meta = make_metadata(
        [1] * len(lengths),
        lengths,
        kv.block_tables,
        num_decode_rows=len(lengths),
        with_lists=False,
    )
    generator = torch.Generator().manual_seed(7)
    shape = (len(lengths), num_heads, kv.k_cache.shape[3])
    q = torch.randn(shape, generator=generator).to(kv.k_cache.dtype)
    num_bytes = attend.workspace_bytes(q, kv.k_cache, meta)
    workspace = torch.full((num_bytes,), 0xFF, dtype=torch.uint8)  # NaN, read as float32
    lse = torch.empty(shape[:2])
    out = attend(
        *(q, kv.k_cache, kv.v_cache, meta),
        scale=SCALE,
        window=window,
        lse_TN=lse,
        workspace=workspace,
    )
    _check_merged(attend, kv, q, window, num_bytes, (out, lse))
    if num_bytes and len(lengths) == 1:
        with pytest.raises(ValueError, match=rf"workspace must be .* at least {num_bytes} entr"):
            attend(
                *(q, kv.k_cache, kv.v_cache, meta),
                scale=SCALE,
                window=window,
                workspace=workspace[:-1],
            )
    tolerance = 1e-5 if q.dtype == torch.float32 else 4e-3
    for row, (keys, values) in enumerate(zip(kv.keys, kv.values, strict=True)):
        want, want_lse = torch.zeros(shape[1:]).double(), torch.full((num_heads,), float("-inf"))
        if len(keys):
            states = naive_states(q[row : row + 1], keys, values, SCALE, window=window)
            want, want_lse = states[0][0], states[1][0]
        torch.testing.assert_close(out[row].double(), want, rtol=0.0, atol=tolerance)
        torch.testing.assert_close(lse[row].double(), want_lse.double(), rtol=0.0, atol=tolerance)
    return out, workspace


def _check_merged(
    attend: PagedAttention,
    kv: PagedKV,
    q: torch.Tensor,
    window: int | None,
    num_bytes: int,
    expected: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """With just the counters that it asks for, the same bits, and the counters are left zero."""
    lengths = [len(keys) for keys in kv.keys]
    meta = make_metadata(
        [1] * len(lengths),
        lengths,
        kv.block_tables,
        num_decode_rows=len(lengths),
        with_lists=False,
    )
    counters = torch.zeros(attend.counters_size(q, kv.k_cache, meta), dtype=torch.int32)
    assert bool(num_bytes) == (counters.numel() > 0)
    out, lse = torch.full_like(expected[0], float("nan")), torch.empty_like(expected[1])
    attend(
        *(q, kv.k_cache, kv.v_cache, meta),
        scale=SCALE,
        window=window,
        out=out,
        lse_TN=lse,
        workspace=torch.full((num_bytes,), 0xFF, dtype=torch.uint8),
        counters=counters,
    )
    assert torch.equal(flat_bits(out), flat_bits(expected[0]))
    assert torch.equal(flat_bits(lse), flat_bits(expected[1]))
    assert not counters.any()
    if counters.numel() and len(lengths) == 1:
        for wrong in (counters[:-1], counters.long(), counters[None]):
            with pytest.raises(ValueError, match="counters must be contiguous int32 with at least"):
                attend(*(q, kv.k_cache, kv.v_cache, meta), scale=SCALE, counters=wrong)


@pytest.mark.parametrize("astray", [-7, 1_000])
def test_counters_that_were_not_zero_make_nan_and_no_number(
    attend: PagedAttention, astray: int
) -> None:
    kv = make_paged_kv([600, 300], (1, 16, 16), dtype=torch.float16)
    meta = make_metadata([1, 1], [600, 300], kv.block_tables, num_decode_rows=2, with_lists=False)
    q = torch.randn(2, 3, 16).half()
    counters = torch.tensor([astray, 0], dtype=torch.int32)
    lse = torch.zeros(2, 3)
    arguments = (q, kv.k_cache, kv.v_cache, meta)
    out = attend(*arguments, scale=SCALE, lse_TN=lse, counters=counters)
    assert out[0].isnan().all() and lse[0].isnan().all()
    assert torch.equal(out[1], attend(*arguments, scale=SCALE)[1])


@pytest.mark.parametrize("with_lists", [False, True])
def test_a_length_that_the_table_cannot_hold_is_refused(
    attend: PagedAttention, with_lists: bool
) -> None:
    reference = select("paged_attention", dtype=torch.float32)
    kv = make_paged_kv([20, 33], (1, 16, 16))
    room = kv.block_tables.shape[1] * 16
    for length, most in ((room + 1, None), (-1, None), (33, 32)):
        meta = make_metadata(
            [1, 1], [20, length], kv.block_tables, num_decode_rows=2, with_lists=with_lists
        )
        meta = replace(meta, max_seq_len=most)
        for op in (reference, attend):
            with pytest.raises(
                ValueError, match=rf"meta.seq_len.* must be in \[0, {most or room}\]"
            ):
                op(torch.zeros(2, 2, 16), kv.k_cache, kv.v_cache, meta, scale=SCALE)


@pytest.mark.parametrize("block_size", [24, 128])
def test_lengths_around_the_edges_of_tiles_and_blocks(
    attend: PagedAttention, block_size: int
) -> None:
    lengths = [1, 17, 0, 63, 64, 65, 129]
    kv = make_paged_kv(lengths, (1, block_size, 16), dtype=torch.float16)
    decoded(attend, kv, 2)


@pytest.mark.parametrize("lengths", [[500], [1_025], [1, 0, 530]], ids=str)
@pytest.mark.parametrize("window", [None, 270])
def test_rows_that_do_not_fill_a_device_are_split_and_merged(
    attend: PagedAttention, lengths: list[int], window: int | None
) -> None:
    kv = make_paged_kv(lengths, (1, 16, 16), dtype=torch.float16)
    _, workspace = decoded(attend, kv, 3, window)
    assert workspace.numel() > 0


def test_every_batch_up_to_the_largest_fits_its_workspace(attend: PagedAttention) -> None:
    def num_bytes(num_rows: int, *, batch_invariant: bool = False) -> int:
        empty = torch.empty(0, device="meta")
        meta = make_metadata(
            [1] * num_rows,
            [5] * num_rows,
            torch.zeros(num_rows, 64, dtype=torch.int32),
            num_decode_rows=num_rows,
        )
        return attend.workspace_bytes(
            empty.new_empty(num_rows, 32, 128),
            empty.new_empty(9, 8, 64, 128),
            meta,
            batch_invariant=batch_invariant,
        )

    sizes = [num_bytes(num_rows) for num_rows in range(1, 130)]
    assert max(sizes) > 0
    assert num_bytes(129) == max(sizes)
    assert num_bytes(1, batch_invariant=True) == 0


def test_what_only_this_backend_refuses_is_named(
    kernels: Mapping[str, object], attend: PagedAttention
) -> None:
    for shape, wanted in (
        ((1, 8, 16), "a kernel_block_size of 16 to 256"),
        ((1, 272, 16), "a kernel_block_size of 16 to 256"),
        ((1, 16, 20), "a head_dim that is a multiple of 8"),
        ((1, 16, 264), "a head_dim up to 256"),
    ):
        kv = make_paged_kv([3], shape)
        meta = make_metadata([1], [3], kv.block_tables, num_decode_rows=1)
        q = torch.zeros(1, 1, shape[2])
        with pytest.raises(ValueError, match=rf"paged_attention: layout must have {wanted}"):
            attend(q, kv.k_cache, kv.v_cache, meta, scale=SCALE)
    layout = KVLayout(
        order=KVOrder.HND, dtype=torch.float8_e4m3fn, kernel_block_size=8, scale=KVScale.HEAD
    )
    write = cast(KVWrite, kernels["kv_write"])
    heads = cast(QKNormRopeKVWrite, kernels["qk_norm_rope_kv_write"])
    supports = [write.kv_support, heads.kv_support, attend.kv_support]
    with pytest.raises(LayoutError, match=r"16 to 256 \(paged_attention of backend 'triton'\)"):
        require_agreement(layout, 64, supports)


def test_bad_arguments_are_refused_as_the_reference_refuses_them(
    attend: PagedAttention, kernels: Mapping[str, object]
) -> None:
    kv = make_paged_kv([9, 20], (2, 16, 8))
    meta = make_metadata([1, 3], [9, 20], kv.block_tables, num_decode_rows=1)
    longer = make_metadata([1, 3], [9, 90], kv.block_tables, num_decode_rows=1)
    q = torch.zeros(4, 4, 8)
    calls: list[tuple[torch.Tensor, dict[str, object]]] = [
        (q[:3], {}),
        (q[:, :3], {}),
        (q[..., :4], {}),
        (q.half(), {}),
        (q, {"scale": -1.0}),
        (q, {"window": 0}),
        (q, {"sinks_N": torch.zeros(3)}),
        (q, {"lse_TN": torch.zeros(4, 3)}),
        (q, {"out": torch.zeros(3, 4, 8)}),
        (q, {"meta": longer}),
    ]
    reference = select("paged_attention", dtype=torch.float32)
    for queries, changes in calls:
        arguments = {"meta": meta, "scale": SCALE} | changes
        messages = []
        for op in (reference, attend):
            with pytest.raises(ValueError) as caught:
                cast(Callable[..., object], op)(queries, kv.k_cache, kv.v_cache, **arguments)
            messages.append(str(caught.value))
        assert messages[0] == messages[1]
    merges: list[object] = [
        select("merge_states", dtype=torch.float32),
        kernels["merge_states"],
    ]
    for parts, lse in ((q, q), (q[None][:0], torch.zeros(0, 4, 4)), (q[None], torch.zeros(4, 4))):
        messages = []
        for merge in merges:
            with pytest.raises(ValueError) as caught:
                cast(Callable[..., object], merge)(parts, lse)
            messages.append(str(caught.value))
        assert messages[0] == messages[1]


@pytest.mark.parametrize("starts", [(0, 5, 9), (0, 5, 3), (-3, 1, 3)])
def test_places_that_only_the_device_knows_to_be_wrong_write_nothing_beside_the_result(
    attend: PagedAttention, starts: tuple[int, int, int]
) -> None:
    kv = make_paged_kv([5, 9], (1, 16, 16))
    meta = replace(
        make_metadata([1, 2], [5, 9], kv.block_tables, num_decode_rows=0),
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        query_start_list=None,
        seq_len_list=None,
        max_query_len=5,
    )
    q, room, lse_room = (
        torch.randn(3, 2, 16),
        torch.full((23, 2, 16), 7.0),
        torch.full((23, 2), 7.0),
    )
    out, lse = room[10:13], lse_room[10:13]
    attend(q, kv.k_cache, kv.v_cache, meta, scale=SCALE, out=out, lse_TN=lse)
    for whole in (room, lse_room):
        assert (whole[:10] == 7.0).all()
        assert (whole[13:] == 7.0).all()
