"""A tensor that is not where the kernels run is refused by name, whichever argument it is."""

from collections.abc import Callable, Mapping

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


@pytest.mark.parametrize("case", CALLED, ids=str)
def test_a_tensor_elsewhere_is_refused(kernels: Ops, case: Case) -> None:
    for wrong in calls_elsewhere(case, Maker(torch.float32)):
        if wrong.argument == "workspace":
            continue  # an op that needs none, for such a call, does not look at it
        with pytest.raises((ValueError, OpError), match=REFUSED):
            kernels[case.op](**wrong.build(Maker(torch.float32)))
