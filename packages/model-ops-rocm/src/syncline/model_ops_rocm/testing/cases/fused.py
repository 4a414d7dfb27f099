"""Calls of the ops that quantise activations or fuse several.

Where sums are involved, inputs are multiples of 1/8: their squares sum exactly in any order, so
that every bit of what follows must agree.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import torch

from syncline.model_ops_rocm.contracts import NormStyle
from syncline.model_ops_rocm.formats.quantised import Quantised
from syncline.model_ops_rocm.kv import KVLayout, KVOrder, KVPool, KVScale
from syncline.model_ops_rocm.quant import CodeType, E8m0Mode, Granularity, ScaleType, ZeroRule
from syncline.model_ops_rocm.testing.parity import Arguments, Case, Maker

# One code up or down where exp is another.
_ONE_CODE: Final = (2**-3, 2**-9)
TOLERANCES: Final[Mapping[tuple[str, torch.dtype], tuple[float, float]]] = MappingProxyType(
    {
        ("silu_and_mul_quant", torch.float32): _ONE_CODE,
        ("silu_and_mul_quant", torch.float16): _ONE_CODE,
        ("silu_and_mul_quant", torch.bfloat16): _ONE_CODE,
    }
)
TOKEN: Final = Quantised(granularity=Granularity.TOKEN, code=CodeType.E4M3FN)
TOKEN_FNUZ: Final = Quantised(granularity=Granularity.TOKEN, code=CodeType.E4M3FNUZ)
BLOCK_128: Final = Quantised(granularity=Granularity.BLOCK_1X128, code=CodeType.E4M3FN)
BLOCK_128_FNUZ: Final = Quantised(
    granularity=Granularity.BLOCK_1X128, code=CodeType.E4M3FNUZ, zero=ZeroRule.SMALLEST
)
TENSOR: Final = Quantised(granularity=Granularity.TENSOR, code=CodeType.E4M3FN)
TENSOR_FNUZ: Final = Quantised(granularity=Granularity.TENSOR, code=CodeType.E4M3FNUZ, clamp=120.0)


def mx(mode: E8m0Mode, zero: ZeroRule = ZeroRule.ONE) -> Quantised:
    """1x32 blocks with e8m0 scales."""
    return Quantised(
        granularity=Granularity.BLOCK_1X32,
        code=CodeType.E4M3FN,
        scale=ScaleType.E8M0,
        e8m0_mode=mode,
        zero=zero,
    )


MX: Final = tuple(mx(mode) for mode in E8m0Mode)


def _scaled(make: Maker, recipe: Quantised) -> Arguments:
    if recipe.granularity is not Granularity.TENSOR:
        return {"recipe": recipe}
    scale = torch.tensor([0.015], dtype=torch.float32, device=make.device)
    return {"recipe": recipe, "scale": scale}


def _flag(make: Maker) -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int32, device=make.device)


def _out(make: Maker, call: Arguments, *shape: int) -> tuple[object, object]:
    """Somewhere to write codes and scales, with space around both; a given scale is not written."""
    recipe = call["recipe"]
    assert isinstance(recipe, Quantised)
    spec = recipe.storage_spec((max(shape[0], 1), shape[-1]))
    num_scales = spec["weight_scale"].shape[-1]
    codes = torch.full((*shape[:-1], shape[-1] + 16), 0xAB, dtype=torch.uint8, device=make.device)
    scales = torch.full((*shape[:-1], num_scales + 2), float("nan"), device=make.device)
    if recipe.scale is ScaleType.E8M0:
        scales = torch.full_like(scales, 0xAB, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    return codes.view(recipe.dtype)[..., : shape[-1]], call.get("scale", scales[..., :num_scales])


def _quantise(
    recipe: Quantised, *shape: int, pad: int = 0, out: bool = False, scale: float = 1.0
) -> Case:
    def build(make: Maker) -> Arguments:
        x = make.randn(*shape, pad=pad).mul_(scale)
        call: Arguments = {"x_TK": x, "nonfinite": _flag(make), **_scaled(make, recipe)}
        return call | {"out": _out(make, call, *shape)} if out else call

    label = "x".join(map(str, shape)) + f"+{pad}-{recipe.describe()}-by-{scale}"
    return Case(op="quantise_activation", label=label, build=build)


def _hostile(recipe: Quantised, width: int) -> Case:
    """Zeros, infinities, NaN, the largest and the smallest numbers of a dtype."""

    def build(make: Maker) -> Arguments:
        x = make.randn(7, width)
        limits = torch.finfo(make.dtype)
        x[0], x[1], x[2] = 0.0, limits.smallest_normal / 4, -limits.max
        x[2, ::2] = 0.0
        x[3, 1], x[4, 2], x[5, 3] = float("inf"), float("nan"), -float("inf")
        return {"x_TK": x, "nonfinite": _flag(make), **_scaled(make, recipe)}

    return Case(op="quantise_activation", label=f"hostile-{width}-{recipe.describe()}", build=build)


def norm_case(recipe: Quantised, *shape: int, residual: bool = False, out: bool = False) -> Case:
    def build(make: Maker) -> Arguments:
        call: Arguments = {
            "x_TH": make.eighths(*shape, pad=8),
            "weight_H": make.randn(shape[-1]),
            "eps": 2.0**-20,
            **_scaled(make, recipe),
        }
        if residual:
            call["residual_TH"] = make.eighths(*shape)
        if out:
            call |= {"out": _out(make, call, *shape), "nonfinite": _flag(make)}
        return call

    label = "x".join(map(str, shape)) + f"-{recipe.describe()}" + ("+residual" if residual else "")
    return Case(op="rms_norm_quant", label=label, build=build)


def _swiglu(recipe: Quantised, *shape: int, out: bool = False) -> Case:
    def build(make: Maker) -> Arguments:
        x = make.randn(*shape[:-1], 2 * shape[-1], pad=8)
        call: Arguments = {"x_T2I": x, **_scaled(make, recipe)}
        if out:
            call |= {"out": _out(make, call, *shape), "nonfinite": _flag(make)}
        return call

    label = "x".join(map(str, shape)) + f"-{recipe.describe()}"
    return Case(op="silu_and_mul_quant", label=label, build=build)


def layout_of(order: KVOrder, scale: KVScale, dtype: torch.dtype, size: int = 16) -> KVLayout:
    """fp8 if there is a scale, else `dtype`."""
    stored = torch.float8_e4m3fn if scale is not KVScale.NONE else dtype
    return KVLayout(order=order, dtype=stored, kernel_block_size=size, scale=scale)


def heads_case(
    num_tokens: int,
    heads: tuple[int, int],
    head_dim: int,
    *,
    order: KVOrder = KVOrder.HND,
    scale: KVScale = KVScale.NONE,
    more: Mapping[str, object] = MappingProxyType({}),
) -> Case:
    num_heads, num_kv_heads = heads

    def build(make: Maker) -> Arguments:
        layout = layout_of(order, scale, make.dtype)
        pool = KVPool(
            layout=layout,
            num_blocks=3,
            block_size=16,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
        )
        fused = make.eighths(num_tokens, num_heads + 2 * num_kv_heads, head_dim, pad=8)
        slots = make.distinct(num_tokens, pool.num_slots, torch.int32)
        slots[2::4] = -1
        stored = {
            name: torch.full(spec.shape, 0.75, device=make.device).to(spec.dtype)
            for name, spec in pool.specs().items()
        }
        call: Arguments = {
            "q_TNH": fused[:, :num_heads],
            "k_TKH": fused[:, num_heads : num_heads + num_kv_heads],
            "v_TKH": fused[:, num_heads + num_kv_heads :],
            "cos_sin_cache": make.angles(50, int(str(more.get("width", head_dim)))),
            "positions_T": make.distinct(num_tokens, 50),
            "k_cache": stored["k"],
            "v_cache": stored["v"],
            "slot_mapping": slots,
            "layout": layout,
            "norm_weights": (make.randn(head_dim), make.randn(head_dim)),
            "eps": 2.0**-20,
            "out": make.nan(num_tokens, num_heads, head_dim),
        }
        if scale is not KVScale.NONE:
            call["kv_scales"] = (stored["k_scale"], stored["v_scale"])
        return call | {name: value for name, value in more.items() if name != "width"}

    label = f"{num_tokens}x{num_heads}/{num_kv_heads}x{head_dim}-{order}-{scale}"
    label += "".join(f"-{name}-{value}" for name, value in more.items())
    return Case(op="qk_norm_rope_kv_write", label=label, build=build)


_GEMMA: Final = {"style": NormStyle.ONE_PLUS_WEIGHT_THEN_ROUND}
CASES: Final[tuple[Case, ...]] = (
    _quantise(TOKEN, 0, 64),
    _quantise(TOKEN, 1, 1, out=True),
    _quantise(TOKEN, 7, 333, pad=3, out=True),
    _quantise(TOKEN_FNUZ, 2, 3, 5_000, scale=1e-3),
    _quantise(BLOCK_128, 5, 300, pad=4, out=True),
    _quantise(BLOCK_128_FNUZ, 3, 2, 128, out=True),
    _quantise(BLOCK_128, 33, 7),
    *(_quantise(recipe, 9, 100, pad=4, out=True) for recipe in MX),
    _quantise(mx(E8m0Mode.EVEN, ZeroRule.SMALLEST), 1, 32, scale=1e-6),
    _quantise(TENSOR, 5, 2_100, pad=1),
    _quantise(TENSOR_FNUZ, 2, 3, 17, scale=30.0),
    *(_hostile(recipe, 160) for recipe in (TOKEN, TOKEN_FNUZ, BLOCK_128, TENSOR, *MX)),
    norm_case(TOKEN, 0, 64),
    norm_case(TOKEN, 3, 257, residual=True, out=True),
    norm_case(BLOCK_128, 2, 3, 640, out=True),
    norm_case(BLOCK_128_FNUZ, 5, 96, residual=True),
    norm_case(MX[1], 4, 100, out=True),
    norm_case(TENSOR, 6, 1_025),
    _swiglu(TOKEN, 0, 8),
    _swiglu(TOKEN, 3, 777, out=True),
    _swiglu(BLOCK_128_FNUZ, 2, 3, 200, out=True),
    _swiglu(MX[3], 5, 65),
    _swiglu(TENSOR, 4, 1_100, out=True),
    heads_case(0, (4, 2), 32),
    heads_case(1, (1, 1), 2),
    heads_case(4, (5, 3), 64, order=KVOrder.NHD),
    heads_case(3, (4, 2), 24, order=KVOrder.HND_D_MAJOR_KEYS),
    heads_case(2, (9, 1), 256, more=_GEMMA),
    heads_case(3, (4, 2), 48, more={"width": 16, "norm_weights": None}),
    heads_case(3, (2, 2), 32, more={"width": 24, "is_interleaved": True}),
    *(heads_case(3, (2, 3), 32, order=KVOrder.NHD, scale=scale) for scale in KVScale),
    *(heads_case(4, (1, 5), 80, scale=scale) for scale in (KVScale.HEAD, KVScale.TOKEN)),
    *(
        heads_case(3, (1, 2), 32, order=order, scale=KVScale.TOKEN)
        for order in (KVOrder.AITER_X, KVOrder.AITER_X_SHUFFLED_V)
    ),
)
