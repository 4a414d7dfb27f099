"""Scales in a layout of their own: same numbers, stored elsewhere, in parts too, with padding."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.model_ops_rocm import (
    CodeType,
    E8m0Mode,
    FormatError,
    Granularity,
    LayoutError,
    Padding,
    PerTokenFp8,
    Quantised,
    Region,
    RowMajor,
    ScaleType,
    Shuffle16x16,
    StorageFormat,
    Unquantised,
    WeightLayout,
    checksum_logical,
    checksum_stored,
    full_region,
)
from syncline.model_ops_rocm.layouts import (
    batched_scale_tiles,
    e8m0_gate_up_shuffle,
    e8m0_shuffle,
    gate_up_rows,
    gate_up_rows_shuffle,
    gate_up_shuffle,
    gfx1250_tiles,
    int4_scale_pairs,
    n32k4_gate_up,
    scale_tiles,
    shuffle_nk,
)
from syncline.model_ops_rocm.layouts.places import places_of
from syncline.model_ops_rocm.testing import allocate, encode_whole, part_of, uneven

MXFP4 = Quantised(
    granularity=Granularity.BLOCK_1X32,
    code=CodeType.E2M1,
    scale=ScaleType.E8M0,
    e8m0_mode=E8m0Mode.EVEN,
)
LAYOUTS: tuple[tuple[WeightLayout, torch.dtype], ...] = (
    (RowMajor(), torch.float32),
    (Shuffle16x16(), torch.bfloat16),
    (Shuffle16x16(), torch.float8_e4m3fn),
    (gate_up_shuffle(gate_up=True), torch.bfloat16),
    (gate_up_rows(), torch.uint8),
    (gate_up_rows_shuffle(), torch.bfloat16),
    (shuffle_nk(inst_n=16, inst_k=16), torch.uint8),
    (gfx1250_tiles(), torch.uint8),
    (e8m0_shuffle(), torch.uint8),
    (e8m0_shuffle(padded=False, merged=True), torch.uint8),
    (e8m0_gate_up_shuffle(gate_up=True), torch.uint8),
    (scale_tiles(pad_rows=True), torch.uint8),
    (n32k4_gate_up(), torch.uint8),
    (batched_scale_tiles(columns=4), torch.uint8),
    (int4_scale_pairs(), torch.bfloat16),
)
SCALE_LAYOUTS = (
    e8m0_shuffle(),
    e8m0_shuffle(padded=False, merged=True),
    e8m0_gate_up_shuffle(gate_up=True),
    scale_tiles(),
    scale_tiles(pad_rows=True, merged=True),
    n32k4_gate_up(),
)


@pytest.mark.parametrize(("layout", "dtype"), LAYOUTS, ids=lambda x: str(x)[:40])
def test_a_place_is_a_sum_of_what_the_row_and_what_the_column_say(
    layout: WeightLayout, dtype: torch.dtype
) -> None:
    shape = (256, 128)
    places = places_of(layout, shape, dtype)
    assert places is not None
    logical = torch.arange(256 * 128).view(shape)
    rows, columns = (torch.arange(size) for size in places.shape)
    at = (places.rows.at(rows)[:, None] + places.columns.at(columns)).flatten()
    assert torch.equal(at.sort().values, torch.arange(places.numel))
    padded = torch.full(places.shape, -1)
    padded[:256, :128] = logical
    stored = torch.empty(places.numel, dtype=torch.int64)
    stored[at] = padded.flatten()
    for index in ((0, 0), (1, 0), (0, 1), (255, 127), (37, 99), (128, 64)):
        address = 128 * index[0] + index[1]
        if not isinstance(layout, RowMajor):
            address = layout.address(shape, dtype, index)  # type: ignore[attr-defined]  # has one
        assert stored[address] == logical[index]
    assert (stored == -1).sum() == places.numel - logical.numel()


@pytest.mark.parametrize("layout", SCALE_LAYOUTS, ids=lambda x: x.describe())
def test_the_layout_moves_the_scales_and_changes_none(layout: WeightLayout) -> None:
    shape = (2, 64, 256)
    plain = StorageFormat(recipe=MXFP4)
    storage = StorageFormat(recipe=MXFP4, scale_layout=layout)
    x = uneven(*shape)
    stored, logical = encode_whole(storage, x), encode_whole(plain, x)
    assert torch.equal(stored["weight"].view(torch.uint8), logical["weight"].view(torch.uint8))
    moved = layout.apply(logical["weight_scale"])
    assert stored["weight_scale"].shape == moved.shape
    assert torch.equal(stored["weight_scale"].view(torch.uint8), moved.view(torch.uint8))
    assert torch.equal(storage.decode(stored), plain.decode(logical))
    assert checksum_logical(storage, stored) == checksum_logical(plain, logical)
    assert checksum_stored(stored) != checksum_stored(logical)
    total = sum(spec.num_bytes for spec in storage.storage_spec(shape).values())
    assert storage.region_bytes(shape, full_region(shape)) == total
    assert storage.describe() == f"{MXFP4.describe()}/row_major/scales_{layout.describe()}"


@pytest.mark.parametrize("layout", [e8m0_shuffle(), scale_tiles(pad_rows=True)], ids=str)
@given(data=st.data())
@settings(max_examples=10, deadline=None)
def test_parts_that_cut_tiles_of_scales_leave_the_bytes_of_one_piece(
    layout: WeightLayout, data: st.DataObject
) -> None:
    shape = (37, 320) if layout == e8m0_shuffle() else (37, 384)
    storage = StorageFormat(recipe=MXFP4, scale_layout=layout)
    x = uneven(*shape)
    row = data.draw(st.integers(1, 36))
    column = data.draw(st.integers(1, shape[1] // 32 - 1)) * 32
    regions: list[Region] = [
        (rows, columns)
        for rows in ((0, row), (row, 37))
        for columns in ((0, column), (column, shape[1]))
    ]
    whole, parts = encode_whole(storage, x), allocate(storage, shape, fill=0x5A)
    scales = storage.scales(storage.amax(x, full_region(shape), shape))
    for number, region in enumerate(data.draw(st.permutations(regions))):
        assert storage.region_is_encodable(shape, region)
        given_scales = scales if number % 2 else None
        storage.encode_into(parts, part_of(x, region), region, scales=given_scales)
    assert checksum_stored(whole) == checksum_stored(parts)
    total = sum(spec.num_bytes for spec in storage.storage_spec(shape).values())
    assert sum(storage.region_bytes(shape, region) for region in regions) == total


def test_a_part_leaves_the_scales_of_others_and_padding_that_is_not_behind_it() -> None:
    storage, shape = StorageFormat(recipe=MXFP4, scale_layout=e8m0_shuffle()), (40, 256)
    region: Region = ((8, 40), (0, 64))
    one, other = allocate(storage, shape, fill=0x00), allocate(storage, shape, fill=0xFF)
    for stored in (one, other):
        storage.encode_into(stored, part_of(uneven(*shape), region), region)
    same = sum(
        int((one[name].view(torch.uint8) == other[name].view(torch.uint8)).sum()) for name in one
    )
    # Two columns of scales in 248 rows, 216 of which are padding.
    assert same == storage.region_bytes(shape, region) == 32 * 32 + 248 * 2


def test_padding_of_the_weight_and_of_the_scales_go_together() -> None:
    padding = Padding(rows=37, columns=45, row_multiple=16, column_multiple=64)
    storage = StorageFormat(
        recipe=MXFP4, layout=Shuffle16x16(), padding=padding, scale_layout=e8m0_shuffle()
    )
    x = uneven(37, 45)
    plain = StorageFormat(recipe=MXFP4, layout=Shuffle16x16(), padding=padding)
    stored = encode_whole(storage, x)
    assert stored["weight_scale"].shape == (256, 8)
    assert torch.equal(storage.decode(stored), plain.decode(encode_whole(plain, x)))


def test_what_a_scale_layout_cannot_hold_is_refused() -> None:
    tokens = StorageFormat(recipe=PerTokenFp8(), scale_layout=e8m0_shuffle())
    with pytest.raises(LayoutError, match=r"elements of 1 byte, got torch.float32"):
        tokens.storage_spec((64, 256))
    uneven_rows = StorageFormat(recipe=MXFP4, scale_layout=scale_tiles())
    with pytest.raises(LayoutError, match=r"N % 32 == 0 and K % 4 == 0, got shape \[40, 8\]"):
        uneven_rows.storage_spec((40, 256))
    with pytest.raises(LayoutError, match=r"\[..., N, K\] with"):
        StorageFormat(recipe=MXFP4, scale_layout=e8m0_shuffle()).storage_spec((256,))
    with pytest.raises(FormatError, match=r"a recipe with scales, got bfloat16"):
        StorageFormat(recipe=Unquantised(torch.bfloat16)).scale_grid((4, 4))
