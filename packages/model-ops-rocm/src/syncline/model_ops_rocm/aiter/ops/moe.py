"""Mixture of experts by AITER; knows no rank and no collective."""

from typing import Final

import torch

from syncline.model_ops_rocm.aiter.enums import ActivationType, QuantType
from syncline.model_ops_rocm.aiter.ops.common import (
    AiterOp,
    as_tensor,
    refuse_batch_invariant,
    require_device,
    require_halves,
    written,
)
from syncline.model_ops_rocm.arguments.linear import require_weight_layout
from syncline.model_ops_rocm.arguments.moe import (
    MOE_EXPERTS,
    MOE_ROUTE,
    check_moe_experts,
    check_moe_route,
)
from syncline.model_ops_rocm.checks import refuse
from syncline.model_ops_rocm.contracts.moe import ExpertMap
from syncline.model_ops_rocm.errors import LayoutError
from syncline.model_ops_rocm.formats.quantised import Quantised
from syncline.model_ops_rocm.layouts import Shuffle16x16, WeightLayout

_SHUFFLED: Final = Shuffle16x16()
EXPERT_LAYOUTS: Final[tuple[WeightLayout, ...]] = (_SHUFFLED,)


class AiterMoeRoute(AiterOp):
    """`topk_softmax`; which of two equal logits comes first is AITER's.

    What it makes of a NaN is not on record, and an id that is none would be read as one: rows that
    have no softmax get logits that have one, and weights of NaN afterwards.
    """

    __slots__ = ()

    def __call__(
        self,
        logits_TE: torch.Tensor,
        top_k: int,
        *,
        renormalise: bool = True,
        expert_map: ExpertMap | None = None,
        positions_T: torch.Tensor | None = None,
        out: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `contracts.MoeRoute`; without a map."""
        check_moe_route(logits_TE, top_k, expert_map=expert_map, positions_T=positions_T, out=out)
        if expert_map is not None:
            refuse(MOE_ROUTE, "expert_map", "be None for AITER", "a map")
        outs = (None, None) if out is None else out
        device = require_device(
            MOE_ROUTE,
            self.aiter,
            logits=logits_TE,
            positions=positions_T,
            weights_out=outs[0],
            ids_out=outs[1],
        )
        route = self.aiter.function("topk_softmax")
        if out is None:
            shape = (logits_TE.shape[0], top_k)
            out = (
                torch.empty(shape, dtype=torch.float32, device=device),
                torch.empty(shape, dtype=torch.int32, device=device),
            )
        weights, ids = out
        if ids.numel() != 0:
            logits, is_lost = _with_a_softmax(logits_TE)
            route(weights, ids, torch.empty_like(ids), logits, renormalise)
            weights.masked_fill_(is_lost, float("nan"))
        if positions_T is not None:
            is_padding = (positions_T < 0).unsqueeze(1)
            weights.masked_fill_(is_padding, 0.0)
            ids.masked_fill_(is_padding, -1)
        return weights, ids


class AiterMoeExperts(AiterOp):
    """`fused_moe` on weights whose slices are shuffled 16x16, in the dtype of x.

    A pair that is skipped becomes one of an expert that is nowhere: AITER masks experts, has no
    sign for a pair, and strips the last slot as that of such an expert.
    """

    __slots__ = ()

    @property
    def layouts(self) -> tuple[WeightLayout, ...]:
        """What `layout` may be."""
        return EXPERT_LAYOUTS

    def workspace_bytes(
        self, w13: torch.Tensor, top_k: int, max_tokens: int, dtype: torch.dtype
    ) -> int:
        """AITER allocates what it needs."""
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
        """See `contracts.MoeExperts`; unquantised, and never batch-invariant."""
        refuse_batch_invariant(MOE_EXPERTS, batch_invariant)
        require_weight_layout(MOE_EXPERTS, layout)
        if layout not in EXPERT_LAYOUTS:
            accepted = ", ".join(one.describe() for one in EXPERT_LAYOUTS)
            raise LayoutError(
                layout=layout.describe(), precondition=f"{MOE_EXPERTS} to take it", got=accepted
            )
        routing = (weights_TK, ids_TK)
        check_moe_experts(x_TH, (w13, w2), routing, layout, (scales, recipe), out)
        require_halves(MOE_EXPERTS, "x", x_TH)
        if scales is not None:
            limit = "be None for AITER, which would quantise the activations too"
            refuse(MOE_EXPERTS, "scales", limit, "two tensors")
        require_device(
            MOE_EXPERTS,
            self.aiter,
            x=x_TH,
            w13=w13,
            w2=w2,
            weights=weights_TK,
            ids=ids_TK,
            out=out,
        )
        experts = self.aiter.function("fused_moe")
        silu, unquantised = (
            self.aiter.member(ActivationType.SILU),
            self.aiter.member(QuantType.NONE),
        )
        num_experts = w13.shape[0]
        if 0 in (*x_TH.shape, *w13.shape, *ids_TK.shape):
            return written(out, torch.zeros_like(x_TH))
        weights, ids = _with_nowhere(weights_TK, ids_TK, num_experts)
        mask = torch.ones(num_experts + 1, dtype=torch.int32, device=x_TH.device)
        mask[num_experts:].zero_()
        result = experts(
            *(x_TH.contiguous(), _flagged(w13), _flagged(w2), weights, ids),
            expert_mask=mask,
            activation=silu,
            quant_type=unquantised,
        )
        return written(out, as_tensor(result))


def _with_a_softmax(logits_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Contiguous logits, ordered as these, that have a softmax; which rows had none, [T, 1]."""
    low, most = float("-inf"), torch.finfo(logits_TE.dtype).max
    is_lost = (logits_TE.isnan() | (logits_TE == float("inf"))).any(dim=1, keepdim=True)
    logits = torch.nan_to_num(logits_TE, nan=low, posinf=most, neginf=low)
    is_empty = (logits == low).all(dim=1, keepdim=True)
    return logits.masked_fill_(is_empty, 0.0).contiguous(), is_lost | is_empty


def _with_nowhere(
    weights_TK: torch.Tensor, ids_TK: torch.Tensor, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """One slot more, of the expert `num_experts`, which takes the skipped pairs too."""
    is_known = (ids_TK >= 0) & (ids_TK < num_experts)
    if ids_TK.device.type == "cpu" and bool((~is_known & (ids_TK != -1)).any()):
        refuse(MOE_EXPERTS, "ids", f"be -1 or in [0, {num_experts})", "one outside")
    ids = torch.where(is_known, ids_TK, num_experts)
    weights = torch.where(is_known, weights_TK, 0.0)
    pad = torch.nn.functional.pad
    return pad(weights, (0, 1)), pad(ids, (0, 1), value=num_experts)


def _flagged(weight: torch.Tensor) -> torch.Tensor:
    """A view whose object says that it is shuffled: the flag is no part of the tensor."""
    stored = weight.view(weight.shape)
    stored.is_shuffled = True  # type: ignore[attr-defined]  # AITER looks for it
    return stored
