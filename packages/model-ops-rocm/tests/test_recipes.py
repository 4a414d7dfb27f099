"""Quantised formats: parts leave the bytes of one piece, whoever holds them and in any order."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.model_ops_rocm import (
    CodeType,
    E8m0Mode,
    Granularity,
    Padding,
    Quantised,
    Region,
    RowMajor,
    ScaleType,
    Shuffle16x16,
    StorageFormat,
    WeightLayout,
    ZeroRule,
    checksum_stored,
    full_region,
)
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

some = pytest.mark.parametrize("recipe", SOME_RECIPES, ids=Quantised.describe)


def same_bytes(one: Stored, other: Stored) -> bool:
    return checksum_stored(one) == checksum_stored(other)


def step_at(recipe: Quantised, magnitude: torch.Tensor) -> torch.Tensor:
    """The largest distance of two neighbouring codes around magnitudes of at most the limit."""
    if recipe.code is CodeType.INT8:
        return torch.ones_like(magnitude)
    mantissa, least = {
        CodeType.E4M3FN: (3, 2.0**-6),
        CodeType.E4M3FNUZ: (3, 2.0**-7),
        CodeType.E2M1: (1, 1.0),
    }[recipe.code]
    return 2.0 ** (magnitude.clamp(min=least).log2().floor() - mantissa)


@pytest.mark.parametrize("recipe", every_recipe(), ids=Quantised.describe)
def test_each_number_decodes_to_within_half_a_step_of_its_clamped_self(recipe: Quantised) -> None:
    x = uneven(5, 200)
    storage = StorageFormat(recipe=recipe)
    stored = encode_whole(storage, x)
    decoded = storage.decode(stored)
    high, wide = block_of(recipe, 5, 200)
    scales = stored["weight_scale"].float()
    for row in range(0, 5, high):
        for column in range(0, 200, wide):
            block = x[row : row + high, column : column + wide].double()
            scale = scales[row // high, column // wide].double()
            amax = block.abs().max()
            if amax == 0:
                smallest = 2.0**-126 if recipe.scale is ScaleType.FP32 else 2.0**-127
                assert scale == (1.0 if recipe.zero is ZeroRule.ONE else smallest)
            elif recipe.scale is ScaleType.FP32:
                assert scale == (amax.float() / torch.tensor(recipe.limit)).double()
            elif recipe.e8m0_mode is E8m0Mode.ROUND_UP:
                assert amax / recipe.limit <= scale < 2 * amax / recipe.limit
            quotient = (block / scale).clamp(-recipe.limit, recipe.limit)
            got = decoded[row : row + high, column : column + wide].double() / scale
            error = (got - quotient).abs()
            assert error.le(step_at(recipe, quotient.abs()) / 2 * (1 + 1e-6) + 1e-6).all()


def grid_edges(data: st.DataObject, size: int, step: int) -> list[int]:
    """Cuts of a dimension at multiples of `step`."""
    inner = list(range(step, size, step))
    cuts = data.draw(st.sets(st.sampled_from(inner), max_size=3)) if inner else set()
    return [0, *sorted(cuts), size]


def rectangles(data: st.DataObject, shape: tuple[int, int], step: tuple[int, int]) -> list[Region]:
    down = pairwise(grid_edges(data, shape[0], step[0]))
    across = list(pairwise(grid_edges(data, shape[1], step[1])))
    return data.draw(st.permutations([(row, column) for row in down for column in across]))


@some
@given(data=st.data())
@settings(max_examples=12, deadline=None)
def test_parts_whole_in_their_domains_leave_the_bytes_of_one_piece(
    recipe: Quantised, data: st.DataObject
) -> None:
    shape = data.draw(st.sampled_from([(130, 200), (256, 96), (1, 258)]))
    storage, x = StorageFormat(recipe=recipe), uneven(*shape)
    parts = allocate(storage, shape, fill=0x5A)
    regions = rectangles(data, shape, block_of(recipe, *shape))
    for region in regions:
        assert storage.region_is_encodable(shape, region)
        storage.encode_into(parts, part_of(x, region), region)
    assert same_bytes(parts, encode_whole(storage, x))
    total = sum(spec.num_bytes for spec in storage.storage_spec(shape).values())
    assert sum(storage.region_bytes(shape, region) for region in regions) == total


@some
@pytest.mark.parametrize("layout", [RowMajor(), Shuffle16x16()], ids=lambda x: x.describe())
@given(data=st.data())
@settings(max_examples=8, deadline=None)
def test_parts_that_cut_domains_leave_the_bytes_of_one_piece_once_maxima_are_combined(
    recipe: Quantised, layout: WeightLayout, data: st.DataObject
) -> None:
    shape = (160, 192)
    storage, x = StorageFormat(recipe=recipe, layout=layout), uneven(*shape)
    step = (1, 2) if isinstance(layout, RowMajor) else (16, 32)
    regions = rectangles(data, shape, step)
    # Each region is on one of three ranks, which sees its parts one by one and combines last.
    owner = [data.draw(st.integers(0, 2)) for _ in regions]
    ranks = [storage.new_amax(shape) for _ in range(3)]
    for rank, region in zip(owner, regions, strict=True):
        storage.amax_into(ranks[rank], part_of(x, region), region)
    scales = storage.scales(ranks[2].combine(ranks[0]).combine(ranks[1]))
    expected, parts = encode_whole(storage, x), allocate(storage, shape, fill=0x5A)
    assert torch.equal(scales.view(torch.uint8), expected["weight_scale"].view(torch.uint8))
    for region in regions:
        assert storage.region_is_encodable(shape, region, scales_given=True)
        storage.encode_into(parts, part_of(x, region), region, scales=scales)
    assert same_bytes(parts, expected)


@some
def test_a_part_changes_no_byte_outside_its_region(recipe: Quantised) -> None:
    storage, shape = StorageFormat(recipe=recipe), (3, 160, 256)
    region: Region = ((1, 2), (0, 128), (128, 256))
    x = uneven(*shape)
    full = encode_whole(storage, x)
    partial = storage.amax(x, full_region(shape), shape)
    one, other = allocate(storage, shape, fill=0x00), allocate(storage, shape, fill=0xFF)
    for stored in (one, other):
        storage.encode_into(stored, part_of(x, region), region, scales=storage.scales(partial))
    per_byte = 2 if recipe.code is CodeType.E2M1 else 1
    changed = {name: one[name].view(torch.uint8) == other[name].view(torch.uint8) for name in one}
    assert int(changed["weight"].sum()) == 128 * 128 // per_byte
    for name, same in changed.items():
        raw = full[name].view(torch.uint8)
        assert torch.equal(one[name].view(torch.uint8)[same], raw[same])


@some
@given(data=st.data())
@settings(max_examples=8, deadline=None)
def test_padding_is_zeros_recorded_in_the_format_and_owned_by_the_edge(
    recipe: Quantised, data: st.DataObject
) -> None:
    shape = (2, 37, 45)
    padding = Padding(rows=37, columns=45, row_multiple=16, column_multiple=64)
    storage = StorageFormat(recipe=recipe, layout=Shuffle16x16(), padding=padding)
    x = uneven(*shape)
    stored = encode_whole(storage, x)
    # The same bytes as of a source that has the zeros, in a format without padding.
    zeros = torch.nn.functional.pad(x, (0, 64 - 45, 0, 48 - 37))
    plain = StorageFormat(recipe=recipe, layout=Shuffle16x16())
    assert same_bytes(stored, encode_whole(plain, zeros))
    assert torch.equal(storage.decode(stored), plain.decode(stored)[:, :37, :45])
    total = sum(spec.num_bytes for spec in storage.storage_spec(shape).values())
    assert storage.region_bytes(shape, full_region(shape)) == total
    rows = grid_edges(data, 37, 16)
    regions: list[Region] = [
        ((matrix, matrix + 1), row, (0, 45)) for matrix in (0, 1) for row in pairwise(rows)
    ]
    partial, parts = storage.new_amax(shape), allocate(storage, shape, fill=0x5A)
    for region in regions:
        storage.amax_into(partial, part_of(x, region), region)
    for region in data.draw(st.permutations(regions)):
        storage.encode_into(parts, part_of(x, region), region, scales=storage.scales(partial))
    assert same_bytes(parts, stored)


@pytest.mark.parametrize(
    "wrong",
    [{"granularity": "token"}, {"code": "int8"}, {"scale": "fp32"}, {"zero": "one"}],
    ids=str,
)
def test_a_recipe_of_names_instead_of_values_is_refused(wrong: dict[str, str]) -> None:
    ((name, value),) = wrong.items()
    fields: dict[str, object] = {"granularity": Granularity.TOKEN, "code": CodeType.E4M3FN}
    with pytest.raises(ValueError, match=rf"Quantised: {name} must be a .*, got '{value}'"):
        Quantised(**{**fields, **wrong})  # type: ignore[arg-type]  # as it says
