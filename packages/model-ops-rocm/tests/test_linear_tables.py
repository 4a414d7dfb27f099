"""What the wrappers of Triton's products decide before a launch; needs neither Triton nor a GPU."""

import pytest
import torch

from syncline.model_ops_rocm.triton.configs import CONFIGS, key_for
from syncline.model_ops_rocm.triton.configs.base import ANY_WIDTH
from syncline.model_ops_rocm.triton.configs.linear import (
    CODES,
    DECODED,
    FEWER_THAN_LIBRARY,
    VECTOR,
    kind_for,
)
from syncline.model_ops_rocm.triton.geometry import matrix_of
from syncline.model_ops_rocm.triton.ops import library

# A row of one token is multiplied by vectors: nothing there is tiled for matrix instructions.
ROWS = {
    key: row
    for key, row in CONFIGS.items()
    if key.op in ("linear", "linear_quantised") and not key.kind.startswith(VECTOR)
}


def test_few_columns_have_rows_of_their_own_on_nvidia_and_for_few_rows() -> None:
    assert kind_for("", "sm_90", 64, 8_192) == "narrow"
    assert kind_for("", "sm_90", 65, 8_192) == ""
    assert kind_for("", "sm_90", 64, 8_193) == ""
    assert kind_for(CODES, "sm_90", 1, 16) == "codes-narrow"
    assert kind_for(CODES, "gfx942", 1, 16) == CODES
    for num_rows in (1, 16, 17, 64, 65, ANY_WIDTH):
        for num_columns in (1, 8_192, 8_193):
            for dtype in (torch.bfloat16, torch.float16, torch.float32):
                kind = kind_for("", "sm_90", num_rows, num_columns)
                assert key_for("linear", "sm_90", dtype, num_rows, kind).up_to >= num_rows


def test_the_bucket_of_batch_invariant_calls_sums_in_one_way() -> None:
    widest = [row for key, row in ROWS.items() if key.up_to == ANY_WIDTH]
    assert widest
    assert all(row.constants["SPLITS"] == 1 for row in widest)
    assert all(row.launch_pdl is None for row in widest)


def test_blocks_of_k_are_what_the_kernels_can_sum() -> None:
    for key, row in ROWS.items():
        block_k = row.constants["BLOCK_K"]
        if key.kind.startswith(CODES):
            # Longer ones of a shuffled weight are cut into dots that the compiler refuses.
            assert block_k == 128
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
