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
from syncline.model_ops_rocm.layouts import WeightLayout
from syncline.model_ops_rocm.reference.activation import silu_and_mul
from syncline.model_ops_rocm.reference.moe_routing import moe_combine, require_ids
from syncline.model_ops_rocm.reference.tiles import linear_in_tiles


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
        batch_invariant: bool = False,
        out: torch.Tensor | None = None,
        workspace: torch.Tensor | None = None,
    ) -> torch.Tensor:
        shapes = check_moe_experts(x_TH, (w13, w2), (weights_TK, ids_TK), layout, scales, out)
        require_ids(MOE_EXPERTS, ids_TK, shapes.num_experts)
        y = x_TH.new_zeros((shapes.num_pairs, shapes.hidden))
        project = _project_in_tiles if batch_invariant else _project
        ids = ids_TK.flatten()
        for expert in torch.unique(ids).tolist():
            if not 0 <= expert < shapes.num_experts:
                continue
            pairs = (ids == expert).nonzero().flatten()
            up, down = (
                _logical(weight[expert], layout, None if scales is None else scale[expert])
                for weight, scale in zip((w13, w2), scales or (w13, w2), strict=True)
            )
            activated = silu_and_mul(project(x_TH[pairs // shapes.top_k], up))
            y[pairs] = project(activated, down)
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


def _project(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return nn_functional.linear(x.float(), weight).to(x.dtype)


def _project_in_tiles(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return linear_in_tiles(x.float(), weight).to(x.dtype)
