"""What the wrappers of Triton's products decide before a launch; needs neither Triton nor a GPU."""

import pytest
import torch

from syncline.model_ops_rocm.triton.configs import CONFIGS, key_for
from syncline.model_ops_rocm.triton.configs.linear import (
    CODES,
    CODES_OF_BLOCKS,
    DECODED,
    FEWER_THAN_LIBRARY,
    VECTOR,
    Sizes,
    invariant_bucket,
    kind_for_codes,
    kind_for_numbers,
    kind_for_vector,
)
from syncline.model_ops_rocm.triton.configs.linear_many import (
    BOUNDS,
    MANY,
    PROGRAMS,
    TILE_ROWS,
    kind_for_many,
)
from syncline.model_ops_rocm.triton.configs.linear_specialised import kind_for_specialised
from syncline.model_ops_rocm.triton.geometry import matrix_of
from syncline.model_ops_rocm.triton.ops import library

ROWS = {
    key: row
    for key, row in CONFIGS.items()
    if key.op in ("linear", "linear_quantised") and not key.kind.startswith(VECTOR)
}


def test_kinds_of_weights_have_rows_of_their_own_on_nvidia_and_for_few_rows() -> None:
    def kind(*sizes: int, arch: str = "sm_90", dtype: torch.dtype = torch.bfloat16) -> str:
        return kind_for_numbers(arch, dtype, Sizes(*sizes))

    assert kind(16, 4_096, 4_096) == "quarters"
    assert kind(16, 4_097, 4_096) == kind(16, 6_143, 4_096) == "halves"
    assert kind(16, 6_144, 4_096) == kind(16, 8_192, 4_096) == "lone"
    assert kind(17, 8_192, 4_096) == kind(16, 8_193, 4_096) == ""
    assert kind(17, 4_096, 8_192) == kind(64, 2_049, 12_288) == "deep"
    assert kind(64, 2_048, 12_288) == ""
    assert kind(16, 4_096, 8_192) == "quarters"
    assert kind(65, 4_096, 8_192) == kind(64, 4_097, 8_192) == kind(64, 4_096, 8_191) == ""
    assert kind(1, 1_024, 2_048) == kind(1, 5_120, 2_048) == "small"
    assert kind(1, 4_096, 1_024) == "shallow"
    assert kind(1, 8_192, 4_096, arch="gfx942") == kind(1, 64, 64, dtype=torch.float32) == ""
    assert kind_for_codes("sm_90", CODES, Sizes(256, 8_192, 4_096)) == "codes-narrow"
    for sizes in (Sizes(257, 8_192, 4_096), Sizes(64, 8_193, 4_096), Sizes(64, 8_192, 4_095)):
        assert kind_for_codes("sm_90", CODES, sizes) == CODES
    assert kind_for_codes("gfx950", CODES, Sizes(1, 16, 4_096)) == CODES


def test_warps_of_their_own_feed_few_rows_by_as_many_tiles_as_were_measured() -> None:
    codes = torch.float8_e4m3fn

    def kind(*sizes: int, arch: str = "sm_90", dtype: torch.dtype = torch.bfloat16) -> str | None:
        return kind_for_specialised(arch, dtype, Sizes(*sizes))

    assert kind(1, 3_777, 4_096) == kind(32, 4_096, 8_191) == "specialised"
    assert kind(1, 3_777, 8_192) == kind(64, 4_096, 50_000) == "specialised-deep"
    assert kind(1, 3_777, 8_192, dtype=codes) == kind(64, 4_096, 8_192, dtype=codes)
    assert kind(64, 4_096, 8_192, dtype=codes) == "specialised"
    assert kind(1, 6_337, 4_096) == kind(32, 8_192, 4_096) == "specialised-lone"
    assert kind(64, 6_081, 4_096) == kind(64, 8_192, 4_096) == "specialised-lone"
    assert kind(1, 5_761, 4_096) == kind(32, 6_336, 4_096) == "specialised-thirds"
    for num_rows in (33, 63, 65):
        assert kind(num_rows, 4_096, 4_096) is kind(num_rows, 4_096, 8_192, dtype=codes) is None
    for num_columns in (3_776, 4_097, 5_760):
        assert kind(16, num_columns, 4_096) is None
    assert kind(64, 6_080, 4_096) is kind(16, 6_144, 8_192, dtype=codes) is None
    assert kind(16, 8_193, 4_096) is kind(16, 4_096, 4_095) is None
    assert kind(16, 8_192, 8_192, dtype=codes) is kind(16, 4_096, 8_191, dtype=codes) is None
    assert kind(16, 4_096, 12_288, arch="gfx942") is None
    for dtype in (torch.float32, torch.float8_e4m3fnuz, torch.float4_e2m1fn_x2):
        assert kind(16, 4_096, 12_288, dtype=dtype) is None


def test_a_fed_product_finds_a_row_that_its_rings_and_shared_memory_hold() -> None:
    fed = {key: row for key, row in ROWS.items() if key.kind.startswith("specialised")}
    assert {key.dtype for key in fed} == {torch.bfloat16, torch.float16, torch.float8_e4m3fn}
    for key, row in fed.items():
        sizes = row.constants
        assert sizes["BLOCK_M"] == key.up_to
        assert 0 < sizes["AHEAD"] <= sizes["STAGES"]
        # Both rings are filled before anything is multiplied, of the least K that is fed; of K
        # each program of a cluster has its part.
        least = 8_192 // key.dtype.itemsize // row.num_ctas
        assert max(sizes["STAGES"], sizes["X_STAGES"]) * sizes["BLOCK_K"] <= least
        rows = sizes["STAGES"] * sizes["BLOCK_N"] + sizes["X_STAGES"] * sizes["BLOCK_M"]
        held = rows * sizes["BLOCK_K"] * key.dtype.itemsize
        if row.num_ctas > 1:
            # Room for half of the other program's sums, and for what keeps it aligned.
            held += sizes["BLOCK_M"] * sizes["BLOCK_N"] * 2 + 1_024
        assert held <= 224 * 1_024
        if key.dtype.itemsize == 1:
            assert sizes["BLOCK_K"] == 4 * 128
        is_shared = key.up_to == 64 and key.kind != "specialised"
        is_shared |= key.kind == "specialised-thirds"
        assert row.num_ctas == (2 if is_shared else 1)


def test_a_warp_of_its_own_feeds_many_rows_of_codes_where_tiles_fill_enough_processors() -> None:
    def kind(*sizes: int, of: str = CODES, arch: str = "sm_90") -> str | None:
        return kind_for_many(arch, of, Sizes(*sizes))

    assert kind(65, 4_096, 4_096) == kind(128, 4_224, 12_288) == "many-codes-quarters"
    assert kind(128, 4_225, 4_096) == kind(129, 4_096, 4_096) == "many-codes-halves"
    assert kind(256, 4_224, 4_096) == kind(128, 8_448, 4_096) == "many-codes-halves"
    assert kind(128, 8_449, 4_096) == kind(256, 4_225, 4_096) == "many-codes"
    assert kind(257, 4_096, 4_096) == kind(100_000, 128, 1_024) == "many-codes"
    assert kind(128, 8_448, 4_095) == "many-codes"
    assert kind(128, 16_896, 4_096) == kind(128, 25_345, 4_096) == "many-codes"
    assert kind(128, 16_897, 4_096) == kind(65, 25_344, 1_024) == "many-codes-wide"
    assert kind(129, 24_576, 4_096) == "many-codes"
    assert kind(128, 24_576, 4_096, of=CODES_OF_BLOCKS) == "many-codes-of-blocks"
    assert kind(128, 4_096, 4_096, of=CODES_OF_BLOCKS) == "many-codes-of-blocks-quarters"
    assert kind(64, 24_576, 4_096) is kind(4_096, 24_576, 1_023) is None
    assert kind(128, 1_920, 4_096) is kind(256, 4_096, 4_096, arch="gfx950") is None
    assert kind(128, 1_921, 4_096) == "many-codes-quarters"


def test_many_rows_of_codes_have_parts_that_fill_all_stages_and_one_round_of_programs() -> None:
    for num_rows in (65, 128, 129, 256, 257, 4_096):
        for columns in (1_921, 4_224, 4_225, 8_448, 8_449, 16_897, 25_344, 25_345):
            for depth in (1_024, 4_095, 4_096, 12_288):
                for kind in (CODES, CODES_OF_BLOCKS):
                    found = kind_for_many("sm_90", kind, Sizes(num_rows, columns, depth))
                    if found is None:
                        continue
                    dtype = torch.float8_e4m3fn
                    key = key_for("linear_quantised", "sm_90", dtype, num_rows, found)
                    row = CONFIGS[key].constants
                    splits, tile = row["SPLITS"], row["COLUMNS"] * row["BLOCK_N"]
                    assert -(-depth // (row["BLOCK_K"] * splits)) >= row["STAGES"]
                    tiles = -(-num_rows // TILE_ROWS) * -(-columns // tile)
                    assert splits == 1 or tiles * splits <= PROGRAMS
                    assert kind == CODES or row["COLUMNS"] == 1
                    assert key.up_to >= num_rows
                    assert key.up_to > max(BOUNDS) or key.up_to in BOUNDS


def test_every_product_finds_a_row() -> None:
    for num_rows in (1, 16, 17, 64, 65, 100_000):
        shapes = (1, 1), (8_192, 4_096), (8_193, 4_096), (4_096, 1_024), (4_096, 12_288)
        for columns, depth in shapes:
            sizes = Sizes(num_rows, columns, depth)
            for arch in ("gfx942", "gfx950", "sm_90"):
                native = torch.float8_e4m3fnuz if arch == "gfx942" else torch.float8_e4m3fn
                for dtype in (torch.bfloat16, torch.float16, torch.float32):
                    kind = kind_for_numbers(arch, dtype, sizes)
                    assert key_for("linear", arch, dtype, num_rows, kind).up_to >= num_rows
                for kind in (CODES, CODES_OF_BLOCKS):
                    chosen = kind_for_codes(arch, kind, sizes)
                    assert key_for("linear_quantised", arch, native, num_rows, chosen)


def test_one_row_finds_a_row_where_there_is_a_kernel_for_it() -> None:
    assert kind_for_vector("", 1_024) == "vector-narrow"
    assert kind_for_vector("", 1_025) == kind_for_vector("", 2_048) == "vector-low"
    assert kind_for_vector("", 2_049) == kind_for_vector("", 4_096) == "vector-square"
    assert kind_for_vector("", 4_097) == "vector"
    assert kind_for_vector(CODES, 1_024) == "vector-codes-narrow"
    assert kind_for_vector(CODES_OF_BLOCKS, 1_025) == "vector-codes-of-blocks"
    for columns in (1, 1_024, 1_025, 4_096, 100_000):
        for depth in (1, 2_048, 4_096, 32_768):
            for dtype in (torch.bfloat16, torch.float16):
                kind = kind_for_vector("", columns)
                assert key_for("linear", "sm_90", dtype, depth, kind).up_to >= depth
            for kind in (CODES, CODES_OF_BLOCKS):
                of_row = kind_for_vector(kind, columns)
                key = key_for("linear_quantised", "sm_90", torch.float8_e4m3fn, depth, of_row)
                # Every thread has 16 codes of its own in each row's piece.
                assert CONFIGS[key].constants["BLOCK_K"] >= 16 * 32 * CONFIGS[key].num_warps
    assert {key.arch for key in CONFIGS if key.kind.startswith(VECTOR)} == {"sm_90"}


def test_batch_invariant_calls_sum_in_one_way() -> None:
    for arch in ("gfx942", "gfx950", "sm_90"):
        native = torch.float8_e4m3fnuz if arch == "gfx942" else torch.float8_e4m3fn
        for op, dtype, kind in (
            ("linear", torch.bfloat16, ""),
            ("linear", torch.float16, ""),
            *(("linear_quantised", native, kind) for kind in (CODES, CODES_OF_BLOCKS, DECODED)),
        ):
            rows = [
                CONFIGS[key_for(op, arch, dtype, *invariant_bucket(arch, kind, num_rows))]
                for num_rows in (1, 16, 64, 65, 513, 10_000)
            ]
            assert {row.constants["SPLITS"] for row in rows} == {1}
            assert len({row.constants["BLOCK_K"] for row in rows}) == 1
            # Below 64 rows of a weight another instruction would be taken than for many.
            assert all(row.constants["BLOCK_N"] >= 64 for row in rows)
            assert arch == "sm_90" or len({id(row) for row in rows}) == 1


def test_blocks_of_k_are_what_the_kernels_can_sum() -> None:
    for key, row in ROWS.items():
        block_k = row.constants["BLOCK_K"]
        if key.kind.startswith(MANY):
            assert block_k % 128 == 0
        elif key.kind.startswith(CODES):
            assert block_k % 128 == 0
            # Longer ones of a shuffled weight, which that kind has not, do not compile.
            assert block_k == 128 or key.kind == "codes-narrow"
        elif key.kind.startswith(DECODED):
            assert 128 % block_k == 0
            assert block_k % 32 == 0
        # Tiles of the 16x16 shuffle are read whole.
        assert row.constants["BLOCK_N"] % 16 == 0
        assert block_k % 16 == 0
    assert set(FEWER_THAN_LIBRARY) == {("sm_90", torch.bfloat16), ("sm_90", torch.float16)}


@pytest.mark.parametrize("shape", [(6,), (5, 6), (3, 5, 6), (2, 3, 5, 6), (1, 1, 1, 6), (0, 5, 6)])
def test_a_matrix_is_where_its_strides_say(shape: tuple[int, ...]) -> None:
    for tensor in (torch.zeros(shape), torch.zeros(*shape[:-1], 2 * shape[-1])[..., ::2]):
        matrix = matrix_of("op", "x", tensor)
        starts = torch.arange(tensor.numel()).reshape(shape)[..., 0].flatten()
        assert matrix.num_rows == len(starts)
        assert matrix.last_stride == tensor.stride(-1)
        for number in range(matrix.num_rows):
            assert number * matrix.stride == int(starts[number]) * tensor.stride(-1)


def test_rows_that_one_stride_cannot_walk_are_refused() -> None:
    crossed = torch.zeros(3, 2, 8).transpose(0, 1)
    with pytest.raises(ValueError, match=r"op: x must have leading dimensions that one stride"):
        matrix_of("op", "x", crossed)


def test_switches_for_short_sums_are_off_inside_and_as_they_were_after() -> None:
    flags = torch.backends.cuda.matmul
    names = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
    earlier = [getattr(flags, name) for name in names]
    try:
        for value in (True, False):
            for name in names:
                setattr(flags, name, value)
            with pytest.raises(KeyError), library.sums_in_float32():
                assert not any(getattr(flags, name) for name in names)
                raise KeyError
            assert [getattr(flags, name) for name in names] == [value, value]
    finally:
        for name, value in zip(names, earlier, strict=True):
            setattr(flags, name, value)


def test_the_library_takes_what_it_need_not_copy() -> None:
    x = torch.zeros(4, 8)
    assert library.reads(matrix_of("op", "x", x), matrix_of("op", "x", x[:, :3]))
    assert not library.reads(matrix_of("op", "x", x), matrix_of("op", "x", x[:, ::2]))
