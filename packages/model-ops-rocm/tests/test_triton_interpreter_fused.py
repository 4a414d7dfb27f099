"""What the fused ops promise beyond parity, in Triton's interpreter and in PyTorch."""

from collections.abc import Callable, Mapping
from typing import Any, cast  # Any: what a fused op returns, tensors in a tuple or alone

import pytest
import torch

from syncline.model_ops_rocm import Quantised, select
from syncline.model_ops_rocm.kv import KVLayout, KVOrder, KVPool, KVScale
from syncline.model_ops_rocm.quant import CodeType, E8m0Mode, Granularity, ScaleType
from syncline.model_ops_rocm.testing.bits import flat_bits
from syncline.model_ops_rocm.testing.cases import fused
from syncline.model_ops_rocm.testing.composed import assert_is_composed
from syncline.model_ops_rocm.testing.parity import Arguments, Case

Ops = Mapping[str, Callable[..., Any]]
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
FUSED = [case for case in fused.CASES if case.op != "quantise_activation"]
TOKEN, BLOCK_128, TENSOR = fused.TOKEN, fused.BLOCK_128, fused.TENSOR


def torch_ops(dtype: torch.dtype) -> Ops:
    names = (
        "rms_norm",
        "rotary_embedding",
        "silu_and_mul",
        "kv_write",
        *{case.op for case in fused.CASES},
    )
    return {name: cast(Callable[..., Any], select(name, dtype=dtype)) for name in names}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", FUSED, ids=str)
def test_in_pytorch_a_fused_op_is_its_parts(case: Case, dtype: torch.dtype) -> None:
    assert_is_composed(case, dtype, torch_ops(dtype))


@pytest.mark.parametrize("case", FUSED, ids=str)
def test_interpreted_a_fused_op_is_its_parts(kernels: Ops, case: Case) -> None:
    assert_is_composed(case, torch.float32, kernels)


@pytest.mark.parametrize("recipe", [TOKEN, BLOCK_128, *fused.MX], ids=Quantised.describe)
def test_what_is_not_finite_gives_a_nan_scale_and_the_flag_and_nothing_else_does(
    kernels: Ops, recipe: Quantised
) -> None:
    for op in (
        kernels["quantise_activation"],
        torch_ops(torch.float32)["quantise_activation"],
    ):
        x, flag = torch.randn(4, 256), torch.zeros(1, dtype=torch.int32)
        codes, scales = op(x, recipe, nonfinite=flag)
        assert int(flag) == 0 and not scales.float().isnan().any()
        x[1, 255], x[3, 0] = float("inf"), float("nan")
        codes, scales = op(x, recipe, nonfinite=flag)
        assert int(flag) == 1
        wrong = scales.float().isnan()
        assert wrong[1, -1] and wrong[3, 0] and int(wrong.sum()) == 2
        assert not codes.float().isnan().any()
        assert not codes.float()[1, -32:].any() and not codes.float()[3, :32].any()


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_a_given_scale_that_is_no_positive_number_sets_the_flag(kernels: Ops, scale: float) -> None:
    for op in (
        kernels["quantise_activation"],
        torch_ops(torch.float32)["quantise_activation"],
    ):
        flag = torch.zeros(1, dtype=torch.int32)
        codes, _ = op(torch.randn(2, 8), TENSOR, scale=torch.tensor([scale]), nonfinite=flag)
        assert int(flag) == 1 and not codes.float().any()


def test_scales_may_lie_column_by_column(kernels: Ops) -> None:
    x = torch.randn(6, 300)
    expected = kernels["quantise_activation"](x, BLOCK_128)
    out = torch.empty_like(expected[0]), torch.empty(3, 6).T
    got = kernels["quantise_activation"](x, BLOCK_128, out=out)
    assert got[1].stride() == (1, 6) and torch.equal(got[1], expected[1])
    assert torch.equal(flat_bits(got[0]), flat_bits(expected[0]))


def test_a_row_has_the_bits_it_has_alone(kernels: Ops) -> None:
    weight = torch.randn(1_000)
    for op in (kernels["rms_norm"], torch_ops(torch.float32)["rms_norm"]):
        x = torch.randn(9, 1_000)
        together = op(x, weight, 1e-6, batch_invariant=True)
        for start, stop in ((0, 1), (4, 5), (3, 7)):
            part = op(x[start:stop], weight, 1e-6, batch_invariant=True)
            assert torch.equal(part, together[start:stop])


def heads_call(**changed: object) -> Arguments:
    layout = KVLayout(order=KVOrder.HND, dtype=torch.float32, kernel_block_size=4)
    call: Arguments = {
        "q_TNH": torch.randn(2, 4, 8),
        "k_TKH": torch.randn(2, 2, 8),
        "v_TKH": torch.randn(2, 2, 8),
        "cos_sin_cache": torch.randn(5, 8),
        "positions_T": torch.tensor([0, 3]),
        "k_cache": torch.zeros(3, 2, 4, 8),
        "v_cache": torch.zeros(3, 2, 4, 8),
        "slot_mapping": torch.tensor([1, 6]),
        "layout": layout,
    }
    return call | changed


def test_bad_arguments_of_the_fused_ops_are_refused_before_a_launch(kernels: Ops) -> None:
    x, weight = torch.zeros(3, 8), torch.zeros(8)
    int8 = Quantised(granularity=Granularity.TOKEN, code=CodeType.INT8)
    square = Quantised(granularity=Granularity.BLOCK_128X128, code=CodeType.E4M3FN)
    mx = Quantised(
        granularity=Granularity.TENSOR,
        code=CodeType.E4M3FN,
        scale=ScaleType.E8M0,
        e8m0_mode=E8m0Mode.EVEN,
    )
    one = torch.ones(1)
    codes, scales = torch.empty(3, 8, dtype=torch.float8_e4m3fn), torch.empty(3, 1)
    fp8 = KVLayout(
        order=KVOrder.NHD, dtype=torch.float8_e4m3fn, kernel_block_size=4, scale=KVScale.HEAD
    )
    half = KVLayout(order=KVOrder.HND, dtype=torch.float16, kernel_block_size=4)
    calls: list[tuple[str, Arguments, str]] = [
        ("quantise_activation", {"x_TK": x, "recipe": int8}, "recipe must have codes of e4m3fn"),
        ("quantise_activation", {"x_TK": x, "recipe": square}, "recipe must be per token, 1x128"),
        ("quantise_activation", {"x_TK": x, "recipe": mx}, "recipe must have an fp32 scale per"),
        ("quantise_activation", {"x_TK": x.long(), "recipe": TOKEN}, "x must be float32"),
        ("quantise_activation", {"x_TK": x[:, :0], "recipe": TOKEN}, "x must have a last dim"),
        ("quantise_activation", {"x_TK": x, "recipe": TENSOR}, "scale must be given"),
        ("quantise_activation", {"x_TK": x, "recipe": TOKEN, "scale": one}, "scale must be None"),
        (
            "quantise_activation",
            {"x_TK": x, "recipe": TENSOR, "scale": one.half()},
            "scale must be float32 with one entry",
        ),
        (
            "quantise_activation",
            {"x_TK": x, "recipe": TOKEN, "out": (codes[:2], scales)},
            r"out\[0\] must have shape \[3, 8\]",
        ),
        (
            "quantise_activation",
            {"x_TK": x, "recipe": BLOCK_128, "out": (codes, scales[:, :0])},
            r"out\[1\] must have shape \[3, 1\]",
        ),
        (
            "quantise_activation",
            {"x_TK": x, "recipe": fused.TOKEN_FNUZ, "out": (codes, scales)},
            r"out\[0\] must be torch.float8_e4m3fnuz",
        ),
        (
            "quantise_activation",
            {"x_TK": x, "recipe": TOKEN, "nonfinite": one},
            "nonfinite must be torch.int32",
        ),
        (
            "rms_norm_quant",
            {"x_TH": x, "weight_H": weight, "eps": 0.0, "recipe": TOKEN},
            "eps must be positive",
        ),
        ("silu_and_mul_quant", {"x_T2I": x[:, :7], "recipe": TOKEN}, "x must have an even last"),
        ("qk_norm_rope_kv_write", heads_call(layout=fp8), "k_cache must be torch.float8_e4m3fn"),
        ("qk_norm_rope_kv_write", heads_call(layout=half), "k_cache must be torch.float16"),
        ("qk_norm_rope_kv_write", heads_call(kv_scales=(one, one)), "kv_scales must be None"),
        ("qk_norm_rope_kv_write", heads_call(v_TKH=torch.zeros(2, 1, 8)), "v must have shape"),
        ("qk_norm_rope_kv_write", heads_call(norm_weights=(weight, x)), "norm_weights of k must"),
        ("qk_norm_rope_kv_write", heads_call(eps=-1.0), "eps must be positive"),
        ("qk_norm_rope_kv_write", heads_call(v_cache=x), r"v_cache must have shape \[3, 2, 4, 8\]"),
        (
            "qk_norm_rope_kv_write",
            heads_call(k_cache=torch.zeros(3, 1, 4, 8), v_cache=torch.zeros(3, 1, 4, 8)),
            r"k must have shape \[2, 1, 8\]",
        ),
        ("qk_norm_rope_kv_write", heads_call(out=x), r"out must have shape \[2, 4, 8\]"),
        (
            "qk_norm_rope_kv_write",
            heads_call(cos_sin_cache=torch.zeros(5, 10)),
            "cos_sin_cache must have shape .* to head_dim 8",
        ),
    ]
    for op, arguments, message in calls:
        for ops in (kernels, torch_ops(torch.float32)):
            with pytest.raises(ValueError, match=f"{op}: {message}"):
                ops[op](**arguments)


@pytest.mark.parametrize("order", KVOrder, ids=str)
def test_a_pool_without_blocks_takes_nothing_and_q_is_still_rotated(
    kernels: Ops, order: KVOrder
) -> None:
    layout = KVLayout(order=order, dtype=torch.float32, kernel_block_size=4)
    pool = KVPool(layout=layout, num_blocks=1, block_size=4, num_kv_heads=2, head_dim=8)
    caches = {f"{name}_cache": torch.zeros(pool.specs()[name].shape)[:0] for name in ("k", "v")}
    call = heads_call(layout=layout, slot_mapping=torch.tensor([-1, 3]), **caches)
    turned = kernels["qk_norm_rope_kv_write"](**call)
    expected, _ = kernels["rotary_embedding"](
        *(call["q_TNH"], call["k_TKH"], call["cos_sin_cache"], call["positions_T"])
    )
    assert torch.equal(turned, expected)
