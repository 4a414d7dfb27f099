"""Calls of the ops between two decode steps, their numbers drawn: most rows go on, some do not."""

from dataclasses import dataclass
from typing import Final, Literal

import torch

from syncline.model_ops_rocm.contracts.decoding import DecodeInputs, DecodeState
from syncline.model_ops_rocm.testing.parity import Arguments, Case, Maker

_NUM_IDS: Final = 12  # few, so that stop ids are met
_NOT_WRITTEN: Final = -77


@dataclass(frozen=True, slots=True, kw_only=True)
class _Advance:
    """One call: R rows of Q tokens, E stop ids; numbers of int32, or int64 if `is_long`."""

    num_rows: int
    num_queries: int = 1
    num_stop_ids: int = 3
    block_size: int = 4
    has_history: bool = False
    has_rows: bool = False  # of more state rows, with padding
    is_packed: bool = False
    is_long: bool = False
    part: Literal["both", "keeps", "lays-out"] = "both"

    @property
    def dtype(self) -> torch.dtype:
        return torch.int64 if self.is_long else torch.int32

    def build(self, make: Maker) -> Arguments:
        num_rows, num_queries = self.num_rows, self.num_queries
        num_state_rows = 2 * num_rows + 3 if self.has_rows else num_rows
        tokens = make.integers(-1, _NUM_IDS, num_rows, num_queries, pad=1)
        call: Arguments = {
            "tokens_RQ": None if self.part == "lays-out" else tokens,
            "state": self._state(make, num_state_rows),
            "out": self._out(make, num_state_rows),
        }
        if self.part == "keeps":
            call["lays_out"] = False
        if num_queries > 1:
            call["num_accepted_R"] = make.integers(0, num_queries, num_rows)
            call["drafts_RK"] = make.integers(-1, _NUM_IDS, num_rows, num_queries - 1, pad=2)
        return call

    def _state(self, make: Maker, num_rows: int) -> DecodeState:
        num_entries = 6
        num_tokens = make.integers(1, num_entries * self.block_size, num_rows)
        tables = make.integers(0, 100, num_rows, num_entries, pad=2)
        tables[make.integers(0, 8, num_rows, num_entries) == 0] = -1
        stop_ids = make.integers(0, 8 * _NUM_IDS, num_rows, self.num_stop_ids)
        stop_ids[stop_ids >= 2 * _NUM_IDS] = -1
        places = num_entries * self.block_size
        return DecodeState(
            num_tokens_S=num_tokens.to(self.dtype),
            last_ids_S=make.integers(0, _NUM_IDS, num_rows),
            is_alive_S=make.integers(0, 6, num_rows) > 0,
            faults_S=torch.zeros(num_rows, dtype=torch.int32, device=make.device),
            min_num_tokens_S=num_tokens + make.integers(-2, 3, num_rows),
            max_num_tokens_S=(num_tokens + make.integers(0, 8, num_rows)).to(self.dtype),
            stop_ids_SE=stop_ids,
            block_tables_SM=tables,
            block_size=self.block_size,
            token_ids_SL=make.integers(0, 9, num_rows, places, pad=3) if self.has_history else None,
        )

    def _out(self, make: Maker, num_state_rows: int) -> DecodeInputs:
        num_rows = self.num_rows
        num_places = num_rows * (self.num_queries if self.is_packed else 1)
        starts = torch.zeros(num_rows + 1, dtype=torch.int32, device=make.device)
        starts[1:] = make.integers(1, self.num_queries + 1, num_rows).cumsum(0)
        rows = make.distinct(num_rows, max(num_rows, num_state_rows))
        rows[1::5] = -1

        def empty(length: int, dtype: torch.dtype) -> torch.Tensor:
            # With room around it, which must stay as it is.
            return torch.full((length + 4,), _NOT_WRITTEN, dtype=dtype, device=make.device)[2:-2]

        return DecodeInputs(
            input_ids_T=empty(num_places, torch.int32),
            positions_T=empty(num_places, torch.int64),
            slot_mapping_T=empty(num_places, self.dtype),
            seq_lens_R=empty(num_rows, torch.int32),
            num_new_R=empty(num_rows, torch.int32),
            query_start_loc_R1=starts if self.is_packed else None,
            rows_R=rows if self.has_rows else None,
        )

    def case(self) -> Case:
        marks = [
            mark
            for mark, is_set in (
                ("history", self.has_history),
                ("rows", self.has_rows),
                ("packed", self.is_packed),
                ("long", self.is_long),
                (self.part, self.part != "both"),
            )
            if is_set
        ]
        shape = f"{self.num_rows}x{self.num_queries}-stops-{self.num_stop_ids}"
        return Case(op="advance", label="-".join((shape, *marks)), build=self.build)


CASES: Final[tuple[Case, ...]] = tuple(
    call.case()
    for call in (
        _Advance(num_rows=0),
        _Advance(num_rows=1),
        _Advance(num_rows=33, has_history=True, num_stop_ids=1),
        _Advance(num_rows=70, has_rows=True, num_stop_ids=9, is_long=True),
        _Advance(num_rows=5, num_stop_ids=0, block_size=1),
        _Advance(num_rows=1, num_queries=3, is_packed=True),
        _Advance(num_rows=41, num_queries=4, is_packed=True, has_history=True, has_rows=True),
        _Advance(num_rows=9, num_queries=2, num_stop_ids=17),
        _Advance(num_rows=3, num_queries=11, is_packed=True, block_size=3, is_long=True),
        _Advance(num_rows=35, has_rows=True, part="lays-out"),
        _Advance(num_rows=12, num_queries=3, is_packed=True, part="lays-out"),
        _Advance(num_rows=12, num_queries=3, has_history=True, part="keeps"),
    )
)
