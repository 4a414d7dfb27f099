"""Fused norms and activations on a GPU are their parts, bit for bit; codes are everywhere the same.

Inputs are random here, so that a sum taken in another order would show. Of a model's shapes every
recipe runs in bfloat16, and each shape and each recipe in the other dtypes: whoever adds a case
adds three to five kernels to compile, and the file is to take a minute.
"""

from collections.abc import Callable, Mapping
from typing import Any, cast  # Any: what an op returns, tensors in a tuple or alone

import pytest
import torch

from syncline.model_ops_rocm import Quantised, detect_arch, select
from syncline.model_ops_rocm.testing.bits import flat_bits
from syncline.model_ops_rocm.testing.cases import fused
from syncline.model_ops_rocm.testing.composed import RoughMaker, assert_is_composed
from syncline.model_ops_rocm.testing.parity import Case

pytestmark = pytest.mark.gpu

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NAMES = ("rms_norm", "silu_and_mul", "quantise_activation", "rms_norm_quant", "silu_and_mul_quant")
RECIPES = (fused.TOKEN, fused.BLOCK_128, fused.MX[1])
SHAPES = ((37, 4_096), (65, 1_024), (9, 2_048), (5, 12_288))
SMALL = [case for case in fused.CASES if case.op in ("rms_norm_quant", "silu_and_mul_quant")]


def norms(dtype: torch.dtype) -> list[Case]:
    """All recipes at all of a model's widths in bfloat16, else one at each."""
    if dtype == torch.bfloat16:
        pairs = [(recipe, shape) for shape in SHAPES for recipe in RECIPES]
    else:
        pairs = [(RECIPES[index % len(RECIPES)], shape) for index, shape in enumerate(SHAPES)]
    return [fused.norm_case(recipe, *shape, residual=True) for recipe, shape in pairs]


def triton_ops(dtype: torch.dtype) -> Mapping[str, Callable[..., Any]]:
    arch = detect_arch()
    return {
        name: cast(Callable[..., Any], select(name, backend="triton", arch=arch, dtype=dtype))
        for name in NAMES
    }


@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, dtype) for dtype in DTYPES for case in (*SMALL, *norms(dtype))],
    ids=str,
)
def test_a_fused_op_is_its_parts(case: Case, dtype: torch.dtype) -> None:
    assert_is_composed(case, dtype, triton_ops(dtype), "cuda")


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
