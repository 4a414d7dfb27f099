"""qk-norm, rotary and KV write in one launch are those three, bit for bit: models' shapes on a GPU.

Every order and scale at every shape in bfloat16; each of them at some shape in the other dtypes,
since the kernels are the costliest to compile of all.
"""

from collections.abc import Callable
from itertools import product
from typing import Any, cast  # Any: what an op returns, tensors in a tuple or alone

import pytest
import torch

from syncline.model_ops_rocm import detect_arch, select
from syncline.model_ops_rocm.kv import KVOrder, KVScale
from syncline.model_ops_rocm.testing.cases import fused
from syncline.model_ops_rocm.testing.composed import assert_is_composed
from syncline.model_ops_rocm.testing.parity import Case

pytestmark = pytest.mark.gpu

NAMES = ("rms_norm", "rotary_embedding", "kv_write", "qk_norm_rope_kv_write")
HEADS = (((32, 8), 128), ((16, 8), 128), ((12, 2), 64), ((8, 2), 256))
STORED = tuple(product((KVOrder.HND, KVOrder.NHD), (KVScale.NONE, KVScale.TOKEN, KVScale.HEAD)))


def shapes(dtype: torch.dtype) -> list[Case]:
    if dtype == torch.bfloat16:
        pairs = list(product(HEADS, STORED))
    else:
        pairs = [(HEADS[index % len(HEADS)], stored) for index, stored in enumerate(STORED)]
    return [
        fused.heads_case(33, heads, head_dim, order=order, scale=scale)
        for (heads, head_dim), (order, scale) in pairs
    ]


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        (case, dtype)
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
        for case in shapes(dtype)
    ],
    ids=str,
)
def test_heads_in_one_launch_are_their_parts(case: Case, dtype: torch.dtype) -> None:
    arch = detect_arch()
    ops = {
        name: cast(Callable[..., Any], select(name, backend="triton", arch=arch, dtype=dtype))
        for name in NAMES
    }
    assert_is_composed(case, dtype, ops, "cuda")
