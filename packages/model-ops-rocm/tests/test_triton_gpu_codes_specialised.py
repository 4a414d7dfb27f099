"""Products of many rows in codes that a warp of its own feeds, on a GPU that has such copies."""

from collections.abc import Callable
from functools import partial
from typing import cast

import pytest
import torch

from syncline.model_ops_rocm import Quantised, StorageFormat, detect_arch, prepare, select
from syncline.model_ops_rocm.formats.padding import Padding
from syncline.model_ops_rocm.quant import CodeType, Granularity
from syncline.model_ops_rocm.testing.launches import launched_by
from syncline.model_ops_rocm.testing.parity import Arguments, recorded
from syncline.model_ops_rocm.triton import sealed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="only sm_90 has products that are fed by a warp of their own",
    ),
]

TOKEN = (Granularity.TOKEN, Granularity.TOKEN)
BLOCKS = (Granularity.BLOCK_1X128, Granularity.BLOCK_128X128)
Kinds = tuple[Granularity, Granularity]
FP8 = torch.float8_e4m3fn
# Of the weight: in parts and whole, wide tiles, edges of rows and of K.
SHAPES = ((4_096, 4_096), (8_192, 4_096), (4_100, 4_112), (24_576, 1_024), (20_001, 1_040))
# Of the largest result: the tensor core's sums of 128 codes, and what the result is rounded to.
BOUNDS = {torch.bfloat16: 8e-3, torch.float16: 2e-3, torch.float32: 1e-3}
SPARE = 16  # rows, before and behind


def linear_of(dtype: torch.dtype = torch.bfloat16) -> Callable[..., torch.Tensor]:
    found = select("linear_quantised", backend="triton", arch=detect_arch(), dtype=dtype)
    return cast(Callable[..., torch.Tensor], found)


def recipe(granularity: Granularity) -> Quantised:
    return Quantised(granularity=granularity, code=CodeType.E4M3FN)


def poisoned(values: torch.Tensor) -> torch.Tensor:
    """The same inside of memory that is NaN elsewhere, at a multiple of 16 bytes."""
    num_bytes = values.itemsize * values[:1].numel() * SPARE
    whole = torch.full((2 * num_bytes + values.nbytes,), 255, dtype=torch.uint8, device="cuda")
    inner = whole[num_bytes : num_bytes + values.nbytes].view(values.dtype).view(values.shape)
    inner.copy_(values)
    return inner


def codes_of(rows: int, columns: int) -> torch.Tensor:
    return poisoned(torch.randn(rows, columns, device="cuda").to(FP8))


def scales_of(of: Quantised, shape: tuple[int, int]) -> torch.Tensor:
    return poisoned(torch.rand(of.storage_spec(shape)["weight_scale"].shape, device="cuda") + 0.5)


def product_of(
    num_rows: int, shape: tuple[int, int], kinds: Kinds, dtype: torch.dtype = torch.bfloat16
) -> Arguments:
    """The keywords of a call."""
    of_x, of_weight = recipe(kinds[0]), recipe(kinds[1])
    return {
        "x_TK": codes_of(num_rows, shape[1]),
        "x_scale": scales_of(of_x, (num_rows, shape[1])),
        "x_recipe": of_x,
        "weight": codes_of(*shape),
        "weight_scale": scales_of(of_weight, shape),
        "storage": StorageFormat(recipe=of_weight),
        "dtype": dtype,
    }


def exact_of(call: Arguments) -> torch.Tensor:
    storage, x_recipe = cast(StorageFormat, call["storage"]), cast(Quantised, call["x_recipe"])
    tensors = {name: one for name, one in call.items() if isinstance(one, torch.Tensor)}
    x = x_recipe.decode({"weight": tensors["x_TK"], "weight_scale": tensors["x_scale"]})
    stored = {name: tensors[name] for name in ("weight", "weight_scale")}
    exact = x.double() @ storage.decode(stored).double().T
    return exact + tensors["bias"].double() if "bias" in tensors else exact


def assert_is_product(got: torch.Tensor, call: Arguments) -> None:
    exact = exact_of(call)
    assert (got.double() - exact).abs().max() < BOUNDS[got.dtype] * exact.abs().max()


def is_fed(call: Callable[[], object]) -> bool:
    """Whether the call is the specialised kernel's, and perhaps the sum of its parts."""
    names = launched_by(call)
    return names[0] == "specialised_codes_kernel" and set(names[1:]) <= {"sum_splits_kernel"}


@pytest.mark.parametrize("kinds", [TOKEN, BLOCKS], ids=["rows", "blocks"])
@pytest.mark.parametrize("num_rows", [65, 128, 129, 256, 257, 1_100])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_many_rows_agree_with_a_product_in_float64(
    shape: tuple[int, int], num_rows: int, kinds: Kinds
) -> None:
    torch.manual_seed(num_rows)
    call = product_of(num_rows, shape, kinds)
    bias = torch.randn(shape[0], device="cuda").bfloat16() * 32
    target = torch.full((num_rows + 1, shape[0] + 8), 7.0, dtype=torch.bfloat16, device="cuda")
    out = target[:num_rows, : shape[0]]
    linear = linear_of()
    assert is_fed(partial(linear, **call, bias=bias, out=out))
    linear(**call, bias=bias, out=out)
    assert_is_product(out, {**call, "bias": bias})
    for _ in range(3):
        assert torch.equal(linear(**call, bias=bias), out)
    assert (target[num_rows:] == 7.0).all()
    assert (target[:, shape[0] :] == 7.0).all()
    assert_is_product(linear(**call), call)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("num_rows", [100, 300])
def test_results_may_be_of_any_dtype_and_lie_in_any_way(num_rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    bias = torch.randn(1, device="cuda").to(dtype).expand(4_100)
    linear = linear_of(dtype)
    for kinds in (TOKEN, BLOCKS):
        call = product_of(num_rows, (4_100, 4_096), kinds, dtype) | {"bias": bias}
        beside = torch.zeros(num_rows, 8_200, dtype=dtype, device="cuda")
        below = torch.zeros(4_100, num_rows + 1, dtype=dtype, device="cuda")
        for out in (beside[:, ::2], below.T[:num_rows]):
            assert is_fed(partial(linear, **call, out=out))
            linear(**call, out=out)
            assert_is_product(out, call)
        assert not beside[:, 1::2].any()
        assert not below[:, num_rows:].any()


@pytest.mark.parametrize("num_rows", [128, 300])
def test_one_scale_may_serve_a_whole_side(num_rows: int) -> None:
    torch.manual_seed(0)
    linear = linear_of()
    sides = (Granularity.TENSOR, Granularity.TOKEN)
    for kinds in ((sides[0], sides[0]), sides, sides[::-1]):
        call = product_of(num_rows, (4_096, 4_096), kinds)
        assert is_fed(partial(linear, **call))
        assert_is_product(linear(**call), call)


@pytest.mark.parametrize("kinds", [TOKEN, BLOCKS], ids=["rows", "blocks"])
def test_what_pads_a_weight_is_not_read(kinds: Kinds) -> None:
    torch.manual_seed(0)
    shape = (4_200, 4_240)
    padding = Padding(rows=shape[0], columns=shape[1], row_multiple=128, column_multiple=256)
    storage = StorageFormat(recipe=recipe(kinds[1]), padding=padding)
    spec = storage.storage_spec(shape)
    weight = codes_of(*spec["weight"].shape)
    weight.view(torch.uint8)[shape[0] :] = 0x7F
    weight.view(torch.uint8)[:, shape[1] :] = 0x7F
    linear = linear_of()
    for num_rows in (128, 300):
        call = product_of(num_rows, shape, kinds) | {
            "weight": weight,
            "weight_scale": torch.rand(spec["weight_scale"].shape, device="cuda") + 0.5,
            "storage": storage,
        }
        assert is_fed(partial(linear, **call))
        assert_is_product(linear(**call), call)


@pytest.mark.parametrize("kinds", [TOKEN, BLOCKS], ids=["rows", "blocks"])
def test_a_scale_that_is_not_a_number_shows_where_it_belongs(kinds: Kinds) -> None:
    linear = linear_of()
    call = product_of(300, (4_096, 4_112), kinds)
    assert is_fed(partial(linear, **call))
    cast(torch.Tensor, call["x_scale"])[299, -1] = float("nan")
    cast(torch.Tensor, call["weight_scale"])[1, -1] = float("nan")
    expected = torch.zeros(300, 4_096, dtype=torch.bool, device="cuda")
    expected[299] = True
    expected[:, slice(128, 256) if kinds == BLOCKS else slice(1, 2)] = True
    assert torch.equal(linear(**call).isnan(), expected)


@pytest.mark.parametrize("kinds", [TOKEN, BLOCKS], ids=["rows", "blocks"])
def test_codes_that_the_accelerator_cannot_read_are_multiplied_otherwise(kinds: Kinds) -> None:
    torch.manual_seed(0)
    linear = linear_of()
    for num_rows in (128, 300):
        call = product_of(num_rows, (4_096, 4_096), kinds)
        for name in ("x_TK", "weight"):
            codes = cast(torch.Tensor, call[name])
            moved = torch.empty(codes.numel() + 8, dtype=FP8, device="cuda")[8:].view(codes.shape)
            moved.copy_(codes)
            other = call | {name: moved}
            assert not is_fed(partial(linear, **other))
            assert_is_product(linear(**other), other)


@pytest.mark.parametrize("kinds", [TOKEN, BLOCKS], ids=["rows", "blocks"])
@pytest.mark.parametrize("num_rows", [100, 256, 1_000])
def test_a_recorded_product_reads_what_its_operands_hold_then(num_rows: int, kinds: Kinds) -> None:
    torch.manual_seed(0)
    linear = linear_of()
    call = product_of(num_rows, (4_096, 4_096), kinds)
    weight = cast(torch.Tensor, call["weight"])
    num_bytes = linear.workspace_bytes(weight, num_rows)  # type: ignore[attr-defined]  # the contract's
    workspace = torch.full((max(num_bytes, 1),), 255, dtype=torch.uint8, device="cuda")
    assert is_fed(partial(linear, **call, workspace=workspace))
    graph, out = recorded(partial(linear, **call, workspace=workspace))
    for _ in range(3):
        for name in ("x_TK", "weight"):
            codes = cast(torch.Tensor, call[name])
            codes.copy_(torch.randn(codes.shape, device="cuda").to(FP8))
        for name in ("x_scale", "weight_scale"):
            cast(torch.Tensor, call[name]).uniform_(0.5, 1.5)
        workspace.fill_(255)
        graph.replay()
        assert torch.equal(out, linear(**call))
    assert_is_product(out, call)


@pytest.mark.parametrize("kinds", [TOKEN, BLOCKS], ids=["rows", "blocks"])
@pytest.mark.parametrize("num_rows", [128, 300])
def test_each_product_is_read_after_the_kernel_that_writes_it(num_rows: int, kinds: Kinds) -> None:
    torch.manual_seed(0)
    linear = linear_of()
    quantise = cast(
        Callable[..., tuple[torch.Tensor, torch.Tensor]],
        select("quantise_activation", backend="triton", arch=detect_arch(), dtype=torch.bfloat16),
    )
    call = product_of(num_rows, (4_096, 4_096), kinds)
    first = torch.randn(num_rows, 4_096, device="cuda").bfloat16()

    def chain(after: Callable[[], object]) -> torch.Tensor:
        """Each product is what the next one multiplies, and two are of the same rows."""
        rows = first
        for _ in range(6):
            codes, scales = quantise(rows, call["x_recipe"])
            after()
            rows = linear(**call | {"x_TK": codes, "x_scale": scales})
            after()
            again = linear(**call | {"x_TK": codes, "x_scale": scales})
            after()
            rows = (rows + again) / 256
        return rows

    graph, captured = recorded(lambda: chain(lambda: None))
    for _ in range(20):
        first.normal_()
        graph.replay()
        assert torch.equal(captured, chain(torch.cuda.synchronize))
    assert captured.isfinite().all()


@pytest.mark.parametrize("kinds", [TOKEN, BLOCKS], ids=["rows", "blocks"])
@pytest.mark.parametrize("shape", [(4_224, 4_352), (17_408, 1_088)], ids=str)
def test_what_is_prepared_serves_fewer_rows(shape: tuple[int, int], kinds: Kinds) -> None:
    linear = linear_of()
    calls = [product_of(num_rows, shape, kinds) for num_rows in (65, 128, 130, 256, 300)]
    example = {
        name: torch.empty_like(one, device="meta") if isinstance(one, torch.Tensor) else one
        for name, one in calls[-1].items()
    }
    prepare(
        "linear_quantised", [example], backend="triton", arch=detect_arch(), dtype=torch.bfloat16
    )
    with sealed():
        for call in calls:
            assert_is_product(linear(**call), call)
