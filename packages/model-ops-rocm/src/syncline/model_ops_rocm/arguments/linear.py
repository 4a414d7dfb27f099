"""What the products with a stored weight refuse, on every backend.

Cheap on purpose: shapes, dtypes and recipes are compared, no value is looked at. Knows no backend.
"""

from collections.abc import Sequence as SequenceABC
from typing import Final

import torch

from syncline.model_ops_rocm.checks import (
    FLOAT_DTYPES,
    refuse,
    require_apart,
    require_contiguous,
    require_dtype,
    require_float,
    require_kind,
    require_ndim,
    require_out,
    require_shape,
)
from syncline.model_ops_rocm.errors import LayoutError
from syncline.model_ops_rocm.formats.quantised import Quantised
from syncline.model_ops_rocm.formats.recipes import WEIGHT, WEIGHT_SCALE
from syncline.model_ops_rocm.formats.storage_format import StorageFormat
from syncline.model_ops_rocm.layouts.base import WeightLayout
from syncline.model_ops_rocm.quant.scheme import Granularity

LINEAR: Final = "linear"
LINEAR_QUANTISED: Final = "linear_quantised"


def require_weight_layout(op: str, layout: object) -> None:
    """Any class that has what a layout has: a name that stands for one has not."""
    if isinstance(layout, type) or not hasattr(layout, "apply_into"):
        refuse(op, "layout", "be of a class that is a WeightLayout", repr(layout))


def require_layout(op: str, layout: WeightLayout, accepted: SequenceABC[WeightLayout]) -> None:
    """LayoutError that lists what there is, unless the layout is among it."""
    require_weight_layout(op, layout)
    if layout not in accepted:
        raise LayoutError(
            layout=layout.describe(),
            precondition=f"{op} to take it",
            got=", ".join(one.describe() for one in accepted),
        )


def check_linear(
    x_TK: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    out: torch.Tensor | None,
) -> tuple[int, ...]:
    """Returns the shape of the result."""
    require_float(LINEAR, "x", x_TK)
    require_ndim(LINEAR, "weight", weight, 2)
    require_dtype(LINEAR, "weight", weight, x_TK.dtype)
    if x_TK.ndim == 0 or x_TK.shape[-1] != weight.shape[1]:
        refuse(LINEAR, "x", f"have a last dimension of {weight.shape[1]}", list(x_TK.shape))
    _check_bias(LINEAR, bias, weight.shape[0], x_TK.dtype)
    shape = (*x_TK.shape[:-1], weight.shape[0])
    if out is not None:
        require_out(LINEAR, out, shape, x_TK.dtype)
        require_apart(LINEAR, {"out": out}, {"x": x_TK, "weight": weight, "bias": bias})
    return shape


def check_quantised_weight(
    weight: torch.Tensor, weight_scale: torch.Tensor, storage: StorageFormat
) -> tuple[Quantised, tuple[int, int]]:
    """Returns the recipe and (N_out, K_in), logical, without padding."""
    require_kind(LINEAR_QUANTISED, "storage", storage, StorageFormat)
    recipe = storage.recipe
    if not isinstance(recipe, Quantised):
        refuse(LINEAR_QUANTISED, "storage", "have a quantised recipe", storage.describe())
    require_ndim(LINEAR_QUANTISED, "weight", weight, 2)
    rows, columns = recipe.logical_shape(weight.shape)
    if storage.padding is not None:
        rows, columns = storage.padding.rows, storage.padding.columns
    spec = storage.storage_spec((rows, columns))
    for name, tensor in ((WEIGHT, weight), (WEIGHT_SCALE, weight_scale)):
        require_shape(LINEAR_QUANTISED, name, tensor, spec[name].shape)
        require_dtype(LINEAR_QUANTISED, name, tensor, spec[name].dtype)
        require_contiguous(LINEAR_QUANTISED, name, tensor)
    return recipe, (rows, columns)


def check_x_of_codes(
    x_TK: torch.Tensor, x_scale: torch.Tensor | None, x_recipe: Quantised, depth: int
) -> torch.Tensor:
    """Returns the scales."""
    require_kind(LINEAR_QUANTISED, "x_recipe", x_recipe, Quantised)
    if x_recipe.granularity is Granularity.BLOCK_128X128:
        limit = "share scales over all, a row, or 128 or 32 of a row"
        refuse(LINEAR_QUANTISED, "x_recipe", limit, x_recipe.describe())
    if x_scale is None:
        refuse(LINEAR_QUANTISED, "x_scale", "be given with x_recipe", None)
    require_ndim(LINEAR_QUANTISED, "x", x_TK, 2)
    spec = x_recipe.storage_spec((x_TK.shape[0], depth))
    for argument, name, tensor in (("x", WEIGHT, x_TK), ("x_scale", WEIGHT_SCALE, x_scale)):
        require_shape(LINEAR_QUANTISED, argument, tensor, spec[name].shape)
        require_dtype(LINEAR_QUANTISED, argument, tensor, spec[name].dtype)
        require_contiguous(LINEAR_QUANTISED, argument, tensor)
    return x_scale


def check_x_of_floats(x_TK: torch.Tensor, x_scale: torch.Tensor | None, depth: int) -> None:
    """Also refuses scales that nothing would be multiplied by."""
    require_float(LINEAR_QUANTISED, "x", x_TK)
    if x_scale is not None:
        refuse(LINEAR_QUANTISED, "x_scale", "come with x_recipe", list(x_scale.shape))
    if x_TK.ndim == 0 or x_TK.shape[-1] != depth:
        refuse(LINEAR_QUANTISED, "x", f"have a last dimension of {depth}", list(x_TK.shape))


def check_quantised_result(
    shape: tuple[int, ...],
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
    *,
    dtype: torch.dtype | None,
    x_dtype: torch.dtype | None,
    **inputs: torch.Tensor | None,
) -> torch.dtype:
    """Returns the result's dtype; `x_dtype` is None for codes. `out` is apart from the inputs."""
    if x_dtype is not None:
        if dtype is not None and dtype is not x_dtype:
            refuse(LINEAR_QUANTISED, "dtype", f"be None or {x_dtype}, that of x", dtype)
        dtype = x_dtype
    if dtype not in FLOAT_DTYPES:
        limit = "be float32, bfloat16 or float16 where x is codes"
        refuse(LINEAR_QUANTISED, "dtype", limit, dtype)
    _check_bias(LINEAR_QUANTISED, bias, shape[-1], dtype)
    if out is not None:
        require_out(LINEAR_QUANTISED, out, shape, dtype)
        require_apart(LINEAR_QUANTISED, {"out": out}, inputs | {"bias": bias})
    return dtype


def _check_bias(op: str, bias: torch.Tensor | None, num_columns: int, dtype: torch.dtype) -> None:
    if bias is not None:
        require_shape(op, "bias", bias, (num_columns,))
        require_dtype(op, "bias", bias, dtype)
