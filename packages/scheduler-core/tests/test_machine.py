"""The scheduler against the model itself: any order of calls, every finished sequence a true one.

The naive model is the hash of the tokens: what a sequence must be follows from its prompt and the
weights that computed each position, whatever was planned, preempted, paused or flushed in between.

`MUTANTS.md` lists faults that this machine and the tests beside it were seen to find.
"""

from collections import deque
from typing import cast
from unittest import TestCase

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from syncline.kv_cache import KVCacheManager, PrefixIndex
from syncline.kv_cache.testing import colliding_key
from syncline.scheduler_core import (
    FinishReason,
    IdleCause,
    PauseMode,
    Request,
    Scheduler,
    SchedulerConfig,
    Sequence,
    StepPlan,
    StopRules,
    UnfinishedPolicy,
)
from syncline.scheduler_core.oracle import (
    HashModel,
    OracleKV,
    OracleRunner,
    VersionLedger,
    hash_drafter,
)

BLOCK_SIZE = 4
MAX_MODEL_LEN = 30
MODEL = HashModel(vocab_size=20)
PROMPTS = st.one_of(
    st.lists(st.integers(0, 2), min_size=1, max_size=14),
    st.integers(1, 14).map(lambda length: [1] * length),
)


def assert_end_is_true(sequence: Sequence, num_slots: int) -> None:
    rules = sequence.request.stop
    outputs = list(sequence.output_token_ids)
    ending = set(rules.stop_token_ids)
    if not rules.ignore_eos:
        ending |= rules.eos_token_ids
    stops = [i + 1 for i, t in enumerate(outputs) if t in ending and i + 1 >= rules.min_tokens]
    limit = min(sequence.num_prompt_tokens + rules.max_tokens, MAX_MODEL_LEN)
    assert sequence.num_tokens <= limit
    if sequence.finish_reason is FinishReason.STOP:
        assert stops == [len(outputs)]
    else:
        assert stops == []
    if sequence.finish_reason is FinishReason.LENGTH:
        # At its own limit, or more than the pool, as it is now, can hold.
        is_pool = sequence.finish_detail.startswith("kv capacity")
        assert sequence.num_tokens > num_slots if is_pool else sequence.num_tokens == limit
    if sequence.finish_reason is FinishReason.ERROR:
        assert sequence.num_prompt_tokens > num_slots and not outputs


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(3, 12),
        max_num_seqs=st.integers(1, 4),
        budget=st.integers(4, 20),
        depth=st.integers(1, 3),
        caching=st.booleans(),
        threshold=st.sampled_from([0, 0, 3]),
        max_num_partial=st.sampled_from([None, None, 1]),
        collides=st.booleans(),
    )
    def create(  # noqa: PLR0913 reason: one parameter per choice
        self,
        num_blocks: int,
        max_num_seqs: int,
        budget: int,
        depth: int,
        caching: bool,
        threshold: int,
        max_num_partial: int | None,
        collides: bool,
    ) -> None:
        self.config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=MAX_MODEL_LEN,
            max_steps_in_flight=depth,
            long_prefill_token_threshold=threshold,
            max_num_partial_prefills=max_num_partial,
        )
        self.kv = KVCacheManager(
            num_blocks,
            BLOCK_SIZE,
            enable_prefix_caching=caching,
            index=PrefixIndex(colliding_key) if collides else None,
        )
        self.scheduler = Scheduler(self.config, self.kv)
        self.runner = OracleRunner(
            OracleKV(num_blocks, BLOCK_SIZE),
            model=MODEL,
            drafter=hash_drafter(0.6),
            keeps_kv=True,
        )
        self.ledger = VersionLedger()
        self.plans: deque[StepPlan] = deque()
        self.num_added = 0
        self.version = 0
        self.is_content_lost = False
        self.unfinished: dict[int, str] = {}
        self.aborted: set[str] = set()

    @rule(
        prompts=st.lists(PROMPTS, min_size=1, max_size=3),
        max_tokens=st.integers(1, 14),
        min_tokens=st.integers(0, 8),
        num_samples=st.integers(1, 4),
        ignore_eos=st.booleans(),
        shares=st.booleans(),
    )
    def add(
        self,
        prompts: list[list[int]],
        max_tokens: int,
        min_tokens: int,
        num_samples: int,
        ignore_eos: bool,
        shares: bool,
    ) -> None:
        for prompt in prompts:
            request = Request(
                request_id=f"r{self.num_added}",
                prompt_token_ids=tuple(prompt),
                stop=StopRules(
                    max_tokens=max_tokens,
                    min_tokens=min(min_tokens, max_tokens),
                    stop_token_ids=frozenset({3}),
                    eos_token_ids=frozenset({4}),
                    ignore_eos=ignore_eos,
                ),
                num_samples=num_samples,
                use_prefix_cache=shares,
            )
            self.num_added += 1
            for seq_id in self.scheduler.add(request):
                self.unfinished[seq_id] = request.request_id

    @rule(
        window=st.sampled_from([1, 1, 1, 2, 3]),
        drafts=st.sampled_from([(0,), (0,), (2,), (0, 1, 4)]),
    )
    def plan(self, window: int, drafts: tuple[int, ...]) -> None:
        wanted = {
            sequence.seq_id: drafts[sequence.seq_id % len(drafts)]
            for sequence in self.scheduler.sequences
        }
        plan = self.scheduler.plan(window=window, num_draft_tokens=wanted)
        if plan is not None:
            assert self.scheduler.idle_cause is None
            self.runner.launch(plan)
            self.plans.append(plan)
            self.is_content_lost = False  # What held it has been told to compute it again.
            chunks = sum(chunk.stop - chunk.start for chunk in plan.prefill_chunks)
            num_tokens = len(plan.decode_rows) + chunks + sum(plan.num_draft_tokens or ())
            assert num_tokens <= self.config.max_num_batched_tokens
            assert plan.decode_rows or plan.prefill_chunks
        else:
            self.check_idle_cause()

    def check_idle_cause(self) -> None:
        """Whoever is idle waits for something that will come."""
        cause = self.scheduler.idle_cause
        if cause is IdleCause.NO_REQUESTS:
            assert not self.scheduler.has_unfinished
        elif cause is IdleCause.PAUSED:
            assert self.scheduler.is_paused
        else:
            assert cause is IdleCause.WAITING_FOR_RESULTS and self.scheduler.steps_in_flight

    @precondition(lambda self: self.runner.num_in_flight)
    @rule()
    def apply(self) -> None:
        result = self.runner.collect()
        self.ledger.note(self.plans.popleft(), result)
        self.scheduler.apply(result)

    @precondition(lambda self: self.unfinished)
    @rule(num_ticks=st.integers(1, 4), drafts=st.sampled_from([(0,), (0,), (0, 1, 2)]))
    def advance(self, num_ticks: int, drafts: tuple[int, ...]) -> None:
        """As the loop of an engine does."""
        self.scheduler.resume()
        for _ in range(num_ticks):
            self.plan(1, drafts)
            if self.runner.num_in_flight:
                self.apply()

    def drain(self) -> None:
        """What changes KV or the pool needs an idle device."""
        while self.runner.num_in_flight:
            self.apply()

    @precondition(lambda self: self.unfinished)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(set(self.unfinished.values()))))
        self.aborted.add(request_id)
        self.scheduler.abort(request_id)

    @precondition(lambda self: self.scheduler.num_running)
    @rule()
    def preempt_one(self) -> None:
        self.scheduler.preempt_one()

    @rule()
    def preempt_all(self) -> None:
        self.scheduler.preempt_all()

    @precondition(lambda self: self.unfinished)
    @rule(
        mode=st.sampled_from(["wait", "keep", "wait", "keep", "abort"]),
        num_plans_before_resume=st.one_of(st.none(), st.integers(0, 2)),
    )
    def pause(self, mode: PauseMode, num_plans_before_resume: int | None) -> None:
        if mode == "abort":
            self.aborted |= set(self.unfinished.values())
        self.scheduler.pause(mode)
        if num_plans_before_resume is not None:
            for _ in range(num_plans_before_resume):
                self.plan(1, (0,))
            self.scheduler.resume()

    @precondition(lambda self: self.unfinished)
    @rule(
        policy=st.sampled_from([None, "recompute", "keep_kv", "keep_kv", "abort"]),
        bumps=st.booleans(),
    )
    def change_kv(self, policy: UnfinishedPolicy | None, bumps: bool) -> None:
        """Another KV epoch, or other weights, or both."""
        self.drain()
        if policy == "keep_kv" and self.is_content_lost:
            policy = "recompute"  # There is nothing to keep.
        self.is_content_lost = policy is None
        if bumps or policy is None:
            self.scheduler.bump_kv_epoch()
        if policy == "abort":
            self.aborted |= set(self.unfinished.values())
        if policy is not None:
            self.version += 1
            self.scheduler.set_weight_version(self.version, policy=policy)
        if policy != "keep_kv":
            # Nothing of the old content may be read: it is gone.
            self.runner.kv = OracleKV(self.kv.num_blocks, BLOCK_SIZE)

    @precondition(lambda self: self.unfinished)
    @rule(num_blocks=st.one_of(st.none(), st.integers(3, 12)))
    def resize_or_flush(self, num_blocks: int | None) -> None:
        if num_blocks is None:
            report = self.scheduler.flush_prefix_cache()
            assert report.is_flushed is not bool(self.runner.num_in_flight)
            assert not report.is_flushed or self.kv.num_cached_blocks == 0
        else:
            self.drain()
            self.what_ended_is_true()  # In the pool as it was.
            self.scheduler.resize_pool(num_blocks)
            self.runner.resize(num_blocks)

    @invariant()
    def drafts_are_accepted_or_rejected(self) -> None:
        stats = self.scheduler.stats
        num_resolved = stats.num_accepted_draft_tokens + stats.num_rejected_draft_tokens
        assert stats.num_draft_tokens == num_resolved
        assert stats.num_recovered_tokens <= stats.num_rejected_draft_tokens

    @invariant()
    def what_ended_is_true(self) -> None:
        self.scheduler.check_integrity()
        for sequence in self.scheduler.take_finished():
            request_id = self.unfinished.pop(sequence.seq_id)
            assert sequence.request_id == request_id
            tokens = zip(sequence.output_token_ids, sequence.logprobs, strict=True)
            assert list(tokens) == self.ledger.expected(MODEL, sequence)
            if sequence.finish_reason is FinishReason.ABORT:
                assert request_id in self.aborted
            else:
                assert_end_is_true(sequence, self.kv.num_blocks * BLOCK_SIZE)
        assert [s.seq_id for s in self.scheduler.sequences] == sorted(self.unfinished)

    def teardown(self) -> None:
        """Left alone, everything ends, and every block is free."""
        self.scheduler.resume()
        for _ in range(2000 + 100 * len(self.unfinished)):
            if not self.scheduler.has_unfinished and not self.runner.num_in_flight:
                break
            before = self.scheduler.stats.num_plans
            self.plan(1, (0,))
            if self.scheduler.stats.num_plans == before and self.runner.num_in_flight:
                self.apply()
            self.what_ended_is_true()
        assert not self.unfinished
        assert self.kv.num_free_blocks == self.kv.num_blocks


SchedulerMachine.TestCase.settings = settings(stateful_step_count=40, deadline=None)  # pyright: ignore[reportUnknownMemberType]  untyped there
TestScheduler = cast(type[TestCase], SchedulerMachine.TestCase)  # pyright: ignore[reportUnknownMemberType]  untyped there
