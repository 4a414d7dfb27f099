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
