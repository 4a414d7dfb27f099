"""Calls of the products with a stored weight.

CASES are for every target. NATIVE_CASES have x in codes, which a target takes only of the type that
it multiplies: `native_cases` makes them of one.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import torch

from syncline.model_ops_rocm.formats import Padding, Quantised, StorageFormat
from syncline.model_ops_rocm.layouts import RowMajor, Shuffle16x16, WeightLayout
from syncline.model_ops_rocm.layouts.base import as_bits
from syncline.model_ops_rocm.quant import CodeType, E8m0Mode, Granularity, ScaleType
from syncline.model_ops_rocm.regions import full_region
from syncline.model_ops_rocm.testing.parity import Arguments, Case, Maker
from syncline.model_ops_rocm.testing.stored import encode_whole, uneven

_BY_DTYPE: Final = {
    torch.float32: (1e-5, 1e-4),
    torch.float16: (2**-9, 2**-9),
    torch.bfloat16: (2**-6, 2**-6),
}
TOLERANCES: Final[Mapping[tuple[str, torch.dtype], tuple[float, float]]] = MappingProxyType(
    {
        (op, dtype): tolerance
        for op in ("linear", "linear_quantised")
        for dtype, tolerance in _BY_DTYPE.items()
    }
)
# fp8 by fp8 on a GPU: within 128 of K the tensor cores keep some 14 bits of a sum, of the largest
# product in it.
FP8_TOLERANCE: Final = (2**-6, 0.1)
_SHUFFLED: Final = Shuffle16x16()


def _linear(
    *shape: int,
    width: int,
    layout: WeightLayout | None = None,
    bias: bool = True,
    is_invariant: bool = False,
    num_counters: int = 0,
) -> Case:
    """x of `shape`, weight [width, shape[-1]]; rows of x and of the result lie apart."""

    def build(make: Maker) -> Arguments:
        stored = make.randn(width, shape[-1])
        if layout is not None:
            stored = layout.apply(stored.cpu()).to(make.device)
        call: Arguments = {
            "x_TK": make.randn(*shape, pad=8),
            "weight": stored,
            "layout": RowMajor() if layout is None else layout,
            "out": make.nan(*shape[:-1], width + 3)[..., :width],
            "batch_invariant": is_invariant,
        }
        if num_counters:
            call["counters"] = torch.zeros(num_counters, dtype=torch.int32, device=make.device)
        return call | {"bias": make.randn(width)} if bias else call

    label = f"{'x'.join(map(str, shape))}-to-{width}" + ("" if layout is None else "-shuffled")
    label += ("" if bias else "-bare") + ("-invariant" if is_invariant else "")
    label += "-merged" if num_counters else ""
    return Case(op="linear", label=label, build=build)


def _clone(stored: torch.Tensor) -> torch.Tensor:
    return as_bits(stored).clone(memory_format=torch.contiguous_format).view(stored.dtype)


def _linear_of_views(make: Maker) -> Arguments:
    weight = make.randn(40, 24).T
    return {"x_TK": make.randn(40, 19).T, "weight": weight, "layout": RowMajor()}


def quantised(
    recipe: Quantised,
    sizes: tuple[int, int, int],
    *,
    x_recipe: Quantised | None = None,
    layout: WeightLayout | None = None,
    multiples: tuple[int, int] | None = None,
    is_invariant: bool = False,
) -> Case:
    """sizes: rows of x, rows of the weight, K; `multiples`: to which the weight is padded."""
    num_tokens, width, depth = sizes

    def build(make: Maker) -> Arguments:
        padding = None
        if multiples is not None:
            padding = Padding(
                rows=width, columns=depth, row_multiple=multiples[0], column_multiple=multiples[1]
            )
        storage = StorageFormat(
            recipe=recipe, layout=RowMajor() if layout is None else layout, padding=padding
        )
        source = make.randn(width, depth).cpu().float() * uneven(width, 1).abs().clamp(0.5, 2)
        # Clones, which are views of nothing: a comparison looks at what a tensor is a view of.
        stored = {name: _clone(one) for name, one in encode_whole(storage, source).items()}
        call: Arguments = {
            "weight": stored["weight"].to(make.device),
            "weight_scale": stored["weight_scale"].to(make.device),
            "storage": storage,
            "bias": make.randn(width),
            "out": make.nan(num_tokens, width + 5)[:, :width],
            "batch_invariant": is_invariant,
        }
        if x_recipe is None:
            return call | {"x_TK": make.randn(num_tokens, depth, pad=8)}
        x = make.randn(num_tokens, depth).cpu().float()
        codes = x_recipe.encode(x, logical_shape=x.shape, region=full_region(x.shape)).tensors
        return call | {
            "x_TK": _clone(codes["weight"]).to(make.device),
            "x_scale": codes["weight_scale"].contiguous().to(make.device),
            "x_recipe": x_recipe,
            "dtype": make.dtype,
        }

    label = f"{num_tokens}x{depth}-to-{width}-{recipe.describe()}"
    label += "" if layout is None else "-shuffled"
    label += "" if multiples is None else "-padded"
    label += "" if x_recipe is None else f"-by-{x_recipe.describe()}"
    label += "-invariant" if is_invariant else ""
    return Case(op="linear_quantised", label=label, build=build)


def _fp32(granularity: Granularity, code: CodeType) -> Quantised:
    return Quantised(granularity=granularity, code=code)


def _e8m0(granularity: Granularity, code: CodeType) -> Quantised:
    return Quantised(
        granularity=granularity, code=code, scale=ScaleType.E8M0, e8m0_mode=E8m0Mode.ROUND_UP
    )


def mx(code: CodeType) -> Quantised:
    """MX: 32 of K share a power of two."""
    return _e8m0(Granularity.BLOCK_1X32, code)


def native_cases(code: CodeType) -> tuple[Case, ...]:
    """x and weight in codes of one fp8 type, in every pair of recipes that a kernel tells apart."""
    tensor, token = _fp32(Granularity.TENSOR, code), _fp32(Granularity.TOKEN, code)
    row_block, block = (
        _fp32(granularity, code)
        for granularity in (Granularity.BLOCK_1X128, Granularity.BLOCK_128X128)
    )
    return (
        quantised(tensor, (0, 32, 128), x_recipe=tensor),
        quantised(tensor, (1, 33, 160), x_recipe=tensor),
        quantised(token, (5, 48, 300), x_recipe=token),
        quantised(token, (70, 48, 96), x_recipe=token, layout=_SHUFFLED, is_invariant=True),
        quantised(block, (3, 160, 272), x_recipe=row_block),
        quantised(block, (20, 272, 320), x_recipe=row_block, layout=_SHUFFLED),
        quantised(row_block, (67, 40, 129), x_recipe=token),
        quantised(token, (2, 16, 400), x_recipe=row_block),
        quantised(
            _e8m0(Granularity.BLOCK_128X128, code),
            (4, 130, 200),
            x_recipe=_e8m0(Granularity.BLOCK_1X128, code),
            layout=_SHUFFLED,
            multiples=(16, 64),
        ),
        # One row: of several pieces, of blocks, of columns that are no whole number of anything.
        quantised(token, (1, 37, 2_320), x_recipe=token),
        quantised(tensor, (1, 1_030, 64), x_recipe=token),
        quantised(token, (1, 21, 1_037), x_recipe=tensor),
        quantised(block, (1, 130, 400), x_recipe=row_block),
        quantised(row_block, (1, 20, 144), x_recipe=token),
        quantised(token, (1, 16, 4_112), x_recipe=row_block),
        quantised(
            _e8m0(Granularity.BLOCK_128X128, code),
            (1, 130, 208),
            x_recipe=_e8m0(Granularity.BLOCK_1X128, code),
            multiples=(16, 64),
        ),
        quantised(token, (1, 33, 160), x_recipe=token, is_invariant=True),
    )


_FN: Final = CodeType.E4M3FN
_FNUZ: Final = CodeType.E4M3FNUZ
# Only where MX codes are multiplied.
MX_CASES: Final[tuple[Case, ...]] = (
    quantised(mx(_FN), (1, 33, 160), x_recipe=mx(_FN)),
    quantised(mx(CodeType.E2M1), (5, 48, 320), x_recipe=mx(CodeType.E2M1)),
    quantised(mx(CodeType.E2M1), (19, 80, 256), x_recipe=mx(_FN), layout=_SHUFFLED),
    quantised(mx(_FN), (70, 48, 288), x_recipe=mx(CodeType.E2M1), is_invariant=True),
)
CASES: Final[tuple[Case, ...]] = (
    _linear(0, 64, width=48),
    _linear(1, 64, width=48),
    _linear(1, 1, width=1),
    _linear(1, 2_300, width=37),
    _linear(1, 1, 3_072, width=16, bias=False),
    _linear(2, 2_300, width=37, num_counters=3),
    _linear(3, 0, width=8),
    _linear(5, 37, width=33, bias=False),
    _linear(19, 96, width=64, layout=_SHUFFLED),
    _linear(2, 3, 160, width=32, layout=_SHUFFLED, bias=False),
    _linear(70, 200, width=130),
    _linear(3, 200, width=130, is_invariant=True),
    _linear(129, 64, width=144, layout=_SHUFFLED, is_invariant=True),
    Case(op="linear", label="transposed", build=_linear_of_views),
    quantised(_fp32(Granularity.TENSOR, _FN), (0, 16, 32)),
    quantised(_fp32(Granularity.TENSOR, _FN), (1, 33, 37)),
    quantised(_fp32(Granularity.TOKEN, _FNUZ), (7, 48, 160), layout=_SHUFFLED),
    quantised(_fp32(Granularity.BLOCK_1X128, _FNUZ), (3, 20, 129)),
    quantised(_fp32(Granularity.BLOCK_128X128, _FN), (66, 130, 260)),
    quantised(_fp32(Granularity.BLOCK_1X32, _FN), (2, 17, 70)),
    quantised(mx(_FN), (18, 48, 96), layout=_SHUFFLED),
    quantised(mx(CodeType.E2M1), (4, 20, 100)),
    quantised(mx(CodeType.E2M1), (3, 30, 150), layout=_SHUFFLED, multiples=(16, 64)),
    quantised(_fp32(Granularity.BLOCK_1X128, CodeType.E2M1), (5, 32, 256), is_invariant=True),
)
