"""The calls of the parity suite on AITER's stand-in, right ones and wrong ones.

A call that AITER takes answers as the reference does; another is refused with nothing written and
no function of AITER called. No call, however wrong, gets to what would abort the process.
"""

from collections.abc import Callable
from typing import cast

import pytest
import torch

from syncline.model_ops_rocm import OpError, select
from syncline.model_ops_rocm.aiter.detect import detect
from syncline.model_ops_rocm.aiter.interface import OP_FUNCTIONS
from syncline.model_ops_rocm.aiter.ops.families import implementations
from syncline.model_ops_rocm.testing.cases import CASES
from syncline.model_ops_rocm.testing.cases.aiter import aiter_tolerance_of
from syncline.model_ops_rocm.testing.fake_aiter import FakeAiter
from syncline.model_ops_rocm.testing.parity import Arguments, Case, Maker, assert_parity
from syncline.model_ops_rocm.testing.refusals import (
    bytes_of,
    calls_of_wrong_kinds,
    one_per_shape_of_call,
    overlaid_calls,
    wrong_calls,
)

InstallAiter = Callable[..., FakeAiter]
Op = Callable[..., object]
HALVES = (torch.bfloat16, torch.float16)
CALLS = [case for case in CASES if case.op in OP_FUNCTIONS]
# Of these, what is taken depends on the architecture.
BY_ARCH = ("linear", "linear_quantised", "quantise_activation", "rms_norm_quant")
CALLS_BY_ARCH = [
    *((case, "gfx942") for case in CALLS),
    *((case, "gfx950") for case in CALLS if case.op in BY_ARCH),
]
# The suite's calls of these are in sizes or recipes that AITER does not take: tests of their own.
ANSWERED_ELSEWHERE = {
    "linear_quantised",
    "quantise_activation",
    "rms_norm_quant",
    "paged_attention",
}
# What AITER rounds in another place is compared where its rounding is what is tested.
QUANTISES = ("quantise_activation", "rms_norm_quant")
# So is the order of experts whose weights are NaN.
LOST = "moe_route-nan-and-inf"


def load(op: str, arch: str) -> Op:
    aiter = detect("0.1.22", device_type="cpu", arch=lambda device: arch)
    return cast(Op, implementations(aiter)[op])


def refused(op: Op, call: Arguments, fake: FakeAiter) -> bool:
    """Whether it was, with every buffer as it was and nothing called."""
    before, calls = bytes_of(call), list(fake.calls)
    try:
        op(**call)
    except (ValueError, OpError):
        assert fake.calls == calls
        assert all(
            torch.equal(one, other) for one, other in zip(bytes_of(call), before, strict=True)
        )
        return True
    return False


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(("case", "arch"), CALLS_BY_ARCH, ids=str)
def test_a_call_is_answered_as_the_reference_does_or_refused(
    install_aiter: InstallAiter, case: Case, dtype: torch.dtype, arch: str
) -> None:
    fake = install_aiter(arch)
    op = load(case.op, arch)
    if refused(op, case.build(Maker(dtype)), fake) or case.op in QUANTISES or str(case) == LOST:
        return
    reference = cast(Op, select(case.op, dtype=dtype))
    tolerance = aiter_tolerance_of(case.op, dtype)
    assert_parity(case, dtype, op, reference, tolerance=tolerance)


@pytest.mark.parametrize("op", sorted(OP_FUNCTIONS.keys() - ANSWERED_ELSEWHERE))
def test_some_call_of_each_op_is_answered(install_aiter: InstallAiter, op: str) -> None:
    """Of the parity suite's; else the test above shows nothing."""
    fake = install_aiter()
    calls = [case.build(Maker(torch.bfloat16)) for case in CALLS if case.op == op]
    assert any(not refused(load(op, "gfx942"), call, fake) for call in calls)


@pytest.mark.parametrize("case", list(one_per_shape_of_call(CALLS)), ids=str)
def test_no_wrong_argument_gets_to_what_would_abort(
    install_aiter: InstallAiter, case: Case
) -> None:
    fake = install_aiter()
    op = load(case.op, "gfx942")
    for wrong in wrong_calls(case, Maker(torch.bfloat16)):
        try:
            call = wrong.build(Maker(torch.bfloat16))
        except ValueError:  # a value of several tensors, which is checked when it is made
            continue
        refused(op, call, fake)


@pytest.mark.parametrize("case", list(one_per_shape_of_call(CALLS)), ids=str)
def test_a_value_of_another_class_and_a_result_over_an_input_are_refused(
    install_aiter: InstallAiter, case: Case
) -> None:
    fake, make = install_aiter(), Maker(torch.bfloat16)
    op = load(case.op, "gfx942")
    for label, call in (*calls_of_wrong_kinds(case, make), *overlaid_calls(case, make)):
        assert refused(op, call, fake), label
