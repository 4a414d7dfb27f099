"""Where a step's rows have their places, and which of their drafts count; knows no target."""

from typing import NamedTuple

import torch
from torch import Tensor


class Places(NamedTuple):
    """Where each row's places are, and how many drafts stand before the last of them."""

    index_RQ: Tensor  # int64 into the flat places, 0 where a row has none
    has_places_R: Tensor
    num_drafts_R: Tensor


def places_of(drafts_RK: Tensor, starts_R1: Tensor | None, num_places: int) -> Places:
    num_rows, num_drafts = drafts_RK.shape
    device = drafts_RK.device
    if starts_R1 is None:
        starts_R1 = torch.arange(num_rows + 1, device=device) * (num_drafts + 1)
    start_R, stop_R = starts_R1[:-1].long(), starts_R1[1:].long()
    has_places_R = (start_R >= 0) & (stop_R > start_R) & (stop_R <= num_places)
    order_K = torch.arange(num_drafts, device=device)
    is_missing_RK = (drafts_RK < 0) | (order_K >= (stop_R - start_R - 1)[:, None])
    ends_R1 = torch.full((num_rows, 1), num_drafts, device=device)
    first_missing_R = torch.cat((torch.where(is_missing_RK, order_K, num_drafts), ends_R1), 1)
    index_RQ = start_R[:, None] + torch.arange(num_drafts + 1, device=device)
    is_place_RQ = has_places_R[:, None] & (index_RQ < stop_R[:, None])
    return Places(
        index_RQ=torch.where(is_place_RQ, index_RQ, 0),
        has_places_R=has_places_R,
        num_drafts_R=first_missing_R.amin(dim=1),
    )


def count_leading(is_accepted_RK: Tensor, places: Places) -> Tensor:
    """int64 [R]: drafts accepted with all before them; -1 for a row without places."""
    order_K = torch.arange(is_accepted_RK.shape[1], device=is_accepted_RK.device)
    is_accepted_RK = is_accepted_RK & (order_K < places.num_drafts_R[:, None])
    num_accepted_R = is_accepted_RK.long().cumprod(dim=1).sum(dim=1)
    return torch.where(places.has_places_R, num_accepted_R, -1)
