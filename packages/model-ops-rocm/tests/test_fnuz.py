"""e4m3fn to e4m3fnuz: every byte keeps its number, and no weight can be converted twice."""

from collections.abc import Callable

import pytest
import torch

from syncline.model_ops_rocm.quant import E4m3fnuzWeight, E4m3fnWeight, to_e4m3fnuz
from syncline.model_ops_rocm.reference import aiter_compat as compat
from syncline.model_ops_rocm.testing.goldens import GoldenCase

FN, FNUZ, E8M0 = torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e8m0fnu


def every_byte() -> torch.Tensor:
    return torch.arange(256, dtype=torch.int32).to(torch.uint8)


def numbers(weight: E4m3fnWeight | E4m3fnuzWeight) -> torch.Tensor:
    return weight.codes.float() * weight.scale.float()


@pytest.mark.parametrize("scale", [1.0, 0.0, -0.5, 0.017, 2.0**-149, 1.7e38])
def test_every_byte_means_the_same_number_after_conversion(scale: float) -> None:
    before = E4m3fnWeight(codes=every_byte().view(FN), scale=torch.tensor([scale]))
    after = to_e4m3fnuz(before)
    assert after.codes.dtype == FNUZ
    assert after.scale.tolist() == [2 * before.scale.item()]
    # float64: neither product is rounded, so equal means equal.
    wanted = before.codes.double() * before.scale.double()
    got = after.codes.double() * after.scale.double()
    assert torch.equal(got.isnan(), wanted.isnan())
    assert torch.equal(got.nan_to_num(), wanted.nan_to_num())
    raw = after.codes.view(torch.uint8)
    assert [raw[0x80].item(), raw[0x7F].item(), raw[0xFF].item()] == [0x00, 0x80, 0x80]
    assert int(raw.eq(0x80).sum()) == 2
    untouched = (every_byte() != 0x80) & ((every_byte() & 0x7F) != 0x7F)
    assert torch.equal(raw[untouched], every_byte()[untouched])


def test_the_input_is_as_it_was() -> None:
    codes, scale = every_byte().view(FN), torch.tensor([0.5])
    to_e4m3fnuz(E4m3fnWeight(codes=codes, scale=scale))
    assert torch.equal(codes.view(torch.uint8), every_byte())
    assert scale.item() == 0.5


def test_every_e8m0_scale_doubles_or_is_refused() -> None:
    one = torch.ones(1).to(FN)
    for byte in range(256):
        scale = torch.tensor([byte], dtype=torch.uint8).view(E8M0)
        weight = E4m3fnWeight(codes=one, scale=scale)
        if byte == 254:
            with pytest.raises(ValueError, match=r"scale must be at most 253, or 255, got 1 that"):
                to_e4m3fnuz(weight)
            continue
        after = to_e4m3fnuz(weight)
        assert after.scale.view(torch.uint8).item() == (255 if byte == 255 else byte + 1)
        assert torch.equal(numbers(after).isnan(), numbers(weight).isnan())
        assert torch.equal(numbers(after).nan_to_num(), numbers(weight).nan_to_num())


def test_a_scale_that_overflows_is_refused_and_one_that_is_not_finite_stays() -> None:
    codes = torch.ones(3).to(FN)
    scale = torch.tensor([1.0, 2.0**127, 3.0])
    with pytest.raises(
        ValueError, match=r"to_e4m3fnuz: scale must be finite after doubling.* 1 th"
    ):
        to_e4m3fnuz(E4m3fnWeight(codes=codes, scale=scale))
    scale = torch.tensor([float("nan"), float("inf"), 3.0])
    assert to_e4m3fnuz(E4m3fnWeight(codes=codes, scale=scale)).scale[1:].tolist() == [
        float("inf"),
        6.0,
    ]


def test_a_converted_weight_is_not_converted_again_and_dtypes_are_checked() -> None:
    after = to_e4m3fnuz(E4m3fnWeight(codes=torch.ones(1).to(FN), scale=torch.ones(1)))
    with pytest.raises(ValueError, match=r"must be an E4m3fnWeight, got E4m3fnuzWeight"):
        to_e4m3fnuz(after)  # type: ignore[arg-type]  # the type checker refuses it too
    with pytest.raises(ValueError, match=r"E4m3fnWeight: codes must be torch.float8_e4m3fn, got"):
        E4m3fnWeight(codes=after.codes, scale=after.scale)
    with pytest.raises(ValueError, match=r"E4m3fnuzWeight: codes must be torch.float8_e4m3fnuz"):
        E4m3fnuzWeight(codes=torch.ones(1).to(FN), scale=after.scale)
    with pytest.raises(ValueError, match=r"E4m3fnWeight: scale must be float32 or float8_e8m0fnu"):
        E4m3fnWeight(codes=torch.ones(1).to(FN), scale=torch.ones(1).half())


def test_it_differs_from_atom_in_nan_bytes_and_three_e8m0_scales_alone() -> None:
    ours = to_e4m3fnuz(E4m3fnWeight(codes=every_byte().view(FN), scale=torch.ones(1)))
    theirs, scale = compat.atom_normalize_e4m3fn_to_e4m3fnuz(every_byte().view(FN), torch.ones(1))
    differs = ours.codes.view(torch.uint8) != theirs.view(torch.uint8)
    assert differs.nonzero().flatten().tolist() == [0x7F, 0xFF]
    assert theirs.float()[differs].tolist() == [240.0, -240.0]
    assert torch.equal(ours.scale, scale)
    kept = every_byte()[every_byte() != 254]
    one = torch.ones(1).to(FN)
    doubled = to_e4m3fnuz(E4m3fnWeight(codes=one, scale=kept.view(E8M0))).scale.view(torch.uint8)
    atom = compat.atom_normalize_e4m3fn_to_e4m3fnuz(one, kept)[1]
    assert kept[doubled != atom].tolist() == [0]
    assert compat.atom_normalize_e4m3fn_to_e4m3fnuz(one, every_byte())[1][254].item() == 254


@pytest.mark.golden
def test_recorded_conversions_are_equal_but_for_those_differences(
    goldens: Callable[[str], list[GoldenCase]],
) -> None:
    # A conversion has codes and their scale doubled; a requantised weight has one scale instead.
    cases = [
        case
        for case in goldens("atom_fp8_fixups")
        if {"w_out", "w_scale_out"} <= case.outputs.keys()
    ]
    if not cases:
        pytest.skip("no case of the recording converts codes")
    for case in cases:
        codes, scale = case.inputs["w"], case.inputs["w_scale"]
        after = to_e4m3fnuz(E4m3fnWeight(codes=codes, scale=scale))
        assert torch.equal(after.scale, case.outputs["w_scale_out"])
        recorded = case.outputs["w_out"].view(torch.uint8)
        differs = after.codes.view(torch.uint8) != recorded
        assert torch.equal(differs, codes.float().isnan()), str(case)
