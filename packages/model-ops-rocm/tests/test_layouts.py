"""Row-major and 16x16: against an address formula in NumPy, and by region."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.model_ops_rocm import (
    LayoutError,
    Region,
    RowMajor,
    Shuffle16x16,
    WeightLayout,
    full_region,
)

np = pytest.importorskip("numpy", reason="the independent derivation is in NumPy")

SHUFFLE = Shuffle16x16()
LAYOUTS: tuple[WeightLayout, ...] = (RowMajor(), SHUFFLE)
DTYPES = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.int8,
    torch.uint8,
)
SHAPES = ((16, 32), (48, 96), (3, 32, 64), (2, 3, 16, 32))


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Every bit pattern may occur, NaNs with payloads too."""
    generator = torch.Generator().manual_seed(seed)
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 256, (num_bytes,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).view(shape)


def bits(tensor: torch.Tensor) -> list[int]:
    flat: list[int] = tensor.contiguous().view(-1).view(torch.uint8).tolist()
    return flat


def stored_addresses(shape: tuple[int, ...], itemsize: int) -> list[int]:
    """Where each logical element is stored, from the formula, one index at a time."""
    *lead, rows, width = shape
    per_chunk = 16 // itemsize
    b, n, k = np.meshgrid(
        np.arange(int(np.prod(lead))), np.arange(rows), np.arange(width), indexing="ij"
    )
    tile_row = b * (rows // 16) + n // 16
    chunk = tile_row * (width // per_chunk) + k // per_chunk
    address = (chunk * 16 + n % 16) * per_chunk + k % per_chunk
    flat: list[int] = address.ravel().tolist()
    return flat


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_shuffle_is_the_address_formula_and_its_inverse_undoes_it(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    logical = random_bits(shape, dtype)
    stored = SHUFFLE.apply(logical)
    assert stored.shape == logical.shape
    assert stored.dtype == dtype
    assert stored.is_contiguous()
    addresses = stored_addresses(shape, dtype.itemsize)
    assert sorted(addresses) == list(range(logical.numel()))
    size = dtype.itemsize
    logical_bits, stored_bits = bits(logical), bits(stored)
    for element, address in enumerate(addresses):
        before = logical_bits[element * size : (element + 1) * size]
        assert stored_bits[address * size : (address + 1) * size] == before
    assert bits(SHUFFLE.inverse(stored)) == logical_bits


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_take_views_and_give_new_storage(layout: WeightLayout) -> None:
    wide = random_bits((64, 48), torch.bfloat16)
    view = wide.T[:, 32:]
    stored = layout.apply(view)
    assert bits(stored) == bits(layout.apply(view.contiguous()))
    assert bits(layout.inverse(stored)) == bits(view)
    assert stored.data_ptr() != wide.data_ptr()
    plain = random_bits((16, 32), torch.float32)
    assert layout.apply(plain).data_ptr() != plain.data_ptr()
    assert layout.inverse(plain).data_ptr() != plain.data_ptr()


@st.composite
def tiled_regions(draw: st.DrawFn, shape: tuple[int, ...], tile: tuple[int, int]) -> Region:
    steps = (1,) * (len(shape) - 2) + tile
    ranges = []
    for size, step in zip(shape, steps, strict=True):
        ends = draw(st.lists(st.integers(0, size // step), min_size=2, max_size=2))
        ranges.append((min(ends) * step, max(ends) * step))
    return tuple(ranges)


@given(data=st.data())
@settings(max_examples=80, deadline=None)
def test_a_region_write_is_apply_inside_and_nothing_outside(data: st.DataObject) -> None:
    layout = data.draw(st.sampled_from(LAYOUTS))
    dtype = data.draw(st.sampled_from(DTYPES))
    shape = data.draw(st.sampled_from(SHAPES))
    region = data.draw(tiled_regions(shape, layout.tile(dtype)))
    before, new = random_bits(shape, dtype, seed=1), random_bits(shape, dtype, seed=2)
    part = tuple(slice(start, stop) for start, stop in region)
    out = layout.apply(before)
    address = out.data_ptr()
    layout.apply_into(out, new[part], region)
    expected = before.clone()
    expected.view(torch.uint8)[
        (*part[:-1], slice(region[-1][0] * dtype.itemsize, region[-1][1] * dtype.itemsize))
    ] = new.view(torch.uint8)[
        (*part[:-1], slice(region[-1][0] * dtype.itemsize, region[-1][1] * dtype.itemsize))
    ]
    assert bits(out) == bits(layout.apply(expected))
    assert out.data_ptr() == address


@pytest.mark.parametrize(
    ("dtype", "region"),
    [
        (torch.bfloat16, ((0, 15), (0, 64))),
        (torch.bfloat16, ((8, 32), (0, 64))),
        (torch.bfloat16, ((0, 32), (0, 60))),
        (torch.bfloat16, ((0, 32), (4, 64))),
        (torch.float8_e4m3fn, ((0, 32), (8, 64))),
        (torch.float32, ((0, 32), (2, 64))),
    ],
)
def test_a_region_that_cuts_a_tile_is_refused_with_nothing_written(
    dtype: torch.dtype, region: Region
) -> None:
    out = random_bits((32, 64), dtype)
    kept = bits(out)
    source = out[tuple(slice(start, stop) for start, stop in region)].clone()
    columns = 16 // dtype.itemsize
    with pytest.raises(LayoutError) as caught:
        SHUFFLE.apply_into(out, source, region)
    assert caught.value.precondition == f"a region of whole tiles of 16 rows x {columns} columns"
    assert str(region) in caught.value.got
    assert bits(out) == kept
    RowMajor().apply_into(out, source, region)


def test_sixteen_bit_regions_may_start_at_any_chunk_of_eight() -> None:
    out = torch.zeros((32, 64), dtype=torch.bfloat16)
    SHUFFLE.apply_into(out, torch.ones((16, 8), dtype=torch.bfloat16), ((16, 32), (40, 48)))
    assert torch.equal(SHUFFLE.inverse(out)[16:32, 40:48], torch.ones(16, 8, dtype=torch.bfloat16))
    assert out.count_nonzero() == 16 * 8


@pytest.mark.parametrize(
    ("shape", "dtype", "precondition"),
    [
        ((20, 32), torch.bfloat16, "N % 16 == 0"),
        ((16, 16), torch.bfloat16, "K % 32 == 0"),
        ((16, 48), torch.uint8, "K % 32 == 0"),
        ((32,), torch.bfloat16, "[..., N, K]"),
        ((), torch.bfloat16, "[..., N, K]"),
        ((16, 32), torch.float64, "elements of 1, 2 or 4 bytes"),
    ],
)
def test_what_cannot_be_shuffled_is_refused_with_the_precondition(
    shape: tuple[int, ...], dtype: torch.dtype, precondition: str
) -> None:
    for call in (
        lambda: SHUFFLE.check(shape, dtype),
        lambda: SHUFFLE.apply(torch.zeros(shape, dtype=dtype)),
        lambda: SHUFFLE.inverse(torch.zeros(shape, dtype=dtype)),
        lambda: SHUFFLE.apply_into(
            torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype), full_region(shape)
        ),
    ):
        with pytest.raises(LayoutError) as caught:
            call()
        assert precondition in caught.value.precondition
        assert caught.value.layout == "shuffle_16x16"
    RowMajor().check(shape, dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_write_that_does_not_fit_is_refused_with_nothing_written(layout: WeightLayout) -> None:
    out = torch.zeros((32, 64), dtype=torch.bfloat16)
    ones = torch.ones_like(out)
    whole = full_region((32, 64))
    with pytest.raises(LayoutError, match=r"a source of torch.bfloat16, got torch.float32"):
        layout.apply_into(out, ones.float(), whole)
    with pytest.raises(LayoutError, match=r"a source of shape \[32, 64\], got \[16, 64\]"):
        layout.apply_into(out, ones[:16], whole)
    with pytest.raises(LayoutError, match=r"contiguous storage"):
        layout.apply_into(out.T, ones.T, ((0, 64), (0, 32)))
    with pytest.raises(LayoutError, match=r"tensors with storage, got a meta tensor"):
        layout.apply_into(out.to("meta"), ones, whole)
    with pytest.raises(LayoutError, match=r"tensors with storage, got a meta tensor"):
        layout.apply_into(out, ones.to("meta"), whole)
    with pytest.raises(ValueError, match=r"region range 0 must be .* <= 32, got \(16, 48\)"):
        layout.apply_into(out, ones, ((16, 48), (0, 64)))
    with pytest.raises(ValueError, match=r"region must have 2 ranges"):
        layout.apply_into(out, ones, ((0, 32),))
    assert out.count_nonzero() == 0


def test_layouts_are_values() -> None:
    assert RowMajor() == RowMajor()
    assert Shuffle16x16() == Shuffle16x16()
    assert len({RowMajor(), Shuffle16x16(), RowMajor()}) == 2
    assert [layout.describe() for layout in LAYOUTS] == ["row_major", "shuffle_16x16"]
