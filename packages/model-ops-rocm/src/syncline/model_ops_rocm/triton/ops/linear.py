"""Linear of unquantised weights by Triton."""

from collections.abc import Sequence as SequenceABC
from typing import Final

import torch

from syncline.model_ops_rocm.arguments.linear import LINEAR, check_linear, require_layout
from syncline.model_ops_rocm.checks import require_contiguous
from syncline.model_ops_rocm.layouts import RowMajor, Shuffle16x16, WeightLayout
from syncline.model_ops_rocm.triton.configs.base import ANY_WIDTH
from syncline.model_ops_rocm.triton.configs.linear import (
    DEEP,
    FEWER_THAN_LIBRARY,
    Sizes,
    invariant_bucket,
    kind_for_numbers,
)
from syncline.model_ops_rocm.triton.geometry import Matrix, matrix_of
from syncline.model_ops_rocm.triton.kernels.linear import linear_kernel
from syncline.model_ops_rocm.triton.launch import (
    IS_INTERPRETED,
    LAUNCHER,
    Chosen,
    require_reachable,
)
from syncline.model_ops_rocm.triton.ops import library, linear_specialised, linear_vector
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

_SHUFFLED: Final = Shuffle16x16()
LAYOUTS: Final[tuple[WeightLayout, ...]] = (RowMajor(), _SHUFFLED)


class TritonLinear:
    """See `contracts.Linear`.

    Where `configs.linear.FEWER_THAN_LIBRARY` says so, a product with a row-major weight is the
    library's, unless strides would make it copy or it is of a kind that Triton is faster at.
    """

    __slots__ = ()

    @property
    def layouts(self) -> SequenceABC[WeightLayout]:
        return LAYOUTS

    def workspace_bytes(self, weight: torch.Tensor, max_tokens: int) -> int:
        return split_bytes(LINEAR, weight, max_tokens)

    def counters_size(self, weight: torch.Tensor, max_tokens: int) -> int:
        return num_counters(LINEAR, weight, max_tokens)

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
        """See `contracts.Linear`."""
        shape = check_linear(x_TK, weight, bias, out=out)
        require_layout(LINEAR, layout, LAYOUTS)
        if layout == _SHUFFLED:
            layout.check(weight.shape, weight.dtype)
            require_contiguous(LINEAR, "weight", weight)
        require_reachable(
            LINEAR,
            x=x_TK,
            weight=weight,
            bias=bias,
            out=out,
            workspace=workspace,
            counters=counters,
        )
        if out is None:
            out = torch.empty(shape, dtype=x_TK.dtype, device=x_TK.device)
        x, (num_columns, depth) = matrix_of(LINEAR, "x", x_TK), weight.shape
        if _is_for_vector(x, x_TK, weight, layout, batch_invariant=batch_invariant):
            linear_vector.multiply_row(x_TK, weight, bias, out)
            if not LAUNCHER.is_preparing:
                return out
        sizes = Sizes(x.num_rows, num_columns, depth)
        chosen = _configuration(x_TK.dtype, sizes, is_invariant=batch_invariant)
        product = Product(
            op=LINEAR,
            chosen=chosen,
            num_rows=x.num_rows,
            num_columns=num_columns,
            bias=bias,
            out=out,
            counters=counters,
        )
        if product.is_empty:
            return out
        if layout != _SHUFFLED and not batch_invariant:
            is_done = _is_fed(product, x_TK, x, weight, workspace)
            if is_done and not LAUNCHER.is_preparing:
                return out
        if layout != _SHUFFLED and not batch_invariant and _is_for_library(product, x, weight):
            library.multiply(x_TK, weight, bias, out)
            return out
        parts = product.parts(workspace)
        constants = chosen[1].constants
        even_n = num_columns % constants["BLOCK_N"] == 0
        even_k = depth % constants["BLOCK_K"] == 0
        LAUNCHER.launch(
            linear_kernel,
            product.grid,
            chosen,
            (
                *(x_TK, weight, product.bias_or_out, out, parts, product.counters_or_out),
                *(x.num_rows, num_columns, depth, x.stride, x.last_stride),
                *(weight.stride(0), weight.stride(1), *product.strides),
            ),
            {
                "HAS_BIAS": product.adds_bias,
                "MERGES": product.merges,
                "CHUNK": chunk_of(layout, weight),
                "EVEN_N": even_n,
                "EVEN_K": even_k,
                "PREFETCH": prefetch(chosen[1], even_n, even_k, weight.stride(1) == 1),
                "OVERLAP": overlaps(chosen[1]),
                "HEAD": head(
                    *(chosen[1], num_columns, depth),
                    is_row_major=layout != _SHUFFLED and weight.stride(1) == 1,
                ),
            },
        )
        product.finish(parts)
        return out


def _is_for_vector(
    x: Matrix,
    x_TK: torch.Tensor,
    weight: torch.Tensor,
    layout: WeightLayout,
    *,
    batch_invariant: bool,
) -> bool:
    """Whether one row is multiplied by itself; compiled wherever one row may come."""
    is_plain = layout != _SHUFFLED and not batch_invariant
    return may_be_one_row(x.num_rows) and is_plain and linear_vector.takes(x_TK, weight)


def _is_fed(
    product: Product,
    x_TK: torch.Tensor,
    x: Matrix,
    weight: torch.Tensor,
    workspace: torch.Tensor | None,
) -> bool:
    """Whether warps of their own feed this product, which then has been launched."""
    if workspace is not None:
        product.parts(workspace)  # refused if it is too small, whichever kernel is chosen
    depth = weight.shape[1]
    return linear_specialised.feed(
        product,
        Side(tensor=x_TK, rows=x, depth=depth),
        Side(tensor=weight, rows=matrix_of(LINEAR, "weight", weight), depth=depth),
    )


def _configuration(dtype: torch.dtype, sizes: Sizes, *, is_invariant: bool) -> Chosen:
    rows, arch = sizes.num_rows, LAUNCHER.arch
    if not is_invariant:
        return LAUNCHER.config(LINEAR, dtype, rows, kind_for_numbers(arch, dtype, sizes))
    if dtype == torch.float32:
        return LAUNCHER.config(LINEAR, dtype, ANY_WIDTH)
    return LAUNCHER.config(LINEAR, dtype, *invariant_bucket(arch, "", rows))


def _is_for_library(product: Product, x: Matrix, weight: torch.Tensor) -> bool:
    key = product.chosen[0]
    most = FEWER_THAN_LIBRARY.get((key.arch, key.dtype), product.num_rows)
    if product.num_rows <= most or key.kind == DEEP or LAUNCHER.is_compiling or IS_INTERPRETED:
        return False
    written = matrix_of(LINEAR, "out", product.out)
    return library.reads(x, written, matrix_of(LINEAR, "weight", weight))


LINEAR_OP: Final = TritonLinear()
