"""Each layout against its address formula, written out by hand, and against compositions."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from syncline.model_ops_rocm.layouts import (
    INT4_EVENS_FIRST,
    INT4_HALVES,
    INT4_SEQUENTIAL,
    Int4Packing,
    PermutedLayout,
    Shuffle16x16,
    Shuffle32x16,
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

# (N, K) padded, n, k -> address within one matrix.
Formula = Callable[[int, int, int, int], int]

ONE_BYTE = (
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.int8,
    torch.uint8,
    torch.float4_e2m1fn_x2,
)
TWO_BYTES = (torch.bfloat16, torch.float16)
E8M0 = (torch.float8_e8m0fnu, torch.uint8)


def tiles(rows: int, columns: int) -> Formula:
    """Tiles one after another, row-major inside and out."""

    def address(_: int, width: int, n: int, k: int) -> int:
        tile = n // rows * (width // columns) + k // columns
        return tile * rows * columns + n % rows * columns + k % columns

    return address


def blocks_interleaved(inner: Formula, block: int) -> Formula:
    """`inner` of the rows g0..g(block-1), u0..u(block-1), g(block).. of [gate rows, up rows]."""

    def address(height: int, width: int, n: int, k: int) -> int:
        up, row = divmod(n, height // 2)
        return inner(height, width, (row // block * 2 + up) * block + row % block, k)

    return address


def lane_tiles(rows: int, k_lanes: int, per_lane: int) -> Formula:
    def address(_: int, width: int, n: int, k: int) -> int:
        step = k_lanes * per_lane
        tile = n // rows * (width // step) + k // step
        lane = k % step // per_lane * rows + n % rows
        return tile * rows * step + lane * per_lane + k % per_lane

    return address


def e8m0(_: int, width: int, x: int, y: int) -> int:
    inside = y % 4 * 64 + x % 16 * 4 + y % 8 // 4 * 2 + x % 32 // 16
    return x // 32 * 32 * width + y // 8 * 256 + inside


def batched(columns: int) -> Formula:
    def address(_: int, width: int, n: int, k: int) -> int:
        block = n // 128 * 128 * width + k // columns * 128 * columns
        return block + (n % 32 * 4 + n % 128 // 32) * columns + k % columns

    return address


def pairs(_: int, width: int, group: int, n: int) -> int:
    return (group // 2 * width + n) * 2 + group % 2


@dataclass(frozen=True, kw_only=True)
class Case:
    layout: PermutedLayout
    formula: Formula
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    padded: tuple[int, int] | None = None  # the last two dimensions, if they grow
    fill: int = 0

    def __str__(self) -> str:
        return f"{self.layout.describe()}-{str(self.dtypes[0]).removeprefix('torch.')}"


WEIGHTS = ((32, 64), (2, 64, 128), (2, 1, 64, 64))
CASES = [
    Case(layout=Shuffle16x16(), formula=tiles(16, 16), shapes=WEIGHTS, dtypes=ONE_BYTE),
    Case(layout=Shuffle16x16(), formula=tiles(16, 8), shapes=WEIGHTS, dtypes=TWO_BYTES),
    Case(layout=Shuffle16x16(), formula=tiles(16, 4), shapes=WEIGHTS, dtypes=(torch.float32,)),
    Case(layout=Shuffle32x16(), formula=tiles(32, 16), shapes=WEIGHTS, dtypes=ONE_BYTE),
    Case(layout=Shuffle32x16(), formula=tiles(32, 8), shapes=WEIGHTS, dtypes=TWO_BYTES),
    Case(layout=Shuffle32x16(), formula=tiles(32, 4), shapes=WEIGHTS, dtypes=(torch.float32,)),
    Case(
        layout=byte_tile_shuffle(rows=8, k_chunk=32),
        formula=tiles(8, 8),
        shapes=((24, 64),),
        dtypes=TWO_BYTES,
    ),
    Case(
        layout=byte_tile_shuffle(int4_container=True),
        formula=tiles(16, 32),
        shapes=((32, 96), (2, 16, 64)),
        dtypes=(torch.int8,),
    ),
    Case(
        layout=byte_tile_shuffle(pad_k_to=64),
        formula=tiles(16, 16),
        shapes=((16, 40), (2, 32, 33)),
        dtypes=ONE_BYTE,
        padded=(0, 64),
    ),
    Case(
        layout=gate_up_shuffle(gate_up=True),
        formula=blocks_interleaved(lane_tiles(16, 4, 16), 16),
        shapes=WEIGHTS,
        dtypes=(*ONE_BYTE, *TWO_BYTES, torch.float32),
    ),
    Case(
        layout=gate_up_shuffle(gate_up=False),
        formula=lane_tiles(16, 4, 16),
        shapes=WEIGHTS,
        dtypes=(*ONE_BYTE, *TWO_BYTES, torch.float32),
    ),
    Case(
        layout=gate_up_shuffle(gate_up=True, lanes=32),
        formula=blocks_interleaved(lane_tiles(32, 2, 16), 32),
        shapes=((2, 64, 64), (1, 128, 32)),
        dtypes=(torch.uint8,),
    ),
    Case(
        layout=gate_up_rows(),
        formula=blocks_interleaved(tiles(1, 1), 1),
        shapes=((6, 5), (3, 8, 1)),
        dtypes=(torch.float32, torch.uint8),
    ),
    Case(
        layout=gate_up_rows_shuffle(),
        formula=blocks_interleaved(tiles(16, 16), 1),
        shapes=WEIGHTS,
        dtypes=ONE_BYTE,
    ),
    Case(
        layout=gate_up_rows_shuffle(),
        formula=blocks_interleaved(tiles(16, 8), 1),
        shapes=WEIGHTS,
        dtypes=TWO_BYTES,
    ),
    Case(
        layout=shuffle_nk(inst_n=16, inst_k=64),
        formula=lane_tiles(16, 4, 16),
        shapes=WEIGHTS,
        dtypes=(torch.int8, torch.bfloat16),
    ),
    Case(
        layout=shuffle_nk(inst_n=32, inst_k=16, int4_container=True),
        formula=lane_tiles(32, 2, 16),
        shapes=((64, 64),),
        dtypes=(torch.int8,),
    ),
    Case(
        layout=gfx1250_tiles(),
        formula=tiles(16, 16),
        shapes=WEIGHTS,
        dtypes=(torch.uint8, torch.bfloat16),
    ),
    Case(
        layout=gfx1250_tiles(rows=2, columns=128, merged=False),
        formula=tiles(2, 128),
        shapes=((4, 256),),
        dtypes=(torch.uint8,),
    ),
    Case(layout=e8m0_shuffle(), formula=e8m0, shapes=((256, 8), (512, 24)), dtypes=E8M0),
    Case(
        layout=e8m0_shuffle(),
        formula=e8m0,
        shapes=((1, 1), (33, 7), (200, 8), (256, 3)),
        dtypes=E8M0,
        padded=(256, 8),
    ),
    Case(
        layout=e8m0_shuffle(padded=False, merged=True),
        formula=e8m0,
        shapes=((32, 8), (2, 64, 16)),
        dtypes=E8M0,
    ),
    Case(
        layout=e8m0_gate_up_shuffle(gate_up=True),
        formula=blocks_interleaved(e8m0, 16),
        shapes=((1, 32, 8), (3, 64, 24)),
        dtypes=E8M0,
    ),
    Case(
        layout=e8m0_gate_up_shuffle(gate_up=True),
        formula=blocks_interleaved(e8m0, 16),
        shapes=((2, 32, 3), (1, 64, 7)),
        dtypes=E8M0,
        padded=(0, 8),
        fill=0x7F,
    ),
    Case(
        layout=e8m0_gate_up_shuffle(gate_up=False),
        formula=e8m0,
        shapes=((2, 32, 3), (1, 64, 8)),
        dtypes=E8M0,
        padded=(0, 8),
        fill=0x7F,
    ),
    Case(layout=scale_tiles(), formula=tiles(32, 4), shapes=((64, 12),), dtypes=E8M0),
    Case(
        layout=scale_tiles(pad_rows=True),
        formula=tiles(32, 4),
        shapes=((20, 8), (1, 4)),
        dtypes=E8M0,
        padded=(32, 0),
        fill=0x7F,
    ),
    Case(layout=scale_tiles(merged=True), formula=tiles(32, 4), shapes=((2, 64, 8),), dtypes=E8M0),
    Case(
        layout=n32k4_gate_up(),
        formula=blocks_interleaved(tiles(32, 4), 1),
        shapes=((1, 32, 8), (2, 64, 12)),
        dtypes=E8M0,
    ),
    Case(
        layout=batched_scale_tiles(columns=4),
        formula=batched(4),
        shapes=((128, 4), (2, 256, 8)),
        dtypes=E8M0,
    ),
    Case(layout=int4_scale_pairs(), formula=pairs, shapes=((2, 4, 6),), dtypes=(torch.bfloat16,)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_layout_is_its_address_formula(case: Case) -> None:
    layout = case.layout
    for shape in case.shapes:
        *lead, height, width = shape
        if case.padded is not None:
            height, width = max(height, case.padded[0]), max(width, case.padded[1])
        num_matrices = torch.Size(lead).numel()
        addresses = [
            matrix * height * width + case.formula(height, width, n, k)
            for matrix in range(num_matrices)
            for n in range(shape[-2])
            for k in range(shape[-1])
        ]
        padding = set(range(num_matrices * height * width)) - set(addresses)
        assert len(set(addresses)) == torch.Size(shape).numel()
        places = torch.tensor(addresses)
        holes = torch.tensor(sorted(padding), dtype=torch.int64)
        for seed, dtype in enumerate(case.dtypes):
            logical = random_bits(shape, dtype, seed)
            stored = layout.apply(logical)
            assert tuple(stored.shape) == layout.stored_shape(shape, dtype)
            assert stored.numel() == num_matrices * height * width
            assert stored.dtype == dtype
            assert torch.equal(flat_bits(stored)[places], flat_bits(logical))
            assert (flat_bits(stored)[holes] == case.fill).all()
            back = layout.inverse(stored, shape=shape)
            assert back.dtype == dtype
            assert torch.equal(flat_bits(back), flat_bits(logical))
        source_index = layout.source_index(shape, case.dtypes[0]).view(-1)
        assert source_index[places].tolist() == list(range(len(addresses)))
        assert (source_index[holes] == -1).all()
        for element in range(0, len(addresses), 37):
            index = tuple(int(part) for part in torch.unravel_index(torch.tensor(element), shape))
            assert layout.address(shape, case.dtypes[0], index) == addresses[element]
            assert layout.index(shape, case.dtypes[0], addresses[element]) == index
        for address in sorted(padding)[::37]:
            assert layout.index(shape, case.dtypes[0], address) is None


def test_layouts_that_differ_by_value_may_agree_on_some_element_sizes() -> None:
    one_byte = random_bits((2, 64, 128), torch.uint8)
    down = gate_up_shuffle(gate_up=False)
    assert torch.equal(down.apply(one_byte), Shuffle16x16().apply(one_byte))
    two_bytes = random_bits((2, 64, 128), torch.int16)
    assert not torch.equal(down.apply(two_bytes), Shuffle16x16().apply(two_bytes))
    assert down != Shuffle16x16()


def test_interleaving_first_is_what_the_fused_layouts_do() -> None:
    weight = random_bits((2, 64, 128), torch.uint8)
    rows = gate_up_rows().apply(weight)
    assert torch.equal(gate_up_rows_shuffle().apply(weight), Shuffle16x16().apply(rows))
    blocks = weight.view(2, 2, 2, 16, 128).transpose(1, 2).reshape(2, 64, 128)
    assert torch.equal(gate_up_shuffle(gate_up=True).apply(weight), Shuffle16x16().apply(blocks))
    scales = random_bits((2, 64, 8), torch.uint8)
    assert torch.equal(
        n32k4_gate_up().apply(scales), scale_tiles(merged=True).apply(gate_up_rows().apply(scales))
    )


@pytest.mark.parametrize("packing", [INT4_SEQUENTIAL, INT4_EVENS_FIRST, INT4_HALVES])
def test_int4_packings_put_each_element_into_its_nibble(packing: Int4Packing) -> None:
    container = torch.randint(-8, 8, (3, 24), generator=torch.Generator().manual_seed(1)).to(
        torch.int8
    )
    packed = packing.pack(container)
    assert packed.shape == (3, 12)
    for row in range(3):
        for word in range(3):
            for nibble in range(8):
                byte = int(packed[row, word * 4 + nibble // 2])
                got = byte >> 4 if nibble % 2 else byte & 0xF
                element = int(container[row, word * 8 + packing.order[nibble]])
                assert got == element & 0xF
    assert torch.equal(packing.unpack(packed), container)
    assert packing.pack(container[:0]).shape == (0, 12)


def test_the_three_packings_of_eight_numbers() -> None:
    word = torch.arange(8, dtype=torch.int8) - 4  # nibbles c d e f 0 1 2 3
    assert INT4_SEQUENTIAL.pack(word).tolist() == [0xDC, 0xFE, 0x10, 0x32]
    assert INT4_EVENS_FIRST.pack(word).tolist() == [0xEC, 0x20, 0xFD, 0x31]
    assert INT4_HALVES.pack(word).tolist() == [0x0C, 0x1D, 0x2E, 0x3F]


def test_shuffling_containers_and_packing_is_packing_and_shuffling_bytes() -> None:
    container = torch.randint(-8, 8, (32, 128), generator=torch.Generator().manual_seed(2)).to(
        torch.int8
    )
    in_container = byte_tile_shuffle(int4_container=True).apply(container)
    assert torch.equal(
        INT4_SEQUENTIAL.pack(in_container), Shuffle16x16().apply(INT4_SEQUENTIAL.pack(container))
    )


def test_what_cannot_be_packed_is_refused() -> None:
    with pytest.raises(ValueError, match=r"int4_halves: container must be torch.int8, got .*int16"):
        INT4_HALVES.pack(torch.zeros(8, dtype=torch.int16))
    with pytest.raises(
        ValueError, match=r"container must be \[..., K\] with K % 8 == 0, got \[4\]"
    ):
        INT4_HALVES.pack(torch.zeros(4, dtype=torch.int8))
    with pytest.raises(ValueError, match=r"container must be in -8..7, got -8..8"):
        INT4_HALVES.pack(torch.tensor([-8, 8, 0, 0, 0, 0, 0, 0], dtype=torch.int8))
    with pytest.raises(ValueError, match=r"packed must be torch.uint8"):
        INT4_HALVES.unpack(torch.zeros(4, dtype=torch.int8))
    with pytest.raises(
        ValueError, match=r"packed must be \[..., K / 2\] with K % 8 == 0, got \[3\]"
    ):
        INT4_HALVES.unpack(torch.zeros(3, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"order must permute 0..7"):
        Int4Packing(name="twice", order=(0, 0, 1, 2, 3, 4, 5, 6))
