"""Calls of the ops between two decode steps, their numbers drawn: most rows go on, some do not."""

from dataclasses import dataclass
from typing import Final, Literal

import torch

from syncline.model_ops_rocm.contracts.decoding import DecodeInputs, DecodeState, Rejection
from syncline.model_ops_rocm.testing.parity import Arguments, Case, Maker

_NUM_IDS: Final = 12  # few, so that stop ids are met
_NOT_WRITTEN: Final = -77
TRITON_WORKSPACE: Final = 256  # bytes per place, enough for the vocabularies of these cases


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
    is_misplaced: bool = False  # packed, with rows of too many places, of none, and places of none
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
        if self.is_misplaced:
            starts[2::2] += self.num_queries
            starts += 1
            starts.clamp_(max=num_places + 2)
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
                ("misplaced", self.is_misplaced),
                (self.part, self.part != "both"),
            )
            if is_set
        ]
        shape = f"{self.num_rows}x{self.num_queries}-stops-{self.num_stop_ids}"
        return Case(op="advance", label="-".join((shape, *marks)), build=self.build)


def _verify(num_rows: int, num_drafts: int, *, is_packed: bool = False, pad: int = 0) -> Case:
    def build(make: Maker) -> Arguments:
        drafts = make.integers(-1, 3, num_rows, num_drafts, pad=pad)
        num_queries = num_drafts + 1
        out = (
            make.integers(5, 9, num_rows, num_queries, pad=1),
            make.integers(5, 9, num_rows),
        )
        if not is_packed:
            target = make.integers(0, 3, num_rows, num_queries, pad=pad).long()
            return {"drafts_RK": drafts, "target": target, "out": out}
        starts = torch.zeros(num_rows + 1, dtype=torch.int64, device=make.device)
        starts[1:] = make.integers(0, num_queries + 2, num_rows).cumsum(0)
        # The last row's places are not all there.
        target = make.integers(0, 3, num_rows * (num_queries + 1))[: num_rows * num_queries // 2]
        return {
            "drafts_RK": drafts,
            "target": target,
            "query_start_loc_R1": starts,
            "out": out,
        }

    label = f"{num_rows}x{num_drafts}" + ("-packed" if is_packed else "")
    return Case(op="verify_drafts", label=label, build=build)


def _reject(
    num_rows: int,
    num_drafts: int,
    num_ids: int,
    *,
    is_certain: bool = False,
    is_packed: bool = False,
    temperature: tuple[float, ...] = (),
) -> Case:
    """Drafts against logits; temperatures are those of the rows, in turn."""

    def build(make: Maker) -> Arguments:
        drafts = make.integers(-1, 6, num_rows, num_drafts)
        num_queries = num_drafts + 1
        target = make.randn(num_rows, num_queries, num_ids, pad=3)
        target[1::9, 0, 2] = float("nan")
        # The likely ids are drafted, so that some hold.
        target[..., :6] += 4.0
        own = target[:, :num_drafts] * 0.75 + make.randn(num_rows, num_drafts, num_ids)
        call: Arguments = {"drafts_RK": drafts}
        if is_packed:
            starts = torch.zeros(num_rows + 1, dtype=torch.int64, device=make.device)
            starts[1:] = make.integers(1, num_queries + 1, num_rows).cumsum(0)
            call["query_start_loc_R1"] = starts.int()
            target = target.flatten(0, 1)
        rejection = Rejection(
            seeds_R=make.distinct(num_rows, 10_000) << 30,
            sample_index_R=make.integers(0, 8, num_rows),
            positions_R=make.integers(-1, 40, num_rows),
            draft_logits_RKV=None if is_certain else own,
            temperature_R=_in_turn(make, temperature, num_rows),
        )
        num_bytes = TRITON_WORKSPACE * (num_rows * num_queries + 1)
        workspace = torch.zeros(num_bytes, dtype=torch.uint8, device=make.device)
        return call | {"target": target, "rejection": rejection, "workspace": workspace}

    marks = ("certain" if is_certain else "", "packed" if is_packed else "")
    shape = f"{num_rows}x{num_drafts}-of-{num_ids}"
    label = "-".join((shape, *filter(None, marks), *map(str, temperature)))
    return Case(op="verify_drafts", label=label, build=build)


def _in_turn(make: Maker, values: tuple[float, ...], num_rows: int) -> torch.Tensor | None:
    if not values:
        return None
    repeated = (values * num_rows)[:num_rows]
    return torch.tensor(repeated, dtype=torch.float32, device=make.device)


_ADVANCES: Final = (
    _Advance(num_rows=0),
    _Advance(num_rows=1),
    _Advance(num_rows=33, has_history=True, num_stop_ids=1),
    _Advance(num_rows=70, has_rows=True, num_stop_ids=9, is_long=True),
    _Advance(num_rows=5, num_stop_ids=0, block_size=1),
    _Advance(num_rows=1, num_queries=3, is_packed=True),
    _Advance(num_rows=7, num_queries=3, is_packed=True, is_misplaced=True),
    _Advance(num_rows=41, num_queries=4, is_packed=True, has_history=True, has_rows=True),
    _Advance(num_rows=9, num_queries=2, num_stop_ids=17),
    _Advance(num_rows=3, num_queries=11, is_packed=True, block_size=3, is_long=True),
    _Advance(num_rows=35, has_rows=True, part="lays-out"),
    _Advance(num_rows=12, num_queries=3, is_packed=True, part="lays-out"),
    _Advance(num_rows=12, num_queries=3, has_history=True, part="keeps"),
)
CASES: Final[tuple[Case, ...]] = (
    *(call.case() for call in _ADVANCES),
    _verify(0, 2),
    _verify(1, 0),
    _verify(1, 1),
    _verify(67, 3, pad=2),
    _verify(19, 4, is_packed=True),
    _verify(40, 1, is_packed=True, pad=1),
    _verify(3, 12),
    _reject(0, 2, 8),
    _reject(1, 0, 7),
    _reject(6, 3, 50),
    _reject(5, 2, 1_500, is_certain=True),
    _reject(5, 2, 2_304, temperature=(0.6, 0.0, 1.0, -1.0, 1.5)),
    _reject(3, 2, 1_025, is_certain=True, temperature=(0.0, 0.6)),
    _reject(4, 3, 1_100, is_packed=True, temperature=(0.9, 0.0)),
    _reject(3, 1, 300, is_packed=True, is_certain=True),
)
