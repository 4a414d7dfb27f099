"""Which products are compiled for a warp of their own that feeds them; needs Triton and no GPU."""

from collections.abc import Mapping

import pytest
import torch

pytest.importorskip("triton")

from syncline.model_ops_rocm import (
    Quantised,
    RowMajor,
    Shuffle16x16,
    StorageFormat,
    TensorSpec,
    WeightLayout,
)
from syncline.model_ops_rocm.quant import CodeType, Granularity
from syncline.model_ops_rocm.testing.stand_in import stand_in_driver
from syncline.model_ops_rocm.triton.launch import IS_INTERPRETED, LAUNCHER
from syncline.model_ops_rocm.triton.ops.linear import LINEAR_OP
from syncline.model_ops_rocm.triton.ops.linear_quantised import LINEAR_QUANTISED_OP

pytestmark = pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter compiles nothing")

BF16 = torch.bfloat16
SPECIALISED = "specialised_linear_kernel"
NAMES = ("weight", "weight_scale")


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
    for x in (wide[:2, :-8], wide[:17, 8:], wide[:64, 8:]):
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
    for num_rows in (1, 33, 63, 65):
        assert SPECIALISED not in launched(x[:num_rows], weight)
    assert SPECIALISED not in launched(x[:16], weight, layout=Shuffle16x16())
    assert SPECIALISED not in launched(x[:16], weight, is_invariant=True)
    assert SPECIALISED not in launched(x[:16].float(), weight.float())


def launched_of_codes(
    num_rows: int,
    granularity: Granularity = Granularity.TOKEN,
    *,
    shape: tuple[int, int] = (4_096, 8_192),
    layout: WeightLayout | None = None,
    is_invariant: bool = False,
    is_preparing: bool = False,
) -> list[str]:
    recipe = Quantised(granularity=granularity, code=CodeType.E4M3FN)
    storage = StorageFormat(recipe=recipe, layout=layout or RowMajor())

    def made(spec: Mapping[str, TensorSpec]) -> list[torch.Tensor]:
        return [torch.empty(spec[name].shape, dtype=spec[name].dtype) for name in NAMES]

    of_x = recipe
    if granularity is Granularity.BLOCK_128X128:
        of_x = Quantised(granularity=Granularity.BLOCK_1X128, code=CodeType.E4M3FN)
    x, x_scale = made(of_x.storage_spec((num_rows, shape[1])))
    weight, weight_scale = made(storage.storage_spec(shape))
    compiling = LAUNCHER.compiling(is_preparing=is_preparing)
    with stand_in_driver("sm_90"), compiling as compiled:
        LINEAR_QUANTISED_OP(
            *(x, weight, weight_scale),
            storage=storage,
            x_scale=x_scale,
            x_recipe=of_x,
            dtype=BF16,
            batch_invariant=is_invariant,
        )
    return [one.binary.metadata.name for one in compiled]


@pytest.mark.parametrize("granularity", [Granularity.TOKEN, Granularity.TENSOR], ids=str)
def test_few_rows_of_codes_are_fed_too(granularity: Granularity) -> None:
    for num_rows in (2, 16, 17, 32, 64):
        assert launched_of_codes(num_rows, granularity) == [SPECIALISED]


def test_other_codes_are_not() -> None:
    for num_rows in (1, 33, 63, 65):
        assert SPECIALISED not in launched_of_codes(num_rows)
    assert SPECIALISED not in launched_of_codes(16, Granularity.BLOCK_128X128)
    assert SPECIALISED not in launched_of_codes(16, shape=(8_192, 8_192))
    assert SPECIALISED not in launched_of_codes(16, shape=(4_096, 4_096))
    assert SPECIALISED not in launched_of_codes(
        16, shape=(4_096, 8_200)
    )  # rows at multiples of 8 bytes
    assert SPECIALISED not in launched_of_codes(16, layout=Shuffle16x16())
    assert SPECIALISED not in launched_of_codes(16, is_invariant=True)


def test_what_is_prepared_of_many_rows_stands_for_every_tile_of_fewer(weight: torch.Tensor) -> None:
    def tiles(num_rows: int) -> set[int]:
        x = torch.empty(num_rows, 4_096, dtype=BF16)
        with stand_in_driver("sm_90"), LAUNCHER.compiling() as compiled:
            LINEAR_OP(x, weight, layout=RowMajor())
        fed = [one for one in compiled if one.binary.metadata.name == SPECIALISED]
        return {one.config.constants["BLOCK_M"] for one in fed}

    assert tiles(64) == {32, 64}
    assert tiles(33) == tiles(32) == tiles(17) == {32}
    assert tiles(16) == {16}
    assert launched_of_codes(64, is_preparing=True).count(SPECIALISED) == 2


def test_what_is_prepared_with_padded_rows_serves_the_same_rows() -> None:
    """K is no whole number of 16 bytes, and rows are such numbers apart."""
    x = torch.empty(32, 4_104, dtype=BF16)[:, :4_100]
    weight = torch.empty(4_096, 4_104, dtype=BF16)[:, :4_100]
    with stand_in_driver("sm_90"), LAUNCHER.compiling() as compiled:
        LINEAR_OP(x, weight, layout=RowMajor())
    names = [one.binary.metadata.name for one in compiled]
    assert SPECIALISED in names
    assert launched(x, weight) == [SPECIALISED]
