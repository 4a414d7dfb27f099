"""Offload, remote prefills and handoffs in any order of calls: true tokens, whole books, no leak.

The naive model is the hash of the tokens, as in `test_machine`; the tier, the remote and the
transport hold real contents, and a transfer ends whenever this machine says so, with as many
tokens as it says.
"""

from dataclasses import replace
from typing import cast
from unittest import TestCase

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from syncline.kv_cache import KVCacheManager
from syncline.scheduler_core import (
    FinishReason,
    Handoff,
    IdleCause,
    PauseMode,
    Request,
    Scheduler,
    SchedulerConfig,
    Sequence,
    StepsInFlightError,
    StopRules,
    TransfersInFlightError,
    UnfinishedPolicy,
)
from syncline.scheduler_core.oracle import (
    HashModel,
    OracleKV,
    OracleRunner,
    OracleTier,
    OracleTransport,
    hash_drafter,
    prefill_remotely,
)

BLOCK_SIZE = 2
MODEL = HashModel(vocab_size=20)


def assert_tokens_are_true(sequence: Sequence) -> None:
    versions = [v for v, count in sequence.version_runs for _ in range(count)]
    token_ids = list(sequence.prompt_token_ids)
    columns = zip(sequence.output_token_ids, sequence.logprobs, versions, strict=True)
    for token_id, logprob, version in columns:
        expected = MODEL.next_token(
            token_ids, sample_index=sequence.sample_index, weight_version=version
        )
        assert (token_id, logprob) == expected
        token_ids.append(token_id)


class TransferMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(4, 14),
        max_num_seqs=st.integers(1, 3),
        depth=st.integers(1, 3),
        caching=st.booleans(),
        max_tier_blocks=st.sampled_from([None, 4]),
    )
    def create(
        self,
        num_blocks: int,
        max_num_seqs: int,
        depth: int,
        caching: bool,
        max_tier_blocks: int | None,
    ) -> None:
        config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=8,
            max_model_len=20,
            max_steps_in_flight=depth,
        )
        tier = OracleTier(max_tier_blocks)
        self.kv = KVCacheManager(num_blocks, BLOCK_SIZE, enable_prefix_caching=caching)
        self.scheduler = Scheduler(config, self.kv, offload=tier)
        self.runner = OracleRunner(
            OracleKV(num_blocks, BLOCK_SIZE), model=MODEL, drafter=hash_drafter(0.5)
        )
        self.transport = OracleTransport(tier)
        self.num_added = 0
        self.version = 0
        self.handoffs: list[tuple[Handoff, list[int]]] = []
        self.unfinished: dict[int, str] = {}

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=7),
        max_tokens=st.integers(1, 8),
        remote_drafts=st.sampled_from([None, None, 0, 2]),
        remote_lag=st.sampled_from([0, 0, 0, 1]),
        num_samples=st.sampled_from([1, 1, 2, 3]),
        hands_off=st.booleans(),
    )
    def add(
        self,
        prompt: list[int],
        max_tokens: int,
        remote_drafts: int | None,
        remote_lag: int,
        num_samples: int,
        hands_off: bool,
    ) -> None:
        request = Request(
            request_id=f"r{self.num_added}",
            prompt_token_ids=tuple(prompt),
            stop=StopRules(max_tokens=max_tokens, stop_token_ids=frozenset({3})),
            num_samples=num_samples if remote_drafts is None else 1,
            hands_off_kv=hands_off,
        )
        if remote_drafts is not None:
            remote = prefill_remotely(
                MODEL,
                request,
                num_draft_tokens=remote_drafts,
                weight_version=max(0, self.version - remote_lag),
            )
            request = replace(request, remote_prefill=remote)
        self.num_added += 1
        for seq_id in self.scheduler.add(request):
            self.unfinished[seq_id] = request.request_id

    @rule(window=st.sampled_from([1, 1, 2]), num_drafts=st.sampled_from([0, 0, 1]))
    def plan(self, window: int, num_drafts: int) -> None:
        plan = self.scheduler.plan(window=window, num_draft_tokens=num_drafts)
        if plan is not None:
            self.transport.launch(plan, self.runner.kv, 0)
            self.runner.launch(plan)
            assert plan.decode_rows or plan.prefill_chunks or plan.kv_stores or plan.kv_loads
            return
        cause = self.scheduler.idle_cause
        if cause is IdleCause.NO_REQUESTS:
            assert not self.scheduler.has_unfinished
        elif cause is IdleCause.PAUSED:
            assert self.scheduler.is_paused
        elif cause is IdleCause.WAITING_FOR_TRANSFER:
            assert self.scheduler.num_transfers
        else:
            assert cause is IdleCause.WAITING_FOR_RESULTS and self.scheduler.steps_in_flight

    @precondition(lambda self: self.runner.num_in_flight)
    @rule()
    def apply(self) -> None:
        self.scheduler.apply(self.runner.collect())

    @precondition(lambda self: self.transport.num_under_way)
    @rule(data=st.data(), num_tokens=st.sampled_from([99, 99, 0, 1, 3]))
    def finish_transfer(self, data: st.DataObject, num_tokens: int) -> None:
        index = data.draw(st.integers(0, self.transport.num_under_way - 1))
        self.transport.finish_one(index, num_tokens, self.scheduler, self.runner.kv)

    @precondition(lambda self: self.handoffs)
    @rule(data=st.data())
    def finish_send(self, data: st.DataObject) -> None:
        handoff, _ = self.handoffs.pop(data.draw(st.integers(0, len(self.handoffs) - 1)))
        self.scheduler.finish_send(handoff.transfer_id)

    @precondition(lambda self: self.unfinished)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.scheduler.abort(data.draw(st.sampled_from(sorted(set(self.unfinished.values())))))

    @rule(every=st.booleans())
    def preempt(self, every: bool) -> None:
        if every:
            self.scheduler.preempt_all()
        else:
            self.scheduler.preempt_one()

    @rule(mode=st.sampled_from(["wait", "keep", "abort"]))
    def pause(self, mode: PauseMode) -> None:
        self.scheduler.pause(mode)

    @precondition(lambda self: self.scheduler.is_paused)
    @rule()
    def resume(self) -> None:
        self.scheduler.resume()

    @precondition(lambda self: not self.runner.num_in_flight)
    @rule(policy=st.sampled_from(["recompute", "abort", None]))
    def bump(self, policy: UnfinishedPolicy | None) -> None:
        self.scheduler.bump_kv_epoch()
        if policy is not None:
            self.version += 1
            self.scheduler.set_weight_version(self.version, policy=policy)

    @rule(num_blocks=st.integers(4, 14))
    def resize(self, num_blocks: int) -> None:
        if self.runner.num_in_flight:
            with pytest.raises(StepsInFlightError):
                self.scheduler.resize_pool(num_blocks)
        elif self.scheduler.num_transfers:
            with pytest.raises(TransfersInFlightError):
                self.scheduler.resize_pool(num_blocks)
        else:
            self.scheduler.resize_pool(num_blocks)
            self.runner.resize(num_blocks)

    @invariant()
    def what_ended_is_true_and_what_is_lent_stays_what_it_was(self) -> None:
        self.scheduler.check_integrity()
        for sequence in self.scheduler.take_finished():
            assert self.unfinished.pop(sequence.seq_id) == sequence.request_id
            assert_tokens_are_true(sequence)
            if sequence.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                assert sequence.num_output_tokens
        assert [s.seq_id for s in self.scheduler.sequences] == sorted(self.unfinished)
        self.handoffs += [(h, self.read(h)) for h in self.scheduler.take_handoffs()]
        for handoff, contexts in self.handoffs:
            assert self.read(handoff) == contexts

    def read(self, handoff: Handoff) -> list[int]:
        """What whoever reads this handoff finds, position by position."""
        slots = [
            self.runner.kv.read(handoff.block_ids[p // BLOCK_SIZE], p % BLOCK_SIZE)
            for p in range(handoff.num_tokens)
        ]
        assert [slot.position for slot in slots] == list(range(handoff.num_tokens))
        return [slot.context for slot in slots]

    def teardown(self) -> None:
        """Left alone, everything ends, and every block is free."""
        self.scheduler.resume()
        for _ in range(2000 + 100 * len(self.unfinished)):
            if not (self.unfinished or self.runner.num_in_flight or self.transport.num_under_way):
                break
            before = self.scheduler.stats.num_plans
            self.plan(1, 0)
            if self.scheduler.stats.num_plans == before:
                if self.runner.num_in_flight:
                    self.apply()
                elif self.transport.num_under_way:
                    self.transport.finish_one(0, 99, self.scheduler, self.runner.kv)
                else:
                    assert self.handoffs or not self.scheduler.has_unfinished
                    for handoff, _ in self.handoffs:
                        self.scheduler.finish_send(handoff.transfer_id)
                    self.handoffs.clear()
            self.what_ended_is_true_and_what_is_lent_stays_what_it_was()
        assert not self.unfinished
        for handoff, _ in self.handoffs:
            self.scheduler.finish_send(handoff.transfer_id)
        assert (self.kv.num_free_blocks, self.scheduler.num_transfers) == (self.kv.num_blocks, 0)


TransferMachine.TestCase.settings = settings(stateful_step_count=30, deadline=None)  # pyright: ignore[reportUnknownMemberType]  untyped there
TestTransfers = cast(type[TestCase], TransferMachine.TestCase)  # pyright: ignore[reportUnknownMemberType]  untyped there
