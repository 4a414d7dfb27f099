"""Verifying drafts in PyTorch: whole tensors, no look at a value."""

import torch
from torch import Tensor

from syncline.model_ops_rocm.arguments.decoding import check_verify
from syncline.model_ops_rocm.contracts.decoding import Rejection
from syncline.model_ops_rocm.reference.places import Places, count_leading, places_of
from syncline.model_ops_rocm.reference.rejection import Verified, verify_by_rejection


class TorchVerifyDrafts:
    """See `contracts.VerifyDrafts`. What it needs while it runs, PyTorch allocates."""

    __slots__ = ()

    def workspace_bytes(
        self, drafts_RK: Tensor, target: Tensor, rejection: Rejection | None = None
    ) -> int:
        return 0

    def __call__(
        self,
        drafts_RK: Tensor,
        target: Tensor,
        *,
        rejection: Rejection | None = None,
        query_start_loc_R1: Tensor | None = None,
        out: tuple[Tensor, Tensor] | None = None,
        workspace: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        check_verify(
            *(drafts_RK, target),
            rejection=rejection,
            query_start_loc_R1=query_start_loc_R1,
            out=out,
        )
        if rejection is None:
            flat = target.flatten()
            places = places_of(drafts_RK, query_start_loc_R1, flat.shape[0])
            verified = _verify_exactly(drafts_RK, flat.long(), places)
        else:
            logits_PV = target.flatten(0, -2)
            places = places_of(drafts_RK, query_start_loc_R1, logits_PV.shape[0])
            verified = verify_by_rejection(drafts_RK, logits_PV, places, rejection)
        return _write_tokens(drafts_RK.long(), verified, out)


def _verify_exactly(drafts_RK: Tensor, drawn_P: Tensor, places: Places) -> Verified:
    # A step without places has none to gather.
    drawn_RQ = torch.cat((drawn_P, drawn_P.new_zeros(1)))[places.index_RQ]
    num_accepted_R = count_leading(drafts_RK == drawn_RQ[:, :-1], places)
    last_R = drawn_RQ.gather(1, num_accepted_R.clamp(min=0)[:, None])[:, 0]
    return Verified(num_accepted_R, last_R)


def _write_tokens(
    drafts_RK: Tensor, verified: Verified, out: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor]:
    """The accepted drafts, the token after them, -1."""
    num_rows, num_drafts = drafts_RK.shape
    num_accepted_R1 = verified.num_accepted_R[:, None]
    order_Q = torch.arange(num_drafts + 1, device=drafts_RK.device)
    padded_RQ = torch.cat((drafts_RK, drafts_RK.new_full((num_rows, 1), -1)), dim=1)
    tokens_RQ = torch.where(order_Q < num_accepted_R1, padded_RQ, -1)
    tokens_RQ = torch.where(order_Q == num_accepted_R1, verified.last_R[:, None], tokens_RQ)
    if out is None:
        return tokens_RQ, verified.num_accepted_R.int()
    out[0].copy_(tokens_RQ)
    out[1].copy_(verified.num_accepted_R)
    return out
