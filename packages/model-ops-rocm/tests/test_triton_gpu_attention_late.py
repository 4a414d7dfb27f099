"""What decode rows read before the kernels ahead have ended: nothing that these may still write.

Mutants these tests kill: a length, a table, queries, keys or values that are read before the wait
for the kernels ahead; pages asked for by an old table that stay what was found there;
an id or a length that was no such, by which something beyond the cache or the table is asked for.
"""

import pytest
import torch

pytest.importorskip("triton")

from syncline.model_ops_rocm.kv import KVOrder
from syncline.model_ops_rocm.testing import make_paged_kv
from syncline.model_ops_rocm.testing.decode_rows import MAX_TOKENS, Rows, Variant, all_lengths
from syncline.model_ops_rocm.testing.late import write_late

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="only sm_90 has rows for clusters",
    ),
]

JUNK_IDS = (2**30, -(2**20), 2**31 - 1, 0)
JUNK_LENGTHS = (2**31 - 1, MAX_TOKENS, -(2**31), 65, 0)


@pytest.mark.parametrize("order", [KVOrder.HND, KVOrder.NHD])
@pytest.mark.parametrize(("num_rows", "num_kv_heads"), [(8, 8), (4, 8), (2, 8), (1, 8)])
def test_all_is_read_after_a_kernel_ahead_that_writes_it_late(
    num_rows: int, num_kv_heads: int, order: KVOrder
) -> None:
    torch.manual_seed(0)
    shape = (num_kv_heads, 64, 128)
    rows = Rows(
        make_paged_kv([MAX_TOKENS] * num_rows, shape, dtype=torch.bfloat16), Variant(order=order)
    )
    rows.run()
    for seed, lengths in enumerate(all_lengths(num_rows, MAX_TOKENS)[:12]):
        kv = make_paged_kv(lengths, shape, dtype=torch.bfloat16, seed=seed)
        new = Rows(kv, Variant(order=order))
        tables = torch.full_like(rows.meta.block_tables, -(2**20))
        tables[:, : kv.block_tables.shape[1]] = kv.block_tables.cuda()
        late = [(new.k, rows.k), (new.v, rows.v), (new.q, rows.q), (new.lengths, rows.lengths)]
        late.append((tables, rows.meta.block_tables))
        rows.kv = kv
        rows.target[..., :128] = float("nan")
        # What lies there before may be anything.
        rows.meta.block_tables.fill_(JUNK_IDS[seed % len(JUNK_IDS)])
        rows.lengths.fill_(JUNK_LENGTHS[seed % len(JUNK_LENGTHS)])
        torch.cuda.synchronize()
        write_late(late)
        rows.run()
        rows.assert_right()
