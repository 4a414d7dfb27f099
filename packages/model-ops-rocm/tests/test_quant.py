"""The per-token fp8 quantiser: against its formula in NumPy, at the edges, and against goldens."""

from collections.abc import Callable

import pytest
import torch

from syncline.model_ops_rocm.quant import FP8_MAX, per_token_fp8_decode, per_token_fp8_encode
from syncline.model_ops_rocm.testing.goldens import GoldenCase

np = pytest.importorskip("numpy", reason="the independent derivation is in NumPy")

E4M3FN, E4M3FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
# Every value of the type by its byte, from the definition: sign, 4 bits of exponent, 3 of mantissa.
BIAS = {E4M3FN: 7, E4M3FNUZ: 8}


def value_of(byte: int, dtype: torch.dtype) -> float:
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, mantissa = (byte >> 3) & 0xF, byte & 0x7
    if exponent == 0:
        return sign * mantissa / 8 * 2.0 ** (1 - BIAS[dtype])
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - BIAS[dtype])


def finite_bytes(dtype: torch.dtype) -> list[int]:
    nans = {E4M3FN: (0x7F, 0xFF), E4M3FNUZ: (0x80,)}[dtype]
    return [byte for byte in range(256) if byte not in nans]


def nearest_code_values(quotient: object, dtype: torch.dtype) -> object:
    """The finite values nearest to float32 quotients, ties to the even mantissa."""
    table = sorted({value_of(byte, dtype): byte & 1 for byte in finite_bytes(dtype)}.items())
    values = np.array([value for value, _ in table])
    odd = np.array([bit for _, bit in table])
    exact = np.asarray(quotient, dtype=np.float64)[..., None]
    distance = np.abs(values - exact)
    lowest = np.min(distance, axis=-1, keepdims=True)
    return values[np.argmin(np.where(distance == lowest, odd, 2), axis=-1)]


@pytest.mark.parametrize("dtype", [E4M3FN, E4M3FNUZ])
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16])
def test_codes_and_scales_equal_the_formula(source: torch.dtype, dtype: torch.dtype) -> None:
    x = torch.randn((24, 96), generator=torch.Generator().manual_seed(0)).to(source)
    x *= torch.logspace(-3, 3, 24)[:, None].to(source)
    codes, scale = per_token_fp8_encode(x, dtype)
    x32 = x.float().numpy()
    expected_scale = np.abs(x32).max(-1, keepdims=True) / np.float32(FP8_MAX[dtype])
    assert np.array_equal(scale.numpy(), expected_scale)
    expected = nearest_code_values(x32 / expected_scale, dtype)
    assert np.array_equal(codes.float().numpy(), expected)
    assert codes.dtype == dtype
    decoded = per_token_fp8_decode(codes, scale)
    assert np.array_equal(decoded.numpy(), codes.float().numpy() * expected_scale)
    # Half a step of 3 mantissa bits, or half the smallest step near zero.
    error = (decoded - x.float()).abs()
    assert error.le(torch.maximum(x.float().abs() / 16, scale * 2.0**-9)).all()


@pytest.mark.parametrize("dtype", [E4M3FN, E4M3FNUZ])
def test_rows_of_zeros_and_rows_that_underflow_have_scale_one(dtype: torch.dtype) -> None:
    x = torch.zeros((3, 8))
    x[1] = -0.0
    x[2, 3] = 1e-45
    codes, scale = per_token_fp8_encode(x, dtype)
    assert torch.equal(scale, torch.ones(3, 1))
    assert torch.equal(codes.float().abs(), torch.zeros(3, 8))
    assert torch.equal(per_token_fp8_decode(codes, scale).abs(), torch.zeros(3, 8))


@pytest.mark.parametrize("dtype", [E4M3FN, E4M3FNUZ])
def test_a_scale_that_rounds_down_saturates_and_never_makes_nan(dtype: torch.dtype) -> None:
    # Subnormal scales are multiples of 2^-149: amax / max rounds by up to a third.
    units = torch.arange(1, 4000, dtype=torch.float64)[:, None]
    x = (units * 2.0**-149).float()
    codes, scale = per_token_fp8_encode(x, dtype)
    assert not codes.float().isnan().any()
    overflowing = (x.double() / scale.double() > 1.05 * FP8_MAX[dtype])[:, 0]
    assert overflowing.any()
    assert codes.float()[overflowing].eq(FP8_MAX[dtype]).all()


def test_what_is_not_finite_never_decodes_to_a_plausible_number() -> None:
    x = torch.ones((2, 4))
    x[0, 1], x[1, 2] = float("inf"), float("nan")
    codes, scale = per_token_fp8_encode(x)
    assert not scale.isfinite().any()
    assert not per_token_fp8_decode(codes, scale).isfinite().any()


def test_leading_dimensions_are_rows_and_empty_is_empty() -> None:
    x = torch.randn((2, 3, 8))
    codes, scale = per_token_fp8_encode(x)
    assert scale.shape == (2, 3, 1)
    flat_codes, flat_scale = per_token_fp8_encode(x.view(6, 8))
    assert torch.equal(codes.view(torch.uint8).view(6, 8), flat_codes.view(torch.uint8))
    assert torch.equal(scale.view(6, 1), flat_scale)
    empty_codes, empty_scale = per_token_fp8_encode(torch.zeros((0, 8)))
    assert empty_codes.shape == (0, 8)
    assert empty_scale.shape == (0, 1)


def test_quantisers_name_what_is_wrong() -> None:
    with pytest.raises(
        ValueError, match=r"per_token_fp8_encode: dtype must be one of .*float8_e5m2"
    ):
        per_token_fp8_encode(torch.zeros(2, 2), torch.float8_e5m2)
    with pytest.raises(ValueError, match=r"per_token_fp8_encode: x must be float32, .* torch.int8"):
        per_token_fp8_encode(torch.zeros((2, 2), dtype=torch.int8))
    codes, scale = per_token_fp8_encode(torch.zeros(2, 2))
    with pytest.raises(ValueError, match=r"per_token_fp8_decode: scale must have shape \[2, 1\]"):
        per_token_fp8_decode(codes, scale[:1])
    with pytest.raises(ValueError, match=r"per_token_fp8_decode: dtype must be one of"):
        per_token_fp8_decode(torch.zeros(2, 2), scale)


@pytest.mark.golden
def test_codes_and_scales_equal_aiter_but_where_its_cast_overflows(
    goldens: Callable[[str], list[GoldenCase]],
) -> None:
    compared = 0
    for case in goldens("quant_per_token"):
        theirs = case.outputs["y"]
        # int8 is another recipe; a given scale is another function.
        if theirs.dtype not in BIAS or "scale_in" in case.inputs:
            continue
        x = case.inputs["x"]
        codes, scale = per_token_fp8_encode(x, theirs.dtype)
        assert torch.equal(scale, case.outputs["scale"]), str(case)
        differs = ~codes.float().eq(theirs.float())
        # The one difference: a quotient beyond the largest code, which only a subnormal scale
        # can give. There AITER's cast decides (NaN for e4m3fnuz), here the clamp.
        largest = FP8_MAX[theirs.dtype]
        assert torch.equal(differs, differs & ((x.float() / scale).abs() > largest))
        assert codes.float()[differs].abs().eq(largest).all()
        compared += 1
    if compared == 0:
        pytest.skip("no case of the recording makes fp8 codes with scales of its own")
