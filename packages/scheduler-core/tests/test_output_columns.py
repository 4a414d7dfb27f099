"""The token log against plain lists, and columns that read like lists."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from syncline.scheduler_core import SchedulerConfig, StateError
from syncline.scheduler_core.columns import (
    LOG_LINES,
    MAX_TOKEN_ID,
    Column,
    OutputColumns,
    TokenLog,
    pack_ids,
    pack_logprobs,
)
from syncline.scheduler_core.oracle import HashModel, Scenario, reference_output, run
from syncline.scheduler_core.testing import make_request


class TokenLogMachine(RuleBasedStateMachine):
    """Outputs join and leave lines, grow beside them, are cut, read and closed at any time."""

    @initialize(max_lines=st.integers(1, 4))
    def create(self, max_lines: int) -> None:
        self.log = TokenLog(max_lines)
        self.outputs: list[OutputColumns] = []
        self.expected: list[list[int]] = []
        self.members: list[OutputColumns] = []
        self.next_id = 0

    def number(self, outputs: OutputColumns) -> int:
        return next(i for i, known in enumerate(self.outputs) if known is outputs)

    def new_ids(self, count: int) -> list[int]:
        self.next_id += count
        return list(range(self.next_id - count, self.next_id))

    @precondition(lambda self: len(self.outputs) < 7)
    @rule()
    def add(self) -> None:
        self.outputs.append(OutputColumns())
        self.expected.append([])

    @rule(data=st.data())
    def seat(self, data: st.DataObject) -> None:
        """Other members, in any order; closed ones may be in steps that were planned before."""
        self.members = data.draw(st.permutations(self.outputs))
        del self.members[data.draw(st.integers(0, len(self.members))) :]

    @precondition(lambda self: self.members)
    @rule(count=st.integers(1, 5))
    def lines(self, count: int) -> None:
        for _ in range(count):
            ids = self.new_ids(len(self.members))
            self.log.append(self.members, pack_ids(ids), pack_logprobs([-float(i) for i in ids]))
            for outputs, token_id in zip(self.members, ids, strict=True):
                if not outputs.is_closed:
                    self.expected[self.number(outputs)].append(token_id)

    @precondition(lambda self: self.outputs)
    @rule(data=st.data(), count=st.integers(0, 3))
    def append_beside_the_log(self, data: st.DataObject, count: int) -> None:
        outputs = data.draw(st.sampled_from(self.outputs))
        if outputs.is_closed:
            return
        ids = self.new_ids(count)
        outputs.append(ids, [-float(i) for i in ids])
        self.expected[self.number(outputs)] += ids

    @precondition(lambda self: self.outputs)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        outputs = data.draw(st.sampled_from(self.outputs))
        kept = data.draw(st.integers(0, len(outputs)))
        outputs.truncate(kept)
        del self.expected[self.number(outputs)][kept:]

    @precondition(lambda self: self.outputs)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.outputs)).close()

    @precondition(lambda self: self.outputs)
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        self.compare(data.draw(st.sampled_from(self.outputs)))

    def compare(self, outputs: OutputColumns) -> None:
        expected = self.expected[self.number(outputs)]
        assert Column(outputs, outputs.ids) == expected
        assert Column(outputs, outputs.logprobs) == [-float(i) for i in expected]

    @invariant()
    def every_length_is_exact_without_a_delivery(self) -> None:
        self.log.check()
        for outputs, expected in zip(self.outputs, self.expected, strict=True):
            assert len(outputs) == len(expected)

    def teardown(self) -> None:
        for outputs in getattr(self, "outputs", []):
            self.compare(outputs)


TestTokenLog = TokenLogMachine.TestCase


def make_outputs(*token_ids: int) -> OutputColumns:
    outputs = OutputColumns()
    outputs.append(token_ids, [-0.5] * len(token_ids))
    return outputs


def test_a_column_reads_like_a_list() -> None:
    outputs = make_outputs(4, 5, 6)
    column = Column(outputs, outputs.ids)
    same, shorter = [4, 5, 6], [4, 5]
    assert column == same and same == column and column != shorter and column != tuple(same)
    assert column == Column(outputs, outputs.ids) and column != 4
    assert column[0] == 4 and column[-1] == 6 and column[1:] == [5, 6] and column[::-1] == [6, 5, 4]
    assert type(column[1:]) is list and repr(column) == "[4, 5, 6]" and 5 in column
    assert list(column) == [4, 5, 6] and column.index(6) == 2 and len(column) == 3
    assert bool(column) and not Column(make_outputs(), make_outputs().ids)
    with pytest.raises(IndexError):
        column[3]
    with pytest.raises(TypeError):
        hash(column)


def test_a_column_in_hand_sees_what_comes_later() -> None:
    log, outputs = TokenLog(), make_outputs(1)
    column = Column(outputs, outputs.ids)
    members = [outputs]
    log.append(members, pack_ids([2]), pack_logprobs([-1.0]))
    assert len(column) == 2 and column[1] == 2
    log.append(members, pack_ids([3]), pack_logprobs([-1.0]))
    assert list(column) == [1, 2, 3]


@pytest.mark.parametrize("wrong", [-1, MAX_TOKEN_ID + 1])
def test_an_id_that_cannot_be_kept_is_refused_and_nothing_grows(wrong: int) -> None:
    outputs = make_outputs(1)
    with pytest.raises(ValueError, match=rf"token_ids must be in \[0, {MAX_TOKEN_ID}\], got \[2, "):
        outputs.append([2, wrong], [-0.5, -0.5])
    assert len(outputs) == 1 and len(outputs.ids) == len(outputs.logprobs) == 1
    outputs.append([MAX_TOKEN_ID], [-0.5])
    assert Column(outputs, outputs.ids) == [1, MAX_TOKEN_ID]


def test_the_check_of_the_log_sees_a_place_given_to_another() -> None:
    log, outputs = TokenLog(), [make_outputs(), make_outputs()]
    log.append(outputs, pack_ids([1, 2]), pack_logprobs([-1.0, -1.0]))
    log.check()
    outputs[0].position = 1
    with pytest.raises(StateError, match="place 0 of the log belongs to somebody else"):
        log.check()
    outputs[0].position = 0
    outputs[1].start = 2
    with pytest.raises(StateError, match="place 1 of the log is out of date"):
        log.check()


def test_a_log_without_lines_is_refused() -> None:
    with pytest.raises(ValueError, match="max_lines must be at least 1, got 0"):
        TokenLog(0)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_long_outputs_through_a_full_log_joins_and_preemptions_are_the_models(depth: int) -> None:
    """Sequences of different lengths, in a pool for about three of them at a time."""
    requests = tuple(make_request(f"r{i}", 3 + i, 2 * LOG_LINES + 9 * i) for i in range(5))
    config = SchedulerConfig(
        max_num_seqs=4, max_num_batched_tokens=32, max_model_len=512, max_steps_in_flight=depth
    )
    model = HashModel()
    outcome = run(Scenario(requests=requests, num_blocks=110, config=config, model=model))
    assert outcome.stats.num_preemptions > 0
    for request in requests:
        expected = reference_output(model, request, 0, max_model_len=512)
        sequence = outcome.sequences[request.request_id, 0]
        assert sequence.output_token_ids == list(expected.token_ids)
        assert sequence.logprobs == list(expected.logprobs)
