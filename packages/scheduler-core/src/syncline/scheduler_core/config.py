"""The scheduler's limits, validated once and never changed."""

from dataclasses import dataclass

from syncline.scheduler_core.checking import require_int
from syncline.scheduler_core.types import AdmissionPolicy, SchedulingPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Caps of one scheduler.

    max_num_seqs             sequences that hold a state row at the same time
    max_num_batched_tokens   tokens of one forward; at least max_num_seqs, so that every running
                             sequence can decode in every step and none starves
    max_model_len            prompt and output tokens of one sequence together
    max_steps_in_flight      plans that may be out without their results: 1 is synchronous, 2 or
                             more is deferred output
    scheduling_policy        "fcfs": in order of arrival; "priority": lower `Request.priority` first
    admission_policy         "forecast": start a sequence if the peak of block use to be expected
                             fits the pool; "greedy": as soon as its own blocks are free, which
                             preempts more
    long_prefill_token_threshold   the most tokens of one prompt in one step; 0: as many as fit
    max_num_partial_prefills       prompts that may be computed in part at a time; a prompt that one
                                   step finishes is never held up by it. None: no bound

    With a threshold, prompts may leave a part of a step's budget unused that fewer, longer chunks
    would have used: with one long prompt alone, everything above the threshold.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_steps_in_flight: int = 1
    scheduling_policy: SchedulingPolicy = "fcfs"
    admission_policy: AdmissionPolicy = "forecast"
    long_prefill_token_threshold: int = 0
    max_num_partial_prefills: int | None = None

    def __post_init__(self) -> None:
        for name, value in (
            ("max_num_seqs", self.max_num_seqs),
            ("max_num_batched_tokens", self.max_num_batched_tokens),
            ("max_model_len", self.max_model_len),
            ("max_steps_in_flight", self.max_steps_in_flight),
        ):
            require_int(name, value)
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens must be at least max_num_seqs ({self.max_num_seqs}), "
                f"got {self.max_num_batched_tokens}"
            )
        if self.scheduling_policy not in ("fcfs", "priority"):
            raise ValueError(
                f"scheduling_policy must be 'fcfs' or 'priority', got {self.scheduling_policy!r}"
            )
        if self.admission_policy not in ("forecast", "greedy"):
            raise ValueError(
                f"admission_policy must be 'forecast' or 'greedy', got {self.admission_policy!r}"
            )
        require_int("long_prefill_token_threshold", self.long_prefill_token_threshold)
        if self.long_prefill_token_threshold < 0:
            raise ValueError(
                f"long_prefill_token_threshold must be at least 0, "
                f"got {self.long_prefill_token_threshold}"
            )
        if self.max_num_partial_prefills is None:
            return
        require_int("max_num_partial_prefills", self.max_num_partial_prefills)
        if self.max_num_partial_prefills < 1:
            raise ValueError(
                f"max_num_partial_prefills must be None or at least 1, "
                f"got {self.max_num_partial_prefills}"
            )
