"""Linear of quantised weights by Triton: which kernel a pair of recipes takes, and what it is told.

fp8 codes meet fp8 codes only where the hardware multiplies them, and MX codes MX codes only where
it knows their scales; elsewhere codes of x are refused, and floating point meets decoded weights.
"""

from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass
from typing import Final, NoReturn

import torch

from syncline.model_ops_rocm.arguments.linear import (
    LINEAR_QUANTISED,
    check_quantised_result,
    check_quantised_weight,
    check_x_of_codes,
    check_x_of_floats,
    require_layout,
)
from syncline.model_ops_rocm.checks import refuse
from syncline.model_ops_rocm.formats.quantised import Quantised
from syncline.model_ops_rocm.formats.storage_format import StorageFormat
from syncline.model_ops_rocm.layouts import RowMajor, WeightLayout
from syncline.model_ops_rocm.quant.scheme import CodeType
from syncline.model_ops_rocm.triton.configs import CONFIGS, key_for
from syncline.model_ops_rocm.triton.configs import linear as tables
from syncline.model_ops_rocm.triton.geometry import matrix_of
from syncline.model_ops_rocm.triton.kernels.linear_decoded import decoded_linear_kernel
from syncline.model_ops_rocm.triton.kernels.linear_mx import mx_linear_kernel
from syncline.model_ops_rocm.triton.kernels.linear_quantised import codes_linear_kernel
from syncline.model_ops_rocm.triton.launch import IS_INTERPRETED, LAUNCHER, require_reachable
from syncline.model_ops_rocm.triton.ops import (
    linear_codes_specialised,
    linear_specialised,
    linear_vector_codes,
)
from syncline.model_ops_rocm.triton.ops.linear import LAYOUTS
from syncline.model_ops_rocm.triton.ops.linear_operand import CODE_NUMBERS, Operand
from syncline.model_ops_rocm.triton.ops.linear_specialised import Side
from syncline.model_ops_rocm.triton.ops.products import (
    Product,
    chunk_of,
    head,
    may_be_one_row,
    num_counters,
    overlaps,
    prefetch,
    split_bytes,
)

_MX_ARCH: Final = "gfx950"
_OF_CODES: Final = (tables.CODES, tables.CODES_OF_BLOCKS)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """What every path of the op passes on."""

    weight: Operand
    layout: WeightLayout
    num_columns: int
    depth: int
    bias: torch.Tensor | None
    out: torch.Tensor
    is_invariant: bool
    workspace: torch.Tensor | None
    counters: torch.Tensor | None

    def product(self, kind: str, num_rows: int) -> Product:
        arch, rows = self._arch(kind), num_rows
        if self.is_invariant:
            rows, kind = tables.invariant_bucket(arch, kind, num_rows)
        elif kind in _OF_CODES and self.layout == RowMajor():
            sizes = tables.Sizes(num_rows, self.num_columns, self.depth)
            kind = tables.kind_for_codes(arch, kind, sizes)
        key = key_for(LINEAR_QUANTISED, arch, self.weight.codes.dtype, rows, kind)
        return Product(
            op=LINEAR_QUANTISED,
            chosen=(key, CONFIGS[key]),
            num_rows=num_rows,
            num_columns=self.num_columns,
            bias=self.bias,
            out=self.out,
            counters=self.counters,
        )

    def _arch(self, kind: str) -> str:
        if not IS_INTERPRETED:
            return LAUNCHER.arch
        # Interpreted, each kind takes the rows of a target that has it.
        is_fnuz = self.weight.recipe.code is CodeType.E4M3FNUZ
        return "gfx942" if kind in _OF_CODES and is_fnuz else _MX_ARCH

    def stored_shape(self, per_element: int = 1) -> tuple[int, int]:
        rows, columns = self.weight.codes.shape
        return rows, columns * per_element

    def constants(self, product: Product, per_element: int) -> dict[str, object]:
        """Of every kernel; `per_element` codes are in an element of the weight."""
        blocks = product.chosen[1].constants
        rows, columns = self.stored_shape()
        even_n = rows % blocks["BLOCK_N"] == 0
        even_k = columns * per_element % blocks["BLOCK_K"] == 0
        return {
            "HAS_BIAS": product.adds_bias,
            "MERGES": product.merges,
            "CHUNK": chunk_of(self.layout, self.weight.codes),
            "EVEN_N": even_n,
            "EVEN_K": self.depth % blocks["BLOCK_K"] == 0,
            "EVEN_STORED_K": even_k,
            "PREFETCH": prefetch(product.chosen[1], even_n, even_k),
            "OVERLAP": overlaps(product.chosen[1]),
        }


class TritonLinearQuantised:
    """See `contracts.LinearQuantised`."""

    __slots__ = ()

    @property
    def layouts(self) -> SequenceABC[WeightLayout]:
        return LAYOUTS

    def workspace_bytes(self, weight: torch.Tensor, max_tokens: int) -> int:
        return split_bytes(LINEAR_QUANTISED, weight, max_tokens)

    def counters_size(self, weight: torch.Tensor, max_tokens: int) -> int:
        return num_counters(LINEAR_QUANTISED, weight, max_tokens)

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
        """See `contracts.LinearQuantised`."""
        recipe, (num_columns, depth) = check_quantised_weight(weight, weight_scale, storage)
        require_layout(LINEAR_QUANTISED, storage.layout, LAYOUTS)
        require_layout(LINEAR_QUANTISED, storage.scale_layout, (RowMajor(),))
        if recipe.code not in CODE_NUMBERS:
            refuse(LINEAR_QUANTISED, "storage", "have fp8 or e2m1 codes", storage.describe())
        left, x_dtype = None, None
        if x_recipe is None:
            check_x_of_floats(x_TK, x_scale, depth)
            x_dtype = x_TK.dtype
        else:
            scale = check_x_of_codes(x_TK, x_scale, x_recipe, depth)
            left = Operand(codes=x_TK, scale=scale, recipe=x_recipe)
        shape = (*x_TK.shape[:-1], num_columns)
        dtype = check_quantised_result(
            *(shape, bias, out),
            dtype=dtype,
            x_dtype=x_dtype,
            x=x_TK,
            x_scale=x_scale,
            weight=weight,
            weight_scale=weight_scale,
        )
        require_reachable(
            LINEAR_QUANTISED,
            x=x_TK,
            weight=weight,
            weight_scale=weight_scale,
            bias=bias,
            x_scale=x_scale,
            out=out,
            workspace=workspace,
            counters=counters,
        )
        if out is None:
            out = torch.empty(shape, dtype=dtype, device=x_TK.device)
        call = _Call(
            weight=Operand(codes=weight, scale=weight_scale, recipe=recipe),
            layout=storage.layout,
            num_columns=num_columns,
            depth=depth,
            bias=bias,
            out=out,
            is_invariant=batch_invariant,
            workspace=workspace,
            counters=counters,
        )
        if left is None:
            _decoded(call, x_TK)
        elif left.is_mx and call.weight.is_mx:
            _mx(call, left)
        else:
            _codes(call, left)
        return out


def _decoded(call: _Call, x_TK: torch.Tensor) -> None:
    weight, x = call.weight, matrix_of(LINEAR_QUANTISED, "x", x_TK)
    is_exact = weight.scale_depth != 32 or (weight.is_e8m0 and x_TK.dtype == torch.bfloat16)
    in_half = is_exact and x_TK.dtype != torch.float32
    product = call.product(tables.DECODED if in_half else tables.DECODED_FP32, x.num_rows)
    if product.is_empty:
        return
    arch, parts = product.chosen[0].arch, product.parts(call.workspace)
    per_element = 2 if weight.recipe.code is CodeType.E2M1 else 1
    LAUNCHER.launch(
        decoded_linear_kernel,
        product.grid,
        product.chosen,
        (
            *(x_TK, weight.readable(arch), weight.scales, product.bias_or_out),
            *(call.out, parts, product.counters_or_out, x.num_rows, call.num_columns, call.depth),
            *(*call.stored_shape(), x.stride, x.last_stride, weight.scale_row, weight.scale_block),
            *product.strides,
        ),
        call.constants(product, per_element)
        | {
            "WEIGHT_E8M0": weight.is_e8m0,
            "SCALE_ROWS": weight.scale_rows,
            "SCALE_DEPTH": weight.scale_depth,
            "CODE": weight.code(arch),
        },
    )
    product.finish(parts)


def _codes(call: _Call, x: Operand) -> None:
    weight = call.weight
    of_blocks = bool(x.scale_depth or weight.scale_depth)
    if x.recipe.code is not weight.recipe.code or 32 in (x.scale_depth, weight.scale_depth):
        _refuse_pair(x, weight)
    if not IS_INTERPRETED and not weight.native(LAUNCHER.arch):
        _refuse_pair(x, weight)
    if _is_for_vector(call, x):
        linear_vector_codes.multiply_row(x, weight, call.bias, call.out, call.depth)
        if not LAUNCHER.is_preparing:
            return
    kind = tables.CODES_OF_BLOCKS if of_blocks else tables.CODES
    product = call.product(kind, x.codes.shape[0])
    arch = product.chosen[0].arch
    if product.is_empty:
        return
    if call.workspace is not None:
        product.parts(call.workspace)  # refused if it is too small, whichever kernel is chosen
    if _is_fed(call, product, x) and not LAUNCHER.is_preparing:
        return
    parts = product.parts(call.workspace)
    LAUNCHER.launch(
        codes_linear_kernel,
        product.grid,
        product.chosen,
        (
            *(x.readable(arch), x.scales, weight.readable(arch), weight.scales),
            *(product.bias_or_out, call.out, parts, product.counters_or_out),
            *(product.num_rows, call.num_columns, call.depth, *call.stored_shape()),
            *(x.codes.shape[1], 1),
            *(x.scale_row, x.scale_block, weight.scale_row, weight.scale_block),
            *product.strides,
        ),
        call.constants(product, 1)
        | {
            "X_E8M0": x.is_e8m0,
            "WEIGHT_E8M0": weight.is_e8m0,
            "SCALE_ROWS": weight.scale_rows,
            "SCALES_OF_BLOCKS": of_blocks,
            "HEAD": head(
                *(product.chosen[1], weight.codes.shape[0], call.depth),
                is_row_major=call.layout == RowMajor(),
            ),
            "DECODE": IS_INTERPRETED,
            "FNUZ": weight.recipe.code is CodeType.E4M3FNUZ,
        },
    )
    product.finish(parts)


def _is_for_vector(call: _Call, x: Operand) -> bool:
    """Whether one row is multiplied by itself; compiled wherever one row may come."""
    is_plain = call.layout == RowMajor() and not call.is_invariant
    is_row = may_be_one_row(x.codes.shape[0])
    sizes = call.num_columns, call.depth
    return is_row and is_plain and linear_vector_codes.takes(call.weight, *sizes)


def _is_fed(call: _Call, product: Product, x: Operand) -> bool:
    """Whether warps of their own feed this product, which then has been launched."""
    weight = call.weight
    if call.layout != RowMajor() or call.is_invariant:
        return False
    has_row_scales = not (x.scale_depth or weight.scale_depth or x.is_e8m0 or weight.is_e8m0)
    is_fed = has_row_scales and linear_specialised.feed(
        product, _side(x, call), _side(weight, call)
    )
    if is_fed and not LAUNCHER.is_preparing:
        return True
    # Prepared, it stands for as many rows as it has and for fewer.
    is_many = linear_codes_specialised.feed(product, x, weight, call.depth, call.workspace)
    return is_fed or is_many


def _side(operand: Operand, call: _Call) -> Side:
    return Side(
        tensor=operand.codes,
        rows=matrix_of(LINEAR_QUANTISED, "codes", operand.codes),
        depth=call.depth,
        scale=operand.scale,
        scale_row=operand.scale_row,
    )


def _mx(call: _Call, x: Operand) -> None:
    weight = call.weight
    if CodeType.E4M3FNUZ in (x.recipe.code, weight.recipe.code):
        _refuse_pair(x, weight)
    if not IS_INTERPRETED and LAUNCHER.arch != _MX_ARCH:
        _refuse_pair(x, weight)
    product = call.product(tables.MX, x.codes.shape[0])
    arch = product.chosen[0].arch
    if product.is_empty:
        return
    per_element = 2 if weight.recipe.code is CodeType.E2M1 else 1
    LAUNCHER.launch(
        mx_linear_kernel,
        product.grid,
        product.chosen,
        (
            *(x.readable(arch), x.scales, weight.readable(arch), weight.scales),
            *(product.bias_or_out, call.out, product.num_rows, call.num_columns),
            *(call.depth, *call.stored_shape(per_element), x.scale_row, weight.scale_row),
            *product.strides,
        ),
        call.constants(product, per_element)
        | {
            "X_CODE": x.code(arch),
            "WEIGHT_CODE": weight.code(arch),
            "DECODE": IS_INTERPRETED,
        },
    )


def _refuse_pair(x: Operand, weight: Operand) -> NoReturn:
    got = f"{x.recipe.describe()} times {weight.recipe.describe()}"
    refuse(LINEAR_QUANTISED, "x_recipe", "go with the weight's where both are native", got)


LINEAR_QUANTISED_OP: Final = TritonLinearQuantised()
