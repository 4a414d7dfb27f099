"""How one request wants its tokens chosen: validated values, nothing resolved against a model.

Names and meanings are vLLM's. What depends on the model (end-of-sequence ids, the seed of a request
that names none) is fixed when the request is added, not here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

MAX_STOP_STRINGS: Final = 64
SEED_LIMIT: Final = 2**64
MAX_MIN_TOKENS: Final = 2**31 - 1
# Logits are float32. Within these limits no parameter, nor any two of them together, turns a logit
# of a working model into an infinity: bias times penalty stays below 1e36.
MIN_TEMPERATURE: Final = 2.0**-126  # The smallest normal float32; 0 itself is greedy.
MAX_TEMPERATURE: Final = 1e30
MAX_ABS_LOGIT_BIAS: Final = 1e30
MAX_REPETITION_PENALTY: Final = 1e6
MIN_REPETITION_PENALTY: Final = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """One request's sampling parameters.

    temperature 0 is greedy: the largest logit, the lowest id on a tie. top_k 0 and -1 mean all.
    logprobs: None and 0 give the sampled token's logprob, which every output token has; k > 0
    adds the k likeliest tokens. prompt_logprobs: None gives nothing, 0 the prompt token's own,
    k > 0 adds the k likeliest. seed None: the engine derives one when the request is added.
    stop None and stop_token_ids None mean none, as vLLM's defaults do.

    A logprob is finite and never 0.0: of a token that nothing rivals it is `SURE_LOGPROB`, the
    negative normal float64 nearest to zero (-2.2e-308).
    """

    n: int = 1
    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | tuple[str, ...] | list[str] | None = ()
    stop_token_ids: tuple[int, ...] | list[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    structured_outputs: object | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _stop_token_ids(self.stop_token_ids))
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        self._check_counts()
        self._check_distribution()
        self._check_penalties()
        self._check_ids()
        for field in ("ignore_eos", "include_stop_str_in_output"):
            value = self.ignore_eos if field == "ignore_eos" else self.include_stop_str_in_output
            if not isinstance(value, bool):
                raise ValueError(f"{field} must be True or False, got {value!r}")
        if self.structured_outputs is not None:
            raise ValueError(
                "structured_outputs is not supported: no grammar can constrain a token yet"
            )

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, however it was given."""
        return _stop_strings(self.stop)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    def _check_counts(self) -> None:
        _require_int("n", self.n, 1)
        _require_int("max_tokens", self.max_tokens, 1)
        _require_int("min_tokens", self.min_tokens, 0)
        if self.min_tokens > MAX_MIN_TOKENS:
            raise ValueError(f"min_tokens must be at most {MAX_MIN_TOKENS}, got {self.min_tokens}")
        if self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens must be at most max_tokens={self.max_tokens}, got {self.min_tokens}"
            )
        _require_int("top_k", self.top_k, -1)
        if self.logprobs is not None:
            _require_int("logprobs", self.logprobs, 0)
        if self.prompt_logprobs is not None:
            _require_int("prompt_logprobs", self.prompt_logprobs, 0)
        if self.seed is not None:
            _require_int("seed", self.seed, 0)
            if self.seed >= SEED_LIMIT:
                raise ValueError(f"seed must be below 2**64, got {self.seed}")

    def _check_distribution(self) -> None:
        _require_range("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        if 0.0 < self.temperature < MIN_TEMPERATURE:
            raise ValueError(
                f"temperature must be 0 or at least {MIN_TEMPERATURE}, got {self.temperature}; "
                "temperature=0 is greedy"
            )
        _require_range("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise ValueError("top_p must be in (0, 1], got 0.0; temperature=0 is greedy")
        _require_range("min_p", self.min_p, 0.0, 1.0)

    def _check_penalties(self) -> None:
        _require_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _require_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _require_range(
            "repetition_penalty",
            self.repetition_penalty,
            MIN_REPETITION_PENALTY,
            MAX_REPETITION_PENALTY,
        )

    def _check_ids(self) -> None:
        for token_id in self.stop_token_ids:
            _require_int("stop_token_ids", token_id, 0)
        for token_id, bias in (self.logit_bias or {}).items():
            _require_int("logit_bias key", token_id, 0)
            _require_range(f"logit_bias[{token_id}]", bias, -MAX_ABS_LOGIT_BIAS, MAX_ABS_LOGIT_BIAS)


def _stop_strings(stop: str | tuple[str, ...] | list[str] | None) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else tuple(() if stop is None else stop)
    if len(strings) > MAX_STOP_STRINGS:
        raise ValueError(f"stop takes at most {MAX_STOP_STRINGS} strings, got {len(strings)}")
    for string in strings:
        if not isinstance(string, str) or not string:
            raise ValueError(f"stop must hold non-empty strings, got {string!r}")
    return strings


def _stop_token_ids(token_ids: tuple[int, ...] | list[int] | None) -> tuple[int, ...]:
    return () if token_ids is None else tuple(token_ids)


def _require_int(field: str, value: object, minimum: int) -> None:
    # bool is an int in Python: n=True would pass for 1 and hide a caller's mistake.
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{field} must be an integer, got {value!r}")
    if value < minimum:
        raise ValueError(f"{field} must be at least {minimum}, got {value}")


def _require_range(field: str, value: float, low: float, high: float) -> None:
    """low <= value <= high; both are finite, so that neither NaN nor an infinity passes."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{field} must be a number, got {value!r}")
    if not low <= value <= high:
        raise ValueError(f"{field} must be a finite number in [{low}, {high}], got {value}")
