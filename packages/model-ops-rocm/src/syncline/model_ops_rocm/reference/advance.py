"""Advancing rows by their sampled tokens in PyTorch: whole tensors, no look at a value.

Where a row must not be written, a difference of zero is added: rows that share a number (padding)
then cannot overwrite each other.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from syncline.model_ops_rocm.arguments.decoding import check_advance
from syncline.model_ops_rocm.contracts.decoding import DecodeFault, DecodeInputs, DecodeState


class _Rows(NamedTuple):
    """The step's rows before it is applied."""

    index_R: Tensor  # int64 state row, 0 where there is none
    was_alive_R: Tensor
    had_R: Tensor  # int64, tokens before the step


class _Kept(NamedTuple):
    now_R: Tensor  # int64, tokens after the step
    last_R: Tensor  # int64, the last of them
    num_kept_R: Tensor
    num_new_R: Tensor
    is_alive_R: Tensor
    faults_R: Tensor  # int64


def advance(
    tokens_RQ: Tensor | None,
    state: DecodeState,
    out: DecodeInputs,
    *,
    num_accepted_R: Tensor | None = None,
    drafts_RK: Tensor | None = None,
    lays_out: bool = True,
) -> DecodeInputs:
    """See `contracts.Advance`."""
    num_rows, num_queries = check_advance(
        *(tokens_RQ, state, out),
        num_accepted_R=num_accepted_R,
        drafts_RK=drafts_RK,
        lays_out=lays_out,
    )
    if num_rows == 0:
        return out
    rows = _rows(state, out)
    if tokens_RQ is None:
        kept = _kept_before(state, rows)
    else:
        accepted_R = 0 if num_accepted_R is None else num_accepted_R.long()
        kept = _keep(tokens_RQ.long(), state, rows, torch.zeros_like(rows.had_R) + accepted_R + 1)
        out.num_new_R.copy_(kept.num_new_R)
    if lays_out:
        ids_RQ = kept.last_R.new_zeros((num_rows, num_queries))
        ids_RQ[:, 0] = kept.last_R
        if drafts_RK is not None:
            ids_RQ[:, 1:] = drafts_RK.clamp(min=0)
        kept = _lay_out(ids_RQ, state, rows, kept, out)
    _store(state, rows, kept, tokens_RQ)
    return out


def _rows(state: DecodeState, out: DecodeInputs) -> _Rows:
    num_state_rows, rows_R = state.num_tokens_S.shape[0], out.rows_R
    if rows_R is None:
        rows_R = torch.arange(out.seq_lens_R.shape[0], device=out.seq_lens_R.device)
    is_row_R = (rows_R >= 0) & (rows_R < num_state_rows)
    index_R = torch.where(is_row_R, rows_R, 0).long()
    return _Rows(
        index_R=index_R,
        was_alive_R=state.is_alive_S[index_R] & is_row_R,
        had_R=state.num_tokens_S[index_R].long(),
    )


def _kept_before(state: DecodeState, rows: _Rows) -> _Kept:
    """Nothing new: every row stands where it stood."""
    zeros_R = torch.zeros_like(rows.had_R)
    return _Kept(
        now_R=rows.had_R,
        last_R=state.last_ids_S[rows.index_R].long(),
        num_kept_R=zeros_R,
        num_new_R=zeros_R,
        is_alive_R=rows.was_alive_R,
        faults_R=zeros_R,
    )


def _keep(tokens_RQ: Tensor, state: DecodeState, rows: _Rows, num_R: Tensor) -> _Kept:
    """The earliest end over every criterion among the `num_R` tokens of each row."""
    num_queries = tokens_RQ.shape[1]
    order_Q = torch.arange(num_queries, device=tokens_RQ.device)
    is_counted_R = rows.was_alive_R & (num_R >= 1) & (num_R <= num_queries)
    num_R = torch.where(is_counted_R, num_R, 0)
    is_new_RQ = order_Q < num_R[:, None]
    limit_R = state.max_num_tokens_S[rows.index_R].long()
    if state.token_ids_SL is not None:
        limit_R = limit_R.clamp(max=state.token_ids_SL.shape[1])
    stop_ids_RE = state.stop_ids_SE[rows.index_R]
    is_stop_RQ = (
        (tokens_RQ[:, :, None] == stop_ids_RE[:, None]) & (tokens_RQ >= 0)[:, :, None]
    ).any(-1)
    min_R = state.min_num_tokens_S[rows.index_R]
    is_stop_RQ &= is_new_RQ & (rows.had_R[:, None] + order_Q + 1 >= min_R[:, None])
    first_stop_R = _first(is_stop_RQ)
    first_bad_R = _first(is_new_RQ & (tokens_RQ < 0))

    room_R = (limit_R - rows.had_R).clamp(min=0)
    num_kept_R = torch.minimum(torch.minimum(num_R, first_bad_R), room_R)
    num_kept_R = torch.minimum(num_kept_R, first_stop_R + 1)
    now_R = rows.had_R + num_kept_R
    has_ended_R = (first_stop_R < num_kept_R) | (now_R >= limit_R)
    is_bad_R = (first_bad_R < num_R) & ~has_ended_R
    faults_R = torch.where(is_bad_R, int(DecodeFault.BAD_TOKEN), 0)
    faults_R = torch.where(rows.was_alive_R & ~is_counted_R, int(DecodeFault.BAD_COUNT), faults_R)
    last_R = tokens_RQ.gather(1, (num_kept_R - 1).clamp(min=0)[:, None])[:, 0]
    last_R = torch.where(num_kept_R > 0, last_R, state.last_ids_S[rows.index_R])
    return _Kept(
        now_R=now_R,
        last_R=last_R,
        num_kept_R=num_kept_R,
        num_new_R=torch.where(is_bad_R, first_bad_R, num_R),
        is_alive_R=is_counted_R & ~has_ended_R & ~is_bad_R,
        faults_R=faults_R,
    )


def _first(is_it_RQ: Tensor) -> Tensor:
    """Where the first True of each row is; Q where there is none."""
    num_queries = is_it_RQ.shape[1]
    order_Q = torch.arange(num_queries, device=is_it_RQ.device)
    return torch.where(is_it_RQ, order_Q, num_queries).amin(dim=1)


def _lay_out(
    ids_RQ: Tensor,
    state: DecodeState,
    rows: _Rows,
    kept: _Kept,
    out: DecodeInputs,
) -> _Kept:
    """Write the next step's inputs; returns `kept` without the rows that cannot go on."""
    num_places, (num_rows, num_queries) = out.input_ids_T.shape[0], ids_RQ.shape
    order_Q = torch.arange(num_queries, device=ids_RQ.device)
    starts_R1 = torch.arange(num_rows + 1, device=ids_RQ.device)
    if out.query_start_loc_R1 is not None:
        starts_R1 = out.query_start_loc_R1.long()
    start_R, stop_R = starts_R1[:-1], starts_R1[1:]
    num_R = stop_R - start_R
    has_places_R = (start_R >= 0) & (num_R >= 1) & (num_R <= num_queries) & (stop_R <= num_places)
    is_place_RQ = has_places_R[:, None] & (order_Q < num_R[:, None])

    positions_RQ = kept.now_R[:, None] - 1 + order_Q
    entries_RQ = positions_RQ // state.block_size
    tables_RM = state.block_tables_SM[rows.index_R].long()
    num_entries = tables_RM.shape[1]
    # A table without entries has none to gather: every block is missing.
    padded_RM = torch.cat((tables_RM, tables_RM.new_full((len(tables_RM), 1), -1)), dim=1)
    is_entry_RQ = (entries_RQ >= 0) & (entries_RQ < num_entries)
    blocks_RQ = padded_RM.gather(1, torch.where(is_entry_RQ, entries_RQ, num_entries))
    is_missing_R = (is_place_RQ & (blocks_RQ < 0)).any(dim=1)
    faults_R = torch.where(is_missing_R, int(DecodeFault.MISSING_BLOCK), 0)
    faults_R = torch.where(has_places_R, faults_R, int(DecodeFault.BAD_PLACES))
    faults_R = torch.where(kept.is_alive_R, faults_R, 0)
    is_alive_R = kept.is_alive_R & (faults_R == 0)

    slots_RQ = blocks_RQ * state.block_size + positions_RQ % state.block_size
    is_used_RQ = is_place_RQ & is_alive_R[:, None]
    # The place beyond the last takes what is not to be written.
    places_N = torch.where(is_used_RQ, start_R[:, None] + order_Q, num_places).flatten()
    for vector_T, values_RQ, fill in (
        (out.input_ids_T, ids_RQ, 0),
        (out.positions_T, positions_RQ, 0),
        (out.slot_mapping_T, slots_RQ, -1),
    ):
        padded_T = values_RQ.new_full((num_places + 1,), fill)
        vector_T.copy_(padded_T.index_put_((places_N,), values_RQ.flatten())[:num_places])
    out.seq_lens_R.copy_(torch.where(is_alive_R, kept.now_R + num_R - 1, 0))
    return kept._replace(is_alive_R=is_alive_R, faults_R=kept.faults_R | faults_R)


def _store(state: DecodeState, rows: _Rows, kept: _Kept, tokens_RQ: Tensor | None) -> None:
    index_R = rows.index_R
    has_died_S = torch.zeros_like(state.faults_S).index_add_(
        0, index_R, (rows.was_alive_R & ~kept.is_alive_R).int()
    )
    state.is_alive_S.logical_and_(has_died_S == 0)
    new_R = kept.faults_R.int() & ~state.faults_S[index_R]
    state.faults_S.index_add_(0, index_R, new_R)
    if tokens_RQ is None:
        return
    tokens_RQ = tokens_RQ.long()
    num_tokens_S, last_ids_S = state.num_tokens_S, state.last_ids_S
    change_R = torch.where(kept.num_kept_R > 0, kept.last_R - last_ids_S[index_R], 0)
    last_ids_S.index_add_(0, index_R, change_R.to(last_ids_S.dtype))
    num_tokens_S.index_add_(0, index_R, kept.num_kept_R.to(num_tokens_S.dtype))
    if state.token_ids_SL is None or state.token_ids_SL.shape[1] == 0:
        return
    history_SL = state.token_ids_SL
    order_Q = torch.arange(tokens_RQ.shape[1], device=tokens_RQ.device)
    is_kept_RQ = order_Q < kept.num_kept_R[:, None]
    at_RQ = (rows.had_R[:, None] + order_Q).clamp(0, history_SL.shape[1] - 1)
    where = (index_R[:, None].expand_as(at_RQ), at_RQ)
    change_RQ = torch.where(is_kept_RQ, tokens_RQ - history_SL[where].long(), 0)
    history_SL.index_put_(where, change_RQ.to(history_SL.dtype), accumulate=True)
