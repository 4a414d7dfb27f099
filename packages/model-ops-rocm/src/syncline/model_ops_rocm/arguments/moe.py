"""What the ops of mixture of experts refuse, on every backend; see `contracts.moe`.

Cheap on purpose: shapes, dtypes and strides are read, no value on the device is. Knows no backend.
"""

from typing import Final, NamedTuple

import torch

from syncline.model_ops_rocm.arguments.linear import require_weight_layout
from syncline.model_ops_rocm.checks import (
    is_whole,
    refuse,
    require_apart,
    require_contiguous,
    require_dtype,
    require_float,
    require_index,
    require_kind,
    require_ndim,
    require_out,
    require_shape,
    require_tensors,
)
from syncline.model_ops_rocm.contracts.moe import ExpertMap, SortedPairs, sorted_capacity
from syncline.model_ops_rocm.formats.quantised import Quantised
from syncline.model_ops_rocm.layouts import RowMajor, Shuffle16x16, WeightLayout
from syncline.model_ops_rocm.quant.scheme import Granularity, ScaleType

MOE_ROUTE = "moe_route"
MOE_SORT = "moe_sort"
MOE_PERMUTE = "moe_permute"
MOE_COMBINE = "moe_combine"
MOE_EXPERTS = "moe_experts"
FP8_DTYPES: Final = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
SCALE_BLOCK: Final = 128
_MAX_SORTED: Final = 2**30  # entries, and ids: kernels count in int32, some beyond the last
Scales = tuple[torch.Tensor, torch.Tensor]  # of w13 and of w2
# What the torch and the Triton backend read of experts, the preferred one first.
LAYOUTS: Final[tuple[WeightLayout, ...]] = (RowMajor(), Shuffle16x16())


class ExpertShapes(NamedTuple):
    """The sizes of one call of `moe_experts`."""

    num_tokens: int
    top_k: int
    num_experts: int
    hidden: int
    intermediate: int

    @property
    def num_pairs(self) -> int:
        return self.num_tokens * self.top_k

    @property
    def mean_pairs(self) -> int:
        """Of an expert, rounded up."""
        return -(-self.num_pairs // self.num_experts)


def check_moe_route(
    logits_TE: torch.Tensor,
    top_k: int,
    *,
    expert_map: ExpertMap | None,
    positions_T: torch.Tensor | None,
    out: tuple[torch.Tensor, torch.Tensor] | None,
) -> None:
    require_float(MOE_ROUTE, "logits", logits_TE)
    require_ndim(MOE_ROUTE, "logits", logits_TE, 2)
    num_tokens, num_experts = logits_TE.shape
    if not (is_whole(top_k) and 1 <= top_k <= num_experts):
        refuse(MOE_ROUTE, "top_k", f"be in [1, {num_experts}]", top_k)
    if positions_T is not None:
        require_index(MOE_ROUTE, "positions", positions_T, num_tokens)
    if expert_map is not None:
        _check_map(expert_map, num_experts, positions_T)
    if out is not None:
        require_tensors(MOE_ROUTE, "out", out)
        _require_pairs(MOE_ROUTE, "out[0]", out[0], torch.float32, (num_tokens, top_k))
        _require_pairs(MOE_ROUTE, "out[1]", out[1], torch.int32, (num_tokens, top_k))
        names = ("expert_map.replicas", "expert_map.num_replicas")
        read = dict(zip(names, expert_map or (), strict=False))
        written = {"out[0]": out[0], "out[1]": out[1]}
        require_apart(MOE_ROUTE, written, {**read, "logits": logits_TE, "positions": positions_T})


def _check_map(expert_map: ExpertMap, num_experts: int, positions_T: torch.Tensor | None) -> None:
    require_kind(MOE_ROUTE, "expert_map", expert_map, ExpertMap)
    replicas, counts = expert_map
    require_ndim(MOE_ROUTE, "expert_map.replicas", replicas, 2)
    if replicas.shape[0] != num_experts or replicas.shape[1] == 0:
        limit = f"have shape [{num_experts}, R] with R of at least 1"
        refuse(MOE_ROUTE, "expert_map.replicas", limit, list(replicas.shape))
    require_shape(MOE_ROUTE, "expert_map.num_replicas", counts, (num_experts,))
    for name, tensor in (("replicas", replicas), ("num_replicas", counts)):
        require_dtype(MOE_ROUTE, f"expert_map.{name}", tensor, torch.int32)
        require_contiguous(MOE_ROUTE, f"expert_map.{name}", tensor)
    if replicas.shape[1] > 1 and positions_T is None:
        refuse(MOE_ROUTE, "positions", "be given where experts have replicas", None)


def check_moe_sort(
    ids_TK: torch.Tensor,
    num_groups: int,
    *,
    block_size: int,
    group_size: int,
    out: SortedPairs | None,
) -> int:
    """Returns the number of entries, padding included."""
    require_ndim(MOE_SORT, "ids", ids_TK, 2)
    _require_pairs(MOE_SORT, "ids", ids_TK, torch.int32, tuple(ids_TK.shape))
    for name, value in (("num_groups", num_groups), ("group_size", group_size)):
        if not is_whole(value) or value < 1:
            refuse(MOE_SORT, name, "be positive", value)
    if num_groups * group_size > _MAX_SORTED:
        limit = f"make at most {_MAX_SORTED} ids with num_groups {num_groups}"
        refuse(MOE_SORT, "group_size", limit, group_size)
    if not is_whole(block_size) or block_size < 1 or block_size & (block_size - 1):
        refuse(MOE_SORT, "block_size", "be a power of two", block_size)
    capacity = sorted_capacity(ids_TK.numel(), num_groups, block_size)
    if capacity > _MAX_SORTED:
        limit = f"need at most {_MAX_SORTED} entries, padding included"
        refuse(MOE_SORT, "ids", limit, f"{capacity} of {list(ids_TK.shape)}")
    if out is not None:
        require_kind(MOE_SORT, "out", out, SortedPairs)
        wanted = ((capacity,), (capacity // block_size,), (num_groups,), tuple(ids_TK.shape))
        for name, tensor, shape in zip(SortedPairs._fields, out, wanted, strict=True):
            _require_pairs(MOE_SORT, f"out.{name}", tensor, torch.int32, shape)
        results = {f"out.{name}": tensor for name, tensor in out._asdict().items()}
        require_apart(MOE_SORT, results, {"ids": ids_TK})
    return capacity


def check_moe_permute(
    x_TH: torch.Tensor,
    ids_TK: torch.Tensor,
    pairs_C: torch.Tensor,
    *,
    group_size: int,
    out: tuple[torch.Tensor, torch.Tensor] | None,
) -> None:
    require_float(MOE_PERMUTE, "x", x_TH)
    require_ndim(MOE_PERMUTE, "x", x_TH, 2)
    require_ndim(MOE_PERMUTE, "ids", ids_TK, 2)
    _require_pairs(MOE_PERMUTE, "ids", ids_TK, torch.int32, (x_TH.shape[0], ids_TK.shape[1]))
    require_ndim(MOE_PERMUTE, "pairs", pairs_C, 1)
    _require_pairs(MOE_PERMUTE, "pairs", pairs_C, torch.int32, tuple(pairs_C.shape))
    if not is_whole(group_size) or group_size < 1:
        refuse(MOE_PERMUTE, "group_size", "be positive", group_size)
    if out is not None:
        require_tensors(MOE_PERMUTE, "out", out)
        rows_shape = (pairs_C.shape[0], x_TH.shape[1])
        require_shape(MOE_PERMUTE, "out[0]", out[0], rows_shape)
        require_dtype(MOE_PERMUTE, "out[0]", out[0], x_TH.dtype)
        _require_pairs(MOE_PERMUTE, "out[1]", out[1], torch.int32, tuple(pairs_C.shape))
        inputs = {"x": x_TH, "ids": ids_TK, "pairs": pairs_C}
        require_apart(MOE_PERMUTE, {"out[0]": out[0], "out[1]": out[1]}, inputs)


def check_moe_combine(
    y_CH: torch.Tensor,
    weights_TK: torch.Tensor,
    places_TK: torch.Tensor,
    *,
    out: torch.Tensor | None,
) -> None:
    require_float(MOE_COMBINE, "y", y_CH)
    require_ndim(MOE_COMBINE, "y", y_CH, 2)
    require_ndim(MOE_COMBINE, "weights", weights_TK, 2)
    shape = tuple(weights_TK.shape)
    _require_pairs(MOE_COMBINE, "weights", weights_TK, torch.float32, shape)
    _require_pairs(MOE_COMBINE, "places", places_TK, torch.int32, shape)
    if out is not None:
        require_out(MOE_COMBINE, out, (shape[0], y_CH.shape[1]), y_CH.dtype)
        inputs = {"y": y_CH, "weights": weights_TK, "places": places_TK}
        require_apart(MOE_COMBINE, {"out": out}, inputs)


def check_moe_experts(
    x_TH: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor],
    routing: tuple[torch.Tensor, torch.Tensor],
    layout: WeightLayout,
    quantised: tuple[Scales | None, Quantised | None],
    out: torch.Tensor | None,
) -> ExpertShapes:
    """`weights` are w13 and w2, `routing` weights_TK and ids_TK, `quantised` scales and recipe;
    returns the sizes."""
    scales, recipe = quantised
    _check_kinds(layout, scales, recipe)
    require_float(MOE_EXPERTS, "x", x_TH)
    require_ndim(MOE_EXPERTS, "x", x_TH, 2)
    shapes = _shapes_of(x_TH, weights, routing)
    for name, tensor in zip(("w13", "w2"), weights, strict=True):
        require_contiguous(MOE_EXPERTS, name, tensor)
        if scales is None:
            require_dtype(MOE_EXPERTS, name, tensor, x_TH.dtype)
        elif tensor.dtype not in FP8_DTYPES or tensor.dtype is not weights[0].dtype:
            refuse(MOE_EXPERTS, name, "be fp8, both of one kind, as there are scales", tensor.dtype)
        # A slice's order: LayoutError names what does not fit.
        layout.check(tensor.shape[1:], tensor.dtype)
    shape = (shapes.num_tokens, shapes.top_k)
    _require_pairs(MOE_EXPERTS, "weights", routing[0], torch.float32, shape)
    _require_pairs(MOE_EXPERTS, "ids", routing[1], torch.int32, shape)
    if scales is not None:
        for name, scale, weight in zip(("scales[0]", "scales[1]"), scales, weights, strict=True):
            _check_scale(name, scale, weight)
        if is_per_row(scales[0], weights[0]) != is_per_row(scales[1], weights[1]):
            refuse(MOE_EXPERTS, "scales", "be both per row or both per block", "one of each")
    if recipe is not None:
        _check_recipe(recipe, weights[0], scales)
    if out is not None:
        require_out(MOE_EXPERTS, out, x_TH.shape, x_TH.dtype)
        names = ("w13", "w2", "weights", "ids", "scales[0]", "scales[1]")
        inputs = dict(zip(names, (*weights, *routing, *(scales or ())), strict=False))
        require_apart(MOE_EXPERTS, {"out": out}, inputs | {"x": x_TH})
    return shapes


def _check_kinds(layout: WeightLayout, scales: Scales | None, recipe: Quantised | None) -> None:
    require_weight_layout(MOE_EXPERTS, layout)
    if scales is not None:
        require_tensors(MOE_EXPERTS, "scales", scales)
    if recipe is not None:
        require_kind(MOE_EXPERTS, "recipe", recipe, Quantised)


def _check_recipe(recipe: Quantised, w13: torch.Tensor, scales: Scales | None) -> None:
    if scales is None:
        refuse(MOE_EXPERTS, "recipe", "be None without scales", recipe.describe())
    is_row = is_per_row(scales[0], w13)
    granularity = Granularity.TOKEN if is_row else Granularity.BLOCK_1X128
    if recipe.dtype is not w13.dtype or recipe.scale is not ScaleType.FP32:
        limit = f"have codes of {w13.dtype}, as w13, and fp32 scales"
        refuse(MOE_EXPERTS, "recipe", limit, recipe.describe())
    if recipe.granularity is not granularity:
        refuse(MOE_EXPERTS, "recipe", f"be per {granularity}, as scales", recipe.describe())


def is_per_row(scale: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether a scale that `check_moe_experts` took is one per row; else it is one per block."""
    return scale.shape == (*weight.shape[:2], 1)


def _shapes_of(
    x_TH: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor],
    routing: tuple[torch.Tensor, torch.Tensor],
) -> ExpertShapes:
    w13, w2 = weights
    num_tokens, hidden = x_TH.shape
    if w13.ndim != 3 or w13.shape[1] % 2 != 0 or w13.shape[2] != hidden:
        refuse(MOE_EXPERTS, "w13", f"have shape [E, 2I, {hidden}]", list(w13.shape))
    num_experts, intermediate = w13.shape[0], w13.shape[1] // 2
    require_shape(MOE_EXPERTS, "w2", w2, (num_experts, hidden, intermediate))
    if routing[1].ndim != 2 or routing[1].shape[0] != num_tokens:
        refuse(MOE_EXPERTS, "ids", f"have shape [{num_tokens}, k]", list(routing[1].shape))
    return ExpertShapes(num_tokens, routing[1].shape[1], num_experts, hidden, intermediate)


def _check_scale(name: str, scale: torch.Tensor, weight: torch.Tensor) -> None:
    num_experts, rows, columns = weight.shape
    per_block = (num_experts, -(-rows // SCALE_BLOCK), -(-columns // SCALE_BLOCK))
    if not is_per_row(scale, weight) and scale.shape != per_block:
        limit = f"have shape {[num_experts, rows, 1]} or {list(per_block)}"
        refuse(MOE_EXPERTS, name, limit, list(scale.shape))
    require_dtype(MOE_EXPERTS, name, scale, torch.float32)
    require_contiguous(MOE_EXPERTS, name, scale)


def _require_pairs(
    op: str, name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    require_shape(op, name, tensor, shape)
    require_dtype(op, name, tensor, dtype)
    require_contiguous(op, name, tensor)
