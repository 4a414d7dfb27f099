"""Writing stored weights: by region, into given storage, in place, per expert; and the refusals."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.model_ops_rocm import (
    FormatError,
    LayoutError,
    RowMajor,
    StorageFormat,
    Unquantised,
    full_region,
)
from syncline.model_ops_rocm.layouts import (
    REST,
    PermutedLayout,
    Shuffle16x16,
    Shuffle32x16,
    WeightLayout,
    batched_scale_tiles,
    byte_tile_shuffle,
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
from syncline.model_ops_rocm.testing.bits import flat_bits, random_bits

# A layout, a shape it takes without padding, and a dtype.
PLAIN: tuple[tuple[PermutedLayout, tuple[int, ...], torch.dtype], ...] = (
    (Shuffle16x16(), (2, 48, 64), torch.bfloat16),
    (Shuffle32x16(), (64, 64), torch.float8_e4m3fnuz),
    (byte_tile_shuffle(int4_container=True), (32, 64), torch.int8),
    (gate_up_shuffle(gate_up=True), (2, 96, 128), torch.float4_e2m1fn_x2),
    (gate_up_shuffle(gate_up=False), (2, 32, 128), torch.float16),
    (gate_up_rows(), (2, 6, 5), torch.float32),
    (gate_up_rows_shuffle(), (2, 96, 64), torch.bfloat16),
    (shuffle_nk(inst_n=32, inst_k=16), (64, 64), torch.int8),
    (gfx1250_tiles(), (2, 48, 64), torch.bfloat16),
    (gfx1250_tiles(rows=2, columns=128, merged=False), (6, 256), torch.uint8),
    (e8m0_shuffle(padded=False, merged=True), (2, 96, 24), torch.float8_e8m0fnu),
    (scale_tiles(columns=8), (96, 24), torch.uint8),
    (n32k4_gate_up(), (2, 96, 12), torch.uint8),
    (batched_scale_tiles(columns=4), (256, 12), torch.uint8),
    (int4_scale_pairs(), (2, 6, 5), torch.bfloat16),
)
PADDED: tuple[tuple[PermutedLayout, tuple[int, ...], torch.dtype], ...] = (
    (byte_tile_shuffle(pad_k_to=96), (2, 32, 100), torch.bfloat16),
    (e8m0_shuffle(), (300, 10), torch.float8_e8m0fnu),
    (e8m0_gate_up_shuffle(gate_up=True), (2, 96, 19), torch.uint8),
    (e8m0_gate_up_shuffle(gate_up=False), (2, 64, 3), torch.uint8),
    (scale_tiles(pad_rows=True), (70, 8), torch.uint8),
)
CASES = (*PLAIN, *PADDED)


def steps_of(layout: WeightLayout, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[int, ...]:
    return (1,) * (len(shape) - 2) + layout.tile(dtype)


def cuts(data: st.DataObject, size: int, step: int) -> list[tuple[int, int]]:
    """Split [0, size) at multiples of step."""
    places = data.draw(st.lists(st.integers(0, size), max_size=2))
    ends = sorted({0, size, *(place // step * step for place in places)})
    return list(itertools.pairwise(ends))


@given(data=st.data())
@settings(max_examples=120, deadline=None)
def test_regions_that_partition_a_weight_write_all_of_it_and_its_padding(
    data: st.DataObject,
) -> None:
    layout, shape, dtype = data.draw(st.sampled_from(CASES))
    logical = random_bits(shape, dtype, seed=1)
    out = random_bits(layout.stored_shape(shape, dtype), dtype, seed=2)
    steps = steps_of(layout, shape, dtype)
    ranges = [cuts(data, size, step) for size, step in zip(shape, steps, strict=True)]
    for region in data.draw(st.permutations(list(itertools.product(*ranges)))):
        part = tuple(slice(start, stop) for start, stop in region)
        # Slices of packed fp4 are not copied by every PyTorch, views of their bytes are.
        source = logical.view(torch.uint8)[part].view(dtype) if dtype.itemsize == 1 else None
        layout.apply_into(out, logical[part] if source is None else source, region, shape=shape)
    assert torch.equal(flat_bits(out), flat_bits(layout.apply(logical)))


@given(data=st.data())
@settings(max_examples=120, deadline=None)
def test_one_region_changes_its_own_addresses_alone(data: st.DataObject) -> None:
    layout, shape, dtype = data.draw(st.sampled_from(CASES))
    steps = steps_of(layout, shape, dtype)
    region = tuple(
        data.draw(st.sampled_from(cuts(data, size, step)))
        for size, step in zip(shape, steps, strict=True)
    )
    out = random_bits(layout.stored_shape(shape, dtype), dtype, seed=2)
    before = flat_bits(out).clone()
    part = tuple(slice(start, stop) for start, stop in region)
    source = random_bits(tuple(stop - start for start, stop in region), dtype, seed=3)
    layout.apply_into(out, source, region, shape=shape)
    after = flat_bits(out)
    owned = torch.zeros(shape, dtype=torch.bool)
    owned[part] = True
    source_index = layout.source_index(shape, dtype).view(-1)
    foreign = (source_index >= 0) & ~owned.view(-1)[source_index]
    assert torch.equal(after[foreign], before[foreign])
    padding = (source_index < 0) & (after != before)
    assert (after[padding] == layout.fill).all()
    back = layout.inverse(out, shape=shape)
    assert torch.equal(flat_bits(back).view(shape)[part], flat_bits(source).view(source.shape))


@pytest.mark.parametrize(("layout", "shape", "dtype"), CASES, ids=lambda part: str(part)[:30])
def test_given_storage_is_filled_whole_both_ways(
    layout: PermutedLayout, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    logical = random_bits(shape, dtype)
    storage = random_bits(layout.stored_shape(shape, dtype), dtype, seed=9)
    assert layout.apply(logical, out=storage) is storage
    assert torch.equal(flat_bits(storage), flat_bits(layout.apply(logical)))
    given_back = random_bits(shape, dtype, seed=9)
    assert layout.inverse(storage, shape=shape, out=given_back) is given_back
    assert torch.equal(flat_bits(given_back), flat_bits(logical))


@pytest.mark.parametrize(("layout", "shape", "dtype"), PLAIN, ids=lambda part: str(part)[:30])
def test_in_place_permutes_the_same_storage_and_back(
    layout: PermutedLayout, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    tensor = random_bits(shape, dtype)
    logical, address = flat_bits(tensor).clone(), tensor.data_ptr()
    stored = flat_bits(layout.apply(tensor)).clone()
    layout.apply_in_place(tensor)
    assert torch.equal(flat_bits(tensor), stored)
    layout.inverse_in_place(tensor)
    assert torch.equal(flat_bits(tensor), logical)
    assert tensor.data_ptr() == address


@pytest.mark.parametrize(("layout", "shape", "dtype"), CASES, ids=lambda part: str(part)[:30])
def test_an_experts_slice_is_that_experts_stored_matrix(
    layout: PermutedLayout, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    experts = random_bits((3, *shape[-2:]), dtype)
    stored = layout.apply(experts)
    for expert in range(3):
        alone = layout.apply(experts[expert])
        assert torch.equal(flat_bits(stored[expert]), flat_bits(alone))
    other = random_bits(shape[-2:], dtype, seed=5)
    layout.apply_into(stored[1], other, full_region(shape[-2:]), shape=shape[-2:])
    assert torch.equal(flat_bits(stored[1]), flat_bits(layout.apply(other)))
    assert torch.equal(flat_bits(stored[2]), flat_bits(layout.apply(experts[2])))


def test_gate_and_up_can_be_written_one_after_the_other() -> None:
    layout = gate_up_shuffle(gate_up=True)
    gate, up = random_bits((2, 32, 64), torch.uint8), random_bits((2, 32, 64), torch.uint8, seed=1)
    out = torch.zeros((2, 64, 64), dtype=torch.uint8)
    layout.apply_into(out, up, ((0, 2), (32, 64), (0, 64)))
    layout.apply_into(out, gate, ((0, 2), (0, 32), (0, 64)))
    assert torch.equal(out, layout.apply(torch.cat((gate, up), dim=1)))


@pytest.mark.parametrize(
    ("layout", "shape", "dtype", "message"),
    [
        (
            Shuffle32x16(),
            (48, 32),
            torch.int8,
            r"N % 32 == 0 and K % 32 == 0, got shape \[48, 32\]",
        ),
        (Shuffle32x16(), (32, 16), torch.int8, "K % 32 == 0"),
        (byte_tile_shuffle(k_chunk=12), (16, 24), torch.int8, "K % 48 == 0"),
        (Shuffle16x16(), (16, 32), torch.float64, "elements of 1, 2 or 4 bytes, got torch.float64"),
        (
            byte_tile_shuffle(int4_container=True),
            (16, 32),
            torch.bfloat16,
            "elements of 1 byte, got torch.bfloat16",
        ),
        (gate_up_shuffle(gate_up=True), (1, 48, 64), torch.uint8, "N % 32 == 0 and K % 64 == 0"),
        (gate_up_shuffle(gate_up=False), (1, 48, 32), torch.uint8, "N % 16 == 0 and K % 64 == 0"),
        (gate_up_rows_shuffle(), (16, 48), torch.uint8, "N % 16 == 0 and K % 32 == 0"),
        (gfx1250_tiles(), (16, 48), torch.uint8, "N % 16 == 0 and K % 32 == 0"),
        (
            byte_tile_shuffle(pad_k_to=48),
            (16, 40),
            torch.uint8,
            r"K % 32 == 0, got shape \[16, 40\] padded to \[16, 48\]",
        ),
        (e8m0_gate_up_shuffle(gate_up=True), (1, 48, 8), torch.uint8, "N % 32 == 0 and K % 8 == 0"),
        (scale_tiles(), (32, 6), torch.uint8, "N % 32 == 0 and K % 4 == 0"),
        (batched_scale_tiles(columns=8), (64, 8), torch.uint8, "N % 128 == 0"),
        (int4_scale_pairs(), (4, 6), torch.float32, "elements of 2 bytes"),
        (e8m0_shuffle(), (8,), torch.uint8, r"\[..., N, K\]"),
    ],
)
def test_a_broken_precondition_is_named(
    layout: PermutedLayout, shape: tuple[int, ...], dtype: torch.dtype, message: str
) -> None:
    tensor = torch.zeros(shape, dtype=dtype)
    for call in (
        lambda: layout.check(shape, dtype),
        lambda: layout.stored_shape(shape, dtype),
        lambda: layout.apply(tensor),
        lambda: layout.inverse(tensor, shape=shape),
        lambda: layout.apply_into(tensor, tensor, full_region(shape), shape=shape),
        lambda: layout.apply_in_place(tensor),
        lambda: layout.address(shape, dtype, (0,) * len(shape)),
        lambda: layout.source_index(shape, dtype),
    ):
        with pytest.raises(LayoutError, match=message) as caught:
            call()
        assert caught.value.layout == layout.describe()


def test_padding_needs_the_logical_shape_and_room() -> None:
    layout = byte_tile_shuffle(pad_k_to=64)
    logical = random_bits((16, 40), torch.uint8)
    stored = layout.apply(logical)
    kept = stored.clone()
    with pytest.raises(LayoutError, match="shape, the logical one, since it pads, got None"):
        layout.inverse(stored)
    with pytest.raises(LayoutError, match="shape, the logical one, since it pads, got None"):
        layout.apply_into(stored, logical, full_region((16, 40)))
    with pytest.raises(LayoutError, match=r"storage for shape \[16, 64\], got \[16, 40\]"):
        layout.apply_in_place(logical)
    with pytest.raises(LayoutError, match=r"stored tensor of shape \[16, 128\], got \[16, 64\]"):
        layout.inverse(stored, shape=(16, 65))
    with pytest.raises(LayoutError, match=r"out of shape \[16, 128\] for \[16, 65\]"):
        layout.apply_into(stored, logical, ((0, 16), (0, 40)), shape=(16, 65))
    with pytest.raises(LayoutError, match="whole tiles of 16 rows x 16 columns"):
        layout.apply_into(stored, logical[:, :39], ((0, 16), (0, 39)), shape=(16, 40))
    assert torch.equal(stored, kept)


@pytest.mark.parametrize("layout", [RowMajor(), Shuffle16x16()])
def test_unfit_storage_is_refused(layout: WeightLayout) -> None:
    tensor = torch.zeros((32, 64), dtype=torch.bfloat16)
    for call in (layout.apply, layout.inverse):
        with pytest.raises(LayoutError, match=r"out of shape \[32, 64\], got \[16, 64\]"):
            call(tensor, out=torch.zeros((16, 64), dtype=torch.bfloat16))
        with pytest.raises(LayoutError, match=r"out of torch.bfloat16, got torch.float16"):
            call(tensor, out=torch.zeros((32, 64), dtype=torch.float16))
        with pytest.raises(LayoutError, match=r"contiguous storage"):
            call(tensor, out=torch.zeros((64, 32), dtype=torch.bfloat16).T)
        with pytest.raises(LayoutError, match=r"a meta tensor"):
            call(tensor.to("meta"))
        with pytest.raises(LayoutError, match=r"a source apart from out, got tensors that share"):
            call(tensor, out=tensor)
    with pytest.raises(LayoutError, match=r"a source apart from out"):
        layout.apply_into(tensor, tensor[16:], ((0, 16), (0, 64)))
    both = torch.zeros((2, 32, 64), dtype=torch.bfloat16)
    layout.apply(both[0], out=both[1])
    with pytest.raises(LayoutError, match=r"a stored tensor of shape \[16, 64\]"):
        layout.inverse(tensor, shape=(16, 64))


def test_a_format_refuses_a_layout_that_pads_and_takes_one_that_merges_rows() -> None:
    padded = StorageFormat(
        recipe=Unquantised(torch.bfloat16), layout=byte_tile_shuffle(pad_k_to=128)
    )
    with pytest.raises(
        FormatError, match=r"a layout that pads nothing of \[16, 64\], got \[16, 12"
    ):
        padded.storage_spec((16, 64))
    merged = StorageFormat(recipe=Unquantised(torch.bfloat16), layout=gfx1250_tiles())
    rows = torch.randn(2, 32, 64, generator=torch.Generator().manual_seed(4)).bfloat16()
    assert merged.storage_spec(rows.shape)["weight"].shape == (2, 2, 1024)
    parts = {"weight": torch.zeros(2, 2, 1024, dtype=torch.bfloat16)}
    for start in (16, 0):
        region = ((0, 2), (start, start + 16), (0, 64))
        merged.encode_into(parts, rows[:, start : start + 16], region)
    assert torch.equal(parts["weight"], gfx1250_tiles().apply(rows))
    assert torch.equal(merged.decode(parts), rows)
    with pytest.raises(LayoutError, match=r"stored columns % 16 == 0, got shape \[2, 2, 1025\]"):
        merged.decode({"weight": torch.zeros(2, 2, 1025, dtype=torch.bfloat16)})
    fits = StorageFormat(recipe=Unquantised(torch.bfloat16), layout=byte_tile_shuffle(pad_k_to=64))
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(3)).bfloat16()
    stored = {"weight": torch.zeros(16, 64, dtype=torch.bfloat16)}
    assert fits.storage_spec(weight.shape)["weight"].shape == weight.shape
    fits.encode_into(stored, weight, full_region(weight.shape))
    assert torch.equal(stored["weight"], Shuffle16x16().apply(weight))
    assert torch.equal(fits.decode(stored), weight)


def test_layouts_are_compared_by_value() -> None:
    layouts = [layout for layout, _, _ in CASES]
    assert len(set(layouts)) == len(layouts)
    assert len({layout.describe() for layout in layouts}) == len(layouts)
    assert byte_tile_shuffle() == Shuffle16x16()
    assert byte_tile_shuffle(rows=32) == Shuffle32x16()
    assert RowMajor() not in set[object](layouts)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: byte_tile_shuffle(rows=0), "rows must be positive, got 0"),
        (lambda: byte_tile_shuffle(k_chunk=-1), "k_chunk must be positive, got -1"),
        (
            lambda: byte_tile_shuffle(pad_k_to=64, int4_container=True),
            "pad_k_to must be 1 for an int4 container, got 64",
        ),
        (lambda: gate_up_shuffle(gate_up=True, lanes=24), "lanes must divide 64, got 24"),
        (lambda: shuffle_nk(inst_n=24, inst_k=16), "inst_n must divide 64, got 24"),
        (lambda: shuffle_nk(inst_n=16, inst_k=6), "inst_k must be a multiple of 4, got 6"),
        (lambda: gfx1250_tiles(rows=0), "rows must be positive, got 0"),
        (lambda: scale_tiles(columns=0), "columns must be positive, got 0"),
        (lambda: batched_scale_tiles(columns=0), "columns must be positive, got 0"),
        (
            lambda: PermutedLayout(
                name="wide", row_digits=(REST,), column_digits=(REST,), order=(0, 1), merged_rows=0
            ),
            "merged_rows must be positive, got 0",
        ),
        (
            lambda: PermutedLayout(
                name="wide",
                row_digits=(REST,),
                column_digits=(REST,),
                order=(0, 1),
                item_sizes=(8,),
            ),
            r"item_sizes must be of \(1, 2, 4\), got \(8,\)",
        ),
    ],
)
def test_a_layout_that_cannot_be_is_refused(build: object, message: str) -> None:
    assert callable(build)
    with pytest.raises(ValueError, match=message):
        build()
