"""A pool's layout is one that each of its ops takes, or the pool is not built."""

import pytest
import torch

from syncline.model_ops_rocm import LayoutError, select
from syncline.model_ops_rocm.kv import KVLayout, KVOrder, KVScale, KVSupport, require_agreement

CODES = KVLayout(
    order=KVOrder.AITER_X,
    dtype=torch.float8_e4m3fn,
    kernel_block_size=16,
    scale=KVScale.TOKEN,
)
ALL = KVSupport(op="kv_write", backend="torch")


def test_the_torch_ops_agree_on_every_layout() -> None:
    supports = [
        select("kv_write", dtype=torch.float32).kv_support,
        select("qk_norm_rope_kv_write", dtype=torch.float32).kv_support,
        select("paged_attention", dtype=torch.float32).kv_support,
    ]
    assert [support.op for support in supports] == [
        "kv_write",
        "qk_norm_rope_kv_write",
        "paged_attention",
    ]
    for order in KVOrder:
        require_agreement(
            KVLayout(order=order, dtype=torch.float32, kernel_block_size=8), 24, supports
        )
    require_agreement(CODES, 32, supports)


@pytest.mark.parametrize(
    ("narrow", "head_dim", "wanted"),
    [
        ({"orders": (KVOrder.HND,)}, 32, r"an order of hnd \(paged_attention of backend 'some'\)"),
        ({"dtypes": (torch.float32,)}, 32, r"a dtype of torch.float32 \(paged_attention"),
        ({"scales": (KVScale.NONE,)}, 32, r"a scale of none \(paged_attention"),
        ({"block_sizes": (32, 64)}, 32, r"a kernel_block_size of 32 to 64 \(paged_attention"),
        ({"max_head_dim": 128}, 256, r"a head_dim up to 128 .*, got head_dim 256"),
        ({"head_dim_multiple": 32}, 48, r"a head_dim that is a multiple of 32 .* head_dim 48"),
    ],
)
def test_an_op_that_does_not_take_the_layout_is_named(
    narrow: dict[str, object], head_dim: int, wanted: str
) -> None:
    support = KVSupport(op="paged_attention", backend="some", **narrow)  # type: ignore[arg-type]  # its own fields
    require_agreement(CODES, head_dim, [ALL])
    with pytest.raises(LayoutError, match=wanted):
        require_agreement(CODES, head_dim, [ALL, support])
    fits = KVLayout(order=KVOrder.HND, dtype=torch.float32, kernel_block_size=64)
    require_agreement(fits, 32, [ALL, support])
