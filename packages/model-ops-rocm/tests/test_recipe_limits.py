"""Quantised formats at their limits: what is refused, reported, padded, empty or a vector."""

import pytest
import torch

from syncline.model_ops_rocm import (
    AmaxPartial,
    CodeType,
    E8m0Mode,
    FormatError,
    Granularity,
    Padding,
    PerTokenFp8,
    Quantised,
    Region,
    ScaleType,
    Shuffle16x16,
    StorageFormat,
    TensorSpec,
    Unquantised,
    checksum_logical,
    checksum_stored,
    full_region,
)
from syncline.model_ops_rocm.quant import per_token_fp8_encode
from syncline.model_ops_rocm.testing import (
    SOME_RECIPES,
    Stored,
    allocate,
    block_of,
    encode_whole,
    every_recipe,
    part_of,
    uneven,
)

RECIPES = every_recipe()
FP4, E8M0 = torch.float4_e2m1fn_x2, torch.float8_e8m0fnu
some = pytest.mark.parametrize("recipe", SOME_RECIPES, ids=Quantised.describe)


def same_bytes(one: Stored, other: Stored) -> bool:
    return checksum_stored(one) == checksum_stored(other)


def test_a_scale_is_refused_until_every_element_was_counted_once() -> None:
    storage, shape = StorageFormat(recipe=SOME_RECIPES[2]), (130, 200)
    x = uneven(*shape)
    upper, lower = ((0, 64), (0, 200)), ((64, 130), (0, 200))
    first = storage.amax(part_of(x, upper), upper, shape)
    with pytest.raises(FormatError, match=r"counted once, got 4 of 4 scales whose domain is not"):
        storage.scales(storage.new_amax(shape))
    with pytest.raises(FormatError, match=r"counted once, got 4 of 4"):
        storage.scales(first)
    second = storage.amax(part_of(x, lower), lower, shape)
    scales = storage.scales(first.combine(second))
    assert torch.equal(scales, encode_whole(storage, x)["weight_scale"])
    with pytest.raises(FormatError, match=r"counted once, got 2 of 4"):
        storage.scales(twice_below(storage, first, second, x))
    with pytest.raises(ValueError, match=r"AmaxPartial: other must be of the same shape and grid"):
        first.combine(storage.new_amax((130, 201)))
    with pytest.raises(FormatError, match=r"maxima on a grid of \[1, 1\], got \[2, 2\]"):
        StorageFormat(recipe=SOME_RECIPES[0]).amax_into(first, part_of(x, upper), upper)
    with pytest.raises(FormatError, match=r"requires a recipe with scales, got float32"):
        StorageFormat(recipe=Unquantised(torch.float32)).new_amax(shape)


def twice_below(
    storage: StorageFormat, first: AmaxPartial, second: AmaxPartial, x: torch.Tensor
) -> AmaxPartial:
    """Everything, and one row of the lower blocks a second time."""
    row: Region = ((129, 130), (0, 200))
    return first.combine(second).combine(storage.amax(part_of(x, row), row, (130, 200)))


@some
@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
def test_what_is_not_finite_is_refused_or_reported_and_decodes_to_nan(
    recipe: Quantised, bad: float
) -> None:
    storage, x = StorageFormat(recipe=recipe), uneven(130, 200)
    good, stored = encode_whole(storage, x), allocate(storage, (130, 200))
    x[129, 7] = bad
    kept = checksum_stored(stored)
    with pytest.raises(ValueError, match=r"source must be finite"):
        storage.encode_into(stored, x, full_region(x.shape))
    assert checksum_stored(stored) == kept
    flag = torch.zeros(1, dtype=torch.bool)
    storage.encode_into(stored, x, full_region(x.shape), nonfinite=flag)
    assert flag.item()
    high, wide = block_of(recipe, 130, 200)
    hit = torch.zeros(130, 200, dtype=torch.bool)
    top, left = 129 // high * high, 7 // wide * wide
    hit[top : top + high, left : left + wide] = True
    decoded = storage.decode(stored)
    assert decoded[hit].isnan().all()
    assert torch.equal(decoded[~hit], storage.decode(good)[~hit])
    # The maxima of parts carry it too, and the bytes are the same bytes.
    edges: list[Region] = [((0, 129), (0, 200)), ((129, 130), (0, 6)), ((129, 130), (6, 200))]
    partial = storage.new_amax((130, 200))
    for region in edges:
        storage.amax_into(partial, part_of(x, region), region)
    parts, scales = allocate(storage, (130, 200)), storage.scales(partial)
    for region in edges:
        storage.encode_into(parts, part_of(x, region), region, scales=scales, nonfinite=flag)
    assert same_bytes(parts, stored)


@some
def test_codes_without_a_scale_are_zeros_whatever_made_them_so(recipe: Quantised) -> None:
    storage, x = StorageFormat(recipe=recipe), torch.full((1, 32), 3.0)
    scales = encode_whole(storage, x)["weight_scale"]
    x[0, 5:8] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    whole, stored = full_region(x.shape), allocate(storage, (1, 32))
    flag = torch.zeros(1, dtype=torch.bool)
    storage.encode_into(stored, x, whole, nonfinite=flag)
    assert stored["weight"].view(torch.uint8).eq(0).all()
    # With scales that know nothing of it, the elements alone are zeros, and the flag says so.
    with pytest.raises(ValueError, match=r"source must be finite"):
        storage.encode_into(stored, x, whole, scales=scales)
    flag.fill_(False)
    storage.encode_into(stored, x, whole, scales=scales, nonfinite=flag)
    assert flag.item()
    decoded = storage.decode(stored)[0]
    assert decoded[5:8].eq(0).all()
    assert decoded[:5].gt(2).all()
    assert decoded[8:].gt(2).all()
    # A given scale that is no number, or none to divide by.
    flag.fill_(False)
    x.fill_(3.0)
    unusable = torch.zeros_like(scales.view(torch.uint8)).view(scales.dtype)
    if recipe.scale is ScaleType.E8M0:
        unusable = torch.full_like(scales.view(torch.uint8), 255).view(scales.dtype)
    storage.encode_into(stored, x, whole, scales=unusable, nonfinite=flag)
    assert flag.item()
    assert stored["weight"].view(torch.uint8).eq(0).all()


def test_a_flag_stays_down_without_cause_and_up_once_it_is() -> None:
    storage, x = StorageFormat(recipe=SOME_RECIPES[1]), uneven(4, 8)
    flag = torch.zeros((), dtype=torch.bool)
    storage.encode_into(allocate(storage, (4, 8)), x, full_region(x.shape), nonfinite=flag)
    assert not flag.item()
    flag.fill_(True)
    storage.encode_into(allocate(storage, (4, 8)), x, full_region(x.shape), nonfinite=flag)
    assert flag.item()
    with pytest.raises(FormatError, match=r"a nonfinite of one bool, got torch.int32 \[1\]"):
        storage.encode_into(
            allocate(storage, (4, 8)),
            x,
            full_region(x.shape),
            nonfinite=torch.zeros(1, dtype=torch.int32),
        )


def test_given_scales_clamp_and_are_checked() -> None:
    storage = StorageFormat(recipe=SOME_RECIPES[1])
    x = torch.tensor([[300.0, -2.5, 3.5, 0.4]])
    stored = allocate(storage, (1, 4))
    storage.encode_into(stored, x, full_region(x.shape), scales=torch.ones(1, 1))
    # To nearest even, and clamped where a cast would wrap.
    assert stored["weight"].tolist() == [[127, -2, 4, 0]]
    kept = checksum_stored(stored)
    for scale in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"given scales positive numbers"):
            storage.encode_into(stored, x, full_region(x.shape), scales=torch.full((1, 1), scale))
    with pytest.raises(
        FormatError, match=r"scales of torch.float32 \[1, 1\], got torch.float32 \["
    ):
        storage.encode_into(stored, x, full_region(x.shape), scales=torch.ones(4))
    with pytest.raises(FormatError, match=r"requires a recipe with scales"):
        plain = StorageFormat(recipe=Unquantised(torch.float32))
        plain.encode_into({"weight": torch.zeros(1, 4)}, x, full_region(x.shape), scales=x)
    assert checksum_stored(stored) == kept


def test_shapes_of_what_is_stored() -> None:
    shape = (2, 130, 200)
    wanted = {
        Granularity.TENSOR: (2, 1, 1),
        Granularity.TOKEN: (2, 130, 1),
        Granularity.BLOCK_1X128: (2, 130, 2),
        Granularity.BLOCK_128X128: (2, 2, 2),
        Granularity.BLOCK_1X32: (2, 130, 7),
    }
    for recipe in RECIPES:
        spec = StorageFormat(recipe=recipe).storage_spec(shape)
        dtype = E8M0 if recipe.scale is ScaleType.E8M0 else torch.float32
        assert spec["weight_scale"] == TensorSpec(shape=wanted[recipe.granularity], dtype=dtype)
        columns = 100 if recipe.code is CodeType.E2M1 else 200
        assert spec["weight"].shape == (2, 130, columns)
    fp4 = StorageFormat(recipe=SOME_RECIPES[3])
    assert fp4.storage_spec((4, 6))["weight"] == TensorSpec(shape=(4, 3), dtype=FP4)
    with pytest.raises(ValueError, match=r"logical_shape must have an even last dimension, or be"):
        fp4.storage_spec((4, 7))


@some
def test_vectors_and_empty_weights(recipe: Quantised) -> None:
    storage = StorageFormat(recipe=recipe)
    x = uneven(2, 200)[0]
    assert torch.equal(
        storage.decode(encode_whole(storage, x)), storage.decode(encode_whole(storage, x[None]))[0]
    )
    partial = storage.new_amax((200,))
    for region in (((0, 50),), ((50, 200),)):
        storage.amax_into(partial, part_of(x, region), region)
    scales = storage.scales(partial)
    assert torch.equal(
        scales.view(torch.uint8), encode_whole(storage, x)["weight_scale"].view(torch.uint8)
    )
    for shape in ((0, 8), (4, 0)):
        stored = encode_whole(storage, torch.zeros(shape))
        assert storage.decode(stored).shape == shape
        assert storage.scales(storage.new_amax(shape)).numel() == stored["weight_scale"].numel()


def test_padding_belongs_to_one_shape_and_is_compared_by_value() -> None:
    padding = Padding(rows=5, columns=7, column_multiple=32)
    storage = StorageFormat(recipe=SOME_RECIPES[3], padding=padding)
    assert storage == StorageFormat(
        recipe=SOME_RECIPES[3], padding=Padding(rows=5, columns=7, column_multiple=32)
    )
    assert storage.describe().endswith("/row_major/padded_5x7_to_5x32")
    assert storage.storage_spec((5, 7))["weight"].shape == (5, 16)
    with pytest.raises(ValueError, match=r"logical_shape must end in \[5, 7\], got \[5, 8\]"):
        storage.storage_spec((5, 8))
    with pytest.raises(ValueError, match=r"Padding: column_multiple must be at least 1, got 0"):
        Padding(rows=5, columns=7, column_multiple=0)
    bfloat16 = StorageFormat(recipe=Unquantised(torch.bfloat16), padding=padding)
    x = uneven(5, 7)
    stored = encode_whole(bfloat16, x)
    assert stored["weight"].shape == (5, 32)
    assert stored["weight"][:, 7:].eq(0).all()
    assert torch.equal(bfloat16.decode(stored), x.bfloat16())
    kept = checksum_stored(stored)
    bfloat16.encode_into(stored, x[1:2, 2:7], ((1, 2), (2, 7)))
    assert checksum_stored(stored) == kept
    assert bfloat16.region_bytes((5, 7), ((1, 2), (2, 7))) == 30 * 2
    assert bfloat16.region_bytes((5, 7), ((1, 2), (2, 6))) == 4 * 2
    assert bfloat16.region_bytes((5, 7), ((1, 2), (7, 7))) == 0


def test_per_token_fp8_is_the_token_recipe_and_checksums_see_through_layouts() -> None:
    x = uneven(32, 64)
    recipe = Quantised(granularity=Granularity.TOKEN, code=CodeType.E4M3FN)
    assert PerTokenFp8() == recipe
    codes, scale = per_token_fp8_encode(x, torch.float8_e4m3fn)
    stored = encode_whole(StorageFormat(recipe=recipe), x)
    assert same_bytes(stored, {"weight": codes, "weight_scale": scale})
    for each in SOME_RECIPES:
        plain = StorageFormat(recipe=each)
        tiled = StorageFormat(recipe=each, layout=Shuffle16x16())
        one, other = encode_whole(plain, x), encode_whole(tiled, x)
        assert checksum_stored(one) != checksum_stored(other)
        assert checksum_logical(plain, one) == checksum_logical(tiled, other)
        before = checksum_stored(one)
        one["weight"].view(torch.uint8)[3, 1] ^= 1
        assert checksum_stored(one) != before


def test_recipes_refuse_what_makes_no_sense_and_have_one_spelling() -> None:
    token = Granularity.TOKEN
    assert Quantised(granularity=token, code=CodeType.E4M3FN, clamp=448.0) == Quantised(
        granularity=token, code=CodeType.E4M3FN
    )
    assert len({recipe.describe() for recipe in RECIPES}) == len(set(RECIPES)) == len(RECIPES)
    for code, clamp in ((CodeType.E4M3FNUZ, 256.0), (CodeType.E2M1, 5.0), (CodeType.INT8, 6.5)):
        with pytest.raises(ValueError, match=r"clamp must be a positive value of .*, got"):
            Quantised(granularity=token, code=code, clamp=clamp)
    with pytest.raises(ValueError, match=r"clamp must be a positive value of int8, at most 127"):
        Quantised(granularity=token, code=CodeType.INT8, clamp=128.0)
    with pytest.raises(ValueError, match=r"e8m0_mode must be given for e8m0 scales and for no oth"):
        Quantised(granularity=token, code=CodeType.E2M1, scale=ScaleType.E8M0)
    with pytest.raises(ValueError, match=r"e8m0_mode must be given for e8m0 scales and for no oth"):
        Quantised(granularity=token, code=CodeType.E2M1, e8m0_mode=E8m0Mode.EVEN)
    with pytest.raises(ValueError, match=r"scale must be fp32 for int8 codes, got e8m0"):
        Quantised(
            granularity=token,
            code=CodeType.INT8,
            scale=ScaleType.E8M0,
            e8m0_mode=E8m0Mode.EVEN,
        )
    storage, x = StorageFormat(recipe=SOME_RECIPES[3]), uneven(4, 64)
    partial = storage.amax(x, full_region(x.shape), (4, 64))
    cut: Region = ((0, 4), (0, 33))
    assert not storage.region_is_encodable((4, 64), cut, scales_given=True)
    with pytest.raises(FormatError, match=r"a region in layout tiles of 1 x 1"):
        storage.encode_into(
            allocate(storage, (4, 64)), part_of(x, cut), cut, scales=storage.scales(partial)
        )
