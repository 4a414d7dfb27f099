"""Advancing rows by their sampled tokens, by Triton: one launch."""

from typing import Final

import torch

from syncline.model_ops_rocm.arguments.decoding import ADVANCE, check_advance
from syncline.model_ops_rocm.contracts.decoding import DecodeInputs, DecodeState
from syncline.model_ops_rocm.triton.geometry import power_of_two
from syncline.model_ops_rocm.triton.kernels.advance import advance_kernel
from syncline.model_ops_rocm.triton.launch import LAUNCHER, require_reachable

_STATE: Final = (
    *("state.num_tokens", "state.last_ids", "state.is_alive", "state.faults"),
    *("state.min_num_tokens", "state.max_num_tokens"),
    *("state.stop_ids", "state.block_tables", "state.token_ids"),
)
_WRITTEN: Final = (
    *("out.input_ids", "out.positions", "out.slot_mapping"),
    *("out.seq_lens", "out.num_new"),
)


def advance(
    tokens_RQ: torch.Tensor | None,
    state: DecodeState,
    out: DecodeInputs,
    *,
    num_accepted_R: torch.Tensor | None = None,
    drafts_RK: torch.Tensor | None = None,
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
    history = state.token_ids_SL
    vectors = (
        *(state.num_tokens_S, state.last_ids_S, state.is_alive_S, state.faults_S),
        *(state.min_num_tokens_S, state.max_num_tokens_S),
        *(state.stop_ids_SE, state.block_tables_SM, history),
    )
    written = (
        *(out.input_ids_T, out.positions_T, out.slot_mapping_T),
        *(out.seq_lens_R, out.num_new_R),
    )
    given = (tokens_RQ, num_accepted_R, drafts_RK, out.query_start_loc_R1, out.rows_R)
    _require_reachable(given, vectors, written)
    chosen = LAUNCHER.config(ADVANCE, torch.int32, num_queries)
    LAUNCHER.launch(
        advance_kernel,
        (-(-num_rows // chosen[1].constants["BLOCK_ROWS"]),),
        chosen,
        (
            *given,
            *vectors,
            *written,
            *(num_rows, state.num_tokens_S.shape[0], out.input_ids_T.shape[0]),
            *_strides(tokens_RQ),
            _stride(num_accepted_R),
            *_strides(drafts_RK),
            _stride(out.rows_R),
            state.stop_ids_SE.stride(0),
            state.block_tables_SM.stride(0),
            _stride(history),
        ),
        {
            "NUM_QUERIES": num_queries,
            "NUM_STOP_IDS": state.stop_ids_SE.shape[1],
            "NUM_ENTRIES": state.block_tables_SM.shape[1],
            "HISTORY_LENGTH": 0 if history is None else history.shape[1],
            "BLOCK_SIZE": state.block_size,
            "LAYS_OUT": lays_out,
            "BLOCK_QUERIES": power_of_two(num_queries),
        },
    )
    return out


def _strides(matrix: torch.Tensor | None) -> tuple[int, int]:
    return (0, 0) if matrix is None else (matrix.stride(0), matrix.stride(1))


def _stride(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.stride(0)


def _require_reachable(
    given: tuple[torch.Tensor | None, ...],
    vectors: tuple[torch.Tensor | None, ...],
    written: tuple[torch.Tensor, ...],
) -> None:
    named = (
        *zip(("tokens", "num_accepted", "drafts"), given[:3], strict=True),
        *zip(("out.query_start_loc", "out.rows"), given[3:], strict=True),
        *zip(_STATE, vectors, strict=True),
        *zip(_WRITTEN, written, strict=True),
    )
    require_reachable(ADVANCE, **dict(named))
