"""Names and small values that the rooms of this package share; no behaviour."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, NewType, TypeAlias

SequenceId = NewType("SequenceId", int)
"""A sequence, unique in a scheduler's life; 0 is as good as any."""

RowId: TypeAlias = int
"""A state row of the runner, 0 to max_num_seqs - 1, held by one running sequence at a time."""

PauseMode: TypeAlias = Literal["abort", "wait", "keep"]
"""abort: end everything; wait: run what has begun to its end; keep: freeze where it stands."""

SchedulingPolicy: TypeAlias = Literal["fcfs", "priority"]
"""fcfs: in order of arrival; priority: the lowest number first, equal ones in order of arrival."""

AdmissionPolicy: TypeAlias = Literal["forecast", "greedy"]
"""When a waiting sequence may start: if the peak of block use that is to be expected fits the pool,
or as soon as its own blocks are free."""

UnfinishedPolicy: TypeAlias = Literal["recompute", "abort", "keep_kv"]
"""What becomes of unfinished sequences when the weights change."""


class FinishReason(StrEnum):
    """Why a sequence ended; `Sequence.finish_detail` has the particulars."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class IdleCause(StrEnum):
    """Why nothing was planned, or why the first waiting sequence was not admitted."""

    NO_REQUESTS = "no_requests"
    PAUSED = "paused"
    WAITING_FOR_RESULTS = "waiting_for_results"
    WAITING_FOR_PREFIX = "waiting_for_prefix"
    WAITING_FOR_TRANSFER = "waiting_for_transfer"
    WAITING_FOR_BLOCKS = "waiting_for_blocks"
    MAX_NUM_SEQS = "max_num_seqs"
    MAX_NUM_BATCHED_TOKENS = "max_num_batched_tokens"
    MAX_NUM_PARTIAL_PREFILLS = "max_num_partial_prefills"


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushReport:
    """Whether a flush of the prefix cache happened, and how many blocks it unlisted."""

    is_flushed: bool
    num_unlisted_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """Counters since construction; each only grows.

    num_prefill_tokens      positions planned in prefill chunks, recomputed ones included
    num_decode_tokens       positions planned in decode rows, those of drafts included
    num_cached_tokens       positions that prefix hits made unnecessary, at every admission
    num_loaded_tokens       positions that loads of KV made unnecessary
    num_recomputed_tokens   prefill tokens whose KV had existed before a preemption
    num_accepted_tokens     output tokens that were appended and kept
    num_surplus_tokens      sampled tokens dropped because they came after their sequence's end

    Of verify steps that began before their sequence's end, each counted whole:

    num_draft_tokens            drafts verified; always accepted plus rejected
    num_accepted_draft_tokens   drafts that were what the target samples, up to the first that
                                was not
    num_rejected_draft_tokens   that first one and those after it
    num_recovered_tokens        tokens sampled in place of a first rejected draft
    num_bonus_tokens            tokens sampled after drafts that were all accepted
    """

    num_plans: int = 0
    num_admissions: int = 0
    num_preemptions: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_cached_tokens: int = 0
    num_loaded_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_accepted_tokens: int = 0
    num_surplus_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    num_rejected_draft_tokens: int = 0
    num_recovered_tokens: int = 0
    num_bonus_tokens: int = 0


class Counters:
    """The mutable side of `SchedulerStats`, one attribute per field."""

    __slots__ = (
        "num_accepted_draft_tokens",
        "num_accepted_tokens",
        "num_admissions",
        "num_bonus_tokens",
        "num_cached_tokens",
        "num_decode_tokens",
        "num_draft_tokens",
        "num_loaded_tokens",
        "num_plans",
        "num_preemptions",
        "num_prefill_tokens",
        "num_recomputed_tokens",
        "num_recovered_tokens",
        "num_rejected_draft_tokens",
        "num_surplus_tokens",
    )

    def __init__(self) -> None:
        self.num_plans = 0
        self.num_admissions = 0
        self.num_preemptions = 0
        self.num_prefill_tokens = 0
        self.num_decode_tokens = 0
        self.num_cached_tokens = 0
        self.num_loaded_tokens = 0
        self.num_recomputed_tokens = 0
        self.num_accepted_tokens = 0
        self.num_surplus_tokens = 0
        self.num_draft_tokens = 0
        self.num_accepted_draft_tokens = 0
        self.num_rejected_draft_tokens = 0
        self.num_recovered_tokens = 0
        self.num_bonus_tokens = 0

    def snapshot(self) -> SchedulerStats:
        return SchedulerStats(
            num_plans=self.num_plans,
            num_admissions=self.num_admissions,
            num_preemptions=self.num_preemptions,
            num_prefill_tokens=self.num_prefill_tokens,
            num_decode_tokens=self.num_decode_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_loaded_tokens=self.num_loaded_tokens,
            num_recomputed_tokens=self.num_recomputed_tokens,
            num_accepted_tokens=self.num_accepted_tokens,
            num_surplus_tokens=self.num_surplus_tokens,
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_draft_tokens=self.num_accepted_draft_tokens,
            num_rejected_draft_tokens=self.num_rejected_draft_tokens,
            num_recovered_tokens=self.num_recovered_tokens,
            num_bonus_tokens=self.num_bonus_tokens,
        )
