"""Which products of codes are compiled for a warp of its own that feeds; needs Triton, no GPU."""

import pytest
import torch

pytest.importorskip("triton")

from syncline.model_ops_rocm import Quantised, RowMajor, Shuffle16x16, StorageFormat, WeightLayout
from syncline.model_ops_rocm.quant import CodeType, E8m0Mode, Granularity, ScaleType
from syncline.model_ops_rocm.testing.stand_in import stand_in_driver
from syncline.model_ops_rocm.triton.launch import IS_INTERPRETED, LAUNCHER
from syncline.model_ops_rocm.triton.ops.linear_quantised import LINEAR_QUANTISED_OP

pytestmark = pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter compiles nothing")

FED, SUM = "specialised_codes_kernel", "sum_splits_kernel"
TOKEN, TENSOR = Granularity.TOKEN, Granularity.TENSOR
OF_X, OF_WEIGHT = Granularity.BLOCK_1X128, Granularity.BLOCK_128X128


def recipe(granularity: Granularity, *, is_e8m0: bool = False) -> Quantised:
    if is_e8m0:
        return Quantised(
            granularity=granularity,
            code=CodeType.E4M3FN,
            scale=ScaleType.E8M0,
            e8m0_mode=E8m0Mode.ROUND_UP,
        )
    return Quantised(granularity=granularity, code=CodeType.E4M3FN)


def stored(of: Quantised, shape: tuple[int, int], offset: int = 0) -> dict[str, torch.Tensor]:
    """Codes that begin so many bytes behind a multiple of 16, and scales."""
    spec = of.storage_spec(shape)
    codes = torch.empty(offset + shape[0] * shape[1], dtype=torch.float8_e4m3fn)[offset:]
    scale = spec["weight_scale"]
    return {
        "weight": codes.view(shape),
        "weight_scale": torch.empty(scale.shape, dtype=scale.dtype),
    }


def launched(  # noqa: PLR0913 - what a product may differ in
    num_rows: int,
    shape: tuple[int, int] = (4_096, 4_096),
    kinds: tuple[Granularity, Granularity] = (TOKEN, TOKEN),
    *,
    offsets: tuple[int, int] = (0, 0),
    layout: WeightLayout | None = None,
    is_e8m0: bool = False,
    is_invariant: bool = False,
    is_preparing: bool = False,
    workspace: torch.Tensor | None = None,
) -> list[str]:
    of_x, of_weight = (recipe(kind, is_e8m0=is_e8m0) for kind in kinds)
    x = stored(of_x, (num_rows, shape[1]), offsets[0])
    weight = stored(of_weight, shape, offsets[1])
    with stand_in_driver("sm_90"), LAUNCHER.compiling(is_preparing=is_preparing) as compiled:
        LINEAR_QUANTISED_OP(
            x["weight"],
            **weight,
            storage=StorageFormat(recipe=of_weight, layout=layout or RowMajor()),
            x_scale=x["weight_scale"],
            x_recipe=of_x,
            dtype=torch.bfloat16,
            batch_invariant=is_invariant,
            workspace=workspace,
        )
    return [one.binary.metadata.name for one in compiled]


@pytest.mark.parametrize("kinds", [(TOKEN, TOKEN), (TENSOR, TOKEN), (OF_X, OF_WEIGHT)], ids=str)
def test_many_rows_of_codes_are_fed_by_a_warp_of_their_own(
    kinds: tuple[Granularity, Granularity],
) -> None:
    for num_rows in (65, 128, 129, 256):
        assert launched(num_rows, kinds=kinds) == [FED, SUM]
    assert launched(257, kinds=kinds) == [FED]
    # Neither columns nor K need be whole tiles.
    assert launched(300, (4_100, 4_112), kinds) == [FED]
    assert launched(65, (17_000, 1_024), kinds) == [FED]


def test_codes_that_tensor_memory_copies_cannot_read_are_not() -> None:
    for offsets in ((8, 0), (0, 8)):
        assert FED not in launched(300, offsets=offsets)
    assert FED not in launched(300, (4_096, 4_104))


def test_other_products_are_not() -> None:
    assert FED not in launched(64)
    assert FED not in launched(300, (4_096, 1_008))
    assert FED not in launched(300, layout=Shuffle16x16())
    assert FED not in launched(300, is_invariant=True)
    for kinds in ((TOKEN, OF_WEIGHT), (OF_X, TOKEN), (OF_X, OF_X)):
        assert FED not in launched(300, kinds=kinds)
    assert FED not in launched(300, kinds=(OF_X, OF_WEIGHT), is_e8m0=True)


def test_what_is_prepared_has_the_parts_of_fewer_rows_and_another_kernel_too() -> None:
    names = launched(300, is_preparing=True)
    assert names[:-1] == [FED, SUM, FED, SUM, FED]  # of 128 rows, of 256, and of all
    assert names[-1] not in (FED, SUM)
    # Codes that begin elsewhere are no less prepared.
    assert launched(300, is_preparing=True, offsets=(8, 8)) == names
    assert FED not in launched(64, is_preparing=True)


def test_parts_need_a_workspace_that_holds_them() -> None:
    weight = torch.empty(4_096, 4_096, dtype=torch.float8_e4m3fn, device="meta")
    for num_rows in (65, 128, 256, 4_096):
        with stand_in_driver("sm_90"):
            num_bytes = LINEAR_QUANTISED_OP.workspace_bytes(weight, num_rows)
            assert LINEAR_QUANTISED_OP.counters_size(weight, num_rows) == 0
        workspace = torch.empty(num_bytes, dtype=torch.uint8)
        assert launched(num_rows, workspace=workspace)[0] == FED
        if num_rows < 257:
            match = "linear_quantised: workspace must be contiguous uint8 with at least"
            with pytest.raises(ValueError, match=match):
                launched(num_rows, workspace=workspace[1:])
