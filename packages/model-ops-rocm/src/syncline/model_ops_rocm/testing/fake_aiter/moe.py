"""The stand-in's routing and experts; weights are read as they are stored, shuffled or not."""

import torch

from syncline.model_ops_rocm.testing.fake_aiter.checks import Functions, abort_unless, need_dense
from syncline.model_ops_rocm.testing.fake_aiter.enums import Enumeration, Member
from syncline.model_ops_rocm.testing.fake_aiter.stored import unshuffled

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


class FakeMoe:
    """Takes members of its own enumerations alone, as a C++ module does."""

    def __init__(self, activations: Enumeration, quants: Enumeration) -> None:
        self._silu = activations.Silu
        self._no = quants.No

    def functions(self) -> Functions:
        return {"topk_softmax": topk_softmax, "fused_moe": self.fused_moe}

    def fused_moe(
        self,
        hidden: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weight: torch.Tensor,
        topk_ids: torch.Tensor,
        expert_mask: torch.Tensor | None = None,
        activation: Member | None = None,
        quant_type: Member | None = None,
        doweight_stage1: bool = False,
        w1_scale: torch.Tensor | None = None,
        w2_scale: torch.Tensor | None = None,
        a1_scale: torch.Tensor | None = None,
        a2_scale: torch.Tensor | None = None,
        block_size_M: int | None = None,
        num_local_tokens: torch.Tensor | None = None,
        moe_sorting_dispatch_policy: int = 0,
        dtype: torch.dtype | None = None,
        hidden_pad: int = 0,
        intermediate_pad: int = 0,
        gate_mode: str = "separated",
    ) -> torch.Tensor:
        """An id is a global expert; the local ones are those whose mask is 1, in order."""
        if activation is not self._silu or quant_type is not self._no:
            raise TypeError("incompatible function arguments")
        halves = _FLOATS[:2]
        for name, tensor in (("hidden", hidden), ("w1", w1), ("w2", w2)):
            need_dense(name, tensor, halves)
        need_dense("topk_weight", topk_weight, (torch.float32,))
        need_dense("topk_ids", topk_ids, (torch.int32,))
        abort_unless(expert_mask is not None, "ids without a mask of the experts")
        assert expert_mask is not None
        need_dense("expert_mask", expert_mask, (torch.int32,))
        inside = (topk_ids >= 0) & (topk_ids < len(expert_mask))
        abort_unless(bool(inside.all()), "an id of no expert")
        abort_unless(int(expert_mask.sum()) == len(w1), "another number of local experts")
        w1, w2 = (_logical(weight).float() for weight in (w1, w2))
        local = (expert_mask.cumsum(0) - 1).masked_fill(expert_mask == 0, -1)
        result = torch.zeros(hidden.shape, dtype=torch.float32)
        # The last slot is the one of the expert that is never here.
        for token, ids in enumerate(topk_ids.tolist()):
            for slot, expert in enumerate(ids[:-1]):
                if (place := int(local[expert])) < 0:
                    continue
                gate, up = (w1[place] @ hidden[token].float()).chunk(2)
                activated = (gate * torch.sigmoid(gate) * up).to(hidden.dtype).float()
                result[token] += topk_weight[token, slot] * (w2[place] @ activated)
        return result.to(hidden.dtype if dtype is None else dtype)


def topk_softmax(
    weights: torch.Tensor,
    ids: torch.Tensor,
    token_expert_indices: torch.Tensor,
    gating: torch.Tensor,
    renorm: bool,
    num_shared: int = 0,
    func: str = "",
) -> None:
    need_dense("gating", gating, _FLOATS)
    need_dense("weights", weights, (torch.float32,))
    abort_unless(not bool(gating.isnan().any()), "a NaN, of which an id may become anything")
    for name, tensor in (("ids", ids), ("token_expert_indices", token_expert_indices)):
        need_dense(name, tensor, (torch.int32,))
        abort_unless(tensor.shape == weights.shape, f"{name} does not fit the weights")
    chosen = gating.float().softmax(-1).sort(dim=-1, descending=True, stable=True)
    top_k = weights.shape[1]
    weights.copy_(chosen.values[:, :top_k])
    if renorm:
        weights.div_(weights.sum(-1, keepdim=True))
    ids.copy_(chosen.indices[:, :top_k])


def _logical(weight: torch.Tensor) -> torch.Tensor:
    return unshuffled(weight) if getattr(weight, "is_shuffled", False) is True else weight
