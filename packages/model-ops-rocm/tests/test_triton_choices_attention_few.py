"""Which decode rows clusters of programs attend to, and how; needs Triton and no GPU."""

import math
import re
from dataclasses import dataclass, replace

import pytest
import torch

pytest.importorskip("triton")

from syncline.model_ops_rocm import AttentionMetadata
from syncline.model_ops_rocm.kv import KVLayout, KVOrder, KVPool, KVScale
from syncline.model_ops_rocm.testing.ptx import (
    descriptors_fetched,
    descriptors_read,
    parameters_of_descriptors,
)
from syncline.model_ops_rocm.testing.stand_in import stand_in_driver
from syncline.model_ops_rocm.triton.configs.attention import (
    CLOSE,
    CLOSE_LONG,
    EIGHTHS,
    HALVES,
    QUARTERS,
)
from syncline.model_ops_rocm.triton.launch import IS_INTERPRETED, LAUNCHER, CompiledLaunch
from syncline.model_ops_rocm.triton.ops.attention import PAGED

pytestmark = pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter compiles nothing")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Decode rows that are few, unless something says otherwise."""

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


def compiled_for(rows: Rows) -> list[CompiledLaunch]:
    """The launches of paged attention."""
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
    return [one for one in compiled if one.key.op == "paged_attention"]


def launched(rows: Rows) -> list[tuple[str, str]]:
    """The kind and the kernel of each of them."""
    return [(one.key.kind, one.binary.metadata.name) for one in compiled_for(rows)]


@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        (CLOSE, Rows()),
        (CLOSE, Rows(context=64)),
        (CLOSE, Rows(num_rows=5, dtype=torch.float16)),
        (CLOSE_LONG, Rows(context=1_024)),
        (CLOSE_LONG, Rows(context=8_192, max_seq_len=1_024)),
        (CLOSE_LONG, Rows(num_heads=8, q_len=16, context=576)),
        (HALVES, Rows(num_kv_heads=4)),
        (HALVES, Rows(num_rows=4, dtype=torch.float16)),
        (HALVES, Rows(num_rows=16, num_kv_heads=2, context=2_048)),
        (QUARTERS, Rows(num_rows=2)),
        (QUARTERS, Rows(num_rows=1, context=64)),
        (QUARTERS, Rows(num_rows=4, num_kv_heads=4, context=2_048)),
        (QUARTERS, Rows(num_rows=1, num_kv_heads=2, context=1_024)),  # of sixteen columns
        (QUARTERS, Rows(num_rows=1, block_size=256, order=KVOrder.NHD)),
        (EIGHTHS, Rows(num_rows=1, context=576)),
        (EIGHTHS, Rows(num_rows=2, num_kv_heads=4, context=4_096)),
        (EIGHTHS, Rows(num_rows=1, context=8_192, max_seq_len=4_096)),
    ],
    ids=str,
)
def test_clusters_attend_to_few_rows(kind: str, rows: Rows) -> None:
    assert launched(rows) == [(kind, "few_decode_kernel")]


@pytest.mark.parametrize(
    "rows",
    [
        Rows(num_rows=9),
        Rows(context=1_088),
        Rows(num_rows=4, context=2_112),
        Rows(num_rows=2, context=2_112),
        Rows(num_rows=1, context=4_160),
        Rows(num_rows=1, num_kv_heads=2, context=2_112),
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
    assert found and not {name for _, name in found} & {"few_decode_kernel"}


@pytest.mark.parametrize(
    "rows",
    [Rows(), Rows(num_kv_heads=4), Rows(num_rows=2), Rows(num_rows=1, context=1_024)],
    ids=str,
)
def test_every_thread_passes_the_barrier_of_its_cluster(rows: Rows) -> None:
    """It counts all threads that have not ended: one that passes it not would hang the device."""
    (one,) = compiled_for(rows)
    programs = one.config.num_ctas
    ptx, threads = one.binary.asm["ptx"], 256
    assert f".reqntid {threads}" in ptx and f".reqnctapercluster {programs}" in ptx
    # Of the four warps that attend, of the one that asks, and of three that make up their number.
    assert len(re.findall(r"barrier\.cluster\.arrive", ptx)) == 5
    # The first program waits in another place than those that send to it.
    assert len(re.findall(r"barrier\.cluster\.wait", ptx)) == 6
    # Each part: sums, highest scores and totals of each of 128 threads.
    parts, numbers = programs - 1, 8 + 2 + 2
    num_bytes = parts * numbers * 128 * 4
    assert re.search(rf"expect_tx\.shared::cta\.b64 _, \[\S+], {num_bytes};", ptx)
    assert len(re.findall(r"st\.async", ptx)) == numbers // 4


@pytest.mark.parametrize("order", [KVOrder.HND, KVOrder.NHD])
@pytest.mark.parametrize(
    "rows",
    [Rows(), Rows(num_kv_heads=4), Rows(num_rows=2), Rows(num_rows=1, context=1_024)],
    ids=str,
)
def test_what_lies_in_l2_may_be_asked_for_before_the_wait_and_nothing_else(
    rows: Rows, order: KVOrder
) -> None:
    (one,) = compiled_for(replace(rows, order=order))
    parts = one.binary.asm["ptx"].split("griddepcontrol.wait")
    assert len(parts) == 3
    # The warps that attend read nothing before their wait, and the one that asks, which begins at
    # the barrier of its cluster, reads length and ids, past L1.
    (asks,) = (number for number in (1, 2) if "cp.async.bulk.tensor" in parts[number])
    ahead = parts[asks - 1].split("barrier.cluster.arrive")[-1]
    others = parts[0] if asks == 2 else parts[1].split("barrier.cluster.arrive")[-1]
    assert re.findall(r"ld\.global[\w.]*", ahead) == ["ld.global.cg.b32"] * 2
    assert "ld.global" not in others
    # After the wait it reads them again, before it asks for anything.
    again = parts[asks].split("cp.async.bulk.tensor")[0]
    assert len(re.findall(r"ld\.global", again)) >= 3 and ".cg" not in again
    fetched = descriptors_fetched(ahead)
    assert [how for _, how in fetched] == ["cp.async.bulk.prefetch.tensor.2d.L2.global.tile"] * 2


@pytest.mark.parametrize("rows", [Rows(), Rows(num_rows=1, order=KVOrder.NHD)], ids=str)
def test_pages_are_fetched_ahead_by_the_descriptors_that_are_read(rows: Rows) -> None:
    """PTX counts a kernel's parameters: what another one holds is no descriptor."""
    ptx = compiled_for(rows)[0].binary.asm["ptx"]
    fetched = {name for name, _ in descriptors_fetched(ptx)}
    assert fetched == descriptors_read(ptx) == parameters_of_descriptors(ptx)
    assert len(fetched) == 2
