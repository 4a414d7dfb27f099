"""The scheduler's limits, validated once and never changed."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Caps of one scheduler.

    max_num_seqs             sequences that hold a state row at the same time
    max_num_batched_tokens   tokens of one forward; at least max_num_seqs, so that every running
                             sequence can decode in every step and none starves
    max_model_len            prompt and output tokens of one sequence together
    max_steps_in_flight      plans that may be out without their results: 1 is synchronous, 2 or
                             more is deferred output
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_steps_in_flight: int = 1

    def __post_init__(self) -> None:
        for name, value in (
            ("max_num_seqs", self.max_num_seqs),
            ("max_num_batched_tokens", self.max_num_batched_tokens),
            ("max_model_len", self.max_model_len),
            ("max_steps_in_flight", self.max_steps_in_flight),
        ):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens must be at least max_num_seqs ({self.max_num_seqs}), "
                f"got {self.max_num_batched_tokens}"
            )
