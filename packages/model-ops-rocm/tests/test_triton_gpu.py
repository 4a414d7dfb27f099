"""Every Triton kernel on a GPU: against the reference, captured in a graph, and never recompiled.

`python -m pytest -m gpu packages/model-ops-rocm/tests/test_triton_gpu.py` runs it.
"""

from collections.abc import Callable
from typing import cast

import pytest
import torch

from syncline.model_ops_rocm import NotPreparedError, detect_arch, prepare, select
from syncline.model_ops_rocm.testing.cases import CASES, tolerance_of
from syncline.model_ops_rocm.testing.parity import (
    Arguments,
    Case,
    Maker,
    assert_parity,
    buffers_of,
    results_of,
)
from syncline.model_ops_rocm.triton import sealed

pytestmark = pytest.mark.gpu

Op = Callable[..., object]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Without tokens nothing is launched, and PyTorch warns of an empty graph.
RECORDABLE = [case for case in CASES if case.is_recordable and not case.label.startswith("0x")]
MORE_THAN_INT32 = 2**31


def triton_op(op: str, dtype: torch.dtype) -> Op:
    return cast(Op, select(op, backend="triton", arch=detect_arch(), dtype=dtype))


def torch_op(op: str, dtype: torch.dtype) -> Op:
    return cast(Op, select(op, dtype=dtype))


def every_buffer(arguments: Arguments) -> list[torch.Tensor]:
    return [buffer for value in arguments.values() for buffer in buffers_of(value)]


def assert_same_bits(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        bits = one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)
        assert torch.equal(*bits)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_kernel_answers_as_the_reference_does(case: Case, dtype: torch.dtype) -> None:
    ours, theirs = triton_op(case.op, dtype), torch_op(case.op, dtype)
    tolerance = tolerance_of(case.op, dtype)
    assert_parity(case, dtype, ours, theirs, tolerance=tolerance, device="cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", RECORDABLE, ids=str)
def test_a_replay_reads_what_its_tensors_hold_by_then(case: Case, dtype: torch.dtype) -> None:
    op = triton_op(case.op, dtype)
    op(**case.build(Maker(dtype, "cuda", seed=1)))  # compiled before it is captured
    captured = case.build(Maker(dtype, "cuda", seed=1))
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        result = op(**captured)
    changed = case.build(Maker(dtype, "cuda", seed=2))
    for buffer, new in zip(every_buffer(captured), every_buffer(changed), strict=True):
        buffer.copy_(new)
    graph.replay()
    torch.cuda.synchronize()
    expected = op(**changed)
    assert_same_bits(list(results_of(result)), list(results_of(expected)))
    assert_same_bits(every_buffer(captured), every_buffer(changed))
    # From run to run as well.
    again = case.build(Maker(dtype, "cuda", seed=2))
    assert_same_bits(list(results_of(op(**again))), list(results_of(expected)))


def norm_call(num_tokens: int, width: int, device: str) -> Arguments:
    make = Maker(torch.bfloat16, device)
    if device == "meta":
        tensors = [torch.empty(num_tokens, width, dtype=torch.bfloat16, device=device)] * 2
        weight = torch.empty(width, dtype=torch.bfloat16, device=device)
    else:
        tensors = [make.randn(num_tokens, width) for _ in range(2)]
        weight = make.randn(width)
    return {"x_TH": tensors[0], "residual_TH": tensors[1], "weight_H": weight, "eps": 1e-6}


def test_what_was_prepared_runs_with_another_number_of_tokens_and_nothing_else_does() -> None:
    arch, dtype = detect_arch(), torch.bfloat16
    op = triton_op("rms_norm", dtype)
    example = norm_call(64, 1_776, "meta")
    prepare("rms_norm", [example], backend="triton", arch=arch, dtype=dtype)
    with sealed():
        for num_tokens in (1, 3, 64, 1_000):
            op(**norm_call(num_tokens, 1_776, "cuda"))
        other = norm_call(4, 1_792, "cuda")
        residual = cast(torch.Tensor, other["residual_TH"])
        kept = residual.clone()
        with pytest.raises(NotPreparedError) as caught:
            op(**other)
        assert (caught.value.op, caught.value.arch) == ("rms_norm", arch)
        torch.cuda.synchronize()
        assert torch.equal(residual, kept)
    op(**other)


def test_tensors_elsewhere_are_refused_before_a_launch() -> None:
    op = triton_op("silu_and_mul", torch.float32)
    with pytest.raises(ValueError, match=r"silu_and_mul: x must be on the current device, cuda:"):
        op(torch.zeros(2, 8))
    with pytest.raises(ValueError, match=r"silu_and_mul: out must be on the current device, cuda"):
        op(torch.zeros(2, 8, device="cuda"), out=torch.zeros(2, 4))


def test_a_pool_of_more_than_2_31_elements_is_written_and_copied_at_its_end() -> None:
    dtype = torch.bfloat16
    shape = (8, 16, 128)
    num_blocks = MORE_THAN_INT32 // (8 * 16 * 128) + 2
    k_cache, v_cache = torch.zeros((2, num_blocks, *shape), dtype=dtype, device="cuda")
    assert k_cache.numel() > MORE_THAN_INT32
    make = Maker(dtype, "cuda")
    k, v = make.randn(2, 8, 128), make.randn(2, 8, 128)
    slots = torch.tensor([num_blocks * 16 - 1, 3], device="cuda")
    triton_op("kv_write", dtype)(k, v, k_cache, v_cache, slots)
    copy = triton_op("kv_copy_blocks", dtype)
    copy(k_cache, v_cache, ((num_blocks - 1, 1), (0, num_blocks - 2)))
    for cache, written in ((k_cache, k), (v_cache, v)):
        assert torch.equal(cache[num_blocks - 1, :, 15], written[0])
        assert torch.equal(cache[0, :, 3], written[1])
        assert torch.equal(cache[1], cache[num_blocks - 1])
        assert torch.equal(cache[num_blocks - 2], cache[0])
        assert int(torch.count_nonzero(cache)) == 2 * int(torch.count_nonzero(written))
