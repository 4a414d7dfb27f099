"""Every Triton kernel, interpreted on the CPU, against the reference; needs Triton alone.

float32 and float16: the interpreter's bfloat16 is wrong. What a GPU computes is tested on a GPU.
"""

from collections.abc import Callable, Mapping
from typing import cast

import pytest
import torch

from syncline.model_ops_rocm import select
from syncline.model_ops_rocm.testing.cases import CASES, tolerance_of
from syncline.model_ops_rocm.testing.parity import Case, assert_parity
from syncline.model_ops_rocm.triton import BACKEND

Ops = Mapping[str, Callable[..., object]]
# NumPy runs the interpreter; a large number overflows to inf there as on a GPU, and inf - inf is
# NaN.
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]


def test_the_cases_have_every_op_of_the_backend() -> None:
    assert {case.op for case in CASES} == {entry.op for entry in BACKEND.entries}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_kernel_answers_as_the_reference_does(
    kernels: Ops, case: Case, dtype: torch.dtype
) -> None:
    reference = cast(Callable[..., object], select(case.op, dtype=dtype))
    tolerance = tolerance_of(case.op, dtype)
    assert_parity(case, dtype, kernels[case.op], reference, tolerance=tolerance)


def test_the_sum_with_the_residual_is_rounded_before_it_is_normalised(kernels: Ops) -> None:
    # Each sum rounds to 1,024; left as it is, every other one would end at 0.9995.
    residual = torch.full((1, 64), 1_024.0, dtype=torch.float16)
    x = torch.tensor([[0.49, -0.24]], dtype=torch.float16).repeat(1, 32)
    weight = torch.ones(64, dtype=torch.float16)
    normed = kernels["rms_norm"](x, weight, 1e-6, residual_TH=residual)
    assert isinstance(normed, torch.Tensor)
    assert torch.equal(normed, torch.ones_like(x))
    assert torch.equal(residual, torch.full_like(x, 1_024.0))


def test_what_a_device_cannot_report_reads_nothing_and_shows(kernels: Ops) -> None:
    x = torch.arange(12.0).reshape(3, 4)
    for op, name in (("embedding", "weight_VH"), ("gather_rows", "x_TH")):
        ids = {"embedding": "ids_T", "gather_rows": "rows_R"}[op]
        rows = kernels[op](**{name: x, ids: torch.tensor([3, 2, -2])})
        assert isinstance(rows, torch.Tensor)
        assert rows[[0, 2]].isnan().all()
        assert torch.equal(rows[1], x[2])
    q = torch.ones(2, 1, 4)
    for wrong in (3, -1):
        positions = torch.tensor([wrong, 0])
        for turned in kernels["rotary_embedding"](q, q, x, positions):  # type: ignore[attr-defined]  # a pair
            assert turned[0].isnan().all()
            assert not turned[1].isnan().any()
    cache = torch.zeros(2, 1, 4, 4)
    kernels["kv_write"](q, q, cache, cache.clone(), torch.tensor([8, -2]))
    assert not cache.any()
    pairs = torch.tensor([[0, 2], [2, 0]])
    kernels["kv_copy_blocks"](cache, cache.clone(), pairs, workspace=torch.ones(256).byte())
    assert not cache.any()


def test_bad_arguments_are_refused_as_the_reference_refuses_them(kernels: Ops) -> None:
    x, weight, cache = torch.zeros(3, 8), torch.zeros(8), torch.zeros(5, 2, 4, 8)
    k, slots, other = torch.zeros(2, 2, 8), torch.tensor([0, 1]), torch.zeros(5, 2, 4, 8)
    q, angles = torch.zeros(2, 4, 8), torch.zeros(4, 8)
    calls: list[tuple[str, tuple[object, ...], dict[str, object]]] = [
        ("rms_norm", (x, torch.zeros(4), 1e-6), {}),
        ("rms_norm", (x, weight.half(), 1e-6), {}),
        ("rms_norm", (x.double(), weight, 1e-6), {}),
        ("rms_norm", (x, weight, 0.0), {}),
        ("rms_norm", (x, weight, 1e-6), {"residual_TH": x[:2]}),
        ("rms_norm", (x, weight, 1e-6), {"out": x[:2]}),
        ("rms_norm", (torch.tensor(1.0), weight, 1e-6), {}),
        ("silu_and_mul", (torch.zeros(2, 7),), {}),
        ("silu_and_mul", (x,), {"out": x}),
        ("rotary_embedding", (q, k[:1], angles, slots), {}),
        ("rotary_embedding", (q, k, angles[:, :5], slots), {}),
        ("rotary_embedding", (q, k, angles, slots[:1]), {}),
        ("rotary_embedding", (q, k, angles.double(), slots), {}),
        ("rotary_embedding", (q, k, angles, slots), {"out": (q, q)}),
        ("embedding", (slots.float(), x), {}),
        ("embedding", (slots, x), {"first_id": -1}),
        ("embedding", (slots, x), {"out": x}),
        ("gather_rows", (weight, slots), {}),
        ("kv_write", (k, k[:1], cache, other, slots), {}),
        ("kv_write", (k.half(), k, cache, other, slots), {}),
        ("kv_write", (k, k, cache, other, slots[:1]), {}),
        ("kv_write", (k, k, cache, cache.transpose(2, 3), slots), {}),
        ("kv_copy_blocks", (cache, other, ((0, 5),)), {}),
        ("kv_copy_blocks", (cache, other, ((0, 1), (2, 1))), {}),
        ("kv_copy_blocks", (cache, other, slots), {}),
    ]
    for op, args, kwargs in calls:
        reference = cast(Callable[..., object], select(op, dtype=torch.float32))
        with pytest.raises(ValueError) as expected:
            reference(*args, **kwargs)
        with pytest.raises(ValueError) as caught:
            kernels[op](*args, **kwargs)
        assert str(caught.value) == str(expected.value)


def test_what_only_this_backend_refuses_is_named(kernels: Ops) -> None:
    cache = torch.zeros(5, 2, 4, 8)
    k, slots = torch.zeros(2, 2, 8), torch.tensor([0, 1])
    with pytest.raises(ValueError, match=r"kv_write: k_cache must be contiguous, got strides"):
        kernels["kv_write"](k, k, cache[::2], cache[::2], slots)
    with pytest.raises(ValueError, match=r"workspace .* at least 512 entries, got torch.uint8"):
        small = torch.zeros(511, dtype=torch.uint8)
        kernels["kv_copy_blocks"](cache, cache.clone(), torch.tensor([[0, 1]]), workspace=small)
    with pytest.raises(ValueError, match=r"rms_norm: x must have a last dimension up to 32768"):
        kernels["rms_norm"](torch.zeros(1, 32_769), torch.zeros(32_769), 1e-6)
    with pytest.raises(ValueError, match=r"rms_norm: x must have leading dimensions that one str"):
        kernels["rms_norm"](torch.zeros(3, 2, 2, 8).transpose(0, 1), torch.zeros(8), 1e-6)
    with pytest.raises(ValueError, match=r"silu_and_mul: x must be on the current device, cpu"):
        kernels["silu_and_mul"](torch.zeros(2, 8, device="meta"))
