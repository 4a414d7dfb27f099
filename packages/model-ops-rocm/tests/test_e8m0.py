"""e8m0 scales: the four modes against AITER's formula on bit patterns, and every byte decoded."""

import pytest
import torch

from syncline.model_ops_rocm import E8m0Mode
from syncline.model_ops_rocm.quant import E8M0_NAN, e8m0_from_amax, e8m0_to_float32
from syncline.model_ops_rocm.reference import aiter_compat as compat

KINDS = [(0, 6.0, 1), (1, 448.0, 3), (2, 240.0, 3)]


def magnitudes() -> torch.Tensor:
    """2^19 float32 magnitudes: all exponents, subnormals among them, with scattered mantissas.

    And both neighbours of the mantissas at which a mode changes its mind.
    """
    scattered = torch.arange(1 << 19, dtype=torch.int64) * 2_654_435_761 & 0x7FFF_FFFF
    edges = torch.tensor([1.0, 1.25, 1.5, 1.75, 1.875, 1.9375]).view(torch.int32).long()
    exponents = (torch.arange(0, 255) - 127)[:, None] << 23
    around = torch.cat([edges - 1, edges, edges + 1])[None, :] + exponents
    bits = torch.cat([scattered, around.flatten().clamp(min=0)])
    return bits[bits < 0x7F80_0000].to(torch.int32).view(torch.float32)


@pytest.mark.parametrize("mode", E8m0Mode)
@pytest.mark.parametrize(("kind", "top", "mantissa"), KINDS)
def test_modes_equal_aiter_for_every_finite_maximum_but_where_it_gives_nan(
    mode: E8m0Mode, kind: int, top: float, mantissa: int
) -> None:
    amax = magnitudes()
    ours = e8m0_from_amax(amax, mode, max_value=top, mantissa_bits=mantissa)
    theirs = compat.f32_to_mx_e8m0_scale(amax, int(mode), kind)
    nan = theirs == E8M0_NAN
    assert torch.equal(ours[~nan], theirs[~nan])
    # Rounding the largest maxima makes an infinity there; here the scale stays what it ought to be.
    assert bool(nan.any()) == (mode is E8m0Mode.EVEN)
    power = {6.0: 2, 448.0: 8, 240.0: 7}[top]
    assert ours[nan].eq(255 - power).all()
    odd = torch.tensor([float("inf"), float("nan"), 0.0])
    got = e8m0_from_amax(odd, mode, max_value=top, mantissa_bits=mantissa)
    assert got.tolist() == [255, 255, 0]


def test_a_finite_maximum_never_has_the_nan_scale() -> None:
    largest = torch.tensor([3.4e38])
    for mode in E8m0Mode:
        got = e8m0_from_amax(largest, mode, max_value=0.5, mantissa_bits=1)
        assert got.tolist() == [254]


def test_every_byte_is_its_power_of_two() -> None:
    bytes_ = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    decoded = e8m0_to_float32(bytes_)
    assert decoded[:255].tolist() == [2.0 ** (byte - 127) for byte in range(255)]
    assert decoded[255:].isnan().all()
    native = bytes_.view(torch.float8_e8m0fnu).float()
    assert torch.equal(decoded[:255], native[:255])
