"""Which products are compiled for a warp of their own that feeds them; needs Triton and no GPU."""

import re
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
from syncline.model_ops_rocm.testing.ptx import (
    descriptors_fetched,
    descriptors_read,
    parameters_of_descriptors,
)
from syncline.model_ops_rocm.testing.stand_in import stand_in_driver
from syncline.model_ops_rocm.triton.launch import IS_INTERPRETED, LAUNCHER
from syncline.model_ops_rocm.triton.ops.linear import LINEAR_OP
from syncline.model_ops_rocm.triton.ops.linear_quantised import LINEAR_QUANTISED_OP

pytestmark = pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter compiles nothing")

BF16 = torch.bfloat16
SPECIALISED = "specialised_linear_kernel"
CLUSTER = "cluster_linear_kernel"
THIRDS = "thirds_linear_kernel"
NAMES = ("weight", "weight_scale")


def launched(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    layout: WeightLayout | None = None,
    is_invariant: bool = False,
    out: torch.Tensor | None = None,
) -> list[str]:
    with stand_in_driver("sm_90"), LAUNCHER.compiling(is_preparing=False) as compiled:
        LINEAR_OP(x, weight, layout=layout or RowMajor(), batch_invariant=is_invariant, out=out)
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_programs_of_a_cluster_share_64_rows_where_k_is_long_or_tiles_are_many(
    dtype: torch.dtype,
) -> None:
    def chosen(num_rows: int, num_columns: int, depth: int) -> list[str]:
        x = torch.empty(num_rows, depth, dtype=dtype)
        return launched(x, torch.empty(num_columns, depth, dtype=dtype))

    for shape in ((4_096, 8_192), (3_778, 12_296), (6_082, 4_096), (8_192, 8_200)):
        assert chosen(64, *shape) == [CLUSTER]
        assert chosen(32, *shape) == [THIRDS if shape == (6_082, 4_096) else SPECIALISED]
        assert CLUSTER not in chosen(63, *shape)
        assert CLUSTER not in chosen(65, *shape)
    assert chosen(64, 4_096, 8_184) == [SPECIALISED]
    for shape in ((3_776, 8_192), (4_160, 8_192), (6_080, 4_096), (8_194, 4_096), (6_144, 4_088)):
        assert CLUSTER not in chosen(64, *shape)
    # Columns are stored by twos, and there is no such table for 64 rows besides.
    for shape in ((4_095, 8_192), (6_145, 4_096)):
        assert {CLUSTER, SPECIALISED}.isdisjoint(chosen(64, *shape))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_programs_of_a_cluster_have_three_tiles_of_about_96(dtype: torch.dtype) -> None:
    def chosen(num_rows: int, num_columns: int, depth: int) -> list[str]:
        x = torch.empty(num_rows, depth, dtype=dtype)
        return launched(x, torch.empty(num_columns, depth, dtype=dtype))

    for num_rows in (2, 16, 17, 32):
        for shape in ((5_761, 4_096), (6_144, 4_096), (6_335, 12_296)):
            assert chosen(num_rows, *shape) == [THIRDS]
        for shape in ((5_760, 4_096), (6_337, 4_096), (6_144, 4_088)):
            assert THIRDS not in chosen(num_rows, *shape)
    for num_rows in (1, 33, 64):
        assert THIRDS not in chosen(num_rows, 6_144, 4_096)
    x, weight = torch.empty(16, 4_096, dtype=dtype), torch.empty(6_144, 4_096, dtype=dtype)
    # Results may lie anywhere.
    for out in (torch.empty(16, 12_288, dtype=dtype)[:, 1::2], torch.empty(6_144, 16).T.to(dtype)):
        assert launched(x, weight, out=out) == [THIRDS]
    assert THIRDS not in launched(torch.empty(16, 4_097, dtype=dtype)[:, 1:], weight)


@pytest.mark.parametrize(
    ("num_rows", "shape"),
    [(64, (4_096, 8_192)), (64, (6_144, 4_096)), (16, (6_144, 4_096)), (32, (6_144, 4_096))],
    ids=str,
)
def test_every_thread_of_a_cluster_passes_its_barrier(
    num_rows: int, shape: tuple[int, int]
) -> None:
    """One that did not arrive, as of a warp that Triton adds to make up a number, would hang it."""
    x, weight = torch.empty(num_rows, shape[1], dtype=BF16), torch.empty(shape, dtype=BF16)
    with stand_in_driver("sm_90"), LAUNCHER.compiling(is_preparing=False) as compiled:
        LINEAR_OP(x, weight, layout=RowMajor())
    (one,) = compiled
    ptx = one.binary.asm["ptx"]
    # The four warps that multiply, two that feed and two besides, each in a place of its own.
    assert re.findall(r"\.reqntid (\d+)", ptx) == ["256"]
    assert re.findall(r"\.reqnctapercluster (\d+)", ptx) == ["2"]
    arrives = re.findall(r"barrier\.cluster\.arrive[.\w]*", ptx)
    assert arrives == ["barrier.cluster.arrive.relaxed"] * 5
    # What Triton lays out lies behind this room, and must begin at a multiple of 1,024 bytes.
    rooms = re.findall(r"\.shared \.align (\d+) \.b8 \w+\[(\d+)\]", ptx)
    assert [align for align, _ in rooms] == ["1024"]
    assert int(rooms[0][1]) % 1_024 == 0


@pytest.mark.parametrize(
    ("num_rows", "shape"),
    [(16, (4_096, 4_096)), (64, (4_096, 4_096)), (64, (6_144, 4_096)), (16, (6_144, 4_096))],
    ids=str,
)
def test_the_descriptor_of_x_is_fetched_before_the_wait(
    num_rows: int, shape: tuple[int, int]
) -> None:
    """PTX counts a kernel's parameters: what another one holds is no descriptor."""
    x, weight = torch.empty(num_rows, shape[1], dtype=BF16), torch.empty(shape, dtype=BF16)
    with stand_in_driver("sm_90"), LAUNCHER.compiling(is_preparing=False) as compiled:
        LINEAR_OP(x, weight, layout=RowMajor())
    ptx, name = compiled[0].binary.asm["ptx"], compiled[0].binary.metadata.name
    of_x, of_weight = f"{name}_param_0", f"{name}_param_5"
    assert parameters_of_descriptors(ptx) == descriptors_read(ptx) == {of_x, of_weight}
    assert descriptors_fetched(ptx) == [(of_x, "prefetch.tensormap")]
    waits = ptx.split("prefetch.tensormap")[1].split("griddepcontrol.wait")
    assert descriptors_read(ptx.split("griddepcontrol.wait")[0] + waits[0]) <= {of_weight}
    # The warp's next requests are for tiles of x.
    names = "".join(line + "\n" for line in ptx.splitlines() if "_param_" in line or "cvta" in line)
    assert descriptors_read(names + waits[1].split("mbarrier.try_wait")[0]) == {of_x}


def test_results_that_cannot_be_stored_in_pairs_are_not_shared() -> None:
    x, weight = torch.empty(64, 8_192, dtype=BF16), torch.empty(4_096, 8_192, dtype=BF16)
    wide, odd = torch.empty(64, 8_192, dtype=BF16), torch.empty(64, 4_099, dtype=BF16)
    for out in (wide[:, :4_096], wide[:, 2:4_098]):
        assert launched(x, weight, out=out) == [CLUSTER]
    for out in (wide[:, ::2], wide[:, 1:4_097], odd[:, :4_096]):
        assert {CLUSTER, SPECIALISED}.isdisjoint(launched(x, weight, out=out))
    unreadable = torch.empty(64, 8_193, dtype=BF16)[:, 1:]
    assert {CLUSTER, SPECIALISED}.isdisjoint(launched(unreadable, weight))


@pytest.mark.parametrize("shape", [(4_096, 8_192), (6_144, 4_096)], ids=str)
def test_what_is_prepared_of_64_rows_stands_for_those_that_are_not_shared_too(
    shape: tuple[int, int],
) -> None:
    x, weight = torch.empty(64, shape[1], dtype=BF16), torch.empty(shape, dtype=BF16)
    odd = torch.empty(64, shape[0] + 3, dtype=BF16)[:, : shape[0]]
    apart = torch.empty(64, 2 * shape[0], dtype=BF16)[:, ::2]
    layout = RowMajor()
    for out in (None, odd, apart):
        with stand_in_driver("sm_90"):
            with LAUNCHER.compiling() as compiled:
                LINEAR_OP(x, weight, layout=layout, out=out)
            few = THIRDS if shape[0] == 6_144 else SPECIALISED
            assert {CLUSTER, few} < {one.binary.metadata.name for one in compiled}
            with LAUNCHER.sealed(), LAUNCHER.compiling(is_preparing=False):
                for num_rows in (64, 63, 32, 17):
                    rows = None if out is None else out[:num_rows]
                    LINEAR_OP(x[:num_rows], weight, layout=layout, out=rows)


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
