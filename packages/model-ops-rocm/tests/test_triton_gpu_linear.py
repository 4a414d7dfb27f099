"""Products with a stored weight on a GPU: codes times codes, large sizes, rows that are their own.

What every op is asked, parity and replay, `test_triton_gpu.py` asks of these too.
"""

from collections.abc import Callable
from typing import cast

import pytest
import torch

from syncline.model_ops_rocm import (
    LayoutError,
    NotPreparedError,
    Quantised,
    RowMajor,
    Shuffle16x16,
    StorageFormat,
    WeightLayout,
    detect_arch,
    prepare,
    select,
)
from syncline.model_ops_rocm.layouts import Shuffle32x16
from syncline.model_ops_rocm.quant import CodeType, Granularity
from syncline.model_ops_rocm.testing.cases.linear import (
    FP8_TOLERANCE,
    MX_CASES,
    native_cases,
    quantised,
)
from syncline.model_ops_rocm.testing.parity import (
    Arguments,
    Case,
    Maker,
    assert_parity,
    recorded,
    results_of,
)
from syncline.model_ops_rocm.testing.stored import encode_whole
from syncline.model_ops_rocm.triton import sealed

pytestmark = pytest.mark.gpu

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FN, FNUZ = CodeType.E4M3FN, CodeType.E4M3FNUZ


def triton_op(op: str, dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    found = select(op, backend="triton", arch=detect_arch(), dtype=dtype)
    return cast(Callable[..., torch.Tensor], found)


def is_native(code: CodeType) -> bool:
    return (code is FNUZ) == (detect_arch() == "gfx942")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", [*native_cases(FN), *native_cases(FNUZ), *MX_CASES], ids=str)
def test_codes_are_multiplied_where_the_hardware_does_and_refused_elsewhere(
    case: Case, dtype: torch.dtype
) -> None:
    reference = cast(Callable[..., object], select(case.op, dtype=dtype))
    ours = triton_op(case.op, dtype)
    if case in MX_CASES:
        is_offered = detect_arch() == "gfx950"
    else:
        is_offered = is_native(FNUZ if "fnuz" in case.label else FN)
    if not is_offered:
        with pytest.raises(ValueError, match="linear_quantised: x_recipe must go with the weight"):
            ours(**case.build(Maker(dtype, "cuda")))
        return
    assert_parity(case, dtype, ours, reference, tolerance=FP8_TOLERANCE, device="cuda")


@pytest.mark.parametrize("layout", [RowMajor(), Shuffle16x16()], ids=["row_major", "shuffled"])
@pytest.mark.parametrize("num_tokens", [1, 16, 17, 64, 65, 300, 1_000])
def test_sizes_of_models_agree_with_a_product_in_float64(
    num_tokens: int, layout: WeightLayout
) -> None:
    torch.manual_seed(num_tokens)
    weight = torch.randn(2_048, 4_096, device="cuda").bfloat16()
    x = torch.randn(num_tokens, 4_096, device="cuda").bfloat16()
    exact = x.double() @ weight.double().T
    linear = triton_op("linear", torch.bfloat16)
    got = linear(x, layout.apply(weight), layout=layout).double()
    assert (got - exact).norm() < 2.5e-3 * exact.norm()
    again = linear(x, layout.apply(weight), layout=layout).double()
    assert torch.equal(got, again)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_row_is_its_own_whatever_shares_the_batch(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = torch.randn(1_024, 2_048, device="cuda").to(dtype)
    x = torch.randn(300, 2_048, device="cuda").to(dtype)
    linear = triton_op("linear", dtype)
    whole = linear(x, weight, layout=RowMajor(), batch_invariant=True)
    for start, stop in ((0, 1), (7, 9), (100, 164), (37, 300), (299, 300)):
        part = linear(x[start:stop], weight, layout=RowMajor(), batch_invariant=True)
        assert torch.equal(part, whole[start:stop])
    exact = x.double() @ weight.double().T
    assert (whole.double() - exact).norm() < 2.5e-3 * exact.norm()


@pytest.mark.parametrize(
    "granularity", [Granularity.TOKEN, Granularity.BLOCK_128X128, Granularity.BLOCK_1X32], ids=str
)
def test_a_row_of_codes_is_its_own_whatever_shares_the_batch(granularity: Granularity) -> None:
    code = FN if is_native(FN) else FNUZ
    recipe = StorageFormat(recipe=Quantised(granularity=granularity, code=code))
    stored = encode_whole(recipe, torch.randn(512, 1_024))
    weight = {name: tensor.cuda() for name, tensor in stored.items()}
    x = torch.randn(200, 1_024, device="cuda").bfloat16()
    linear = triton_op("linear_quantised", torch.bfloat16)
    arguments = {**weight, "storage": recipe, "batch_invariant": True}
    whole = linear(x, **arguments)
    for start, stop in ((0, 1), (7, 9), (37, 200)):
        assert torch.equal(linear(x[start:stop], **arguments), whole[start:stop])


@pytest.mark.parametrize("is_blocked", [False, True], ids=["rows", "blocks"])
def test_a_row_of_codes_by_codes_is_its_own_whatever_shares_the_batch(is_blocked: bool) -> None:
    code = FN if is_native(FN) else FNUZ
    ours, theirs = (
        (Granularity.BLOCK_1X128, Granularity.BLOCK_128X128)
        if is_blocked
        else (Granularity.TOKEN, Granularity.TOKEN)
    )
    x_recipe = Quantised(granularity=ours, code=code)
    storage = StorageFormat(recipe=Quantised(granularity=theirs, code=code))
    weight = {
        name: tensor.cuda()
        for name, tensor in encode_whole(storage, torch.randn(512, 1_024)).items()
    }
    x = encode_whole(StorageFormat(recipe=x_recipe), torch.randn(600, 1_024))
    codes, scales = x["weight"].cuda(), x["weight_scale"].cuda()
    linear = triton_op("linear_quantised", torch.bfloat16)

    def product(start: int, stop: int) -> torch.Tensor:
        return linear(
            codes[start:stop],
            **weight,
            storage=storage,
            x_scale=scales[start:stop],
            x_recipe=x_recipe,
            dtype=torch.bfloat16,
            batch_invariant=True,
        )

    whole = product(0, 600)
    for start, stop in ((0, 1), (16, 17), (16, 80), (80, 145), (37, 200), (37, 537), (0, 513)):
        assert torch.equal(product(start, stop), whole[start:stop])


def test_what_the_kernels_do_not_read_is_refused() -> None:
    weight, x = torch.zeros(64, 64, device="cuda"), torch.zeros(3, 64, device="cuda")
    linear = triton_op("linear", torch.float32)
    with pytest.raises(
        LayoutError, match="shuffle_32x16 requires linear to take it, got row_major"
    ):
        linear(x, weight, layout=Shuffle32x16())
    with pytest.raises(ValueError, match="linear: weight must be contiguous"):
        linear(x, weight.T.contiguous().T, layout=Shuffle16x16())
    case = quantised(Quantised(granularity=Granularity.TOKEN, code=CodeType.INT8), (3, 16, 32))
    with pytest.raises(ValueError, match="linear_quantised: storage must have fp8 or e2m1 codes"):
        triton_op(case.op, torch.float32)(**case.build(Maker(torch.float32, "cuda")))


def test_a_product_in_parts_needs_a_workspace_that_holds_them() -> None:
    linear = triton_op("linear", torch.bfloat16)
    weight = torch.randn(3_328, 4_096, device="cuda").bfloat16()
    x = torch.randn(8, 4_096, device="cuda").bfloat16()
    num_bytes = linear.workspace_bytes(weight, 8)  # type: ignore[attr-defined]  # the contract's
    workspace = torch.empty(max(num_bytes, 1), dtype=torch.uint8, device="cuda")
    got = linear(x, weight, layout=RowMajor(), workspace=workspace)
    assert torch.equal(got, *results_of(linear(x, weight, layout=RowMajor())))


@pytest.mark.parametrize("is_blocked", [False, True], ids=["rows", "blocks"])
@pytest.mark.parametrize("num_tokens", [1, 16, 17, 64, 65, 128, 129, 256, 257])
@pytest.mark.parametrize("shape", [(1_024, 4_096), (9_216, 512), (1_000, 4_608)], ids=str)
def test_codes_by_codes_agree_with_a_product_in_float64(
    shape: tuple[int, int], num_tokens: int, is_blocked: bool
) -> None:
    code = FN if is_native(FN) else FNUZ
    ours = Granularity.BLOCK_1X128 if is_blocked else Granularity.TOKEN
    theirs = Granularity.BLOCK_128X128 if is_blocked else Granularity.TOKEN
    x_recipe = Quantised(granularity=ours, code=code)
    storage = StorageFormat(recipe=Quantised(granularity=theirs, code=code))
    torch.manual_seed(num_tokens)
    stored = encode_whole(storage, torch.randn(shape))
    x = encode_whole(StorageFormat(recipe=x_recipe), torch.randn(num_tokens, shape[1]))
    exact = x_recipe.decode(x).double() @ storage.decode(stored).double().T
    weight = {name: tensor.cuda() for name, tensor in stored.items()}
    linear = triton_op("linear_quantised", torch.bfloat16)
    size = linear.counters_size(weight["weight"], num_tokens)  # type: ignore[attr-defined]  # the contract's
    counters = torch.zeros(size, dtype=torch.int32, device="cuda")

    def product(counters: torch.Tensor | None) -> torch.Tensor:
        return linear(
            x["weight"].cuda(),
            **weight,
            storage=storage,
            x_scale=x["weight_scale"].cuda(),
            x_recipe=x_recipe,
            dtype=torch.bfloat16,
            counters=counters,
        )

    in_two = product(None)
    assert (in_two.cpu().double() - exact).norm() < 4e-3 * exact.norm()
    for _ in range(10):
        assert torch.equal(product(counters), in_two)
    assert not counters.any()


def recipes_of(is_blocked: bool) -> tuple[Quantised, StorageFormat]:
    """Of x and of the weight, in codes that the hardware multiplies."""
    code = FN if is_native(FN) else FNUZ
    ours = Granularity.BLOCK_1X128 if is_blocked else Granularity.TOKEN
    theirs = Granularity.BLOCK_128X128 if is_blocked else Granularity.TOKEN
    storage = StorageFormat(recipe=Quantised(granularity=theirs, code=code))
    return Quantised(granularity=ours, code=code), storage


def row_of_codes(shape: tuple[int, int], is_blocked: bool) -> tuple[Arguments, torch.Tensor]:
    """One row by a weight of `shape`, and their product in float64."""
    x_recipe, storage = recipes_of(is_blocked)
    torch.manual_seed(shape[1])
    stored = encode_whole(storage, torch.randn(shape))
    x = encode_whole(StorageFormat(recipe=x_recipe), torch.randn(1, shape[1]))
    call: Arguments = {
        **{name: tensor.cuda() for name, tensor in stored.items()},
        "storage": storage,
        "x_TK": x["weight"].cuda(),
        "x_scale": x["weight_scale"].cuda(),
        "x_recipe": x_recipe,
        "dtype": torch.float32,
    }
    return call, x_recipe.decode(x).double() @ storage.decode(stored).double().T


@pytest.mark.parametrize("is_blocked", [False, True], ids=["rows", "blocks"])
@pytest.mark.parametrize(
    "shape",
    [(4_096, 12_288), (8_192, 4_096), (1_024, 4_096), (1_027, 2_064), (130, 400), (5, 16)],
    ids=str,
)
def test_one_row_of_codes_is_summed_in_float32_where_it_has_a_kernel(
    shape: tuple[int, int], is_blocked: bool
) -> None:
    call, exact = row_of_codes(shape, is_blocked)
    bound = 2e-6 if detect_arch() == "sm_90" else 4e-3
    linear, bias = triton_op("linear_quantised", torch.float32), torch.randn(shape[0])
    got = linear(**call, bias=bias.cuda())
    exact += bias.double()
    assert (got.cpu().double() - exact).norm() < bound * exact.norm()
    assert torch.equal(linear(**call, bias=bias.cuda()), got)


@pytest.mark.parametrize("is_blocked", [False, True], ids=["rows", "blocks"])
def test_one_row_of_codes_shows_a_scale_that_is_not_a_number(is_blocked: bool) -> None:
    linear = triton_op("linear_quantised", torch.float32)
    for name, where, columns in (
        ("x_scale", (0, -1), slice(0, 300)),
        ("weight_scale", (1, 0), slice(128, 256) if is_blocked else slice(1, 2)),
    ):
        call, _ = row_of_codes((300, 400), is_blocked)
        scales = cast(torch.Tensor, call[name])
        scales[where] = float("nan")
        expected = torch.zeros(1, 300, dtype=torch.bool)
        expected[:, columns] = True
        assert torch.equal(linear(**call).isnan().cpu(), expected)


@pytest.mark.parametrize("is_blocked", [False, True], ids=["rows", "blocks"])
def test_one_row_of_codes_is_read_after_the_kernel_that_writes_it(is_blocked: bool) -> None:
    x_recipe, storage = recipes_of(is_blocked)
    quantise = triton_op("quantise_activation", torch.bfloat16)
    linear = triton_op("linear_quantised", torch.bfloat16)
    stored = encode_whole(storage, torch.randn(2_048, 2_048))
    weight = {name: tensor.cuda() for name, tensor in stored.items()}
    x = torch.randn(1, 2_048, device="cuda").bfloat16()

    def chain() -> torch.Tensor:
        """Each product is the row that the next one multiplies."""
        row = x
        for _ in range(8):
            codes, scales = quantise(row, x_recipe)
            row = linear(
                codes,
                **weight,
                storage=storage,
                x_scale=scales,
                x_recipe=x_recipe,
                dtype=torch.bfloat16,
            )
            row = row / 32
        return row

    graph, captured = recorded(chain)
    for _ in range(20):
        x.normal_()
        graph.replay()
        assert torch.equal(captured, chain())


def test_one_row_of_codes_is_prepared_with_sixteen() -> None:
    shape = (264, 528)
    x_recipe, storage = recipes_of(False)
    linear = triton_op("linear_quantised", torch.float32)
    call, exact = row_of_codes(shape, False)
    rows = x_recipe.storage_spec((16, shape[1]))
    example = call | {
        "x_TK": torch.empty(rows["weight"].shape, dtype=rows["weight"].dtype, device="meta"),
        "x_scale": torch.empty(rows["weight_scale"].shape, device="meta"),
        **{
            name: torch.empty(spec.shape, dtype=spec.dtype, device="meta")
            for name, spec in storage.storage_spec(shape).items()
        },
    }
    with sealed(), pytest.raises(NotPreparedError):
        linear(**call)
    prepare(
        "linear_quantised", [example], backend="triton", arch=detect_arch(), dtype=torch.float32
    )
    with sealed():
        got = linear(**call)
    assert (got.cpu().double() - exact).norm() < 4e-3 * exact.norm()


@pytest.mark.parametrize("num_tokens", [2, 16])
@pytest.mark.parametrize(
    ("shape", "is_merged"),
    [
        ((3_328, 4_096), True),
        ((2_560, 12_288), True),
        ((5_120, 4_096), False),
        ((2_000, 2_304), False),
    ],
    ids=str,
)
def test_parts_are_merged_to_the_bits_of_a_second_launch(
    shape: tuple[int, int], is_merged: bool, num_tokens: int
) -> None:
    linear = triton_op("linear", torch.bfloat16)
    weight = torch.randn(shape, device="cuda").bfloat16()
    x = torch.randn(num_tokens, shape[1], device="cuda").bfloat16()
    bias = torch.randn(shape[0], device="cuda").bfloat16()
    in_two = linear(x, weight, bias, layout=RowMajor())
    exact = x.double() @ weight.double().T + bias.double()
    assert (in_two.double() - exact).norm() < 2.5e-3 * exact.norm()
    size = linear.counters_size(weight, num_tokens)  # type: ignore[attr-defined]  # the contract's
    counters = torch.zeros(max(size, 1), dtype=torch.int32, device="cuda")
    num_bytes = linear.workspace_bytes(weight, num_tokens)  # type: ignore[attr-defined]  # the contract's
    workspace = torch.full((num_bytes,), 255, dtype=torch.uint8, device="cuda")
    for _ in range(100):
        got = linear(x, weight, bias, layout=RowMajor(), workspace=workspace, counters=counters)
        assert torch.equal(got, in_two)
    assert not counters.any()
    counters.fill_(100)
    got = linear(x, weight, bias, layout=RowMajor(), workspace=workspace, counters=counters)
    did_meet = bool(counters[0] > 100)  # the parts of a tile
    assert did_meet == (is_merged and detect_arch() == "sm_90")
    assert bool(got.isnan().all()) == did_meet
