"""AITER's products on the stand-in, which reads the weight and the scales as they are stored."""

from collections.abc import Callable
from typing import cast

import pytest
import torch

from syncline.model_ops_rocm import (
    CodeType,
    E8m0Mode,
    Granularity,
    LayoutError,
    Padding,
    Quantised,
    RowMajor,
    ScaleType,
    Shuffle16x16,
    StorageFormat,
    full_region,
    select,
)
from syncline.model_ops_rocm.aiter.detect import detect
from syncline.model_ops_rocm.aiter.ops.families import implementations
from syncline.model_ops_rocm.layouts import Shuffle32x16, e8m0_shuffle
from syncline.model_ops_rocm.testing.fake_aiter import FakeAiter

InstallAiter = Callable[..., FakeAiter]
Op = Callable[..., torch.Tensor]
NATIVE = {"gfx942": CodeType.E4M3FNUZ, "gfx950": CodeType.E4M3FN}
SHUFFLED = Shuffle16x16()


def load(op: str, arch: str = "gfx942") -> Op:
    aiter = detect("0.1.22", device_type="cpu", arch=lambda device: arch)
    return cast(Op, implementations(aiter)[op])


def ones(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


@pytest.mark.parametrize("arch", NATIVE)
@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_linear_multiplies_what_is_stored(
    install_aiter: InstallAiter, arch: str, shuffled: bool, num_tokens: int
) -> None:
    install_aiter(arch)
    layout = SHUFFLED if shuffled else RowMajor()
    weight = torch.randn(128, 192).bfloat16()
    x = torch.randn(num_tokens, 2, 200).bfloat16()[..., 4:196]
    bias = torch.randn(128).bfloat16()
    out = torch.full((num_tokens, 2, 130), float("nan")).bfloat16()[..., :128]
    got = load("linear", arch)(x, layout.apply(weight), bias, layout=layout, out=out)
    assert got is out
    expected = torch.nn.functional.linear(x.float(), weight.float(), bias.float())
    torch.testing.assert_close(out.float(), expected, rtol=2**-6, atol=2**-6)


def test_a_flag_on_the_weight_changes_nothing(install_aiter: InstallAiter) -> None:
    """Only the layout that the caller names says how the weight is read."""
    install_aiter()
    weight, x = torch.eye(32).bfloat16(), torch.randn(3, 32).bfloat16()
    weight.is_shuffled = True  # type: ignore[attr-defined]  # as a loader may leave it
    linear = load("linear")
    assert torch.equal(linear(x, weight, layout=RowMajor()), x)
    stored = SHUFFLED.apply(weight)
    assert torch.equal(linear(x, stored, layout=SHUFFLED), x)
    # The stand-in would notice: read as row-major, the shuffled weight is another one.
    assert not torch.equal(linear(x, stored, layout=RowMajor()), x)


@pytest.mark.parametrize(
    ("arch", "weight", "match"),
    [
        ("gfx950", ones(32, 64), r"multiples of 64 where it is shuffled, got \[32, 64\]"),
        ("gfx950", ones(64, 32), r"multiples of 64 where it is shuffled, got \[64, 32\]"),
        ("gfx942", ones(64, 64, dtype=torch.float16), "weight must be bfloat16 where it is"),
        ("gfx942", ones(64, 128)[:, :64], r"weight must be contiguous, got strides \(128, 1\)"),
        ("gfx942", ones(2, 32, 64), "weight must have 2 dimensions"),
        ("gfx942", ones(64, 64, dtype=torch.float32), "weight must be torch.bfloat16"),
    ],
)
def test_a_weight_that_aiter_would_not_take_is_refused(
    install_aiter: InstallAiter, arch: str, weight: torch.Tensor, match: str
) -> None:
    fake = install_aiter(arch)
    x = torch.ones(2, weight.shape[-1], dtype=weight.dtype)
    if weight.dtype == torch.float32:
        x = x.bfloat16()
    with pytest.raises(ValueError, match=match):
        load("linear", arch)(x, weight, layout=SHUFFLED)
    assert fake.calls == []


def test_a_layout_that_linear_does_not_read_is_refused(install_aiter: InstallAiter) -> None:
    fake = install_aiter()
    x, weight = ones(2, 64), ones(64, 64)
    with pytest.raises(LayoutError, match=r"shuffle_32x16 requires linear to take it"):
        load("linear")(x, weight, layout=Shuffle32x16())
    with pytest.raises(LayoutError, match=r"shuffle_16x16 requires"):
        load("linear")(ones(2, 8), ones(8, 8), layout=SHUFFLED)
    with pytest.raises(ValueError, match=r"linear: batch_invariant must be False for AITER"):
        load("linear")(x, weight, layout=RowMajor(), batch_invariant=True)
    assert fake.calls == []


PAIRS = {
    "token": (Granularity.TOKEN, Granularity.TOKEN),
    "block": (Granularity.BLOCK_1X128, Granularity.BLOCK_128X128),
    "tensor": (Granularity.TENSOR, Granularity.TENSOR),
}
FUNCTIONS = {
    ("token", False): "gemm_a8w8",
    ("token", True): "gemm_a8w8_bpreshuffle",
    ("block", False): "gemm_a8w8_blockscale",
    ("block", True): "gemm_a8w8_blockscale_bpreshuffle",
    ("tensor", False): "tgemm.mm",
}


def quantised(x: torch.Tensor, storage: StorageFormat) -> dict[str, torch.Tensor]:
    stored = {
        name: torch.empty(spec.shape, dtype=spec.dtype)
        for name, spec in storage.storage_spec(x.shape).items()
    }
    storage.encode_into(stored, x, full_region(x.shape))
    return stored


def call_of(
    x: torch.Tensor, weight: torch.Tensor, storage: StorageFormat, x_recipe: Quantised
) -> dict[str, object]:
    """A product of codes, by keyword; the weight is stored as `storage` says."""
    codes = quantised(x, StorageFormat(recipe=x_recipe))
    stored = quantised(weight, storage)
    return {
        "x_TK": codes["weight"],
        "x_scale": codes["weight_scale"],
        "x_recipe": x_recipe,
        "weight": stored["weight"],
        "weight_scale": stored["weight_scale"],
        "storage": storage,
        "dtype": torch.bfloat16,
    }


@pytest.mark.parametrize("arch", NATIVE)
@pytest.mark.parametrize(("pair", "shuffled"), FUNCTIONS)
@pytest.mark.parametrize("num_tokens", [1, 7])
@pytest.mark.parametrize("has_bias", [False, True])
def test_codes_are_multiplied_as_they_are_stored(
    install_aiter: InstallAiter,
    arch: str,
    pair: str,
    shuffled: bool,
    num_tokens: int,
    has_bias: bool,
) -> None:
    fake = install_aiter(arch)
    of_x, of_weight = (Quantised(granularity=one, code=NATIVE[arch]) for one in PAIRS[pair])
    storage = StorageFormat(recipe=of_weight, layout=SHUFFLED if shuffled else RowMajor())
    x = torch.randn(num_tokens, 256) * torch.logspace(-2, 2, 256)
    weight = torch.randn(384, 256) * torch.logspace(-1, 1, 384).unsqueeze(1)
    call = call_of(x, weight, storage, of_x)
    if has_bias:
        call["bias"] = torch.randn(384).bfloat16()
    got = load("linear_quantised", arch)(**call)
    expected = cast(Op, select("linear_quantised", dtype=torch.bfloat16))(**call)
    scale = float(expected.float().abs().amax())
    torch.testing.assert_close(got, expected, rtol=2**-6, atol=2**-9 * scale)
    assert fake.calls == [FUNCTIONS[pair, shuffled]]
    out = torch.full_like(expected, float("nan"))
    assert load("linear_quantised", arch)(**call, out=out) is out
    assert torch.equal(out, got)


def test_int8_and_rows_of_padding(install_aiter: InstallAiter) -> None:
    install_aiter()
    recipe = Quantised(granularity=Granularity.TOKEN, code=CodeType.INT8)
    x, weight = torch.randn(3, 64), torch.randn(100, 64)
    reference = cast(Op, select("linear_quantised", dtype=torch.float16))
    call = call_of(x, weight, StorageFormat(recipe=recipe), recipe) | {"dtype": torch.float16}
    got = load("linear_quantised")(**call)
    torch.testing.assert_close(got, reference(**call), rtol=2**-9, atol=2**-9)
    fnuz = Quantised(granularity=Granularity.TOKEN, code=CodeType.E4M3FNUZ)
    padded = StorageFormat(
        recipe=fnuz,
        layout=SHUFFLED,
        padding=Padding(rows=100, columns=64, row_multiple=128, column_multiple=32),
    )
    call = call_of(x, weight, padded, fnuz) | {"bias": torch.randn(100).bfloat16()}
    got = load("linear_quantised")(**call)
    torch.testing.assert_close(got, reference(**call), rtol=2**-6, atol=2**-4)


def test_no_tokens_are_the_bias_of_none(install_aiter: InstallAiter) -> None:
    fake = install_aiter()
    recipe = Quantised(granularity=Granularity.TOKEN, code=CodeType.E4M3FNUZ)
    call = call_of(torch.ones(1, 64), torch.ones(32, 64), StorageFormat(recipe=recipe), recipe)
    call["x_TK"] = torch.empty(0, 64, dtype=recipe.dtype)
    call["x_scale"] = torch.empty(0, 1)
    assert load("linear_quantised")(**call).shape == (0, 32)
    assert fake.calls == []


FN, FNUZ = CodeType.E4M3FN, CodeType.E4M3FNUZ
TOKEN, TENSOR = Granularity.TOKEN, Granularity.TENSOR
REFUSED = [
    ("gfx942", (TOKEN, FN), (TOKEN, FN), RowMajor(), "codes of e4m3fnuz for AITER on gfx942"),
    ("gfx950", (TOKEN, FNUZ), (TOKEN, FN), RowMajor(), "x_recipe must have codes of e4m3fn "),
    ("gfx950", (TENSOR, FN), (TOKEN, FN), RowMajor(), "x_recipe must make one of AITER's pairs"),
    ("gfx950", (TENSOR, FN), (TENSOR, FN), SHUFFLED, "x_recipe must make one of AITER's pairs"),
    ("gfx950", (TOKEN, FN), (TOKEN, FN), SHUFFLED, "have rows in multiples of 128 for AITER"),
    (
        *("gfx950", (Granularity.BLOCK_1X128, FN), (Granularity.BLOCK_128X128, FN), RowMajor()),
        "have rows and columns in multiples of 128 for AITER",
    ),
]


@pytest.mark.parametrize(("arch", "of_x", "of_weight", "layout", "match"), REFUSED)
def test_a_product_that_aiter_lacks_is_refused(
    install_aiter: InstallAiter,
    arch: str,
    of_x: tuple[Granularity, CodeType],
    of_weight: tuple[Granularity, CodeType],
    layout: RowMajor,
    match: str,
) -> None:
    fake = install_aiter(arch)
    x_recipe, recipe = (Quantised(granularity=one, code=code) for one, code in (of_x, of_weight))
    storage = StorageFormat(recipe=recipe, layout=layout)
    call = call_of(torch.ones(2, 64), torch.ones(96, 64), storage, x_recipe)
    with pytest.raises(ValueError, match=match):
        load("linear_quantised", arch)(**call)
    assert fake.calls == []


def test_activations_that_are_no_codes_are_refused(install_aiter: InstallAiter) -> None:
    fake = install_aiter()
    recipe = Quantised(granularity=TOKEN, code=FNUZ)
    storage = StorageFormat(recipe=recipe)
    call = call_of(torch.ones(2, 64), torch.ones(32, 64), storage, recipe)
    product = load("linear_quantised")
    floats = call | {"x_TK": ones(2, 64), "x_scale": None, "x_recipe": None, "dtype": None}
    with pytest.raises(ValueError, match=r"x_recipe must be given for AITER, which multiplies"):
        product(**floats)
    with pytest.raises(ValueError, match=r"dtype must be bfloat16 or float16 for AITER"):
        product(**call | {"dtype": torch.float32})
    with pytest.raises(ValueError, match=r"batch_invariant must be False for AITER"):
        product(**call, batch_invariant=True)
    shuffled = StorageFormat(recipe=recipe, layout=Shuffle32x16())
    with pytest.raises(LayoutError, match=r"requires linear_quantised to take it"):
        product(**call | {"storage": shuffled})
    mx = Quantised(
        granularity=Granularity.BLOCK_1X32,
        code=FNUZ,
        scale=ScaleType.E8M0,
        e8m0_mode=E8m0Mode.ROUND_UP,
    )
    with pytest.raises(ValueError, match=r"storage must have fp32 scales for AITER"):
        product(**call_of(torch.ones(2, 64), torch.ones(32, 64), StorageFormat(recipe=mx), recipe))
    tiled = StorageFormat(recipe=mx, scale_layout=e8m0_shuffle())
    with pytest.raises(LayoutError, match=r"e8m0_shuffle requires linear_quantised to take it"):
        product(**call_of(torch.ones(2, 64), torch.ones(32, 64), tiled, recipe))
    assert fake.calls == []
