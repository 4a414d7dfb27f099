"""Builders and stand-ins for tests of this package and of those above it; not for production."""

from collections.abc import Callable, Container, Iterable
from collections.abc import Sequence as SequenceABC

from syncline.kv_cache import KVCacheManager, StableKey
from syncline.scheduler_core.config import SchedulerConfig
from syncline.scheduler_core.oracle import ReferenceOutput
from syncline.scheduler_core.plan import StepPlan, StepResult
from syncline.scheduler_core.request import Request, StopMatch, StopMatcher, StopRules
from syncline.scheduler_core.scheduler import Scheduler
from syncline.scheduler_core.sequence import Sequence
from syncline.scheduler_core.types import AdmissionPolicy, FinishReason


def make_config(
    *,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    max_model_len: int = 128,
    max_steps_in_flight: int = 1,
    admission_policy: AdmissionPolicy = "greedy",
) -> SchedulerConfig:
    """Small limits, and the policy that preempts most: what is tested here has to survive that."""
    return SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        max_steps_in_flight=max_steps_in_flight,
        admission_policy=admission_policy,
    )


def make_scheduler(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    enable_prefix_caching: bool = True,
    config: SchedulerConfig | None = None,
) -> Scheduler:
    kv = KVCacheManager(num_blocks, block_size, enable_prefix_caching=enable_prefix_caching)
    return Scheduler(make_config() if config is None else config, kv)


def make_request(
    request_id: str = "a",
    prompt: int | SequenceABC[int] = 6,
    max_tokens: int = 6,
    *,
    stop: StopRules | None = None,
    num_samples: int = 1,
    make_stop_matcher: Callable[[], StopMatcher] | None = None,
) -> Request:
    """prompt: ids, or how many; ids made from a number differ between request ids."""
    if isinstance(prompt, int):
        seed = sum(ord(letter) * 31**i for i, letter in enumerate(request_id))
        prompt = [(seed * 17 + i * 7) % 61 for i in range(prompt)]
    return Request(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        stop=StopRules(max_tokens=max_tokens) if stop is None else stop,
        num_samples=num_samples,
        make_stop_matcher=make_stop_matcher,
    )


def num_yielding_rows(plan: StepPlan) -> int:
    return len(plan.decode_rows) + sum(chunk.is_final for chunk in plan.prefill_chunks)


def make_result(plan: StepPlan, token_ids: int | Iterable[int] = 7) -> StepResult:
    """A result with one token per yielding row: the same id for all, or the ids given."""
    ids = [token_ids] * num_yielding_rows(plan) if isinstance(token_ids, int) else list(token_ids)
    return StepResult(step_id=plan.step_id, token_ids=ids, logprobs=[-0.5] * len(ids))


def make_counted_result(plan: StepPlan, *rows: SequenceABC[SequenceABC[int]]) -> StepResult:
    """For each yielding row the ids of each of its steps: [[1, 2], [3]] is a window of two steps.

    Steps that a decode row did not run may be left out. The logprob of id i is -0.5 - i.
    """
    ids = [token_id for steps in rows for ids in steps for token_id in ids]
    splits = [[len(ids) for ids in steps] for steps in rows]
    decode_splits = splits[: len(plan.decode_rows)]
    is_split = plan.window > 1 and plan.num_draft_tokens is not None
    window_counts = [n for s in decode_splits for n in [*s, *[0] * (plan.window - len(s))]]
    return StepResult(
        step_id=plan.step_id,
        token_ids=ids,
        logprobs=[-0.5 - token_id for token_id in ids],
        counts=tuple(sum(split) for split in splits),
        window_counts=tuple(window_counts) if is_split else None,
    )


class EndOnId:
    """A StopMatcher that calls one id the end of the stop string `text`."""

    __slots__ = ("_text", "_token_id")

    def __init__(self, token_id: int, text: str = "end") -> None:
        self._token_id = token_id
        self._text = text

    def find(self, output_token_ids: SequenceABC[int], num_new: int) -> StopMatch | None:
        for kept in range(len(output_token_ids) - num_new + 1, len(output_token_ids) + 1):
            if output_token_ids[kept - 1] == self._token_id:
                return StopMatch(num_output_tokens=kept, stop_reason=self._text)
        return None


def step(scheduler: Scheduler, token_ids: int | Iterable[int] = 7) -> StepPlan:
    """Plan one step and apply a result for it at once. Raises ValueError if nothing is planned."""
    plan = scheduler.plan()
    if plan is None:
        raise ValueError(f"nothing was planned: {scheduler.idle_cause}")
    scheduler.apply(make_result(plan, token_ids))
    return plan


def describe(scheduler: Scheduler) -> tuple[object, ...]:
    """Everything a caller can see, as one comparable value."""
    return (
        scheduler.stats,
        scheduler.steps_in_flight,
        scheduler.num_running,
        scheduler.num_waiting,
        tuple(
            (
                repr(sequence),
                tuple(sequence.token_ids),
                tuple(sequence.logprobs),
                tuple(sequence.version_runs),
                sequence.num_issued_tokens,
                sequence.target_len,
                tuple(sequence.table.block_ids),
                repr(sequence.columns),
            )
            for sequence in scheduler.sequences
        ),
    )


class ScriptedTier:
    """An `OffloadConnector` that says what it was told to say.

    num_blocks   how many blocks it claims to hold of any sequence
    wanted       indices of the blocks that it wants stored of any sequence
    """

    __slots__ = ("num_asked", "num_blocks", "num_cleared", "stored_keys", "wanted")

    def __init__(self, num_blocks: int = 99) -> None:
        self.num_blocks = num_blocks
        self.wanted: Container[int] = ()
        self.num_asked = 0
        self.num_cleared = 0
        self.stored_keys: list[StableKey] = []

    def num_held_blocks(self, keys: SequenceABC[StableKey]) -> int:
        self.num_asked += 1
        return self.num_blocks

    def missing(self, keys: SequenceABC[StableKey]) -> SequenceABC[int]:
        return [i for i in range(len(keys)) if i in self.wanted]

    def stored(self, keys: SequenceABC[StableKey]) -> None:
        self.stored_keys += keys

    def clear(self) -> None:
        self.num_cleared += 1


def assert_reference(
    sequence: Sequence,
    expected: ReferenceOutput,
    *,
    may_abort: bool = False,
    num_slots: int | None = None,
) -> None:
    """A finished sequence has the reference's tokens, logprobs and reason.

    Only the beginning of them if it was aborted, where that may be, or if it has filled a pool of
    `num_slots` positions (None: the pool holds every sequence).
    """
    num_outputs = sequence.num_output_tokens
    assert tuple(sequence.output_token_ids) == expected.token_ids[:num_outputs]
    assert tuple(sequence.logprobs) == expected.logprobs[:num_outputs]
    if sequence.finish_reason is FinishReason.ABORT:
        assert may_abort
    elif num_slots is not None and sequence.finish_detail.startswith("kv capacity"):
        assert sequence.finish_reason is FinishReason.LENGTH
        assert sequence.num_tokens == num_slots + 1
    else:
        assert sequence.finish_reason is expected.finish_reason
        assert num_outputs == len(expected.token_ids)


def check_every(num_plans: int) -> Callable[[Scheduler], None]:
    """An observer for `oracle.run` that compares the books in every so many plans."""

    def check(scheduler: Scheduler) -> None:
        if scheduler.stats.num_plans % num_plans == 0:
            scheduler.check_integrity()

    return check
