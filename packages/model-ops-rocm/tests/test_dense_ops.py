"""RMSNorm, rotary, SwiGLU, linear and embedding against plain formulas, bit for bit in float32."""

from collections.abc import Callable

import pytest
import torch

from syncline.model_ops_rocm import RowMajor, Shuffle16x16, WeightLayout, select

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EPS = 1e-6


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rms_formula(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x32 = x.float()
    normed = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + EPS)
    return weight * normed.to(x.dtype)


def rotate_formula(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    twice_cos = torch.cat((cos, cos), dim=-1)[:, None]
    twice_sin = torch.cat((sin, sin), dim=-1)[:, None]
    return x * twice_cos + turned * twice_sin


def rope_cache(num_positions: int, head_dim: int) -> torch.Tensor:
    inverse = 10_000.0 ** (-torch.arange(0, head_dim, 2).float() / head_dim)
    angles = torch.arange(num_positions).float()[:, None] * inverse
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(7, 128), (0, 128), (5, 4, 32), (1, 1), (3, 96)])
def test_rms_norm_equals_the_formula(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    rms_norm = select("rms_norm", dtype=dtype)
    x, weight = randn(*shape, dtype=dtype), randn(shape[-1], dtype=dtype, seed=1)
    kept = x.clone()
    result = rms_norm(x, weight, EPS)
    assert torch.equal(result, rms_formula(x, weight))
    assert result.dtype == dtype
    assert torch.equal(x, kept)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_adds_the_residual_in_place_and_normalises_the_rounded_sum(
    dtype: torch.dtype,
) -> None:
    rms_norm = select("rms_norm", dtype=dtype)
    x, residual = randn(6, 64, dtype=dtype), randn(6, 64, dtype=dtype, seed=2)
    weight = randn(64, dtype=dtype, seed=1)
    total, kept = x + residual, x.clone()
    result = rms_norm(x, weight, EPS, residual_TH=residual)
    assert torch.equal(residual, total)
    assert torch.equal(result, rms_formula(total, weight))
    assert torch.equal(x, kept)


def test_rms_norm_takes_views_and_writes_out() -> None:
    rms_norm = select("rms_norm", dtype=torch.float32)
    fused, weight = randn(5, 256), randn(32, seed=1)
    heads = fused[:, 64:192].view(5, 4, 32)
    out = torch.full((5, 4, 32), float("nan"))
    assert rms_norm(heads, weight, EPS, out=out) is out
    assert torch.equal(out, rms_formula(heads, weight))
    assert torch.equal(rms_norm(heads.transpose(0, 1), weight, EPS), out.transpose(0, 1))


def test_rms_norm_of_zeros_is_zero() -> None:
    rms_norm = select("rms_norm", dtype=torch.float32)
    assert torch.equal(rms_norm(torch.zeros(2, 8), torch.ones(8), EPS), torch.zeros(2, 8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [0, 1, 9])
def test_rotary_equals_the_formula(num_tokens: int, dtype: torch.dtype) -> None:
    rotary = select("rotary_embedding", dtype=dtype)
    q = randn(num_tokens, 4, 32, dtype=dtype)
    k = randn(num_tokens, 2, 32, dtype=dtype, seed=1)
    cache = rope_cache(64, 32)
    positions = torch.tensor([63, 0, 7, 7, 1, 2, 30, 31, 62])[:num_tokens]
    cos, sin = cache[positions].to(dtype).chunk(2, dim=-1)
    for got, x in zip(rotary(q, k, cache, positions), (q, k), strict=True):
        assert got.dtype == dtype
        assert torch.equal(got, rotate_formula(x, cos, sin))


def test_rotary_takes_views_of_a_fused_projection() -> None:
    rotary = select("rotary_embedding", dtype=torch.float32)
    fused = randn(6, 8 * 16)
    q, k = fused[:, : 4 * 16].view(6, 4, 16), fused[:, 4 * 16 : 6 * 16].view(6, 2, 16)
    kept, cache, positions = fused.clone(), rope_cache(8, 16), torch.arange(6)
    views = rotary(q, k, cache, positions)
    copies = rotary(q.clone(), k.clone(), cache, positions)
    assert all(torch.equal(one, other) for one, other in zip(views, copies, strict=True))
    assert torch.equal(fused, kept)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 64), (0, 64), (2, 3, 6)])
def test_silu_and_mul_equals_the_formula(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    silu_and_mul = select("silu_and_mul", dtype=dtype)
    x = randn(*shape, dtype=dtype)
    gate, up = x.chunk(2, dim=-1)
    expected = torch.nn.functional.silu(gate) * up
    assert torch.equal(silu_and_mul(x), expected)
    out = torch.full_like(expected, float("nan"))
    assert silu_and_mul(x, out=out) is out
    assert torch.equal(out, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", [RowMajor(), Shuffle16x16()])
@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_linear_reads_the_stored_bytes(
    num_tokens: int, layout: WeightLayout, dtype: torch.dtype
) -> None:
    linear = select("linear", dtype=dtype)
    x, weight = randn(num_tokens, 64, dtype=dtype), randn(48, 64, dtype=dtype, seed=1)
    bias = randn(48, dtype=dtype, seed=2)
    stored = layout.apply(weight)
    assert torch.equal(
        linear(x, stored, bias, layout=layout), torch.nn.functional.linear(x, weight, bias)
    )
    exact = x.double() @ weight.double().T
    tolerance = 1e-5 if dtype == torch.float32 else 0.2
    assert (linear(x, stored, layout=layout).double() - exact).abs().le(tolerance).all()
    # Bytes written to the stored tensor are seen by the next call.
    stored.zero_()
    assert torch.equal(linear(x, stored, layout=layout), torch.zeros(num_tokens, 48, dtype=dtype))


def test_linear_with_the_wrong_layout_gives_other_numbers() -> None:
    linear = select("linear", dtype=torch.float32)
    x, weight = randn(3, 64), randn(48, 64, seed=1)
    stored = Shuffle16x16().apply(weight)
    right = linear(x, stored, layout=Shuffle16x16())
    assert not torch.allclose(linear(x, stored, layout=RowMajor()), right)


def test_linear_takes_views_and_writes_out() -> None:
    linear = select("linear", dtype=torch.float32)
    wide, weight = randn(3, 128), randn(16, 64, seed=1)
    out = torch.full((3, 16), float("nan"))
    assert linear(wide[:, 64:], weight, layout=RowMajor(), out=out) is out
    assert torch.allclose(out, wide[:, 64:] @ weight.T)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32])
def test_embedding_gives_rows(index_dtype: torch.dtype, dtype: torch.dtype) -> None:
    embedding = select("embedding", dtype=dtype)
    weight = randn(11, 8, dtype=dtype)
    for ids in ([], [10, 0, 0, 3]):
        rows = embedding(torch.tensor(ids, dtype=index_dtype), weight)
        assert torch.equal(rows, weight[ids])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32])
def test_shards_of_an_embedding_add_up_to_the_whole(
    index_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    embedding = select("embedding", dtype=dtype)
    weight = randn(11, 8, dtype=dtype)
    ids = torch.tensor([10, 0, 4, 5, 3], dtype=index_dtype)
    parts = [(0, 5), (5, 9), (9, 9), (9, 11)]
    shards = [embedding(ids, weight[start:stop], first_id=start) for start, stop in parts]
    assert torch.equal(torch.stack(shards).sum(0), weight[ids.long()])
    outside = embedding(ids, weight[5:9], first_id=5)[[0, 1, 2, 4]]
    assert torch.equal(outside, torch.zeros(4, 8, dtype=dtype))


def test_rows_are_gathered_and_padding_is_zero() -> None:
    gather_rows = select("gather_rows", dtype=torch.float32)
    x = randn(6, 8)
    x[5] = float("nan")  # what no entry names
    got = gather_rows(x, torch.tensor([4, -1, 0, 4]))
    assert torch.equal(got, torch.stack((x[4], torch.zeros(8), x[0], x[4])))
    assert gather_rows(x, torch.tensor([], dtype=torch.int32)).shape == (0, 8)
    assert torch.equal(gather_rows(x[:0], torch.tensor([-1])), torch.zeros(1, 8))
    for wrong in (6, -2):
        with pytest.raises(ValueError, match=r"gather_rows: rows must be -1 or in \[0, 6\)"):
            gather_rows(x, torch.tensor([0, wrong]))


def test_ops_write_into_what_they_are_given() -> None:
    q, k, cache = randn(2, 4, 8), randn(2, 2, 8, seed=1), rope_cache(4, 8)
    rotary = select("rotary_embedding", dtype=torch.float32)
    positions, out = torch.tensor([3, 1]), (torch.empty(2, 4, 8), torch.empty(2, 2, 8))
    got = rotary(q, k, cache, positions, out=out)
    assert got[0] is out[0] and got[1] is out[1]
    assert all(map(torch.equal, out, rotary(q, k, cache, positions)))
    x, ids, row = randn(5, 8), torch.tensor([3]), torch.empty(1, 8)
    embedding = select("embedding", dtype=torch.float32)
    gather_rows = select("gather_rows", dtype=torch.float32)
    calls: list[Callable[[], torch.Tensor]] = [
        lambda: embedding(ids, x, out=row),
        lambda: embedding(ids + 2, x, first_id=2, out=row),
        lambda: gather_rows(x, ids, out=row),
    ]
    for call in calls:
        row.fill_(float("nan"))
        assert call() is row
        assert torch.equal(row[0], x[3])
    with pytest.raises(ValueError, match=r"rotary_embedding: out must have shape \[2, 2, 8\]"):
        rotary(q, k, cache, positions, out=(out[0], out[0]))
    with pytest.raises(ValueError, match=r"embedding: out must have shape \[1, 8\]"):
        embedding(ids, x, out=x)
    with pytest.raises(ValueError, match=r"gather_rows: out must be torch.float32"):
        gather_rows(x, ids, out=row.half())
    with pytest.raises(ValueError, match=r"embedding: first_id must be None or non-negative"):
        embedding(ids, x, first_id=-1)


def test_dense_ops_name_what_is_wrong() -> None:
    rms_norm = select("rms_norm", dtype=torch.float32)
    rotary = select("rotary_embedding", dtype=torch.float32)
    silu_and_mul = select("silu_and_mul", dtype=torch.float32)
    linear = select("linear", dtype=torch.float32)
    embedding = select("embedding", dtype=torch.float32)
    x, weight = randn(3, 8), randn(8)
    with pytest.raises(ValueError, match=r"rms_norm: weight must have shape \[8\], got \[4\]"):
        rms_norm(x, randn(4), EPS)
    with pytest.raises(ValueError, match=r"rms_norm: weight must be torch.float32, got torch.bfl"):
        rms_norm(x, weight.bfloat16(), EPS)
    with pytest.raises(ValueError, match=r"rms_norm: x must be float32, bfloat16 or float16, got"):
        rms_norm(x.double(), weight, EPS)
    with pytest.raises(ValueError, match=r"rms_norm: eps must be positive and finite, got 0\.0"):
        rms_norm(x, weight, 0.0)
    with pytest.raises(ValueError, match=r"rms_norm: eps must be positive and finite, got nan"):
        rms_norm(x, weight, float("nan"))
    with pytest.raises(ValueError, match=r"rms_norm: residual must have shape \[3, 8\]"):
        rms_norm(x, weight, EPS, residual_TH=randn(2, 8))
    with pytest.raises(ValueError, match=r"rms_norm: out must have shape \[3, 8\]"):
        rms_norm(x, weight, EPS, out=randn(3, 4))
    with pytest.raises(ValueError, match=r"rms_norm: x must have a last dimension"):
        rms_norm(torch.tensor(1.0), weight, EPS)
    q, k, cache = randn(2, 4, 8), randn(2, 2, 8), rope_cache(4, 8)
    with pytest.raises(ValueError, match=r"rotary_embedding: positions must be in \[0, 4\)"):
        rotary(q, k, cache, torch.tensor([0, 4]))
    with pytest.raises(ValueError, match=r"rotary_embedding: positions must be in \[0, 4\)"):
        rotary(q, k, cache, torch.tensor([0, -1]))
    with pytest.raises(ValueError, match=r"rotary_embedding: positions .* 2 entries, got"):
        rotary(q, k, cache, torch.tensor([0]))
    with pytest.raises(ValueError, match=r"rotary_embedding: cos_sin_cache .* got \[4, 10\]"):
        rotary(q, k, torch.zeros(4, 10), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match=r"rotary_embedding: k must have shape \[2, K, 8\]"):
        rotary(q, k[:1], cache, torch.tensor([0, 1]))
    with pytest.raises(ValueError, match=r"silu_and_mul: x must have an even last dimension"):
        silu_and_mul(randn(2, 7))
    with pytest.raises(ValueError, match=r"linear: x must have a last dimension of 16"):
        linear(x, randn(4, 16), layout=RowMajor())
    with pytest.raises(ValueError, match=r"linear: bias must have shape \[4\], got \[3\]"):
        linear(x, randn(4, 8), randn(3), layout=RowMajor())
    with pytest.raises(ValueError, match=r"linear: weight must be torch.float32, got torch.float8"):
        linear(x, randn(4, 8).to(torch.float8_e4m3fn), layout=RowMajor())
    with pytest.raises(ValueError, match=r"embedding: ids must be in \[0, 4\)"):
        embedding(torch.tensor([4]), randn(4, 8))
    with pytest.raises(ValueError, match=r"embedding: ids must be in \[0, 4\)"):
        embedding(torch.tensor([-1]), randn(4, 8))
    with pytest.raises(ValueError, match=r"embedding: ids must be int64 or int32, got"):
        embedding(torch.tensor([0.0]), randn(4, 8))


def test_a_refused_residual_is_left_alone() -> None:
    rms_norm = select("rms_norm", dtype=torch.float32)
    residual = randn(3, 8)
    kept = residual.clone()
    with pytest.raises(ValueError, match=r"out must have shape"):
        rms_norm(randn(3, 8, seed=1), randn(8), EPS, residual_TH=residual, out=randn(1, 8))
    assert torch.equal(residual, kept)


def test_a_style_that_is_only_its_name_is_refused() -> None:
    rms_norm = select("rms_norm", dtype=torch.float32)
    for style in ("one_plus_weight_then_round", "zzz", None):
        with pytest.raises(ValueError, match=r"rms_norm: style must be one of .*, got"):
            rms_norm(torch.ones(1, 16), torch.ones(16), 1e-6, style=style)  # type: ignore[arg-type]  # as it says
