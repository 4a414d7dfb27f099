"""The device stops a row where the scheduler ends its sequence: one against the other.

A window of steps runs without the host, so the device's rules are the scheduler's rules once more.
"""

from dataclasses import replace
from itertools import product

import pytest
import torch

from syncline.kv_cache import KVCacheManager
from syncline.model_ops_rocm import DecodeInputs, DecodeState, select
from syncline.scheduler_core import Scheduler, Sequence, StepPlan, StopRules
from syncline.scheduler_core.stopping import earliest_stop
from syncline.scheduler_core.testing import (
    make_config,
    make_counted_result,
    make_request,
    make_scheduler,
)

PLAIN, STOP, EOS = 3, 7, 5
BLOCK_SIZE = 4
advance = select("advance", dtype=torch.float32)


def ids(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def small_rules() -> list[StopRules]:
    return [
        StopRules(
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            stop_token_ids=frozenset({STOP}),
            eos_token_ids=frozenset({EOS}),
            ignore_eos=ignore_eos,
        )
        for max_tokens in (1, 2, 3, 4)
        for min_tokens in range(max_tokens + 1)
        for ignore_eos in (False, True)
    ]


def empty_inputs(num_rows: int, num_places: int) -> DecodeInputs:
    def make(length: int) -> torch.Tensor:
        return torch.full((length,), -9, dtype=torch.int32)

    return DecodeInputs(
        input_ids_T=make(num_places),
        positions_T=make(num_places),
        slot_mapping_T=make(num_places),
        seq_lens_R=make(num_rows),
        num_new_R=make(num_rows),
    )


def test_every_small_row_of_tokens_ends_where_the_scheduler_ends_it() -> None:
    """Up to 2 tokens before, up to 3 new, each of them plain, a stop id or an end of sequence."""
    cases = [
        (rules, num_before, new)
        for rules in small_rules()
        for num_before in range(min(rules.max_tokens, 3))
        for num_new in (1, 2, 3)
        for new in product((PLAIN, STOP, EOS), repeat=num_new)
    ]
    kept, is_alive = [], []
    for rules, num_before, new in cases:
        scheduler = make_scheduler()
        scheduler.add(make_request(prompt=2, stop=rules))
        (sequence,) = scheduler.sequences
        sequence.append([PLAIN] * num_before + list(new), [-0.5] * (num_before + len(new)), 0)
        stop = earliest_stop(sequence, len(new))
        kept.append(num_before + len(new) if stop is None else stop.num_output_tokens)
        is_alive.append(stop is None)
    assert len(cases) > 2_500 and True in is_alive and False in is_alive

    rules_of = [rules for rules, _, _ in cases]
    stop_ids = [sorted(rules.ending_token_ids) for rules in rules_of]
    state = DecodeState(
        num_tokens_S=ids([2 + num_before for _, num_before, _ in cases]),
        last_ids_S=ids([PLAIN] * len(cases)),
        is_alive_S=torch.ones(len(cases), dtype=torch.bool),
        faults_S=ids([0] * len(cases)),
        min_num_tokens_S=ids([2 + rules.min_tokens for rules in rules_of]),
        max_num_tokens_S=ids([2 + rules.max_tokens for rules in rules_of]),
        stop_ids_SE=torch.tensor([one + [-1] * (2 - len(one)) for one in stop_ids]),
        block_tables_SM=torch.zeros(len(cases), 3, dtype=torch.int32),
        block_size=BLOCK_SIZE,
    )
    advance(
        torch.tensor([[*new, *[STOP] * (3 - len(new))] for _, _, new in cases]),
        state,
        empty_inputs(len(cases), len(cases)),
        num_accepted_R=ids([len(new) - 1 for _, _, new in cases]),
    )
    assert not state.faults_S.any()
    assert (state.num_tokens_S - 2).tolist() == kept
    assert state.is_alive_S.tolist() == is_alive


class Device:
    """State rows as a plan fills them, and windows that run without the scheduler."""

    def __init__(self, num_rows: int, max_model_len: int) -> None:
        num_entries = -(-max_model_len // BLOCK_SIZE)
        self.max_model_len = max_model_len
        self.state = DecodeState(
            num_tokens_S=ids([0] * num_rows),
            last_ids_S=ids([0] * num_rows),
            is_alive_S=torch.zeros(num_rows, dtype=torch.bool),
            faults_S=ids([0] * num_rows),
            min_num_tokens_S=ids([0] * num_rows),
            max_num_tokens_S=ids([0] * num_rows),
            stop_ids_SE=torch.full((num_rows, 2), -1),
            block_tables_SM=torch.full((num_rows, num_entries), -1, dtype=torch.int32),
            block_size=BLOCK_SIZE,
            token_ids_SL=torch.zeros(num_rows, max_model_len, dtype=torch.int32),
        )

    def apply(self, plan: StepPlan, sequences: dict[int, Sequence]) -> None:
        state = self.state
        history = state.token_ids_SL
        assert history is not None
        for row in plan.left:
            state.is_alive_S[row] = False
            state.block_tables_SM[row] = -1
        for join in plan.joined:
            rules, row = sequences[join.seq_id].request.stop, join.row
            state.num_tokens_S[row] = len(join.token_ids)
            state.last_ids_S[row] = join.token_ids[-1]
            history[row, : len(join.token_ids)] = ids(list(join.token_ids))
            state.is_alive_S[row] = True
            limit = min(join.num_prompt_tokens + rules.max_tokens, self.max_model_len)
            state.max_num_tokens_S[row] = limit
            state.min_num_tokens_S[row] = join.num_prompt_tokens + rules.min_tokens
            ending = sorted(rules.ending_token_ids)
            state.stop_ids_SE[row] = torch.tensor(ending + [-1] * (2 - len(ending)))
            state.block_tables_SM[row, : len(join.block_ids)] = ids(list(join.block_ids))
        for row, first, block_ids in plan.new_blocks:
            state.block_tables_SM[row, first : first + len(block_ids)] = ids(list(block_ids))

    def run(
        self, rows: list[int], num_drafts: list[int], window: int, numbers: torch.Generator
    ) -> list[list[list[int]]]:
        """For each row the tokens of its steps: of each, some of its drafts are accepted."""
        num_queries = 1 + max(num_drafts)
        starts = [0]
        for number in num_drafts:
            starts.append(starts[-1] + 1 + number)
        out = replace(
            empty_inputs(len(rows), starts[-1]), query_start_loc_R1=ids(starts), rows_R=ids(rows)
        )
        steps: list[list[list[int]]] = [[] for _ in rows]
        drafts = torch.full((len(rows), num_queries - 1), 2)
        advance(None, self.state, out, drafts_RK=drafts)
        for index in range(window):
            self.check_slots(rows, starts, out)
            drawn = torch.randint(0, 12, (len(rows), num_queries), generator=numbers)
            wanted = torch.randint(0, num_queries, (len(rows),), generator=numbers)
            accepted = torch.minimum(wanted, torch.tensor(num_drafts))
            is_last = index == window - 1
            advance(
                *(drawn, self.state, out),
                num_accepted_R=accepted,
                drafts_RK=drafts,
                lays_out=not is_last,
            )
            for own, tokens, count in zip(steps, drawn, out.num_new_R.tolist(), strict=True):
                if count:
                    own.append(tokens[:count].tolist())
        return steps

    def check_slots(self, rows: list[int], starts: list[int], out: DecodeInputs) -> None:
        """Who is alive writes the places after its tokens but the last, who is not writes none."""
        for r, row in enumerate(rows):
            first = int(self.state.num_tokens_S[row]) - 1
            table = self.state.block_tables_SM[row].tolist()
            slots = [
                table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
                for position in range(first, first + starts[r + 1] - starts[r])
            ]
            if not self.state.is_alive_S[row]:
                slots = [-1] * len(slots)
            assert out.slot_mapping_T[starts[r] : starts[r + 1]].tolist() == slots

    def keep_first_tokens(self, rows: list[int], numbers: torch.Generator) -> list[int]:
        """Of rows whose prompt has just been computed."""
        out = replace(empty_inputs(len(rows), len(rows)), rows_R=ids(rows))
        drawn = torch.randint(0, 12, (len(rows), 1), generator=numbers)
        advance(drawn, self.state, out, lays_out=False)
        assert out.num_new_R.tolist() == [1] * len(rows)
        return drawn[:, 0].tolist()


@pytest.mark.parametrize("num_drafts", [0, 1, 3])
@pytest.mark.parametrize("window", [1, 2, 4])
def test_windows_and_drafts_on_the_device_end_as_the_scheduler_ends_them(
    window: int, num_drafts: int
) -> None:
    max_model_len = 20
    config = make_config(max_num_seqs=5, max_model_len=max_model_len)
    scheduler = Scheduler(config, KVCacheManager(40, BLOCK_SIZE))
    for number, rules in enumerate(small_rules()):
        rules = StopRules(
            max_tokens=4 * rules.max_tokens,
            min_tokens=2 * rules.min_tokens,
            stop_token_ids=rules.stop_token_ids,
            eos_token_ids=rules.eos_token_ids,
            ignore_eos=rules.ignore_eos,
        )
        scheduler.add(make_request(f"r{number}", 2 + number % 7, stop=rules))
    device = Device(5, max_model_len)
    numbers = torch.Generator().manual_seed(100 * window + num_drafts)
    sequences: dict[int, Sequence] = {one.seq_id: one for one in scheduler.sequences}
    row_of: dict[int, int] = {}
    ended: list[Sequence] = []
    while scheduler.has_unfinished:
        plan = scheduler.plan(window=window, num_draft_tokens=num_drafts)
        assert plan is not None
        device.apply(plan, sequences)
        row_of |= {join.seq_id: join.row for join in plan.joined}
        finals = [chunk.row for chunk in plan.prefill_chunks if chunk.is_final]
        rows, drafts = list(plan.decode_rows), list(plan.num_draft_tokens or ())
        drafts = drafts or [0] * len(rows)
        steps = device.run(rows, drafts, plan.window, numbers) if rows else []
        firsts = device.keep_first_tokens(finals, numbers) if finals else []
        scheduler.apply(make_counted_result(plan, *steps, *([[one]] for one in firsts)))
        for sequence in scheduler.take_finished():
            row = row_of[sequence.seq_id]
            assert not device.state.is_alive_S[row]
            tokens = [*sequence.prompt_token_ids, *sequence.output_token_ids]
            assert device.state.token_ids_SL is not None
            assert device.state.token_ids_SL[row, : len(tokens)].tolist() == tokens
            assert int(device.state.num_tokens_S[row]) == len(tokens)
            ended.append(sequence)
        for sequence in scheduler.sequences:
            if sequence.row is not None and sequence.output_token_ids:
                assert device.state.is_alive_S[sequence.row]
                assert int(device.state.num_tokens_S[sequence.row]) == sequence.num_tokens
    assert len(ended) == len(small_rules())
    assert {sequence.finish_reason for sequence in ended} == {"stop", "length"}
    assert not device.state.faults_S.any()
