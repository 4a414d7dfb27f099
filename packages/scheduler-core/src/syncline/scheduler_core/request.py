"""What a caller submits: one prompt, n samples, and the rules that end a sample.

Knows nothing of sampling parameters, text or weights: stop strings come as a `StopMatcher`.
"""

from collections.abc import Callable
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass
from typing import Protocol

from syncline.scheduler_core.checking import (
    require_bool,
    require_frozenset,
    require_int,
    require_kind,
    require_str,
    require_time,
    require_token_ids,
)
from syncline.scheduler_core.connectors.values import RemotePrefill


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRules:
    """When a sample ends. A stop counts only if at least `min_tokens` tokens are kept with it.

    stop_token_ids   end the sample, always
    eos_token_ids    end the sample unless `ignore_eos`
    stop_sequences   runs of output ids that end the sample where they are complete
    """

    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    eos_token_ids: frozenset[int] = frozenset()
    stop_sequences: tuple[tuple[int, ...], ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        require_int("max_tokens", self.max_tokens)
        require_int("min_tokens", self.min_tokens)
        require_frozenset("stop_token_ids", self.stop_token_ids)
        require_frozenset("eos_token_ids", self.eos_token_ids)
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError(
                f"min_tokens must be between 0 and max_tokens ({self.max_tokens}), "
                f"got {self.min_tokens}"
            )
        if not all(self.stop_sequences):
            raise ValueError("stop_sequences must not contain an empty sequence")

    @property
    def ending_token_ids(self) -> frozenset[int]:
        """Ids that end a sample by themselves."""
        return self.stop_token_ids if self.ignore_eos else self.stop_token_ids | self.eos_token_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class StopMatch:
    """A stop string was completed: keep `num_output_tokens`, its last token included."""

    num_output_tokens: int
    stop_reason: str


class StopMatcher(Protocol):
    """Finds stop strings in one sequence's output; the caller of the scheduler supplies it."""

    def find(self, output_token_ids: SequenceABC[int], num_new: int) -> StopMatch | None:
        """The earliest stop among the last `num_new` tokens, or None.

        Asked once per token row, always with the whole output, in order of growth. If it raises,
        or names a position that was not asked about, its sequence ends with reason error, without
        that row's tokens; everything else goes on.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt with `num_samples` independent samples.

    priority                  lower runs first, equal ones in order of arrival; must be 0 unless
                              `SchedulerConfig.scheduling_policy` is "priority"
    cache_salt, adapter_id    KV is shared only with requests that have the same
    use_prefix_cache          False: neither reads nor fills the prefix cache
    required_prompt_columns   columns needed at every prompt position: the prompt is then computed
                              in full once, whatever is cached
    arrival_s                 when it came, by the caller's clock; None: not known
    make_stop_matcher         called once per sample
    remote_prefill            another engine has computed the prompt: the output starts with its
                              token, and KV of the prompt is loaded instead of computed
    hands_off_kv              another engine goes on: when a sample has ended by itself, KV of its
                              prompt is kept for it (`Scheduler.take_handoffs`)
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    stop: StopRules
    num_samples: int = 1
    priority: int = 0
    cache_salt: str = ""
    adapter_id: str = ""
    arrival_s: float | None = None
    use_prefix_cache: bool = True
    required_prompt_columns: frozenset[str] = frozenset()
    make_stop_matcher: Callable[[], StopMatcher] | None = None
    remote_prefill: RemotePrefill | None = None
    hands_off_kv: bool = False

    def __post_init__(self) -> None:
        require_str("request_id", self.request_id)
        require_str(f"cache_salt of request {self.request_id!r}", self.cache_salt)
        require_str(f"adapter_id of request {self.request_id!r}", self.adapter_id)
        require_token_ids(f"prompt_token_ids of request {self.request_id!r}", self.prompt_token_ids)
        require_int(f"num_samples of request {self.request_id!r}", self.num_samples)
        require_int(f"priority of request {self.request_id!r}", self.priority)
        require_frozenset(
            f"required_prompt_columns of request {self.request_id!r}", self.required_prompt_columns
        )
        if self.num_samples < 1:
            raise ValueError(
                f"num_samples of request {self.request_id!r} must be at least 1, "
                f"got {self.num_samples}"
            )
        require_time(f"arrival_s of request {self.request_id!r}", self.arrival_s)
        require_bool(f"use_prefix_cache of request {self.request_id!r}", self.use_prefix_cache)
        require_bool(f"hands_off_kv of request {self.request_id!r}", self.hands_off_kv)
        require_kind(f"stop of request {self.request_id!r}", self.stop, StopRules)
        if self.remote_prefill is not None:
            name = f"remote_prefill of request {self.request_id!r}"
            require_kind(name, self.remote_prefill, RemotePrefill)
            self._check_remote()

    def _check_remote(self) -> None:
        """One token has been sampled, for one sample, by an engine that returns no columns."""
        if self.num_samples != 1:
            raise ValueError(
                f"num_samples of request {self.request_id!r} must be 1 with a remote_prefill, "
                f"got {self.num_samples}"
            )
        if self.required_prompt_columns:
            raise ValueError(
                f"required_prompt_columns of request {self.request_id!r} must be empty with a "
                f"remote_prefill, got {sorted(self.required_prompt_columns)}"
            )
