"""Activations quantised by AITER on the stand-in, which rounds by reciprocals as its kernels do."""

from collections.abc import Callable
from typing import cast

import pytest
import torch

from syncline.model_ops_rocm import (
    CodeType,
    E8m0Mode,
    Granularity,
    NormStyle,
    Quantised,
    ScaleType,
    select,
)
from syncline.model_ops_rocm.aiter.detect import detect
from syncline.model_ops_rocm.aiter.ops.families import implementations
from syncline.model_ops_rocm.testing.fake_aiter import FakeAiter

InstallAiter = Callable[..., FakeAiter]
Encoded = tuple[torch.Tensor, torch.Tensor]
Quantise = Callable[..., Encoded]
NATIVE = {"gfx942": CodeType.E4M3FNUZ, "gfx950": CodeType.E4M3FN}
HALVES = (torch.bfloat16, torch.float16)


def load(op: str, arch: str) -> Quantise:
    found = implementations(detect("0.1.22", device_type="cpu", arch=lambda device: arch))
    return cast(Quantise, found[op])


def recipe_of(granularity: Granularity, code: CodeType) -> Quantised:
    if granularity is Granularity.BLOCK_1X32:
        return Quantised(
            granularity=granularity,
            code=code,
            scale=ScaleType.E8M0,
            e8m0_mode=E8m0Mode.ROUND_UP,
        )
    return Quantised(granularity=granularity, code=code)


def numbers(encoded: Encoded, width: int) -> torch.Tensor:
    codes, scales = encoded[0].float(), encoded[1].float()
    if scales.numel() == 1:
        return codes * scales
    return codes * scales.repeat_interleave(width // scales.shape[-1], -1)


def assert_near(got: Encoded, expected: Encoded, width: int) -> None:
    """A scale apart by a rounding, and codes by one step of theirs, which is an eighth at most."""
    scales = expected[1].float()
    is_block = scales > 1e-11
    torch.testing.assert_close(got[1].float()[is_block], scales[is_block], rtol=2**-22, atol=0.0)
    ours, theirs = numbers(got, width), numbers(expected, width)
    step = theirs.abs() / 8 + 2.0**-9 * ours.abs().amax()
    assert bool(((ours - theirs).abs() <= step).all())
    assert bool((got[0].float() == expected[0].float()).float().mean() > 0.97)


@pytest.mark.parametrize("arch", NATIVE)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(
    "granularity",
    [Granularity.TOKEN, Granularity.TENSOR, Granularity.BLOCK_1X128, Granularity.BLOCK_1X32],
)
@pytest.mark.parametrize("shape", [(0, 256), (1, 128), (5, 3, 256)])
def test_activations_are_within_a_rounding_of_the_recipe(
    install_aiter: InstallAiter,
    arch: str,
    dtype: torch.dtype,
    granularity: Granularity,
    shape: tuple[int, ...],
) -> None:
    install_aiter(arch)
    recipe = recipe_of(granularity, NATIVE[arch])
    x = torch.randn(*shape[:-1], shape[-1] + 8).to(dtype)[..., : shape[-1]]
    keywords: dict[str, object] = {}
    if granularity is Granularity.TENSOR:
        keywords["scale"] = torch.tensor([0.02])
    got = load("quantise_activation", arch)(x, recipe, **keywords)
    expected = cast(Quantise, select("quantise_activation", dtype=dtype))(x, recipe, **keywords)
    assert [one.shape for one in got] == [one.shape for one in expected]
    assert [one.dtype for one in got] == [one.dtype for one in expected]
    if x.numel():
        assert_near(got, expected, x.shape[-1])


def test_a_row_of_zeros_is_zeros(install_aiter: InstallAiter) -> None:
    """There its scale is 0 and its codes are the lowest."""
    install_aiter()
    x = torch.randn(3, 128).bfloat16()
    x[1] = 0
    recipe = recipe_of(Granularity.TOKEN, CodeType.E4M3FNUZ)
    out = torch.empty(3, 128, dtype=recipe.dtype), torch.full((3, 1), float("nan"))
    got = load("quantise_activation", "gfx942")(x, recipe, out=out)
    assert got[0] is out[0]
    assert got[1] is out[1]
    assert not out[0][1].view(torch.uint8).any()
    assert out[1][1] == 1.0


@pytest.mark.parametrize("granularity", [Granularity.TOKEN, Granularity.BLOCK_1X128])
@pytest.mark.parametrize(
    "style", [NormStyle.WEIGHT_THEN_ROUND, NormStyle.ONE_PLUS_WEIGHT_THEN_ROUND]
)
def test_a_norm_is_quantised(
    install_aiter: InstallAiter, granularity: Granularity, style: NormStyle
) -> None:
    install_aiter("gfx950")
    recipe = recipe_of(granularity, CodeType.E4M3FN)
    x, residual = torch.randn(2, 2, 3, 256).bfloat16()
    other, weight = residual.clone(), torch.randn(256).bfloat16()
    call = {"weight_H": weight, "eps": 1e-6, "recipe": recipe, "style": style}
    got = load("rms_norm_quant", "gfx950")(x, residual_TH=residual, **call)
    reference = cast(Quantise, select("rms_norm_quant", dtype=torch.bfloat16))
    expected = reference(x, residual_TH=other, **call)
    assert torch.equal(residual, other)
    # What is quantised there is not rounded to bfloat16 before.
    torch.testing.assert_close(got[1], expected[1], rtol=2**-8, atol=0.0)
    ours, theirs = numbers(got, 256), numbers(expected, 256)
    # One step of a code, and what the scale differs by.
    assert bool(((ours - theirs).abs() <= theirs.abs() * (1 / 8 + 2**-7) + 2**-8).all())


FN, FNUZ = CodeType.E4M3FN, CodeType.E4M3FNUZ
TOKEN = Granularity.TOKEN
REFUSED = [
    ("gfx942", recipe_of(TOKEN, FN), {}, "have codes of e4m3fnuz for AITER on gfx942"),
    ("gfx950", recipe_of(TOKEN, FNUZ), {}, "have codes of e4m3fn for AITER on gfx950"),
    ("gfx950", Quantised(granularity=TOKEN, code=FN, clamp=256.0), {}, "the type's whole range"),
    (
        "gfx950",
        Quantised(granularity=Granularity.BLOCK_1X32, code=FN),
        {},
        "have e8m0 scales for 1x32 and for nothing else",
    ),
    (
        "gfx950",
        Quantised(
            granularity=Granularity.BLOCK_1X32,
            code=FN,
            scale=ScaleType.E8M0,
            e8m0_mode=E8m0Mode.EVEN,
        ),
        {},
        "round e8m0 scales up",
    ),
    ("gfx950", recipe_of(Granularity.BLOCK_1X128, FN), {}, "multiple of 128, got"),
    (
        "gfx950",
        recipe_of(TOKEN, FN),
        {"nonfinite": torch.zeros(1, dtype=torch.int32)},
        "nonfinite must be None for AITER",
    ),
    ("gfx950", recipe_of(TOKEN, CodeType.INT8), {}, "have codes of e4m3fn or e4m3fnuz"),
]


@pytest.mark.parametrize(("arch", "recipe", "keywords", "match"), REFUSED)
def test_a_recipe_that_aiter_lacks_is_refused(
    install_aiter: InstallAiter,
    arch: str,
    recipe: Quantised,
    keywords: dict[str, torch.Tensor],
    match: str,
) -> None:
    fake = install_aiter(arch)
    x = torch.ones(2, 96).bfloat16()
    with pytest.raises(ValueError, match=match):
        load("quantise_activation", arch)(x, recipe, **keywords)
    assert fake.calls == []


def test_a_norm_that_aiter_lacks_is_refused(install_aiter: InstallAiter) -> None:
    fake = install_aiter("gfx950")
    norm, x = load("rms_norm_quant", "gfx950"), torch.ones(2, 96).bfloat16()
    with pytest.raises(ValueError, match=r"style must round once, after the weight, for AITER"):
        norm(x, x[0], 1e-6, recipe_of(TOKEN, FN))
    style = NormStyle.WEIGHT_THEN_ROUND
    with pytest.raises(ValueError, match=r"recipe must be per token or 1x128 with fp32 scales"):
        norm(x, x[0], 1e-6, recipe_of(Granularity.BLOCK_1X32, FN), style=style)
    with pytest.raises(ValueError, match=r"rms_norm_quant: weight must have shape \[96\]"):
        norm(x, x[0, 1:], 1e-6, recipe_of(TOKEN, FN), style=style)
    assert fake.calls == []
