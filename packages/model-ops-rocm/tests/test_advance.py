"""Advancing rows by their tokens: against plain Python, row by row, and what is refused."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, cast  # Any: fields of several types

import pytest
import torch

from syncline.model_ops_rocm import DecodeFault, DecodeInputs, DecodeState, select
from syncline.model_ops_rocm.testing.cases.decoding import CASES
from syncline.model_ops_rocm.testing.parity import Case, Maker
from syncline.model_ops_rocm.testing.syncs import NoHostSync

# What stands in wrong places has no row to be compared with: for that the backends are compared.
ADVANCES = [case for case in CASES if case.op == "advance" and "misplaced" not in case.label]
advance = select("advance", dtype=torch.float32)
Ids = list[int]
Place = tuple[int, int, int]  # id, position, slot


def ids(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@dataclass(slots=True, kw_only=True)
class Row:
    """One state row as Python numbers; `history` is None where there is none."""

    num_tokens: int
    last_id: int
    is_alive: bool
    faults: int
    least: int
    limit: int
    stop_ids: Ids
    table: Ids
    history: Ids | None


def keep(row: Row, tokens: Ids) -> int:
    """The tokens that it yields, one after another; changes `row`; returns how many came."""
    limit = row.limit if row.history is None else min(row.limit, len(row.history))
    for index, token in enumerate(tokens):
        if row.num_tokens >= limit:
            row.is_alive = False
            break
        if token < 0:
            row.is_alive = False
            row.faults |= DecodeFault.BAD_TOKEN
            return index
        if row.history is not None:
            row.history[row.num_tokens] = token
        row.num_tokens += 1
        row.last_id = token
        if (token in row.stop_ids and row.num_tokens >= row.least) or row.num_tokens >= limit:
            row.is_alive = False
            break
    return len(tokens)


def lay_out(row: Row, drafts: Ids, num_places: int, block_size: int) -> tuple[list[Place], int]:
    """Its places of the next step, and its seq_len; changes `row` if it cannot go on."""
    nothing = [(0, 0, -1)] * num_places, 0
    if not row.is_alive:
        return nothing
    places = []
    ids = [row.last_id, *(max(draft, 0) for draft in drafts)]
    for index, token in enumerate(ids[:num_places]):
        position = row.num_tokens - 1 + index
        entry = position // block_size
        block = row.table[entry] if entry < len(row.table) else -1
        if block < 0:
            row.is_alive = False
            row.faults |= DecodeFault.MISSING_BLOCK
            return nothing
        places.append((token, position, block * block_size + position % block_size))
    return places, row.num_tokens + num_places - 1


NOBODY = Row(
    num_tokens=0,
    last_id=0,
    is_alive=False,
    faults=0,
    least=0,
    limit=0,
    stop_ids=[],
    table=[],
    history=None,
)
OPTIONAL = ("num_accepted_R", "drafts_RK")


def vectors_of(out: DecodeInputs) -> tuple[torch.Tensor, ...]:
    places = (out.input_ids_T, out.positions_T, out.slot_mapping_T)
    return (*places, out.seq_lens_R, out.num_new_R)


def rows_of(state: DecodeState) -> list[Row]:
    history = state.token_ids_SL
    return [
        Row(
            num_tokens=int(state.num_tokens_S[row]),
            last_id=int(state.last_ids_S[row]),
            is_alive=bool(state.is_alive_S[row]),
            faults=int(state.faults_S[row]),
            least=int(state.min_num_tokens_S[row]),
            limit=int(state.max_num_tokens_S[row]),
            stop_ids=[one for one in state.stop_ids_SE[row].tolist() if one >= 0],
            table=state.block_tables_SM[row].tolist(),
            history=None if history is None else history[row].tolist(),
        )
        for row in range(len(state.num_tokens_S))
    ]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("case", ADVANCES, ids=str)
def test_each_row_is_what_one_token_after_another_makes_of_it(case: Case, seed: int) -> None:
    call = case.build(Maker(torch.float32, seed=seed))
    tokens = cast(torch.Tensor | None, call["tokens_RQ"])
    state, out = cast(DecodeState, call["state"]), cast(DecodeInputs, call["out"])
    accepted, drafts = (cast(torch.Tensor | None, call.get(one)) for one in OPTIONAL)
    num_rows = len(out.seq_lens_R)
    starts = list(range(num_rows + 1))
    if out.query_start_loc_R1 is not None:
        starts = out.query_start_loc_R1.tolist()
    rows = rows_of(state)
    listed = range(num_rows) if out.rows_R is None else out.rows_R.tolist()
    before = [vector.tolist() for vector in vectors_of(out)]
    with NoHostSync():
        cast(Callable[..., object], advance)(**call)

    places: list[Place] = []
    seq_lens, num_new = [], []
    for r, number in enumerate(listed):
        row = rows[number] if number >= 0 else NOBODY
        if tokens is not None:
            count = 1 if accepted is None else int(accepted[r]) + 1
            num_new.append(keep(row, tokens[r, :count].tolist()) if row.is_alive else 0)
        if call.get("lays_out", True):
            own = [] if drafts is None else drafts[r].tolist()
            num_places = starts[r + 1] - starts[r]
            own_places, seq_len = lay_out(row, own, num_places, state.block_size)
            places += own_places
            seq_lens.append(seq_len)
    if places:
        places += [(0, 0, -1)] * (len(out.input_ids_T) - len(places))
    assert rows_of(state) == rows
    expected = [*(list(one) for one in zip(*places, strict=True)), seq_lens, num_new]
    expected = [[], [], [], *expected] if not places else expected
    for found, wanted, untouched in zip(vectors_of(out), expected, before, strict=True):
        assert found.tolist() == (wanted or untouched)


def test_the_drawn_cases_have_every_end_that_there_is() -> None:
    ends: set[object] = set()
    for case in ADVANCES:
        call = case.build(Maker(torch.float32))
        state = cast(DecodeState, call["state"])
        before = rows_of(state)
        cast(Callable[..., object], advance)(**call)
        for old, new in zip(before, rows_of(state), strict=True):
            ends.add(("fault", new.faults))
            ends.add(("alive", old.is_alive, new.is_alive))
            ends.add(("length", new.num_tokens >= new.limit))
    assert {("fault", int(fault)) for fault in (0, 1, 4)} <= ends
    assert {("alive", True, True), ("alive", True, False), ("alive", False, False)} <= ends
    assert {("length", True), ("length", False)} <= ends


def one_row(num_queries: int = 1, **changed: Any) -> tuple[DecodeState, DecodeInputs]:
    """A row of 5 tokens in blocks 8 and 9 of 4 tokens, and the next step's inputs."""
    state = DecodeState(
        num_tokens_S=ids(5),
        last_ids_S=ids(6),
        is_alive_S=torch.tensor([True]),
        faults_S=ids(0),
        min_num_tokens_S=ids(0),
        max_num_tokens_S=ids(100),
        stop_ids_SE=torch.tensor([[2, -1]]),
        block_tables_SM=torch.tensor([[8, 9, -1, 7]]),
        block_size=4,
    )
    out = DecodeInputs(
        input_ids_T=ids(*[9] * num_queries),
        positions_T=ids(*[9] * num_queries),
        slot_mapping_T=ids(*[9] * num_queries),
        seq_lens_R=ids(9),
        num_new_R=ids(9),
        query_start_loc_R1=ids(0, num_queries) if num_queries > 1 else None,
    )
    return replace(state, **changed), out


def test_a_window_runs_until_its_row_stops_and_then_changes_nothing() -> None:
    state, out = one_row()
    seen = []
    for token in (4, 3, 2, 6):
        advance(torch.tensor([[token]]), state, out)
        place = [int(vector) for vector in (out.input_ids_T, out.positions_T, out.slot_mapping_T)]
        seen.append((*place, int(out.seq_lens_R), int(out.num_new_R)))
    assert seen == [(4, 5, 37, 6, 1), (3, 6, 38, 7, 1), (0, 0, -1, 0, 1), (0, 0, -1, 0, 0)]
    assert (int(state.num_tokens_S), bool(state.is_alive_S), int(state.faults_S)) == (8, False, 0)


def test_a_window_begins_with_a_layout_and_ends_without_one() -> None:
    state, out = one_row(num_tokens_S=ids(7))
    advance(None, state, out)
    assert (int(out.input_ids_T), int(out.positions_T), int(out.slot_mapping_T)) == (6, 6, 38)
    assert (int(out.seq_lens_R), int(out.num_new_R)) == (7, 9)
    advance(torch.tensor([[4]]), state, out)
    assert (int(out.input_ids_T), int(out.slot_mapping_T), int(out.seq_lens_R)) == (4, 39, 8)
    # The block of the place after it is not reserved before the next plan: no fault.
    advance(torch.tensor([[3]]), state, out, lays_out=False)
    assert (int(out.input_ids_T), int(out.slot_mapping_T), int(out.seq_lens_R)) == (4, 39, 8)
    assert (int(state.num_tokens_S), int(state.last_ids_S), int(out.num_new_R)) == (9, 3, 1)
    assert (bool(state.is_alive_S), int(state.faults_S)) == (True, 0)
    state.block_tables_SM[0, 2] = 5
    advance(None, state, out)
    assert (int(out.input_ids_T), int(out.slot_mapping_T), int(out.seq_lens_R)) == (3, 20, 9)


def test_a_missing_block_stops_the_row_with_a_fault_and_writes_nowhere() -> None:
    state, out = one_row(num_tokens_S=ids(8))
    advance(torch.tensor([[4]]), state, out)
    assert (int(out.slot_mapping_T), int(out.seq_lens_R), int(out.num_new_R)) == (-1, 0, 1)
    assert (bool(state.is_alive_S), int(state.faults_S)) == (False, DecodeFault.MISSING_BLOCK)
    assert int(state.num_tokens_S) == 9  # The token is kept all the same: it was sampled.

    # A row that is said to live without a token has no place either.
    state, out = one_row(num_tokens_S=ids(0))
    advance(None, state, out)
    assert (int(out.slot_mapping_T), int(out.seq_lens_R)) == (-1, 0)
    assert (bool(state.is_alive_S), int(state.faults_S)) == (False, DecodeFault.MISSING_BLOCK)

    # Behind the table's end as well, and for a draft's place as for the token's.
    for num_tokens, num_queries in ((16, 1), (7, 2)):
        state, out = one_row(num_queries, num_tokens_S=ids(num_tokens))
        tokens = torch.full((1, num_queries), 4)
        accepted = ids(0) if num_queries > 1 else None
        advance(tokens, state, out, num_accepted_R=accepted)
        assert set(out.slot_mapping_T.tolist()) == {-1}
        assert int(state.faults_S) == DecodeFault.MISSING_BLOCK


@pytest.mark.parametrize("accepted", [-1, 2, 1_000, -(2**31)])
def test_a_number_of_accepted_drafts_that_cannot_be_stops_the_row(accepted: int) -> None:
    state, out = one_row(2)
    tokens = torch.tensor([[4, 3]])
    advance(tokens, state, out, num_accepted_R=ids(accepted))
    assert (bool(state.is_alive_S), int(state.faults_S)) == (False, DecodeFault.BAD_COUNT)
    assert (int(state.num_tokens_S), int(out.num_new_R)) == (5, 0)
    assert out.slot_mapping_T.tolist() == [-1, -1]


@pytest.mark.parametrize("starts", [(0, 0), (0, 3), (1, 3), (-1, 1), (2, 1)])
def test_places_that_cannot_be_stop_the_row(starts: tuple[int, int]) -> None:
    state, out = one_row(2)
    out = replace(out, query_start_loc_R1=ids(*starts))
    advance(torch.tensor([[4, 3]]), state, out, num_accepted_R=ids(1))
    assert (bool(state.is_alive_S), int(state.faults_S)) == (False, DecodeFault.BAD_PLACES)
    assert int(state.num_tokens_S) == 7
    assert not set(out.slot_mapping_T.tolist()) - {-1, 9}


def test_a_fault_is_added_to_those_before_it() -> None:
    state, out = one_row(faults_S=ids(16), num_tokens_S=ids(8))
    advance(torch.tensor([[4]]), state, out)
    assert int(state.faults_S) == 16 | DecodeFault.MISSING_BLOCK


def test_a_history_ends_a_row_where_it_is_full() -> None:
    state, out = one_row(token_ids_SL=torch.zeros(1, 7, dtype=torch.int64))
    for token in (4, 3, 1):
        advance(torch.tensor([[token]]), state, out)
    assert state.token_ids_SL is not None
    assert state.token_ids_SL.tolist() == [[0, 0, 0, 0, 0, 4, 3]]
    assert (int(state.num_tokens_S), bool(state.is_alive_S), int(state.faults_S)) == (7, False, 0)


def test_padding_rows_never_touch_the_state_row_they_share() -> None:
    state, out = one_row()
    rows = ids(-1, 0, -1, 5, -7)
    out = DecodeInputs(
        **{
            name: ids(*[9] * 5)
            for name in ("input_ids_T", "positions_T", "slot_mapping_T", "seq_lens_R", "num_new_R")
        },
        rows_R=rows,
    )
    advance(torch.tensor([[6], [4], [6], [6], [6]]), state, out)
    assert out.slot_mapping_T.tolist() == [-1, 37, -1, -1, -1]
    assert out.num_new_R.tolist() == [0, 1, 0, 0, 0]
    assert (int(state.num_tokens_S), bool(state.is_alive_S)) == (6, True)


def test_what_is_wrong_is_named() -> None:
    state, out = one_row()
    tokens = torch.tensor([[4]])
    pair = torch.tensor([[4, 4]])

    def refused(match: str, *args: object, **kwargs: object) -> None:
        with pytest.raises(ValueError, match=rf"^advance: {match}"):
            cast(Callable[..., object], advance)(*args, **kwargs)

    refused(r"tokens must be int64 or int32, got torch.float32", tokens.float(), state, out)
    refused(r"tokens must have 2 dimensions, got \[1\]", tokens[0], state, out)
    refused(r"tokens must have at least one token per row", tokens[:, :0], state, out)
    refused(r"tokens must be given where no step is", None, state, out, lays_out=False)
    refused(r"state.block_size must be positive, got 0", tokens, replace(state, block_size=0), out)
    refused(r"num_accepted must be given for 2 tokens per row, got None", pair, state, out)
    refused(
        r"num_accepted must be one-dimensional with 1 entries, got \[2\]",
        *(pair, state, out),
        num_accepted_R=ids(0, 0),
    )
    refused(r"drafts must have shape \[1, 0\], got \[1, 2\]", tokens, state, out, drafts_RK=pair)
    refused(
        r"state.is_alive must be torch.bool, got torch.int32",
        *(tokens, replace(state, is_alive_S=ids(1)), out),
    )
    refused(
        r"state.faults must be torch.int32, got torch.int64",
        *(tokens, replace(state, faults_S=torch.tensor([0])), out),
    )
    no_rows = {
        field.name: getattr(state, field.name)[:0]
        for field in fields(state)
        if isinstance(getattr(state, field.name), torch.Tensor)
    }
    padding = replace(out, rows_R=ids(-1))
    message = r"state.num_tokens must have a row, got \[0\]"
    refused(message, tokens, replace(state, **no_rows), padding)
    refused(
        r"state.max_num_tokens must be one-dimensional with 1 entries, got \[2\]",
        *(tokens, replace(state, max_num_tokens_S=ids(1, 1)), out),
    )
    wide = torch.zeros(1, 8, dtype=torch.int32)[:, ::2]
    refused(
        r"state.block_tables must have contiguous rows, got strides \(8, 2\)",
        *(tokens, replace(state, block_tables_SM=wide), out),
    )
    refused(
        r"state.stop_ids must have shape \[1, 1\], got \[2, 1\]",
        *(tokens, replace(state, stop_ids_SE=torch.zeros(2, 1).int()), out),
    )
    refused(
        r"state.num_tokens must have the 2 rows of tokens, without out.rows, got 1",
        *(torch.tensor([[4], [4]]), state, out),
    )
    refused(
        r"out.positions must be int64 or int32, got torch.float32",
        *(tokens, state, replace(out, positions_T=torch.zeros(1))),
    )
    refused(
        r"out.slot_mapping must be one-dimensional with 1 entries, got \[2\]",
        *(tokens, state, replace(out, slot_mapping_T=ids(9, 9))),
    )
    places = {name: ids(9, 9) for name in ("input_ids_T", "positions_T", "slot_mapping_T")}
    refused(
        r"out.input_ids must have 1 places, one per row, without query_start_loc, got 2",
        *(tokens, state, replace(out, **places)),
    )
    refused(
        r"out.input_ids must have at most 1 x 1 places, got 2",
        *(tokens, state, replace(out, **places, query_start_loc_R1=ids(0, 1))),
    )
