"""Products with a stored weight by AITER; knows layouts by value, and puts AITER's flag on a view.

Unit: one product. What AITER multiplies in fp8 is both operands, in the architecture's own kind;
it has no product of floating-point activations with codes on record.
"""

from collections.abc import Sequence as SequenceABC
from typing import Final, NamedTuple

import torch

from syncline.model_ops_rocm.aiter.ops.common import (
    HALVES,
    AiterOp,
    as_tensor,
    refuse_batch_invariant,
    require_device,
    require_halves,
    written,
)
from syncline.model_ops_rocm.aiter.ops.quantise import NATIVE_CODES
from syncline.model_ops_rocm.arguments.linear import (
    LINEAR,
    LINEAR_QUANTISED,
    check_linear,
    check_quantised_result,
    check_quantised_weight,
    check_x_of_codes,
    require_layout,
)
from syncline.model_ops_rocm.checks import refuse, require_contiguous
from syncline.model_ops_rocm.formats.quantised import Quantised
from syncline.model_ops_rocm.formats.storage_format import StorageFormat
from syncline.model_ops_rocm.layouts import RowMajor, Shuffle16x16, WeightLayout
from syncline.model_ops_rocm.quant import CodeType, Granularity, ScaleType

_ROW_MAJOR: Final = RowMajor()
_SHUFFLED: Final = Shuffle16x16()
LAYOUTS: Final[tuple[WeightLayout, ...]] = (_SHUFFLED, _ROW_MAJOR)
# Without a tuned entry the shuffled product is left to hipBLASLt on gfx942; elsewhere assembly
# kernels take it, and those assert these multiples.
_SHUFFLED_MULTIPLE: Final = 64
# Of rows and columns of a weight in blocks, and of rows of a shuffled one: no other is on record.
_BLOCK: Final = 128


class AiterLinear(AiterOp):
    """`tgemm.mm`, which picks a kernel by its tables, and takes a shuffled weight by a flag."""

    __slots__ = ()

    @property
    def layouts(self) -> SequenceABC[WeightLayout]:
        return LAYOUTS

    def workspace_bytes(self, weight: torch.Tensor, max_tokens: int) -> int:
        """AITER allocates what it needs."""
        return 0

    def counters_size(self, weight: torch.Tensor, max_tokens: int) -> int:
        return 0

    def __call__(  # noqa: PLR0913 - the contract's
        self,
        x_TK: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        layout: WeightLayout,
        batch_invariant: bool = False,
        out: torch.Tensor | None = None,
        workspace: torch.Tensor | None = None,
        counters: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `contracts.Linear`; never batch-invariant."""
        refuse_batch_invariant(LINEAR, batch_invariant)
        require_halves(LINEAR, "x", x_TK)
        shape = check_linear(x_TK, weight, bias, out=out)
        require_layout(LINEAR, layout, LAYOUTS)
        require_contiguous(LINEAR, "weight", weight)
        if layout == _SHUFFLED:
            self._check_shuffled(weight)
        require_device(LINEAR, self.aiter, x=x_TK, weight=weight, bias=bias, out=out)
        multiply = self.aiter.function("tgemm.mm")
        if x_TK.numel() == 0 or weight.numel() == 0:
            return _empty_product(shape, x_TK.dtype, bias, out, x_TK.device)
        rows = x_TK.reshape(-1, x_TK.shape[-1]).contiguous()
        # The flag lies on the tensor's object: a view of our own has it or not as the layout says.
        stored = weight.view(weight.shape)
        if layout == _SHUFFLED:
            stored.is_shuffled = True  # type: ignore[attr-defined]  # AITER looks for it
        product = as_tensor(multiply(rows, stored, bias, x_TK.dtype))
        return written(out, product.view(shape))

    def _check_shuffled(self, weight: torch.Tensor) -> None:
        _SHUFFLED.check(weight.shape, weight.dtype)
        if weight.dtype != torch.bfloat16:
            refuse(LINEAR, "weight", "be bfloat16 where it is shuffled", weight.dtype)
        if self.aiter.arch(weight.device) == "gfx942":
            return
        if any(size % _SHUFFLED_MULTIPLE for size in weight.shape):
            limit = f"have multiples of {_SHUFFLED_MULTIPLE} where it is shuffled"
            refuse(LINEAR, "weight", limit, list(weight.shape))


class _Product(NamedTuple):
    """The function of a pair of recipes, for a weight that is row-major or shuffled."""

    row_major: str | None
    shuffled: str | None


_PRODUCTS: Final[dict[tuple[Granularity, Granularity], _Product]] = {
    (Granularity.TOKEN, Granularity.TOKEN): _Product("gemm_a8w8", "gemm_a8w8_bpreshuffle"),
    (Granularity.BLOCK_1X128, Granularity.BLOCK_128X128): _Product(
        "gemm_a8w8_blockscale", "gemm_a8w8_blockscale_bpreshuffle"
    ),
    (Granularity.TENSOR, Granularity.TENSOR): _Product("tgemm.mm", None),
}


_WITH_BIAS: Final = ("tgemm.mm", "gemm_a8w8")


class AiterLinearQuantised(AiterOp):
    """The `gemm_a8w8` of both recipes: per token, 1x128 by 128x128; `tgemm.mm` per tensor."""

    __slots__ = ()

    @property
    def layouts(self) -> SequenceABC[WeightLayout]:
        return LAYOUTS

    def workspace_bytes(self, weight: torch.Tensor, max_tokens: int) -> int:
        """AITER allocates what it needs."""
        return 0

    def counters_size(self, weight: torch.Tensor, max_tokens: int) -> int:
        return 0

    def __call__(  # noqa: PLR0913 - the contract's
        self,
        x_TK: torch.Tensor,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        storage: StorageFormat,
        x_scale: torch.Tensor | None = None,
        x_recipe: Quantised | None = None,
        dtype: torch.dtype | None = None,
        batch_invariant: bool = False,
        out: torch.Tensor | None = None,
        workspace: torch.Tensor | None = None,
        counters: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `contracts.LinearQuantised`; of codes alone, and never batch-invariant.

        A bias is added to the rounded product, and rounded again, where AITER takes none.
        """
        refuse_batch_invariant(LINEAR_QUANTISED, batch_invariant)
        recipe, (num_out, depth) = check_quantised_weight(weight, weight_scale, storage)
        if x_recipe is None:
            refuse(LINEAR_QUANTISED, "x_recipe", "be given for AITER, which multiplies codes", None)
        scales = check_x_of_codes(x_TK, x_scale, x_recipe, depth)
        shape = (x_TK.shape[0], num_out)
        dtype = check_quantised_result(
            *(shape, bias, out),
            dtype=dtype,
            x_dtype=None,
            x=x_TK,
            x_scale=x_scale,
            weight=weight,
            weight_scale=weight_scale,
        )
        if dtype not in HALVES:
            refuse(LINEAR_QUANTISED, "dtype", "be bfloat16 or float16 for AITER", dtype)
        require_layout(LINEAR_QUANTISED, storage.layout, LAYOUTS)
        require_layout(LINEAR_QUANTISED, storage.scale_layout, (_ROW_MAJOR,))
        device = require_device(
            LINEAR_QUANTISED,
            self.aiter,
            x=x_TK,
            x_scale=scales,
            weight=weight,
            weight_scale=weight_scale,
            bias=bias,
            out=out,
        )
        self._check_codes(x_TK, recipe, x_recipe)
        is_shuffled = storage.layout == _SHUFFLED
        name = _product_of(x_recipe, recipe, is_shuffled=is_shuffled)
        _check_sizes(weight, depth, recipe, is_shuffled=is_shuffled)
        multiply = self.aiter.function(name)
        if x_TK.numel() == 0 or weight.numel() == 0:
            return _empty_product(shape, dtype, bias, out, device)
        # Rows that pad the weight have no bias.
        takes_bias = name in _WITH_BIAS and weight.shape[0] == num_out
        given = bias if takes_bias else None
        if name == "tgemm.mm":
            one, other = scales.view(1), weight_scale.view(1)
            result = multiply(x_TK, weight, given, dtype, scale_a=one, scale_b=other)
        elif name == "gemm_a8w8":
            result = multiply(x_TK, weight, scales, weight_scale, given, dtype)
        else:
            if name == "gemm_a8w8_blockscale_bpreshuffle":
                # Column by column in memory, in the shape that it had.
                scales = scales.T.contiguous().view(scales.shape)
            result = multiply(x_TK, weight, scales, weight_scale, dtype=dtype)
        product = as_tensor(result)[:, :num_out]
        if bias is not None and given is None:
            product = product.add_(bias)
        return written(out, product)

    def _check_codes(self, x_TK: torch.Tensor, recipe: Quantised, x_recipe: Quantised) -> None:
        """Both of one kind: the architecture's fp8, or int8 per token."""
        arch = self.aiter.arch(x_TK.device)
        is_int8 = recipe.code is CodeType.INT8 and recipe.granularity is Granularity.TOKEN
        wanted = CodeType.INT8 if is_int8 else NATIVE_CODES.get(arch)
        for argument, one in (("storage", recipe), ("x_recipe", x_recipe)):
            if one.code is not wanted:
                limit = f"have codes of {wanted} for AITER on {arch}"
                refuse(LINEAR_QUANTISED, argument, limit, one.describe())
            if one.scale is not ScaleType.FP32:
                limit = "have fp32 scales for AITER"
                refuse(LINEAR_QUANTISED, argument, limit, one.describe())


def _product_of(x_recipe: Quantised, recipe: Quantised, *, is_shuffled: bool) -> str:
    pair = (x_recipe.granularity, recipe.granularity)
    product = _PRODUCTS.get(pair, _Product(None, None))
    name = product.shuffled if is_shuffled else product.row_major
    if is_shuffled and recipe.code is CodeType.INT8:
        name = None
    if name is None:
        order = "shuffled" if is_shuffled else "row-major"
        known = "token with token, 1x128 with 128x128, or row-major tensor with tensor"
        got = f"{x_recipe.describe()} with {recipe.describe()}, {order}"
        refuse(LINEAR_QUANTISED, "x_recipe", f"make one of AITER's pairs ({known})", got)
    return name


def _check_sizes(weight: torch.Tensor, depth: int, recipe: Quantised, *, is_shuffled: bool) -> None:
    """Of the stored weight, whose rows may be padded, and its columns not."""
    rows, columns = weight.shape
    if columns != depth:
        refuse(LINEAR_QUANTISED, "weight", f"have {depth} columns for AITER", list(weight.shape))
    in_blocks = recipe.granularity is Granularity.BLOCK_128X128
    if (in_blocks and columns % _BLOCK != 0) or ((in_blocks or is_shuffled) and rows % _BLOCK != 0):
        limit = f"have rows{' and columns' if in_blocks else ''} in multiples of {_BLOCK} for AITER"
        refuse(LINEAR_QUANTISED, "weight", limit, list(weight.shape))


def _empty_product(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
    device: torch.device,
) -> torch.Tensor:
    """No element to multiply: a sum of nothing is 0, plus the bias."""
    result = torch.zeros(shape, dtype=dtype, device=device)
    return written(out, result if bias is None else result.add_(bias))
