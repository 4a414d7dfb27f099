"""The casts of the GPU at hand, native and by integers, against the quantisers, bit for bit."""

import pytest
import torch

from syncline.model_ops_rocm import detect_arch
from syncline.model_ops_rocm.quant import encode_minifloat
from syncline.model_ops_rocm.quant.scheme import MINI_FLOATS, CodeType, max_of
from syncline.model_ops_rocm.testing.patterns import fp32_patterns
from syncline.model_ops_rocm.triton.targets import casts_natively

pytestmark = pytest.mark.gpu

BLOCK = 1 << 10
NUM_PATTERNS = (1 << 16) + (1 << 24)


@pytest.mark.parametrize("code", CodeType, ids=str)
def test_native_and_integer_casts_give_the_codes_of_the_encoder(code: CodeType) -> None:
    from syncline.model_ops_rocm.triton.kernels.cast_probe import codes_kernel

    x = fp32_patterns(NUM_PATTERNS, "cuda")
    x = torch.where(x.isfinite(), x, 0.0).clamp(-max_of(code), max_of(code))
    if code is CodeType.INT8:
        expected = x.round().to(torch.int8)
    else:
        expected = encode_minifloat(x, MINI_FLOATS[code])
    for native in {False, casts_natively(detect_arch(), code)}:
        codes = torch.empty_like(expected)
        codes_kernel[(x.numel() // BLOCK,)](x, codes, str(code), native, BLOCK)
        assert torch.equal(codes, expected)


@pytest.mark.parametrize("bound", [0.0, 448.0])
def test_a_quotient_by_multiplications_is_the_divisions_where_a_code_depends_on_it(
    bound: float,
) -> None:
    from syncline.model_ops_rocm.triton.kernels.cast_probe import quotients_kernel

    generator = torch.Generator("cuda").manual_seed(0)
    # Every mantissa, scales of every exponent, quotients around the ones that have codes.
    scale = fp32_patterns(NUM_PATTERNS, "cuda").abs()
    scale = torch.where(scale.isfinite() & (scale > 0), scale, 1.0)
    order = torch.randperm(scale.numel(), generator=generator, device="cuda")
    quotient = torch.randn(scale.numel(), generator=generator, device="cuda") * 2.0 ** (
        torch.randint(-14, 11, (scale.numel(),), generator=generator, device="cuda")
    )
    x = (scale * quotient).nan_to_num(0.0, 3e38, -3e38)
    # Half of the pairs divide what a code times a scale is, so the quotient is near a code.
    x[::2] = (scale * (quotient * 8).round().clamp(-448, 448) / 8)[::2].nan_to_num(0.0, 3e38, -3e38)
    x, scale = x[order], scale[order]
    got, exact = torch.empty_like(x), torch.empty_like(x)
    quotients_kernel[(x.numel() // BLOCK,)](x, scale, got, exact, bound, BLOCK)
    counts = (exact.abs() >= 2.0**-12) & (exact.abs() <= (bound or 2.0**20))
    assert int(counts.sum()) > x.numel() // 2
    assert torch.equal(got[counts].view(torch.int32), exact[counts].view(torch.int32))
    small = exact.abs() < 2.0**-12
    assert bool((got[small].abs() < 2.0**-11).all())
    assert torch.equal(got.signbit(), exact.signbit())
    if bound:
        assert bool((got[exact.abs() > bound].abs() >= bound).all())
