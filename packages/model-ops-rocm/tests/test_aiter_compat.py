"""The AITER-compatible quantisers, one element at a time in NumPy, and digests of their results.

Needs no recorded vector. Inputs are made of integers, so they are the same on every machine.
"""

import hashlib
import math
from pathlib import Path

import pytest
import torch

import syncline.model_ops_rocm as package
from syncline.model_ops_rocm.quant import E2M1, E4M3FN, E4M3FNUZ, MiniFloat
from syncline.model_ops_rocm.reference import aiter_compat as compat
from syncline.model_ops_rocm.reference.aiter_compat_moe import grouped_topk

np = pytest.importorskip("numpy", reason="the independent derivation is in NumPy")

FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
KINDS: dict[torch.dtype, MiniFloat] = {FN: E4M3FN, FNUZ: E4M3FNUZ}
QUIET = pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")


def scattered(*shape: int, seed: int = 1) -> torch.Tensor:
    """Multiples of 2^-12 within +-8, rows scaled by powers of two; row 0 is zero, row 1 tiny."""
    index = torch.arange(math.prod(shape), dtype=torch.int64)
    mixed = (index * 2_654_435_761 + seed * 40_503) % 65_536
    x = (mixed - 32_768).float().view(shape) * 2.0**-12
    rows = x.view(-1, shape[-1])
    rows *= 2.0 ** ((torch.arange(rows.shape[0]) % 9 - 4).float()[:, None])
    rows[0] = 0
    rows[1] *= 2.0**-142
    return x


def nearest(value: float, kind: MiniFloat) -> int:
    """The code without sign nearest to a magnitude that does not overflow; ties to even."""
    codes = range(kind.max_code + 1)
    return min(codes, key=lambda code: (abs(kind.value_of(code) - abs(value)), code & 1))


def scalar_cast(value: float, dtype: torch.dtype) -> int:
    """The byte, or -1 for a NaN code."""
    if dtype == torch.int8:
        return 0 if math.isnan(value) or abs(value) >= 2**31 else math.trunc(value) & 0xFF
    kind = KINDS[dtype]
    if math.isnan(value) or (dtype == FNUZ and abs(value) >= 248.0):
        return -1
    code = nearest(min(abs(value), kind.max_value), kind)
    negative = math.copysign(1.0, value) < 0
    return code | 0x80 if negative and (code or kind.signed_zero) else code


def bytes_of(codes: torch.Tensor) -> list[int]:
    """Every code as its byte, -1 for NaN."""
    raw = codes.view(torch.uint8).int()
    if codes.is_floating_point():
        raw = torch.where(codes.float().isnan(), -1, raw)
    return raw.flatten().tolist()


def divided(x: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> list[int]:
    """Scalar float32 division and cast; `scales` has the shape of `x`."""
    quotients = x.float().numpy() / scales.numpy()
    return [scalar_cast(float(q), dtype) for q in quotients.flatten()]


@QUIET
@pytest.mark.parametrize("dtype", [FN, FNUZ, torch.int8])
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
def test_rows_runs_of_128_and_tensors_divide_by_amax_over_max(
    source: torch.dtype, dtype: torch.dtype
) -> None:
    x = scattered(5, 256).to(source)
    limit = np.float32(compat.DTYPE_MAX[dtype])
    for width, quantise in ((256, compat.pertoken_quant), (128, compat.per_1x128_quant)):
        codes, scale = quantise(x, dtype)
        amax = np.abs(x.float().numpy().reshape(-1, width)).max(-1)
        wanted = amax / limit
        wanted[wanted == 0] = 1
        assert scale.numpy().flatten().tolist() == wanted.tolist()
        spread = scale.reshape(5, -1).repeat_interleave(width, dim=-1)
        assert bytes_of(codes) == divided(x, spread, dtype)
    codes, scale = compat.per_tensor_quant(x, dtype)
    assert scale.tolist() == [float(np.abs(x.float().numpy()).max() / limit)]
    assert bytes_of(codes) == divided(x, scale.expand(5, 256), dtype)


@QUIET
@pytest.mark.parametrize("dtype", [FN, FNUZ, torch.int8])
def test_a_factor_per_column_and_a_smaller_range_are_arguments(dtype: torch.dtype) -> None:
    x, smooth = scattered(5, 64).bfloat16(), torch.arange(64).float() / 7 - 3
    product = x.float().numpy() * smooth.numpy()
    amax = np.abs(product).max(-1, keepdims=True)
    codes, scale = compat.pertoken_quant(x, dtype, smooth=smooth, dtype_max=7.0)
    wanted = amax / np.float32(7)
    wanted[wanted == 0] = 1
    assert scale.numpy().tolist() == wanted.tolist()
    assert bytes_of(codes) == divided(torch.from_numpy(product), scale.expand(5, 64), dtype)
    codes, scale = compat.per_tensor_quant(x, dtype, dtype_max=7.0)
    assert scale.tolist() == [float(np.abs(x.float().numpy()).max() / np.float32(7))]
    assert bytes_of(codes) == divided(x, scale.expand(5, 64), dtype)


@QUIET
def test_what_the_references_do_wrong() -> None:
    zeros = torch.zeros(1, 4)
    for dtype in (FN, FNUZ):
        codes, scale = compat.per_tensor_quant(zeros, dtype)
        assert scale.tolist() == [0.0]
        assert codes.float().isnan().all()
    assert compat.per_tensor_quant(zeros, torch.int8)[0].tolist() == [[0] * 4]
    # int8 truncates toward zero, and wraps where a given scale is too small.
    x, one = torch.tensor([[1.9, -1.9, 127.9, 128.0, 200.0, 3e9, -129.0]]), torch.ones(1)
    codes, _ = compat.per_tensor_quant(x, torch.int8, scale=one)
    assert codes.tolist() == [[1, -1, 127, -128, -56, 0, 127]]
    assert compat.pertoken_quant(torch.tensor([[3.5, -7.0]]), torch.int8, dtype_max=7.0)[
        0
    ].tolist() == [[3, -7]]
    # Overflow: e4m3fn saturates, e4m3fnuz is NaN from the tie at 248 on.
    x = torch.tensor([[460.0, 1e9, -1e9]])
    assert compat.per_tensor_quant(x, FN, scale=one)[0].float().tolist() == [[448.0, 448.0, -448.0]]
    x = torch.tensor([[247.9, 248.0, -1e9]])
    assert bytes_of(compat.per_tensor_quant(x, FNUZ, scale=one)[0]) == [0x7F, -1, -1]
    # float32 scales of runs of 32 come from 256 on every architecture: too much for e4m3fnuz.
    run = torch.ones(1, 32)
    assert compat.per_1x32_f8_quant(run, FN, e8m0=False)[0].float().eq(256.0).all()
    assert compat.per_1x32_f8_quant(run, FNUZ, e8m0=False)[0].float().isnan().all()
    assert (
        compat.per_1x32_f8_quant(zeros.expand(8, 4).reshape(1, 32), FN, e8m0=False)[0]
        .float()
        .isnan()
        .all()
    )


def test_blocks_of_128_by_128() -> None:
    x = scattered(130, 200)
    for dtype, limit in ((FN, 448.0), (FNUZ, 240.0)):
        codes, scale = compat.atom_per_128x128_quant(x, dtype)
        assert scale.shape == (2, 2)
        picked = [(n, k) for n in (0, 1, 2, 64, 127, 128, 129) for k in (0, 77, 127, 128, 199)]
        for n, k in picked:
            block = x[n // 128 * 128 : n // 128 * 128 + 128, k // 128 * 128 : k // 128 * 128 + 128]
            wanted = max(np.float32(block.abs().max()) / np.float32(limit), np.float32(2.0**-126))
            assert scale[n // 128, k // 128].item() == float(wanted)
            quotient = float(np.float32(x[n, k]) / wanted)
            clamped = max(-limit, min(limit, quotient))
            assert bytes_of(codes[n, k : k + 1]) == [scalar_cast(clamped, dtype)]
        assert compat.atom_per_128x128_quant(torch.zeros(3, 3), dtype)[1].item() == 2.0**-126
    whole = scattered(2, 128, 256)
    whole[0, :, :128] = 0
    codes, scale = compat.weight_per_128x128_quant(whole, FN)
    assert scale.shape == (2, 1, 2)
    assert scale[0, 0, 0].item() == 1.0
    for expert in range(2):
        alone, alone_scale = compat.atom_per_128x128_quant(whole[expert], FN)
        assert torch.equal(codes[expert].view(torch.uint8), alone.view(torch.uint8))
        same = alone_scale == scale[expert]
        assert torch.equal(same, alone_scale != 2.0**-126)


def scalar_e8m0(amax: float, mode: int, maximum: float, power: int, mantissa: int) -> int:
    """The definition: a power of two by comparison, for amax whose quotients are normal."""
    exponents = range(-126, 128)
    if mode == 2:
        fraction, exponent = math.frexp(amax)
        amax = math.floor(fraction * 2 ** (mantissa + 1) + 0.5) * 2.0 ** (exponent - mantissa - 1)
    divisor = maximum if mode == 1 else 2.0**power
    if mode in (1, 3):
        return 127 + min(e for e in exponents if 2.0**e * divisor >= amax)
    return 127 + max(e for e in exponents if 2.0**e * divisor <= amax)


@pytest.mark.parametrize("kind", [0, 1, 2])
@pytest.mark.parametrize("mode", [0, 1, 2, 3])
def test_e8m0_scales_follow_the_definition_of_their_mode(mode: int, kind: int) -> None:
    maximum, power, mantissa = (6.0, 448.0, 240.0)[kind], (2, 8, 7)[kind], (1, 3, 3)[kind]
    points = [1.0, 1.25, 1.5, 1.75, 6.0, 448.0, 240.0, 7.0, 496.0, 0.3, 1e-20, 1e30]
    bits = torch.tensor(points).view(torch.int32)
    amax = torch.cat([bits - 1, bits, bits + 1]).view(torch.float32)
    got = compat.f32_to_mx_e8m0_scale(amax, mode, kind).tolist()
    assert got == [scalar_e8m0(value, mode, maximum, power, mantissa) for value in amax.tolist()]
    odd = torch.tensor([0.0, float("inf"), float("nan")])
    assert compat.f32_to_mx_e8m0_scale(odd, mode, kind).tolist() == [0, 255, 255]


def test_fp4_codes_are_the_nearest_and_their_nibbles_in_order() -> None:
    x = scattered(4, 64)
    for mode in range(4):
        codes, scale = compat.per_1x32_f4_quant(x, mode=mode)
        factors = 2.0 ** (scale.double() - 127)
        quotients = (x.view(4, 2, 32).double() / factors[..., None]).view(4, 64)
        for row, column in ((0, 0), (2, 5), (2, 36), (3, 7), (3, 62)):
            quotient = quotients[row, column].item()
            nibble = int(codes[row, column // 2]) >> (4 * (column % 2)) & 0xF
            assert nibble & 7 == nearest(min(abs(quotient), 6.0), E2M1)
            assert nibble >> 3 == (math.copysign(1.0, quotient) < 0)
    other, other_scale = compat.per_1x32_f4_quant(x.T.contiguous().view(64, 4), pack_dim=0)
    codes, scale = compat.per_1x32_f4_quant(x)
    assert torch.equal(other, codes.T)
    assert torch.equal(other_scale, scale.T)
    shuffled = compat.per_1x32_f4_quant(x, shuffle=True)[1]
    assert shuffled.shape == (256, 8)
    for row in range(4):
        for column in range(2):
            place = (column % 4) * 64 + row % 16 * 4 + row % 32 // 16
            assert shuffled.flatten()[place] == scale[row, column]


def test_int4_does_its_sums_in_the_dtype_of_the_source() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        weight = scattered(3, 64).to(dtype)
        codes, scale = compat.per_1x32_i4_quant(weight)
        assert scale.shape == (2, 3)
        assert scale.dtype == torch.bfloat16
        for row in range(3):
            for group in range(2):
                part = weight[row, 32 * group : 32 * group + 32]
                step = (part.abs().max().float().clamp(min=1e-6).to(dtype) / 7).to(dtype)
                assert scale[group, row] == step.bfloat16()
                # bfloat16 quotients are float32 quotients, rounded: 8 bits need no more than 24.
                rounded = (part.float() / step.float()).to(dtype).float().round().clamp(-7, 7)
                assert codes[row, 32 * group : 32 * group + 32].tolist() == rounded.tolist()


def test_grouped_routing_keeps_the_scores_where_it_does_not_renormalise() -> None:
    logits = scattered(4, 16)[2:]
    weights, ids = grouped_topk(logits, 3, (4, 2), scoring="sigmoid", renormalise=False)
    assert torch.equal(weights, logits.sigmoid().gather(1, ids.long()))
    whole, same = grouped_topk(logits, 3, (4, 2), scoring="sigmoid")
    assert torch.equal(ids, same)
    assert torch.equal(whole, weights / weights.sum(dim=-1, keepdim=True))


def digest(*tensors: torch.Tensor) -> str:
    found = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        numbers = bytes_of(tensor) if tensor.itemsize == 1 else tensor.view(torch.int32).tolist()
        found.update(repr(numbers).encode())
    return found.hexdigest()


@QUIET
def test_results_are_the_ones_they_were() -> None:
    x, block = scattered(8, 256), scattered(2, 128, 128)
    found = {
        "token fn": digest(*compat.pertoken_quant(x, FN)),
        "token i8": digest(*compat.pertoken_quant(x, torch.int8)),
        "tensor fnuz": digest(*compat.per_tensor_quant(x, FNUZ)),
        "1x128 fn": digest(*compat.per_1x128_quant(x, FN)),
        "128x128 fnuz": digest(*compat.weight_per_128x128_quant(block, FNUZ)),
        "atom fn": digest(*compat.atom_per_128x128_quant(x, FN)),
        "fp4": digest(*compat.per_1x32_f4_quant(x)),
        "fp4 even": digest(*compat.per_1x32_f4_quant(x, mode=2)),
        "fp8 e8m0": digest(*compat.per_1x32_f8_quant(x, FN, e8m0=True)),
        "fp8 f32": digest(*compat.per_1x32_f8_quant(x, FNUZ, e8m0=False)),
        "int4": digest(compat.per_1x32_i4_quant(x)[0]),
    }
    assert found == DIGESTS


DIGESTS = {
    "token fn": "be7103e73653bb90",
    "token i8": "71acec360a232886",
    "tensor fnuz": "f47ebd5650848ea3",
    "1x128 fn": "5f475b545487d4a9",
    "128x128 fnuz": "5f681ec19536358d",
    "atom fn": "37ce974c2f784da6",
    "fp4": "c683cf4c993bcc06",
    "fp4 even": "7d90a63b840110db",
    "fp8 e8m0": "aa43c10a5b73a22a",
    "fp8 f32": "50f87806f23ce924",
    "int4": "c0cc2f64edf952d1",
}


def test_no_other_module_of_the_package_uses_them() -> None:
    root = Path(package.__file__).parent
    users = [
        path.name
        for path in root.rglob("*.py")
        if path.name != "aiter_compat.py" and "aiter_compat" in path.read_text("utf-8")
    ]
    assert users == []
