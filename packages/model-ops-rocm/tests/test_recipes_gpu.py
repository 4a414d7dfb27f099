"""Quantising on a GPU leaves the bytes of the CPU: codes, scales, maxima and the flag."""

import pytest
import torch

from syncline.model_ops_rocm import Quantised, StorageFormat, checksum_stored, full_region
from syncline.model_ops_rocm.quant import E2M1, E4M3FN, E4M3FNUZ, MiniFloat, encode_minifloat
from syncline.model_ops_rocm.testing import allocate, encode_whole, every_recipe, uneven

pytestmark = pytest.mark.gpu


def require_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")


@pytest.mark.parametrize("recipe", every_recipe(), ids=Quantised.describe)
def test_a_gpu_source_is_stored_in_the_bytes_of_a_cpu_source(recipe: Quantised) -> None:
    require_gpu()
    storage, shape = StorageFormat(recipe=recipe), (130, 200)
    for dtype in (torch.float32, torch.bfloat16):
        for factor in (1.0, 2.0**-140, 2.0**118):
            x = (uneven(*shape) * factor).to(dtype)
            out = {name: tensor.cuda() for name, tensor in allocate(storage, shape).items()}
            flag = torch.zeros(1, dtype=torch.bool, device="cuda")
            storage.encode_into(out, x.cuda(), full_region(shape), nonfinite=flag)
            stored = encode_whole(storage, x)
            assert checksum_stored(out) == checksum_stored(stored)
            assert not flag.item()
            assert torch.equal(storage.decode(out).cpu(), storage.decode(stored))
            scales = storage.scales(storage.amax(x.cuda(), full_region(shape), shape)).cpu()
            assert torch.equal(scales.view(torch.uint8), stored["weight_scale"].view(torch.uint8))


@pytest.mark.parametrize("kind", [E4M3FN, E4M3FNUZ, E2M1], ids=lambda kind: kind.name)
def test_the_integer_encoder_gives_the_cpu_codes_for_every_pattern_with_a_zero_low_byte(
    kind: MiniFloat,
) -> None:
    require_gpu()
    chunk = 1 << 22
    for start in range(0, 1 << 24, chunk):
        x = (torch.arange(start, start + chunk, dtype=torch.int32) << 8).view(torch.float32)
        codes = encode_minifloat(x.cuda(), kind).cpu()
        assert torch.equal(codes, encode_minifloat(x, kind))
        if kind is not E2M1:
            native = {E4M3FN.name: torch.float8_e4m3fn, E4M3FNUZ.name: torch.float8_e4m3fnuz}
            cast = x.cuda().clamp(-kind.max_value, kind.max_value).to(native[kind.name])
            finite = ~x.isnan()
            assert torch.equal(cast.view(torch.uint8).cpu()[finite], codes[finite])
