"""Integer encoders: equal to PyTorch's casts and to the definition of each type, exhaustively."""

import itertools
from collections.abc import Iterator

import pytest
import torch

from syncline.model_ops_rocm.quant import (
    E2M1,
    E4M3FN,
    E4M3FNUZ,
    MiniFloat,
    decode_minifloat,
    encode_minifloat,
    pack_nibbles,
    unpack_nibbles,
)

NATIVE = {E4M3FN.name: torch.float8_e4m3fn, E4M3FNUZ.name: torch.float8_e4m3fnuz}
KINDS = pytest.mark.parametrize("kind", [E4M3FN, E4M3FNUZ, E2M1], ids=lambda kind: kind.name)
FP8 = pytest.mark.parametrize("kind", [E4M3FN, E4M3FNUZ], ids=lambda kind: kind.name)


def floats(bits: torch.Tensor) -> torch.Tensor:
    return bits.to(torch.int32).view(torch.float32)


def zero_low_byte_patterns() -> Iterator[torch.Tensor]:
    """All 2^24 float32 patterns with a zero low byte, both signs, every NaN of them, in chunks."""
    chunk = 1 << 21
    for start in range(0, 1 << 24, chunk):
        yield floats(torch.arange(start, start + chunk, dtype=torch.int32) << 8)


def scattered_patterns() -> torch.Tensor:
    """2^20 patterns with any low byte: an odd multiplier visits integers in a scattered order."""
    return floats((torch.arange(1 << 20, dtype=torch.int64) * 2_654_435_761 + 12_345) & 0xFFFF_FFFF)


def edge_patterns(kind: MiniFloat) -> torch.Tensor:
    """Both float32 neighbours of every value and of every midpoint of two values, and these."""
    values = [kind.value_of(code) for code in range(kind.max_code + 1)]
    points = values + [(a + b) / 2 for a, b in itertools.pairwise(values)]
    step = values[-1] - values[-2]
    points += [values[-1] + step / 2, values[-1] + step, 2.0**127, float("inf"), float("nan")]
    bits = torch.tensor(points, dtype=torch.float32).view(torch.int32)
    near = torch.cat([bits, bits + 1, (bits - 1).clamp(min=0)])
    return torch.cat([near, near | -(1 << 31)]).view(torch.float32)


def native_codes(x: torch.Tensor, kind: MiniFloat) -> torch.Tensor:
    """PyTorch's cast, clamped: an overflow depends on the type and the version."""
    return x.clamp(-kind.max_value, kind.max_value).to(NATIVE[kind.name]).view(torch.uint8)


def counted_codes(x: torch.Tensor) -> torch.Tensor:
    """e2m1 by counting the midpoints that a magnitude has passed; a tie goes to the even code."""
    m = x.abs().nan_to_num(nan=float("inf"))
    passed = [m > 0.25, m >= 0.75, m > 1.25, m >= 1.75, m > 2.5, m >= 3.5, m > 5.0]
    codes = torch.stack(passed).to(torch.uint8).sum(0, dtype=torch.uint8)
    return codes | torch.signbit(x).to(torch.uint8) << 3


def expected_codes(x: torch.Tensor, kind: MiniFloat) -> torch.Tensor:
    return counted_codes(x) if kind is E2M1 else native_codes(x, kind)


@KINDS
def test_all_patterns_with_a_zero_low_byte_encode_as_expected(kind: MiniFloat) -> None:
    # They hold every bfloat16, and every float16 whose last two mantissa bits are zero.
    seen = 0
    for x in zero_low_byte_patterns():
        assert torch.equal(encode_minifloat(x, kind), expected_codes(x, kind))
        seen += x.numel()
    assert seen == 1 << 24


@KINDS
def test_scattered_patterns_and_neighbours_of_ties_encode_as_expected(kind: MiniFloat) -> None:
    for x in (scattered_patterns(), edge_patterns(kind)):
        assert torch.equal(encode_minifloat(x, kind), expected_codes(x, kind))
    every_bf16 = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    assert every_bf16.float().isnan().sum() == 2 * 127
    x = every_bf16.float()
    assert torch.equal(encode_minifloat(x, kind), expected_codes(x, kind))


@KINDS
def test_neighbours_of_ties_encode_to_the_nearest_value_in_exact_arithmetic(
    kind: MiniFloat,
) -> None:
    # float64 holds every difference of a float32 and a nearby value without rounding.
    values = torch.tensor([kind.value_of(c) for c in range(kind.max_code + 1)]).double()
    odd = torch.arange(kind.max_code + 1) & 1
    x = edge_patterns(kind)
    x = x[x.abs() < 1024]
    distance = (values - x.double().abs()[:, None]).abs()
    nearest = distance == distance.min(dim=1, keepdim=True).values
    best = torch.where(nearest, odd, 2).argmin(dim=1)
    assert torch.equal(encode_minifloat(x, kind).long() & (kind.sign_bit - 1), best)
    assert (nearest.sum(dim=1) == 2).any()


@FP8
def test_every_byte_decodes_as_pytorch_decodes_it(kind: MiniFloat) -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    native = codes.view(NATIVE[kind.name]).float()
    decoded = decode_minifloat(codes, kind)
    assert torch.equal(decoded.isnan(), native.isnan())
    finite = ~native.isnan()
    assert torch.equal(decoded[finite].view(torch.int32), native[finite].view(torch.int32))
    assert int(finite.sum()) == (254 if kind is E4M3FN else 255)
    # A value encodes to its own code; a NaN to a NaN.
    assert torch.equal(encode_minifloat(decoded, kind)[finite], codes[finite])
    assert decode_minifloat(encode_minifloat(decoded, kind), kind)[~finite].isnan().all()


def test_fp4_has_its_sixteen_values() -> None:
    codes = torch.arange(16, dtype=torch.int32).to(torch.uint8)
    wanted = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    decoded = decode_minifloat(codes, E2M1)
    assert decoded.tolist() == wanted + [-value for value in wanted]
    assert decoded.signbit().tolist() == [False] * 8 + [True] * 8
    assert torch.equal(encode_minifloat(decoded, E2M1), codes)


def test_saturation_zeros_and_nan() -> None:
    x = torch.tensor([1e30, float("inf"), -float("inf"), -0.0, 2.0**-149, float("nan")])
    assert encode_minifloat(x, E4M3FN).tolist() == [0x7E, 0x7E, 0xFE, 0x80, 0, 0x7F]
    assert encode_minifloat(x, E4M3FNUZ).tolist() == [0x7F, 0x7F, 0xFF, 0, 0, 0x80]
    assert encode_minifloat(x, E2M1).tolist() == [7, 7, 15, 8, 0, 7]
    # What rounds to zero from below has no sign in the type without a negative zero.
    assert encode_minifloat(torch.tensor([-1e-9]), E4M3FNUZ).tolist() == [0]
    assert E4M3FN.holds(448.0)
    assert E4M3FNUZ.holds(240.0)
    assert not E4M3FNUZ.holds(256.0)
    assert not E2M1.holds(5.0)


def test_packing_puts_the_even_index_into_the_low_nibble_and_has_an_inverse() -> None:
    assert pack_nibbles(torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8)).tolist() == [[0x21, 0x0F]]
    packed = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(2, 128)
    assert torch.equal(pack_nibbles(unpack_nibbles(packed)), packed)
    with pytest.raises(ValueError, match=r"pack_nibbles: the last dimension must be even, got"):
        pack_nibbles(torch.zeros((2, 3), dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"encode_minifloat: x must be float32, got torch.bfl"):
        encode_minifloat(torch.zeros(2).bfloat16(), E4M3FN)
