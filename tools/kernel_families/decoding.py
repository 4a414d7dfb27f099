"""The launches of what lies between two decode steps."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final

import torch

from kernel_families.base import Arguments, Calls, Rules, empty, ids
from syncline.model_ops_rocm.contracts.decoding import DecodeInputs, DecodeState, Rejection
from syncline.model_ops_rocm.triton.configs.base import ConfigKey

_NUM_STATE_ROWS: Final = 257
_NUM_IDS: Final = 151_936


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


def _rejections(key: ConfigKey, num_tokens: int) -> Iterator[tuple[str, Arguments]]:
    """Rows of 4 places; the half dtypes differ in how a logit is read alone."""
    shape = (num_tokens, 4, _NUM_IDS)
    draft_logits = empty(key, num_tokens, 3, _NUM_IDS)
    rejection = Rejection(
        seeds_R=ids(num_tokens),
        sample_index_R=_int32(num_tokens),
        positions_R=ids(num_tokens),
        draft_logits_RKV=draft_logits,
        temperature_R=torch.empty(num_tokens, device="meta"),
    )
    num_bytes = num_tokens * 8 * 8 * _NUM_IDS // 1_024
    call: Arguments = {
        "drafts_RK": _int32(num_tokens, 3),
        "target": empty(key, *shape),
        "rejection": rejection,
        "workspace": torch.empty(num_bytes, dtype=torch.uint8, device="meta"),
        "out": (_int32(num_tokens, 4), _int32(num_tokens)),
    }
    yield "drawn", call
    if key.dtype is not torch.bfloat16:
        return
    certain = replace(rejection, draft_logits_RKV=None, temperature_R=None)
    yield "certain", call | {"rejection": certain}
    packed = {"target": empty(key, 4 * num_tokens, _NUM_IDS)}
    yield "packed", call | packed | {"query_start_loc_R1": _int32(num_tokens + 1)}


def _verifications(key: ConfigKey, num_tokens: int) -> Iterator[tuple[str, Arguments]]:
    if key.kind:
        if key.kind == "rejection-tiles":  # whose calls use the other kind's rows as well
            yield from _rejections(key, num_tokens)
        return
    num_queries = key.up_to
    out = _int32(num_tokens, num_queries), _int32(num_tokens)
    drafts = _int32(num_tokens, num_queries - 1)
    yield "plain", {"drafts_RK": drafts, "target": ids(num_tokens, num_queries), "out": out}
    packed: Arguments = {"drafts_RK": drafts, "target": ids(num_tokens * num_queries), "out": out}
    yield "packed", packed | {"query_start_loc_R1": _int32(num_tokens + 1)}


CALLS: Final[Mapping[str, Calls]] = {"advance": _advances, "verify_drafts": _verifications}
# Numbers of one row each, looked up by that row or by its position: nothing here is a tile.
_OF_A_ROW: Final = Rules(max_narrow_loads=99, max_narrow_stores=99)
RULES: Final[Mapping[str, Rules]] = {"advance": _OF_A_ROW, "verify_drafts": _OF_A_ROW}
