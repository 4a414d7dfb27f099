"""One argument made wrong in a call of each op: refused by name with nothing written, or meant.

What the other backends refuse is compared with this one where they can run.
"""

from collections.abc import Callable
from typing import cast

import pytest
import torch

from syncline.model_ops_rocm import OpError, select
from syncline.model_ops_rocm.registry import OPS
from syncline.model_ops_rocm.testing.cases import CASES
from syncline.model_ops_rocm.testing.parity import Case, Maker
from syncline.model_ops_rocm.testing.refusals import (
    WrongCall,
    bytes_of,
    calls_of_wrong_kinds,
    one_per_shape_of_call,
    overlaid_calls,
    wrong_calls,
)

# What the torch backend needs no memory for it does not look at.
UNREAD = {"workspace", "counters"}
# It stores weights of float64 too, as a format does.
TAKES_DOUBLE = {("encode", "source"), ("encode_grouped", "source"), ("amax_into", "source")}


CALLED = list(one_per_shape_of_call(CASES))


def test_every_op_is_called() -> None:
    assert {case.op for case in CALLED} == set(OPS)


def outcome(op: Callable[..., object], wrong: WrongCall) -> str | None:
    """The refusal, which left every buffer as it was; None if the call was accepted."""
    try:
        call = wrong.build(Maker(torch.float32))
    except ValueError as error:  # a value of several tensors, which is checked when it is made
        return str(error)
    before = bytes_of(call)
    try:
        op(**call)
    except (ValueError, OpError) as error:
        for one, other in zip(bytes_of(call), before, strict=True):
            assert torch.equal(one, other), f"{wrong}: written before it was refused"
        return str(error)
    except Exception as error:  # noqa: BLE001 reason: whatever it is, it is no refusal
        pytest.fail(f"{wrong}: {type(error).__name__}: {error}")
    return None


@pytest.mark.parametrize("case", CALLED, ids=str)
def test_what_is_wrong_is_refused_by_op_argument_and_limit(case: Case) -> None:
    op = cast(Callable[..., object], select(case.op, dtype=torch.float32))
    for wrong in wrong_calls(case, Maker(torch.float32)):
        refusal = outcome(op, wrong)
        if wrong.argument in UNREAD:
            continue
        name = next((step for step in wrong.path[::-1] if isinstance(step, str)), wrong.argument)
        if wrong.change in ("double", "dtype") and (case.op, name) not in TAKES_DOUBLE:
            assert refusal is not None, f"{wrong} was accepted"
        if refusal is not None:
            subject, _, rest = refusal.partition(" must ")
            if wrong.argument == "jobs":
                assert f"{case.op}: jobs[{wrong.path[0]}]: " in refusal, f"{wrong}: {refusal}"
            assert ", got " in rest or " got " in refusal, f"{wrong}: {refusal}"
            assert subject.split(":")[0] in (case.op, "AttentionMetadata", "AmaxPartial") or (
                refusal.startswith(("layout ", "storage format ", "region "))
            ), f"{wrong}: {refusal}"


@pytest.mark.parametrize("case", CALLED, ids=str)
def test_a_result_over_another_tensor_of_the_call_is_refused(case: Case) -> None:
    op = cast(Callable[..., object], select(case.op, dtype=torch.float32))
    for label, call in overlaid_calls(case, Maker(torch.float32)):
        before = bytes_of(call)
        try:
            op(**call)
        except (ValueError, OpError) as error:
            assert " apart from " in str(error) or " must be the given scale" in str(error), label
        else:
            pytest.fail(f"{label} was accepted")
        assert all(map(torch.equal, bytes_of(call), before)), label


@pytest.mark.parametrize("case", CALLED, ids=str)
def test_an_argument_of_another_class_is_refused_by_name(case: Case) -> None:
    op = cast(Callable[..., object], select(case.op, dtype=torch.float32))
    for label, call in calls_of_wrong_kinds(case, Maker(torch.float32)):
        before = bytes_of(call)
        with pytest.raises(ValueError, match=rf"^({case.op}: |region ).*must .*, got"):
            op(**call)
        assert all(map(torch.equal, bytes_of(call), before)), label


WRONG_NUMBERS = (True, "1", torch.ones(()), float("nan"), float("inf"), -1)


def numbers_of(case: Case) -> list[str]:
    """Names of the arguments that are numbers, and neither truth values nor members of an enum."""
    call = case.build(Maker(torch.float32))
    return [name for name, value in call.items() if type(value) in (int, float)]


@pytest.mark.parametrize("case", [case for case in CALLED if numbers_of(case)], ids=str)
def test_what_is_no_number_of_the_kind_is_refused(case: Case) -> None:
    op = cast(Callable[..., object], select(case.op, dtype=torch.float32))
    for name in numbers_of(case):
        for wrong in WRONG_NUMBERS:
            call = case.build(Maker(torch.float32)) | {name: wrong}
            before = bytes_of(call)
            with pytest.raises(ValueError, match=f"^{case.op}: {name} must .*, got"):
                op(**call)
            assert all(map(torch.equal, bytes_of(call), before)), f"{case}: {name} {wrong}"
