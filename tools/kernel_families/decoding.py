"""The launches of what lies between two decode steps."""

from collections.abc import Iterator, Mapping
from typing import Final

import torch

from kernel_families.base import Arguments, Calls, Rules, ids
from syncline.model_ops_rocm.contracts.decoding import DecodeInputs, DecodeState
from syncline.model_ops_rocm.triton.configs.base import ConfigKey

_NUM_STATE_ROWS: Final = 257


def _int32(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int32, device="meta")


def _advances(key: ConfigKey, num_tokens: int) -> Iterator[tuple[str, Arguments]]:
    """The numbers of rows are numbers of tokens; each row has as many as the bucket says."""
    num_queries = key.up_to
    num_places = num_tokens * num_queries
    state = DecodeState(
        num_tokens_S=ids(_NUM_STATE_ROWS),
        last_ids_S=_int32(_NUM_STATE_ROWS),
        is_alive_S=torch.empty(_NUM_STATE_ROWS, dtype=torch.bool, device="meta"),
        faults_S=_int32(_NUM_STATE_ROWS),
        min_num_tokens_S=_int32(_NUM_STATE_ROWS),
        max_num_tokens_S=_int32(_NUM_STATE_ROWS),
        stop_ids_SE=_int32(_NUM_STATE_ROWS, 8),
        block_tables_SM=_int32(_NUM_STATE_ROWS, 128),
        block_size=64,
        token_ids_SL=_int32(_NUM_STATE_ROWS, 8_192),
    )
    out = DecodeInputs(
        input_ids_T=_int32(num_places),
        positions_T=ids(num_places),
        slot_mapping_T=_int32(num_places),
        seq_lens_R=_int32(num_tokens),
        num_new_R=_int32(num_tokens),
        query_start_loc_R1=_int32(num_tokens + 1) if num_queries > 1 else None,
        rows_R=_int32(num_tokens),
    )
    call: Arguments = {
        "tokens_RQ": ids(num_tokens, num_queries),
        "state": state,
        "out": out,
    }
    if num_queries > 1:
        call["num_accepted_R"] = _int32(num_tokens)
        call["drafts_RK"] = _int32(num_tokens, num_queries - 1)
    yield "both", call
    yield "lays-out", call | {"tokens_RQ": None, "num_accepted_R": None}
    yield "keeps", call | {"lays_out": False}


CALLS: Final[Mapping[str, Calls]] = {"advance": _advances}
# Numbers of one row each, looked up by that row or by its position: nothing here is a tile.
RULES: Final[Mapping[str, Rules]] = {"advance": Rules(max_narrow_loads=99, max_narrow_stores=99)}
