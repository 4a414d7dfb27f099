"""Fused ops on a GPU are their parts, bit for bit; quantised activations are everywhere the same.

Inputs are random here, so that a sum taken in another order would show.
"""

from collections.abc import Callable, Mapping
from typing import Any, cast  # Any: what a fused op returns, tensors in a tuple or alone

import pytest
import torch

from syncline.model_ops_rocm import Quantised, detect_arch, select
from syncline.model_ops_rocm.kv import KVOrder, KVScale
from syncline.model_ops_rocm.testing.bits import flat_bits
from syncline.model_ops_rocm.testing.cases import fused
from syncline.model_ops_rocm.testing.composed import RoughMaker, composed
from syncline.model_ops_rocm.testing.parity import Arguments, Case, buffers_of, results_of

pytestmark = pytest.mark.gpu

Ops = Mapping[str, Callable[..., Any]]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ALONE = ("rms_norm", "rotary_embedding", "silu_and_mul", "kv_write", "quantise_activation")
MODEL_SHAPES = (
    *(
        fused.norm_case(recipe, *shape, residual=True)
        for shape in ((37, 4_096), (65, 1_024), (9, 2_048), (5, 12_288))
        for recipe in (fused.TOKEN, fused.BLOCK_128, fused.MX[1])
    ),
    *(
        fused.heads_case(33, heads, head_dim, order=order, scale=scale)
        for heads, head_dim in (((32, 8), 128), ((16, 8), 128), ((12, 2), 64), ((8, 2), 256))
        for order in (KVOrder.HND, KVOrder.NHD)
        for scale in (KVScale.NONE, KVScale.TOKEN, KVScale.HEAD)
    ),
)
FUSED = [case for case in fused.CASES if case.op not in ALONE]


def triton_ops(dtype: torch.dtype) -> Ops:
    names = {*ALONE, *(case.op for case in FUSED)}
    arch = detect_arch()
    return {
        name: cast(Callable[..., Any], select(name, backend="triton", arch=arch, dtype=dtype))
        for name in names
    }


def buffers(result: object, arguments: Arguments) -> list[torch.Tensor]:
    kept = [buffer for value in arguments.values() for buffer in buffers_of(value)]
    return [*results_of(result), *kept]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", [*FUSED, *MODEL_SHAPES], ids=str)
def test_a_fused_op_is_its_parts(case: Case, dtype: torch.dtype) -> None:
    ops = triton_ops(dtype)
    ours, theirs = (case.build(RoughMaker(dtype, "cuda", seed=1)) for _ in range(2))
    got = buffers(ops[case.op](**ours), ours)
    expected = buffers(composed(case.op, ops)(**theirs), theirs)
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(flat_bits(one), flat_bits(other))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("recipe", [fused.TOKEN, fused.TOKEN_FNUZ, fused.BLOCK_128, *fused.MX])
def test_codes_are_the_same_on_cpu_and_gpu_by_pytorch_and_by_triton(
    recipe: Quantised, dtype: torch.dtype
) -> None:
    x = RoughMaker(dtype).randn(300, 4_100)
    x *= torch.logspace(-8, 4, 300)[:, None].to(dtype)
    on_cpu = select("quantise_activation", dtype=dtype)(x, recipe)
    on_gpu = select("quantise_activation", dtype=dtype)(x.cuda(), recipe)
    by_triton = triton_ops(dtype)["quantise_activation"](x.cuda(), recipe)
    for one, other, third in zip(on_cpu, on_gpu, by_triton, strict=True):
        assert torch.equal(flat_bits(one), flat_bits(other.cpu()))
        assert torch.equal(flat_bits(one), flat_bits(third.cpu()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [128, 1_024, 4_096, 12_288])
def test_a_row_of_the_norm_has_the_bits_it_has_alone(width: int, dtype: torch.dtype) -> None:
    make, op = RoughMaker(dtype, "cuda"), triton_ops(dtype)["rms_norm"]
    x, weight = make.randn(513, width), make.randn(width)
    together = op(x, weight, 1e-6, batch_invariant=True)
    for num_rows in (1, 2, 7, 64):
        alone = op(x[-num_rows:], weight, 1e-6, batch_invariant=True)
        assert torch.equal(alone, together[-num_rows:])
