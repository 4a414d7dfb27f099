"""Triton's casts and scales, interpreted on the CPU, against the quantisers, bit for bit.

The native casts need a GPU that has them: test_triton_gpu_casts.py.
"""

import importlib
import math
from types import ModuleType

import pytest
import torch

from syncline.model_ops_rocm.quant import E8m0Mode, ZeroRule, e8m0_to_float32, encode_minifloat
from syncline.model_ops_rocm.quant.scales import e8m0_scales, fp32_scales
from syncline.model_ops_rocm.quant.scheme import MINI_FLOATS, CodeType, max_of
from syncline.model_ops_rocm.testing.patterns import fp32_patterns

BLOCK = 1 << 15
CLAMPS = (448.0, 240.0, 6.0)


@pytest.fixture(scope="module")
def probe(interpreter: None) -> ModuleType:
    return importlib.import_module("syncline.model_ops_rocm.triton.kernels.cast_probe")


@pytest.mark.parametrize("code", CodeType, ids=str)
def test_the_integer_cast_gives_the_codes_of_the_encoder(probe: ModuleType, code: CodeType) -> None:
    x = fp32_patterns(1 << 17)
    x = torch.where(x.isfinite(), x, 0.0).clamp(-max_of(code), max_of(code))
    dtype = torch.int8 if code is CodeType.INT8 else torch.uint8
    codes = torch.empty(x.shape, dtype=dtype)
    probe.codes_kernel[(x.numel() // BLOCK,)](x, codes, str(code), False, BLOCK)
    if code is CodeType.INT8:
        assert torch.equal(codes, x.round().to(torch.int8))
    else:
        assert torch.equal(codes, encode_minifloat(x, MINI_FLOATS[code]))


@pytest.mark.parametrize("zero", ZeroRule, ids=str)
@pytest.mark.parametrize("clamp", CLAMPS)
def test_scales_are_those_of_the_quantisers(
    probe: ModuleType, clamp: float, zero: ZeroRule
) -> None:
    x = fp32_patterns(1 << 17)
    grid, amax, is_one = (x.numel() // BLOCK,), x.abs(), zero is ZeroRule.ONE
    scales = torch.empty_like(x)
    probe.fp32_scales_kernel[grid](x, scales, clamp, is_one, BLOCK)
    expected = fp32_scales(amax, clamp=clamp, zero=zero)
    assert torch.equal(scales.view(torch.int32), expected.view(torch.int32))
    power = math.floor(math.log2(clamp))
    for mode in E8m0Mode:
        stored = torch.empty(x.shape, dtype=torch.uint8)
        probe.e8m0_scales_kernel[grid](
            x, stored, scales, clamp, power, 3, mode.value, is_one, BLOCK
        )
        expected = e8m0_scales(amax, clamp=clamp, zero=zero, mode=mode, mantissa_bits=3)
        assert torch.equal(stored, expected.view(torch.uint8))
        assert torch.equal(scales.view(torch.int32), e8m0_to_float32(stored).view(torch.int32))
