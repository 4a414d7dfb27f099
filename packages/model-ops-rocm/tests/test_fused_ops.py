"""Rounding of RMSNorm, kinds of rotation and quantised activations against plain formulas."""

import pytest
import torch

from syncline.model_ops_rocm import NormStyle, Quantised, StorageFormat, full_region, select
from syncline.model_ops_rocm.testing.cases import fused

HALVES = (torch.bfloat16, torch.float16)
EPS = 1e-5


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_style_says_where_the_norm_rounds(dtype: torch.dtype) -> None:
    x, weight = randn(64, 96, dtype=dtype), randn(96, dtype=dtype, seed=1)
    exact = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + EPS)
    expected = {
        NormStyle.ROUND_THEN_WEIGHT: exact.to(dtype) * weight,
        NormStyle.WEIGHT_THEN_ROUND: (exact * weight.float()).to(dtype),
        NormStyle.ONE_PLUS_WEIGHT_THEN_ROUND: (exact * (1.0 + weight.float())).to(dtype),
    }
    op = select("rms_norm", dtype=dtype)
    assert torch.equal(op(x, weight, EPS), expected[NormStyle.ROUND_THEN_WEIGHT])
    for style in NormStyle:
        for out in (None, torch.empty_like(x)):
            assert torch.equal(op(x, weight, EPS, style=style, out=out), expected[style])
    # Else the styles would need no names.
    first, second, third = expected.values()
    assert not torch.equal(first, second) and not torch.equal(second, third)


@pytest.mark.parametrize("width", [1, 3, 128, 1_000])
def test_the_batch_invariant_norm_is_as_near_as_the_other(width: int) -> None:
    x, weight = randn(5, width), randn(width, seed=1)
    op = select("rms_norm", dtype=torch.float32)
    got, plain = op(x, weight, EPS, batch_invariant=True), op(x, weight, EPS)
    torch.testing.assert_close(got, plain, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize(("width", "head_dim"), [(8, 8), (4, 8), (2, 6)])
@pytest.mark.parametrize("is_interleaved", [False, True])
def test_a_rotation_turns_pairs_and_leaves_the_rest(
    width: int, head_dim: int, is_interleaved: bool
) -> None:
    q, k = randn(3, 2, head_dim), randn(3, 1, head_dim, seed=1)
    angle = randn(7, width // 2, seed=2)
    cache, positions = torch.cat((angle.cos(), angle.sin()), dim=-1), torch.tensor([6, 0, 3])
    op = select("rotary_embedding", dtype=torch.float32)
    turned = op(q, k, cache, positions, is_interleaved=is_interleaved)
    for x, y in zip((q, k), turned, strict=True):
        expected = x.clone()
        for pair in range(width // 2):
            one, other = (2 * pair, 2 * pair + 1) if is_interleaved else (pair, pair + width // 2)
            cos, sin = angle[positions, pair].cos()[:, None], angle[positions, pair].sin()[:, None]
            expected[..., one] = x[..., one] * cos - x[..., other] * sin
            expected[..., other] = x[..., other] * cos + x[..., one] * sin
        assert torch.equal(y, expected)


@pytest.mark.parametrize("recipe", [fused.TOKEN_FNUZ, fused.BLOCK_128, *fused.MX], ids=str)
def test_quantised_activations_are_what_a_storage_format_stores(recipe: Quantised) -> None:
    x = randn(6, 300, dtype=torch.bfloat16)
    storage = StorageFormat(recipe=recipe)
    stored = {
        name: torch.empty(spec.shape, dtype=spec.dtype)
        for name, spec in storage.storage_spec(x.shape).items()
    }
    storage.encode_into(stored, x, full_region(x.shape))
    codes, scales = select("quantise_activation", dtype=x.dtype)(x, recipe)
    assert torch.equal(codes.view(torch.uint8), stored["weight"].view(torch.uint8))
    assert torch.equal(scales.view(torch.uint8), stored["weight_scale"].view(torch.uint8))
