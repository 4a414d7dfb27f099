"""A tensor that is not where the kernels run is refused by name, whichever argument it is."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from typing import cast

import pytest
import torch

from syncline.model_ops_rocm import OpError
from syncline.model_ops_rocm.testing.cases import CASES
from syncline.model_ops_rocm.testing.parity import Case, Maker
from syncline.model_ops_rocm.testing.refusals import calls_elsewhere, one_per_shape_of_call
from syncline.model_ops_rocm.triton import BACKEND

Ops = Mapping[str, Callable[..., object]]
OPS = {entry.op for entry in BACKEND.entries}
CALLED = [case for case in one_per_shape_of_call(CASES) if case.op in OPS]
# A format's own words for what it stores from, and a scale that must be the given one.
REFUSED = (
    r"must be on the current device, cpu, got meta|got a meta tensor"
    r"|requires a nonfinite of one bool|must be the given scale"
)


@pytest.fixture(scope="module")
def ops() -> Iterator[Ops]:
    if os.environ.get("TRITON_INTERPRET") != "1":
        if find_spec("triton") is None:
            pytest.skip("Triton is not installed")
        if "triton" in sys.modules:
            pytest.skip("Triton was imported to compile: run with TRITON_INTERPRET=1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        yield cast(Ops, BACKEND.load())


@pytest.mark.parametrize("case", CALLED, ids=str)
def test_a_tensor_elsewhere_is_refused(ops: Ops, case: Case) -> None:
    for wrong in calls_elsewhere(case, Maker(torch.float32)):
        if wrong.argument == "workspace":
            continue  # an op that needs none, for such a call, does not look at it
        with pytest.raises((ValueError, OpError), match=REFUSED):
            ops[case.op](**wrong.build(Maker(torch.float32)))
