"""What a launch is told, and how tensors are walked: plain values, without Triton."""

import pytest
import torch

from syncline.model_ops_rocm import NoConfigurationError
from syncline.model_ops_rocm.triton import BACKEND
from syncline.model_ops_rocm.triton.configs import CONFIGS, key_for
from syncline.model_ops_rocm.triton.configs.base import ANY_WIDTH
from syncline.model_ops_rocm.triton.configs.elementwise import MAX_NORM_WIDTH
from syncline.model_ops_rocm.triton.geometry import power_of_two, rows_of
from syncline.model_ops_rocm.triton.targets import (
    MAX_SHARED_BYTES,
    SUPPORTED_ARCHS,
    LaunchConfig,
    Target,
    launch_options,
)

COMMON = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": False}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Which rows an op has that does not have one for each dtype of a model.
ROWS_OF = {
    "combine_partials": (torch.float32,),
    "count_tokens": (torch.int32,),
    # Ids are all that is looked at.
    "advance": (torch.int32,),
    "moe_sort": (torch.int32,),
    # Weights in fp8 have their own.
    "moe_experts": (torch.bfloat16, torch.float32, torch.float8_e4m3fn),
    "verify_drafts": (torch.int32, *DTYPES),
    # Sources of float16 have the rows of bfloat16; codes are copied as well.
    "encode": (torch.bfloat16, torch.float32, torch.uint8),
    "encode_grouped": (torch.bfloat16, torch.float32, torch.uint8),
    "amax_into": (torch.bfloat16, torch.float32),
    # By the weight's codes.
    "linear_quantised": (
        torch.float8_e4m3fn,
        torch.float8_e4m3fnuz,
        torch.float4_e2m1fn_x2,
    ),
}


def test_options_of_a_vendor_go_to_that_vendor_alone() -> None:
    hip = LaunchConfig(num_warps=4, waves_per_eu=2, matrix_instr_nonkdim=16)
    cuda = LaunchConfig(num_warps=4, maxnreg=128, launch_pdl=True)
    for arch in ("gfx942", "gfx950"):
        expected = COMMON | {"waves_per_eu": 2, "matrix_instr_nonkdim": 16}
        assert launch_options(Target.of_arch(arch), hip) == expected
        with pytest.raises(ValueError, match=rf"{arch} has no option maxnreg, launch_pdl"):
            launch_options(Target.of_arch(arch), cuda)
    sm_90 = Target.of_arch("sm_90")
    assert launch_options(sm_90, cuda) == COMMON | {"maxnreg": 128, "launch_pdl": True}
    with pytest.raises(ValueError, match=r"sm_90 has no option waves_per_eu, matrix_instr_nonkdim"):
        launch_options(sm_90, hip)


def test_clusters_are_an_option_of_nvidia_alone() -> None:
    config = LaunchConfig(num_warps=4, num_ctas=2)
    assert launch_options(Target.of_arch("sm_90"), config) == COMMON | {"num_ctas": 2}
    for arch in ("gfx942", "gfx950"):
        with pytest.raises(ValueError, match=rf"{arch} has no option num_ctas$"):
            launch_options(Target.of_arch(arch), config)


def test_kpack_is_an_option_of_gfx942_alone() -> None:
    config = LaunchConfig(num_warps=4, kpack=2)
    assert launch_options(Target.of_arch("gfx942"), config) == COMMON | {"kpack": 2}
    for arch in ("gfx950", "sm_90"):
        with pytest.raises(ValueError, match=rf"{arch} has no option kpack$"):
            launch_options(Target.of_arch(arch), config)


def test_an_impossible_configuration_is_refused_when_it_is_made() -> None:
    with pytest.raises(ValueError, match=r"num_warps must be 1, 2, 4, 8 or 16, got 3"):
        LaunchConfig(num_warps=3)
    with pytest.raises(ValueError, match=r"num_stages must be positive, got 0"):
        LaunchConfig(num_warps=4, num_stages=0)
    with pytest.raises(ValueError, match=r"num_ctas must be 1, 2, 4 or 8, got 3"):
        LaunchConfig(num_warps=4, num_ctas=3)


def test_every_op_has_a_row_for_every_architecture_and_dtype_and_every_row_has_an_op() -> None:
    wanted = {
        (entry.op, arch, dtype)
        for entry in BACKEND.entries
        for arch in SUPPORTED_ARCHS
        for dtype in ROWS_OF.get(entry.op, DTYPES)
    }
    assert {key[:3] for key in CONFIGS} == wanted
    assert set(MAX_SHARED_BYTES) == set(SUPPORTED_ARCHS)
    for key, config in CONFIGS.items():
        launch_options(Target.of_arch(key.arch), config)
        blocks = [value for name, value in config.constants.items() if name.startswith("BLOCK_")]
        assert all(value == power_of_two(value) for value in blocks)


def test_a_shape_takes_the_narrowest_bucket_that_holds_it() -> None:
    def bucket(op: str, width: int) -> int:
        return key_for(op, "sm_90", torch.bfloat16, width).up_to

    assert [bucket("rms_norm", width) for width in (1, 128, 129, 1_024, 1_025, 4_097)] == [
        *(128, 128, 1_024, 1_024, 4_096, MAX_NORM_WIDTH)
    ]
    assert [bucket("silu_and_mul", width) for width in (1, 1_024, 1_025)] == [1_024] * 2 + [
        ANY_WIDTH
    ]
    with pytest.raises(NoConfigurationError) as caught:
        bucket("kv_write", 257)
    error = caught.value
    assert (error.op, error.arch, error.dtype, error.width) == (
        *("kv_write", "sm_90", torch.bfloat16, 257),
    )
    with pytest.raises(NoConfigurationError, match=r"no configuration for arch 'sm_80'"):
        key_for("rms_norm", "sm_80", torch.bfloat16, 128)


@pytest.mark.parametrize("shape", [(6,), (5, 6), (3, 5, 6), (2, 3, 5, 6), (1, 1, 1, 6), (0, 5, 6)])
def test_rows_are_where_their_strides_say(shape: tuple[int, ...]) -> None:
    for tensor in (torch.zeros(shape), torch.zeros(*shape[:-1], 2 * shape[-1])[..., ::2]):
        rows = rows_of("op", "x", tensor)
        starts = torch.arange(tensor.numel()).reshape(shape)[..., 0].flatten()
        assert rows.num_rows == len(starts)
        for number in range(rows.num_rows):
            outer, inner = divmod(number, rows.inner)
            at = outer * rows.outer_stride + inner * rows.inner_stride
            assert at == int(starts[number]) * tensor.stride(-1)
        assert rows.strides == (rows.outer_stride, rows.inner_stride, tensor.stride(-1))


def test_the_way_rows_are_walked_does_not_depend_on_their_number() -> None:
    fused = torch.zeros(9, 8 * 16)
    heads = fused[:, 16:80].view(9, 4, 16)
    assert rows_of("op", "x", heads)[1:] == rows_of("op", "x", heads[:1])[1:] == (4, 128, 16, 1)
    assert rows_of("op", "x", fused)[1:] == rows_of("op", "x", fused[:1])[1:] == (1, 128, 0, 1)


def test_leading_dimensions_that_one_stride_cannot_walk_are_refused() -> None:
    crossed = torch.zeros(3, 2, 4, 8).transpose(0, 1)
    with pytest.raises(ValueError, match=r"op: x must have leading dimensions that one stride can"):
        rows_of("op", "x", crossed)


def test_powers_of_two() -> None:
    assert [power_of_two(width) for width in (1, 2, 3, 64, 65)] == [1, 2, 4, 64, 128]
