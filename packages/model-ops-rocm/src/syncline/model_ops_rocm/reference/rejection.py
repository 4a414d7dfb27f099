"""Speculative rejection sampling in PyTorch: float64 throughout, so that others have an oracle.

Source: Leviathan et al., "Fast inference from transformers via speculative decoding" (ICML 2023).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from syncline.model_ops_rocm.contracts.decoding import Rejection
from syncline.model_ops_rocm.reference.philox import PURPOSE_ACCEPT, PURPOSE_RECOVER, uniforms
from syncline.model_ops_rocm.reference.places import Places, count_leading


class Verified(NamedTuple):
    """int64 [R] each: accepted drafts, and the token after them."""

    num_accepted_R: Tensor
    last_R: Tensor


def verify_by_rejection(
    drafts_RK: Tensor, logits_PV: Tensor, places: Places, rejection: Rejection
) -> Verified:
    """See `contracts.VerifyDrafts`; `logits_PV` are those of the flat places."""
    num_rows, num_drafts = drafts_RK.shape
    drafts_RK = drafts_RK.long()
    places = places._replace(has_places_R=places.has_places_R & (rejection.positions_R >= 0))
    # Nothing is read of a place that no row has.
    padded_PV = torch.cat((logits_PV, logits_PV.new_zeros((1, logits_PV.shape[1]))))
    temperature_R = rejection.temperature_R
    if temperature_R is None:
        temperature_R = torch.ones(num_rows, device=drafts_RK.device)
    p_RQV = _probabilities(padded_PV[places.index_RQ], temperature_R)
    num_ids = p_RQV.shape[2]
    is_id_RK = (drafts_RK >= 0) & (drafts_RK < num_ids)
    known_RK = torch.where(is_id_RK, drafts_RK, 0)
    if rejection.draft_logits_RKV is None:
        q_RKV = torch.zeros_like(p_RQV[:, :num_drafts])
        q_RKV.scatter_(2, known_RK[:, :, None], is_id_RK[:, :, None].to(q_RKV.dtype))
    else:
        q_RKV = _probabilities(rejection.draft_logits_RKV, temperature_R)
    p_RK = p_RQV[:, :num_drafts].gather(2, known_RK[:, :, None])[:, :, 0]
    q_RK = q_RKV.gather(2, known_RK[:, :, None])[:, :, 0]

    order_Q = torch.arange(num_drafts + 1, device=drafts_RK.device)
    u_RQ = _uniforms(rejection, order_Q, PURPOSE_ACCEPT)
    # A greedy row's p is 1 or 0.
    is_greedy_R1 = (temperature_R == 0.0)[:, None]
    is_accepted_RK = torch.where(is_greedy_R1, p_RK > 0.0, u_RQ[:, :-1] * q_RK < p_RK)
    num_accepted_R = count_leading(is_accepted_RK & is_id_RK, places)

    at_R = num_accepted_R.clamp(min=0)
    rows_R = torch.arange(num_rows, device=drafts_RK.device)
    p_RV = p_RQV[rows_R, at_R]
    padded_RQV = torch.cat((q_RKV, q_RKV.new_zeros((num_rows, 1, num_ids))), dim=1)
    has_draft_R1 = (at_R < places.num_drafts_R)[:, None] & ~is_greedy_R1
    residual_RV = (p_RV - padded_RQV[rows_R, at_R]).clamp(min=0.0)
    mass_R1 = residual_RV.sum(dim=1, keepdim=True)
    # Where rounding left nothing of the residual, p and q are the same.
    weights_RV = torch.where(has_draft_R1 & (mass_R1 != 0.0), residual_RV, p_RV)
    u_R = _uniforms(rejection, order_Q, PURPOSE_RECOVER)[rows_R, at_R]
    return Verified(num_accepted_R, _invert(weights_RV, u_R))


def _probabilities(logits_RNV: Tensor, temperature_R: Tensor) -> Tensor:
    """float64; one-hot for a greedy row, NaN where logits or temperature are no numbers."""
    x_RNV = logits_RNV.to(torch.float64)
    temperature_R11 = temperature_R.to(torch.float64)[:, None, None]
    is_greedy_R11 = temperature_R11 == 0.0
    gaps_RNV = x_RNV - x_RNV.amax(dim=2, keepdim=True)
    p_RNV = (gaps_RNV / temperature_R11.masked_fill(is_greedy_R11, 1.0)).softmax(dim=2)
    best_RNV = torch.zeros_like(p_RNV).scatter_(2, x_RNV.argmax(dim=2, keepdim=True), 1.0)
    is_number_R11 = (temperature_R11 >= 0.0) & (temperature_R11 < float("inf"))
    is_bad_RN1 = p_RNV.sum(dim=2, keepdim=True).isnan() | ~is_number_R11
    p_RNV = torch.where(is_greedy_R11, best_RNV, p_RNV)
    return p_RNV.masked_fill(is_bad_RN1, float("nan"))


def _uniforms(rejection: Rejection, order_Q: Tensor, purpose: int) -> Tensor:
    positions_RQ = rejection.positions_R.long()[:, None] + order_Q
    seeds_RQ = rejection.seeds_R[:, None].expand_as(positions_RQ)
    samples_RQ = rejection.sample_index_R[:, None].expand_as(positions_RQ)
    return uniforms(seeds_RQ, samples_RQ, positions_RQ, purpose)


def _invert(weights_RV: Tensor, u_R: Tensor) -> Tensor:
    """The first id whose running sum passes u times the whole; -1 where weights are no numbers."""
    running_RV = weights_RV.cumsum(dim=1)
    total_R = running_RV[:, -1]
    has_weight_RV = weights_RV > 0.0
    order_V = torch.arange(weights_RV.shape[1], device=weights_RV.device)
    num_ids = len(order_V)
    is_passed_RV = has_weight_RV & (running_RV > (u_R * total_R)[:, None])
    first_R = torch.where(is_passed_RV, order_V, num_ids).amin(dim=1)
    last_R = torch.where(has_weight_RV, order_V, -1).amax(dim=1)
    chosen_R = torch.where(first_R < num_ids, first_R, last_R)
    return torch.where(total_R > 0.0, chosen_R, -1)
