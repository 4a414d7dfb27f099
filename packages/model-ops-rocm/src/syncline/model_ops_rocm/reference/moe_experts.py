"""The experts of a layer in PyTorch: one expert after the other, in float32.

Knows a layout's inverse, no kernel's tile: the slices of w13 and w2 are decoded on every call,
because the reference must read the bytes that are stored.
"""

from collections.abc import Sequence as SequenceABC

import torch
import torch.nn.functional as nn_functional

from syncline.model_ops_rocm.arguments.moe import (
    LAYOUTS,
    MOE_EXPERTS,
    SCALE_BLOCK,
    check_moe_experts,
    is_per_row,
)
from syncline.model_ops_rocm.formats.quantised import Quantised
from syncline.model_ops_rocm.formats.recipes import WEIGHT, WEIGHT_SCALE
from syncline.model_ops_rocm.layouts import WeightLayout
from syncline.model_ops_rocm.reference.activation import silu_and_mul
from syncline.model_ops_rocm.reference.fused import quantise_activation
from syncline.model_ops_rocm.reference.moe_routing import moe_combine, require_ids
from syncline.model_ops_rocm.reference.row_by_row import linear_row_by_row


class TorchMoeExperts:
    """See `contracts.MoeExperts`; needs no workspace."""

    __slots__ = ()

    @property
    def layouts(self) -> SequenceABC[WeightLayout]:
        return LAYOUTS

    def workspace_bytes(
        self, w13: torch.Tensor, top_k: int, max_tokens: int, dtype: torch.dtype
    ) -> int:
        return 0

    def __call__(  # noqa: PLR0913 - the contract's
        self,
        x_TH: torch.Tensor,
        w13: torch.Tensor,
        w2: torch.Tensor,
        weights_TK: torch.Tensor,
        ids_TK: torch.Tensor,
        *,
        layout: WeightLayout,
        scales: tuple[torch.Tensor, torch.Tensor] | None = None,
        recipe: Quantised | None = None,
        batch_invariant: bool = False,
        out: torch.Tensor | None = None,
        workspace: torch.Tensor | None = None,
    ) -> torch.Tensor:
        routing = (weights_TK, ids_TK)
        shapes = check_moe_experts(x_TH, (w13, w2), routing, layout, (scales, recipe), out)
        require_ids(MOE_EXPERTS, ids_TK, shapes.num_experts)
        y = x_TH.new_zeros((shapes.num_pairs, shapes.hidden))
        project = linear_row_by_row if batch_invariant else nn_functional.linear
        ids = ids_TK.flatten()
        source = _as_multiplied(x_TH, recipe)
        for expert in torch.unique(ids).tolist():
            if not 0 <= expert < shapes.num_experts:
                continue
            pairs = (ids == expert).nonzero().flatten()
            up, down = (
                _logical(weight[expert], layout, None if scales is None else scale[expert])
                for weight, scale in zip((w13, w2), scales or (w13, w2), strict=True)
            )
            gate_up = project(source[pairs // shapes.top_k], up).to(x_TH.dtype)
            activated = _as_multiplied(silu_and_mul(gate_up), recipe)
            y[pairs] = project(activated, down).to(x_TH.dtype)
        is_kept = (ids_TK >= 0) & (ids_TK < shapes.num_experts)
        numbers = torch.arange(shapes.num_pairs, dtype=torch.int32, device=x_TH.device)
        places = numbers.view(ids_TK.shape).masked_fill(~is_kept, -1)
        return moe_combine(y, weights_TK, places, out=out)


def _logical(
    stored: torch.Tensor, layout: WeightLayout, scale: torch.Tensor | None
) -> torch.Tensor:
    """One expert's matrix in float32."""
    weight = layout.inverse(stored).float()
    if scale is None:
        return weight
    if is_per_row(scale[None], weight[None]):
        return weight * scale
    spread = scale.repeat_interleave(SCALE_BLOCK, 0).repeat_interleave(SCALE_BLOCK, 1)
    return weight * spread[: weight.shape[0], : weight.shape[1]]


def _as_multiplied(x: torch.Tensor, recipe: Quantised | None) -> torch.Tensor:
    """x in float32; what its codes say, if it has some."""
    if recipe is None:
        return x.float()
    codes, scales = quantise_activation(x, recipe)
    return recipe.decode({WEIGHT: codes, WEIGHT_SCALE: scales})
