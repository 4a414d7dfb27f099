"""Which products are compiled for a warp of their own that feeds them; needs Triton and no GPU."""

import pytest
import torch

pytest.importorskip("triton")

from syncline.model_ops_rocm import RowMajor, Shuffle16x16, WeightLayout
from syncline.model_ops_rocm.testing.stand_in import stand_in_driver
from syncline.model_ops_rocm.triton.launch import IS_INTERPRETED, LAUNCHER
from syncline.model_ops_rocm.triton.ops.linear import LINEAR_OP

pytestmark = pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter compiles nothing")

BF16 = torch.bfloat16
SPECIALISED = "specialised_linear_kernel"


def launched(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    layout: WeightLayout | None = None,
    is_invariant: bool = False,
) -> list[str]:
    with stand_in_driver("sm_90"), LAUNCHER.compiling(is_preparing=False) as compiled:
        LINEAR_OP(x, weight, layout=layout or RowMajor(), batch_invariant=is_invariant)
    return [one.binary.metadata.name for one in compiled]


@pytest.fixture(scope="module")
def weight() -> torch.Tensor:
    return torch.empty(4_096, 4_096, dtype=BF16)


def test_few_rows_that_lie_close_are_fed_by_a_warp_of_their_own(weight: torch.Tensor) -> None:
    wide = torch.empty(64, 4_104, dtype=BF16)
    for x in (wide[:2, :-8], wide[:64, 8:]):
        assert launched(x, weight) == [SPECIALISED]


def test_rows_that_tensor_memory_copies_cannot_read_are_not(weight: torch.Tensor) -> None:
    wide = torch.empty(16, 4_104, dtype=BF16)
    uneven = torch.empty(16, 4_097, dtype=BF16)[:, :-1]
    one_for_all = torch.empty(1, 4_096, dtype=BF16).expand(16, -1)
    apart = torch.empty(16, 8_192, dtype=BF16)[:, ::2]
    for x in (wide[:, 1:-7], uneven, one_for_all, apart):
        assert SPECIALISED not in launched(x, weight)
    x = torch.empty(16, 4_096, dtype=BF16)
    assert SPECIALISED not in launched(x, torch.empty(4_096, 4_097, dtype=BF16)[:, :-1])


def test_other_products_are_not(weight: torch.Tensor) -> None:
    x = torch.empty(65, 4_096, dtype=BF16)
    for num_rows in (1, 17, 63, 65):
        assert SPECIALISED not in launched(x[:num_rows], weight)
    assert SPECIALISED not in launched(x[:16], weight, layout=Shuffle16x16())
    assert SPECIALISED not in launched(x[:16], weight, is_invariant=True)
    assert SPECIALISED not in launched(x[:16].float(), weight.float())
