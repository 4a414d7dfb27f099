"""Linear of quantised weights in PyTorch: what is stored is what is multiplied."""

import pytest
import torch
import torch.nn.functional as F

from syncline.model_ops_rocm import (
    Linear,
    Padding,
    Quantised,
    RowMajor,
    Shuffle16x16,
    StorageFormat,
    Unquantised,
    select,
)
from syncline.model_ops_rocm.quant import CodeType, Granularity, ScaleType
from syncline.model_ops_rocm.quant.e8m0 import e8m0_to_float32
from syncline.model_ops_rocm.regions import full_region
from syncline.model_ops_rocm.testing.stored import SOME_RECIPES, encode_whole, every_recipe

FP8 = Quantised(granularity=Granularity.TOKEN, code=CodeType.E4M3FN)
BLOCKS = Quantised(granularity=Granularity.BLOCK_128X128, code=CodeType.E4M3FN)
ROW_BLOCKS = Quantised(granularity=Granularity.BLOCK_1X128, code=CodeType.E4M3FN)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("recipe", every_recipe()[::3], ids=Quantised.describe)
def test_every_recipe_multiplies_as_its_decoded_weight(recipe: Quantised) -> None:
    linear = select("linear_quantised", dtype=torch.float32)
    storage = StorageFormat(recipe=recipe)
    stored = encode_whole(storage, randn(40, 160, seed=1))
    x, bias = randn(3, 160), randn(40, seed=2)
    got = linear(x, stored["weight"], stored["weight_scale"], bias, storage=storage)
    assert torch.equal(got, F.linear(x, storage.decode(stored), bias))


def test_scales_multiply_the_blocks_that_they_are_for() -> None:
    # By hand: ones and twos in codes, another scale for each block of 128 x 128.
    linear = select("linear_quantised", dtype=torch.float32)
    codes = torch.ones(130, 257).to(torch.float8_e4m3fn)
    codes[:, 128] = 2
    scale = torch.tensor([[1.0, 10.0, 100.0], [0.5, 0.25, 0.125]])
    x = torch.ones(1, 257)
    y = linear(x, codes, scale, storage=StorageFormat(recipe=BLOCKS))
    assert y[0, :128].eq(128 + 10 * 129 + 100).all()
    assert y[0, 128:].eq(64 + 0.25 * 129 + 0.125).all()
    x_codes, x_scale = torch.ones(1, 257).to(torch.float8_e4m3fn), torch.tensor([[1.0, 2.0, 4.0]])
    y = linear(
        x_codes,
        codes,
        scale,
        storage=StorageFormat(recipe=BLOCKS),
        x_scale=x_scale,
        x_recipe=ROW_BLOCKS,
        dtype=torch.float32,
    )
    assert y[0, :128].eq(128 + 2 * 10 * 129 + 4 * 100).all()


def test_a_scale_that_is_not_a_number_shows() -> None:
    linear = select("linear_quantised", dtype=torch.bfloat16)
    stored = dict(encode_whole(StorageFormat(recipe=FP8), randn(4, 32)))
    stored["weight_scale"][2] = float("nan")
    y = linear(
        randn(3, 32).bfloat16(),
        stored["weight"],
        stored["weight_scale"],
        storage=StorageFormat(recipe=FP8),
    )
    assert y.isnan().all(dim=0).tolist() == [False, False, True, False]


@pytest.mark.parametrize("recipe", SOME_RECIPES, ids=Quantised.describe)
def test_a_shuffled_and_padded_weight_gives_the_same_numbers(recipe: Quantised) -> None:
    linear = select("linear_quantised", dtype=torch.float16)
    source, x = randn(40, 150, seed=1), randn(3, 150).half()
    padding = Padding(rows=40, columns=150, row_multiple=16, column_multiple=64)
    results = []
    for layout in (RowMajor(), Shuffle16x16()):
        storage = StorageFormat(recipe=recipe, layout=layout, padding=padding)
        stored = encode_whole(storage, source)
        results.append(linear(x, stored["weight"], stored["weight_scale"], storage=storage))
        assert results[-1].shape == (3, 40)
        assert results[-1].dtype == torch.float16
    assert torch.equal(*results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
# Of few columns, and of depths beside a multiple of 32, a library sums by a row's place.
@pytest.mark.parametrize(
    ("width", "depth"), [(33, 96), (130, 257), (7, 33), (2, 31), (5, 65), (8, 127), (10, 33)]
)
def test_a_row_is_its_own_whatever_shares_the_batch(
    width: int, depth: int, dtype: torch.dtype
) -> None:
    linear, weight = select("linear", dtype=dtype), randn(width, depth, seed=1).to(dtype)
    x, bias = randn(70, depth).to(dtype), randn(width, seed=2).to(dtype)
    quantised = select("linear_quantised", dtype=dtype)
    storage = StorageFormat(recipe=FP8)
    stored = encode_whole(storage, randn(width, depth, seed=1))

    def product(rows: torch.Tensor) -> list[torch.Tensor]:
        return [
            linear(rows, weight, bias, layout=RowMajor(), batch_invariant=True),
            quantised(
                rows,
                stored["weight"],
                stored["weight_scale"],
                storage=storage,
                batch_invariant=True,
            ),
        ]

    whole = product(x)
    assert torch.allclose(whole[0].float(), F.linear(x, weight, bias).float(), rtol=0.02, atol=0.05)
    for start, stop in ((0, 1), (5, 6), (31, 33), (40, 70), (69, 70)):
        for part, one in zip(product(x[start:stop]), whole, strict=True):
            assert torch.equal(part, one[start:stop])
    # Beside others, in another order.
    order = torch.randperm(70, generator=torch.Generator().manual_seed(3))
    for part, one in zip(product(x[order]), whole, strict=True):
        assert torch.equal(part, one[order])


def test_a_product_over_nothing_is_the_bias_with_and_without_the_flag() -> None:
    linear: Linear = select("linear", dtype=torch.float32)
    for x in (torch.zeros(2, 0), torch.zeros(0, 2, 0), torch.zeros(0, 3)):
        weight, bias = torch.zeros(4, x.shape[-1]), randn(4)
        for flag in (False, True):
            got = linear(x, weight, bias, layout=RowMajor(), batch_invariant=flag)
            assert torch.equal(got, bias.expand(*x.shape[:-1], 4))


def test_linear_says_which_layouts_it_reads_and_needs_no_workspace() -> None:
    linear: Linear = select("linear", dtype=torch.float32)
    assert list(linear.layouts) == [RowMajor(), Shuffle16x16()]
    assert linear.workspace_bytes(torch.zeros(8, 8), 4_096) == 0


def test_bad_arguments_are_refused_by_name() -> None:
    linear = select("linear_quantised", dtype=torch.float32)
    storage = StorageFormat(recipe=FP8)
    stored = encode_whole(storage, randn(8, 32))
    weight, scale, x = stored["weight"], stored["weight_scale"], randn(3, 32)
    encoded = FP8.encode(x, logical_shape=x.shape, region=full_region(x.shape)).tensors
    codes: dict[str, object] = {
        "x_TK": encoded["weight"],
        "x_scale": encoded["weight_scale"],
        "x_recipe": FP8,
    }
    good: dict[str, object] = {
        "x_TK": x,
        "weight": weight,
        "weight_scale": scale,
        "storage": storage,
    }
    bad: list[tuple[dict[str, object], str]] = [
        ({"storage": StorageFormat(recipe=Unquantised(torch.float32))}, "storage must have a quan"),
        ({"storage": StorageFormat(recipe=BLOCKS)}, r"weight_scale must have shape \[1, 1\]"),
        ({"weight": weight.view(torch.float8_e4m3fnuz)}, "weight must be torch.float8_e4m3fn,"),
        ({"weight": weight[0]}, "weight must have 2 dimensions"),
        ({"weight": weight.T.contiguous().T}, "weight must be contiguous"),
        ({"weight_scale": scale[:4]}, r"weight_scale must have shape \[8, 1\]"),
        ({"weight_scale": scale.bfloat16()}, "weight_scale must be torch.float32"),
        ({"x_TK": x[:, :31]}, "x must have a last dimension of 32"),
        ({"x_TK": x.double()}, "x must be float32, bfloat16 or float16"),
        ({"x_scale": scale}, "x_scale must come with x_recipe"),
        ({"dtype": torch.float16}, "dtype must be None or torch.float32"),
        ({"bias": torch.zeros(7)}, r"bias must have shape \[8\]"),
        ({"bias": torch.zeros(8).half()}, "bias must be torch.float32"),
        ({"out": torch.zeros(3, 7)}, r"out must have shape \[3, 8\]"),
        (codes, "dtype must be float32, bfloat16 or float16 where x is codes, got None"),
        (codes | {"x_scale": None}, "x_scale must be given with x_recipe"),
        (codes | {"x_recipe": BLOCKS}, "x_recipe must share scales over all, a row"),
        (codes | {"x_recipe": ROW_BLOCKS, "x_scale": scale}, "x_scale must have shape"),
        (codes | {"x_TK": encoded["weight"][None]}, "x must have 2 dimensions"),
    ]
    assert linear(**good).shape == (3, 8)  # type: ignore[arg-type]  # keywords of many types
    for change, message in bad:
        with pytest.raises(ValueError, match=f"linear_quantised: {message}"):
            linear(**(good | change))  # type: ignore[arg-type]  # as above


def test_codes_of_x_decode_by_their_own_recipe() -> None:
    linear = select("linear_quantised", dtype=torch.float32)
    storage = StorageFormat(recipe=BLOCKS, layout=Shuffle16x16())
    stored = encode_whole(storage, randn(32, 160, seed=1))
    x = randn(5, 160)
    for recipe in every_recipe()[::5]:
        if recipe.granularity is Granularity.BLOCK_128X128:
            continue
        encoded = recipe.encode(x, logical_shape=x.shape, region=full_region(x.shape)).tensors
        scale = encoded["weight_scale"].contiguous()
        y = linear(
            encoded["weight"].contiguous(),
            stored["weight"],
            stored["weight_scale"],
            storage=storage,
            x_scale=scale,
            x_recipe=recipe,
            dtype=torch.float32,
        )
        decoded = recipe.decode({"weight": encoded["weight"], "weight_scale": scale})
        assert torch.equal(y, F.linear(decoded, storage.decode(stored)))
        if recipe.scale is ScaleType.E8M0:
            assert e8m0_to_float32(scale.view(torch.uint8)).isfinite().all()
