"""StorageFormat: full and partial encodes leave the same bytes, counted once, and decode back."""

from collections.abc import Mapping
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.model_ops_rocm import (
    FormatError,
    LayoutError,
    PerTokenFp8,
    Quantised,
    Region,
    RowMajor,
    Shuffle16x16,
    StorageFormat,
    TensorSpec,
    Unquantised,
    checksum_logical,
    checksum_stored,
    checksum_tensor,
    full_region,
    select,
)
from syncline.model_ops_rocm.quant import (
    CodeType,
    E8m0Mode,
    Granularity,
    ScaleType,
    per_token_fp8_decode,
    per_token_fp8_encode,
)
from syncline.model_ops_rocm.testing.stored import encode_whole

SHAPE = (48, 96)
FORMATS = tuple(
    StorageFormat(recipe=recipe, layout=layout)
    for recipe in (
        Unquantised(torch.float32),
        Unquantised(torch.bfloat16),
        Unquantised(torch.float16),
        PerTokenFp8(),
        PerTokenFp8(torch.float8_e4m3fnuz),
    )
    for layout in (RowMajor(), Shuffle16x16())
)
named = pytest.mark.parametrize("storage", FORMATS, ids=StorageFormat.describe)


def source(shape: tuple[int, ...] = SHAPE, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def allocate(
    storage: StorageFormat, shape: tuple[int, ...] = SHAPE, fill: int = 0xA5
) -> dict[str, torch.Tensor]:
    """Storage whose every byte is `fill`, so a byte nobody wrote is seen."""
    stored = {}
    for name, spec in storage.storage_spec(shape).items():
        raw = torch.full((spec.num_bytes,), fill, dtype=torch.uint8)
        stored[name] = raw.view(spec.dtype).view(spec.shape)
    return stored


def part_of(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    return tensor[tuple(slice(start, stop) for start, stop in region)]


def same_bytes(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return checksum_stored(one) == checksum_stored(other)


@named
def test_a_whole_encode_decodes_to_the_rounded_numbers(storage: StorageFormat) -> None:
    weight, stored = source(), allocate(storage)
    storage.encode_into(stored, weight, full_region(SHAPE))
    if isinstance(storage.recipe, Unquantised):
        expected = weight.to(storage.recipe.dtype)
    else:
        codes, scale = per_token_fp8_encode(weight, stored["weight"].dtype)
        expected = per_token_fp8_decode(codes, scale)
        assert torch.equal(stored["weight_scale"], scale)
    assert torch.equal(storage.decode(stored), expected)
    assert torch.equal(
        storage.layout.inverse(stored["weight"]).float(),
        (expected if isinstance(storage.recipe, Unquantised) else codes).float(),
    )


def test_the_layout_is_applied_once() -> None:
    weight, storage = source().bfloat16(), FORMATS[3]
    assert storage.describe() == "bfloat16/shuffle_16x16"
    stored = allocate(storage)
    storage.encode_into(stored, weight, full_region(SHAPE))
    assert torch.equal(stored["weight"], Shuffle16x16().apply(weight))


@named
@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_parts_in_any_order_leave_the_bytes_of_a_whole_encode(
    storage: StorageFormat, data: st.DataObject
) -> None:
    rows, columns = storage.layout.tile(storage.storage_spec(SHAPE)["weight"].dtype)
    row_cuts = data.draw(st.sets(st.integers(1, SHAPE[0] // rows - 1), max_size=3))
    column_cuts = (
        set()
        if isinstance(storage.recipe, Quantised)
        else data.draw(st.sets(st.integers(1, SHAPE[1] // columns - 1), max_size=3))
    )
    row_edges = [0, *(cut * rows for cut in sorted(row_cuts)), SHAPE[0]]
    column_edges = [0, *(cut * columns for cut in sorted(column_cuts)), SHAPE[1]]
    regions: list[Region] = [
        (row, column) for row in pairwise(row_edges) for column in pairwise(column_edges)
    ]
    weight, whole, parts = source(), allocate(storage), allocate(storage, fill=0x5A)
    storage.encode_into(whole, weight, full_region(SHAPE))
    for region in data.draw(st.permutations(regions)):
        assert storage.region_is_encodable(SHAPE, region)
        storage.encode_into(parts, part_of(weight, region), region)
    assert same_bytes(whole, parts)
    # Coverage is conserved: the parts own every stored byte once.
    total = sum(spec.num_bytes for spec in storage.storage_spec(SHAPE).values())
    assert sum(storage.region_bytes(SHAPE, region) for region in regions) == total
    assert storage.region_bytes(SHAPE, full_region(SHAPE)) == total


@named
def test_a_part_changes_no_byte_outside_its_region(storage: StorageFormat) -> None:
    region = ((16, 32), (0, 96))
    one, other = allocate(storage, fill=0x00), allocate(storage, fill=0xFF)
    addresses = {name: tensor.data_ptr() for name, tensor in one.items()}
    for stored in (one, other):
        storage.encode_into(stored, part_of(source(), region), region)
    changed = 0
    for name, tensor in one.items():
        same = tensor.view(torch.uint8) == other[name].view(torch.uint8)
        changed += int(same.sum())
        assert tensor.data_ptr() == addresses[name]
    assert changed == storage.region_bytes(SHAPE, region)


@named
def test_source_may_be_a_view_of_any_wide_floating_dtype(storage: StorageFormat) -> None:
    whole = full_region(SHAPE)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        weight = source((SHAPE[1], SHAPE[0])).to(dtype).T
        one, other = allocate(storage), allocate(storage)
        storage.encode_into(one, weight, whole)
        storage.encode_into(other, weight.contiguous(), whole)
        assert same_bytes(one, other)


@named
def test_storage_spec_names_what_to_allocate(storage: StorageFormat) -> None:
    spec = storage.storage_spec((2, *SHAPE))
    assert spec["weight"] == TensorSpec(shape=(2, *SHAPE), dtype=storage.recipe.dtype)  # type: ignore[attr-defined]  # every recipe here has one
    if isinstance(storage.recipe, Quantised):
        assert spec["weight_scale"] == TensorSpec(shape=(2, 48, 1), dtype=torch.float32)
        assert set(spec) == {"weight", "weight_scale"}
        assert spec["weight_scale"].num_bytes == 2 * 48 * 4
    else:
        assert set(spec) == {"weight"}


def test_one_dimension_and_none_are_fine_in_row_major() -> None:
    storage = StorageFormat(recipe=Unquantised(torch.float32))
    for shape in ((7,), (), (0, 4)):
        stored = allocate(storage, shape)
        storage.encode_into(stored, source(shape), full_region(shape))
        assert torch.equal(storage.decode(stored), source(shape))
    fp8 = StorageFormat(recipe=PerTokenFp8())
    with pytest.raises(ValueError, match=r"logical_shape must have a row dimension"):
        fp8.storage_spec(())


def test_experts_are_separate_matrices() -> None:
    storage = StorageFormat(recipe=Unquantised(torch.bfloat16), layout=Shuffle16x16())
    weight, shape = source((3, 16, 32)), (3, 16, 32)
    stored = allocate(storage, shape)
    for expert in range(3):
        region = ((expert, expert + 1), (0, 16), (0, 32))
        storage.encode_into(stored, weight[expert : expert + 1], region)
    assert torch.equal(stored["weight"][1], Shuffle16x16().apply(weight[1].bfloat16()))


def test_a_part_of_a_scales_domain_is_neither_encodable_nor_owner_of_the_scale() -> None:
    storage = StorageFormat(recipe=PerTokenFp8())
    part: Region = ((0, 16), (0, 48))
    assert not storage.region_is_encodable(SHAPE, part)
    assert not storage.scale_domain(SHAPE, part)
    assert storage.scale_domain(SHAPE, ((3, 4), (0, 96)))
    assert storage.region_bytes(SHAPE, part) == 16 * 48
    assert storage.region_bytes(SHAPE, ((0, 16), (0, 96))) == 16 * 96 + 16 * 4
    stored = allocate(storage)
    kept = checksum_stored(stored)
    with pytest.raises(FormatError) as caught:
        storage.encode_into(stored, source((16, 48)), part)
    assert "whole in the domain of its scales" in caught.value.precondition
    assert caught.value.storage_format == "token_e4m3fn_fp32/row_major"
    assert checksum_stored(stored) == kept


def test_a_part_of_a_tile_is_not_encodable() -> None:
    storage = StorageFormat(recipe=Unquantised(torch.bfloat16), layout=Shuffle16x16())
    assert not storage.region_is_encodable(SHAPE, ((0, 8), (0, 96)))
    assert not storage.region_is_encodable(SHAPE, ((0, 16), (0, 12)))
    assert storage.region_is_encodable(SHAPE, ((0, 16), (0, 8)))
    assert storage.region_is_encodable(SHAPE, ((3, 3), (0, 12)))
    with pytest.raises(FormatError, match=r"layout tiles of 16 x 8"):
        storage.encode_into(allocate(storage), source((8, 96)), ((0, 8), (0, 96)))


@named
def test_what_does_not_fit_is_refused_with_nothing_written(storage: StorageFormat) -> None:
    stored, whole = allocate(storage), full_region(SHAPE)
    kept = checksum_stored(stored)
    with pytest.raises(FormatError, match=r"a source of shape \[48, 96\], got \[48, 95\]"):
        storage.encode_into(stored, source((48, 95)), whole)
    with pytest.raises(
        FormatError, match=r"a source of 16-bit or wider floating point, got torch.i"
    ):
        storage.encode_into(stored, torch.zeros(SHAPE, dtype=torch.int32), whole)
    with pytest.raises(FormatError, match=r"16-bit or wider floating point, got torch.float8"):
        storage.encode_into(stored, source().to(torch.float8_e4m3fn), whole)
    with pytest.raises(FormatError, match=r"a source with storage, got a meta tensor"):
        storage.encode_into(stored, source().to("meta"), whole)
    with pytest.raises(ValueError, match=r"region range 1 must be .* <= 96, got \(0, 97\)"):
        storage.encode_into(stored, source(), ((0, 48), (0, 97)))
    with pytest.raises(FormatError, match=r"a stored tensor named 'weight', got"):
        storage.encode_into({"wieght": stored["weight"]}, source(), whole)
    with pytest.raises(FormatError, match=r"stored tensors named"):
        storage.encode_into({**stored, "bias": torch.zeros(1)}, source(), whole)
    wrong = {**stored, "weight": stored["weight"].view(torch.uint8)}
    with pytest.raises((FormatError, LayoutError)):
        storage.encode_into(wrong, source(), whole)
    meta = {name: tensor.to("meta") for name, tensor in stored.items()}
    with pytest.raises(FormatError, match=r"weight with storage, got a meta tensor"):
        storage.encode_into(meta, source(), whole)
    with pytest.raises(FormatError, match=r"weight with storage, got a meta tensor"):
        storage.decode(meta)
    strided = {name: tensor.repeat(1, 2)[:, ::2] for name, tensor in stored.items()}
    with pytest.raises(FormatError, match=r"in contiguous storage"):
        storage.encode_into(strided, source(), whole)
    assert checksum_stored(stored) == kept


def test_a_source_that_is_not_finite_has_no_scale() -> None:
    storage = StorageFormat(recipe=PerTokenFp8())
    stored, weight = allocate(storage), source()
    kept = checksum_stored(stored)
    weight[5, 7] = float("nan")
    with pytest.raises(ValueError, match=r"source must be finite"):
        storage.encode_into(stored, weight, full_region(SHAPE))
    assert checksum_stored(stored) == kept


def test_an_empty_region_owns_and_writes_nothing() -> None:
    for storage in FORMATS:
        stored = allocate(storage)
        kept = checksum_stored(stored)
        region: Region = ((16, 16), (0, 96))
        assert storage.region_bytes(SHAPE, region) == 0
        storage.encode_into(stored, source((0, 96)), region)
        assert checksum_stored(stored) == kept


def test_formats_are_values_and_recipes_refuse_other_dtypes() -> None:
    assert FORMATS[1] == StorageFormat(recipe=Unquantised(torch.float32), layout=Shuffle16x16())
    assert len(set(FORMATS)) == len(FORMATS)
    with pytest.raises(ValueError, match=r"Unquantised: dtype must be a floating type of at least"):
        Unquantised(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"Unquantised: dtype must be a floating type"):
        Unquantised(torch.int32)
    with pytest.raises(ValueError, match=r"PerTokenFp8: dtype must be one of"):
        PerTokenFp8(torch.bfloat16)


def test_stored_checksums_see_one_flipped_bit_and_logical_ones_see_through_layouts() -> None:
    weight, whole = source(), full_region(SHAPE)
    plain, shuffled = FORMATS[2], FORMATS[3]
    one, other = allocate(plain), allocate(shuffled)
    plain.encode_into(one, weight, whole)
    shuffled.encode_into(other, weight, whole)
    assert checksum_stored(one) != checksum_stored(other)
    assert checksum_logical(plain, one) == checksum_logical(shuffled, other)
    assert checksum_logical(plain, one) == checksum_tensor(weight.bfloat16())
    before = checksum_stored(one)
    one["weight"].view(torch.int16)[3, 5] ^= 1
    assert checksum_stored(one) != before
    one["weight"].view(torch.int16)[3, 5] ^= 1
    assert checksum_stored(one) == before


def test_checksums_see_shape_dtype_and_name_and_take_views() -> None:
    x = torch.zeros(2, 6)
    assert checksum_tensor(x) != checksum_tensor(x.view(3, 4))
    assert checksum_tensor(x) != checksum_tensor(x.view(torch.int32))
    assert checksum_stored({"a": x}) != checksum_stored({"b": x})
    assert checksum_tensor(source().T) == checksum_tensor(source().T.contiguous())
    assert checksum_tensor(torch.zeros(0)) == checksum_tensor(torch.zeros(0))
    with pytest.raises(ValueError, match=r"checksum: tensor must have storage"):
        checksum_tensor(x.to("meta"))


def test_packed_fp4_is_stored_and_read_in_the_deterministic_mode_of_pytorch() -> None:
    """Which fills what it allocates, and cannot fill packed fp4."""
    fp4 = Quantised(
        granularity=Granularity.BLOCK_1X32,
        code=CodeType.E2M1,
        scale=ScaleType.E8M0,
        e8m0_mode=E8m0Mode.ROUND_UP,
    )
    x = torch.linspace(-3, 3, 32 * 64).view(32, 64)
    for layout in (RowMajor(), Shuffle16x16()):
        storage = StorageFormat(recipe=fp4, layout=layout)
        stored = encode_whole(storage, x)
        expected = storage.decode(stored), checksum_stored(stored)
        linear = select("linear_quantised", dtype=torch.float32)
        product = linear(x, stored["weight"], stored["weight_scale"], storage=storage)
        torch.use_deterministic_algorithms(True)
        try:
            again = encode_whole(storage, x)
            found = storage.decode(again), checksum_stored(again)
            other = linear(x, again["weight"], again["weight_scale"], storage=storage)
        finally:
            torch.use_deterministic_algorithms(False)
        assert torch.equal(found[0], expected[0]) and found[1] == expected[1]
        assert torch.equal(product, other)
