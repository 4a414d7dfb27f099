"""qk-norm, rotary and KV write in one launch are those three, bit for bit, on a GPU: small shapes.

Inputs are random here, so that a sum taken in another order would show. The kernels are the
costliest to compile of all, two to four for each case and dtype: a model's shapes are in
test_triton_gpu_fused_model_heads.py.
"""

from collections.abc import Callable
from typing import Any, cast  # Any: what an op returns, tensors in a tuple or alone

import pytest
import torch

from syncline.model_ops_rocm import detect_arch, select
from syncline.model_ops_rocm.testing.cases import fused
from syncline.model_ops_rocm.testing.composed import assert_is_composed
from syncline.model_ops_rocm.testing.parity import Case

pytestmark = pytest.mark.gpu

NAMES = ("rms_norm", "rotary_embedding", "kv_write", "qk_norm_rope_kv_write")
CASES = [case for case in fused.CASES if case.op == "qk_norm_rope_kv_write"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_heads_in_one_launch_are_their_parts(case: Case, dtype: torch.dtype) -> None:
    arch = detect_arch()
    ops = {
        name: cast(Callable[..., Any], select(name, backend="triton", arch=arch, dtype=dtype))
        for name in NAMES
    }
    assert_is_composed(case, dtype, ops, "cuda")
