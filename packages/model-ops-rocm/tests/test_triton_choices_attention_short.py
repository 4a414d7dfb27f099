"""Which decode rows have all of their pages asked for at once; needs Triton and no GPU."""

import math
from dataclasses import dataclass

import pytest
import torch

pytest.importorskip("triton")

from syncline.model_ops_rocm import AttentionMetadata
from syncline.model_ops_rocm.kv import KVLayout, KVOrder, KVPool, KVScale
from syncline.model_ops_rocm.testing.stand_in import stand_in_driver
from syncline.model_ops_rocm.triton.launch import IS_INTERPRETED, LAUNCHER
from syncline.model_ops_rocm.triton.ops.attention import PAGED

pytestmark = pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter compiles nothing")

FEW = [("decode_few", "short_decode_kernel")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Decode rows that are few and short, unless something says otherwise."""

    arch: str = "sm_90"
    num_rows: int = 8
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    block_size: int = 64
    context: int = 512
    max_seq_len: int | None = None
    q_len: int = 1
    order: KVOrder = KVOrder.HND
    in_codes: bool = False
    offset: int = 0  # of the cache's first element in its memory
    batch_invariant: bool = False


def launched(rows: Rows) -> list[tuple[str, str]]:
    """The kind and the kernel of each launch of paged attention."""
    scale = KVScale.HEAD if rows.in_codes else KVScale.NONE
    layout = KVLayout(
        order=rows.order,
        dtype=torch.float8_e4m3fn if rows.in_codes else rows.dtype,
        kernel_block_size=rows.block_size,
        scale=scale,
    )
    width = rows.context // rows.block_size
    pool = KVPool(
        layout=layout,
        num_blocks=2,
        block_size=rows.block_size,
        num_kv_heads=rows.num_kv_heads,
        head_dim=rows.head_dim,
    )
    specs = pool.specs()
    k, v = (
        torch.zeros(math.prod(spec.shape) + rows.offset, dtype=spec.dtype)[rows.offset :]
        for spec in (specs["k"], specs["v"])
    )
    scales = torch.ones(rows.num_kv_heads)
    num_tokens = rows.num_rows * rows.q_len
    meta = AttentionMetadata(
        query_start_loc=torch.arange(rows.num_rows + 1, dtype=torch.int32) * rows.q_len,
        seq_lens=torch.full((rows.num_rows,), rows.q_len, dtype=torch.int32),
        block_tables=torch.zeros(rows.num_rows, width, dtype=torch.int32),
        num_decode_rows=rows.num_rows,
        decode_query_len=rows.q_len,
        max_query_len=rows.q_len,
        max_seq_len=rows.max_seq_len,
    )
    with stand_in_driver(rows.arch), LAUNCHER.compiling(is_preparing=False) as compiled:
        PAGED(
            torch.zeros(num_tokens, rows.num_heads, rows.head_dim, dtype=rows.dtype),
            *(k.view(specs["k"].shape), v.view(specs["v"].shape), meta),
            scale=1.0,
            layout=layout,
            kv_scales=(scales, scales) if rows.in_codes else None,
            batch_invariant=rows.batch_invariant,
        )
    return [
        (one.key.kind, one.binary.metadata.name)
        for one in compiled
        if one.key.op == "paged_attention"
    ]


@pytest.mark.parametrize(
    "rows",
    [
        Rows(),
        Rows(num_kv_heads=4),
        Rows(num_rows=4, dtype=torch.float16),
        Rows(num_rows=16, num_kv_heads=2),
        Rows(context=320),
        Rows(context=1_024),
        Rows(context=8_192, max_seq_len=1_024),
        Rows(block_size=256, order=KVOrder.NHD),
        Rows(num_heads=8, q_len=16),
    ],
    ids=str,
)
def test_few_short_rows_have_a_kernel_of_their_own(rows: Rows) -> None:
    assert launched(rows) == FEW


@pytest.mark.parametrize(
    "rows",
    [
        Rows(num_rows=3),
        Rows(num_rows=9),
        Rows(context=256),
        Rows(context=1_088),
        Rows(max_seq_len=256),
        Rows(head_dim=64),
        Rows(head_dim=256),
        Rows(block_size=32),
        Rows(num_heads=8, q_len=17),
        Rows(num_rows=16, num_heads=34, num_kv_heads=2),
        Rows(order=KVOrder.HND_D_MAJOR_KEYS),
        Rows(in_codes=True),
        Rows(dtype=torch.float32),
        Rows(offset=1),
        Rows(batch_invariant=True),
        Rows(arch="gfx942"),
    ],
    ids=str,
)
def test_all_other_rows_do_not(rows: Rows) -> None:
    found = launched(rows)
    assert found and not {name for _, name in found} & {"short_decode_kernel"}
