"""What a caller gets back: frozen values, made once when a sample ends or is looked at.

Knows nothing of scheduling. Token columns have equal length: one finite logprob and one weight
version (as runs) for every id in `token_ids`; `text` may be shorter when a stop string cut it.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

TopLogprobs = Mapping[int, float]  # token id -> logprob, likeliest first


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One sample of one prompt.

    index            which of the n samples.
    text             detokenised, special tokens left out, cut at the stop string that ended it.
    logprobs         of each token as sampled; see `EngineConfig.logprobs_mode`.
    top_logprobs     per token, when `SamplingParams.logprobs` > 0.
    finish_reason    stop | length | abort | error; None while the sample is unfinished.
    stop_reason      the stop token id or stop string; None for an end-of-sequence id.
    finish_detail    what an error or a cap was, in words.
    weight_versions  runs of (weight version, number of tokens sampled under it).
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    top_logprobs: tuple[TopLogprobs, ...] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    finish_detail: str = ""
    weight_versions: tuple[tuple[int, int], ...] = ()
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0

    @property
    def cumulative_logprob(self) -> float:
        return sum(self.logprobs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A finished sample with what it answers; `submit` and `poll` hand these out one by one."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    prompt_logprobs: tuple[TopLogprobs | None, ...] | None
    output: CompletionOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """A prompt and its n samples in index order.

    prompt           the text, where the caller gave text.
    prompt_logprobs  per prompt position, None at position 0, when asked for.
    finished         every sample has a finish reason.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    prompt_logprobs: tuple[TopLogprobs | None, ...] | None
    outputs: tuple[CompletionOutput, ...]
    num_cached_tokens: int
    finished: bool

    def to_json(self) -> dict[str, object]:
        """Plain lists, dicts, strings and numbers."""
        return asdict(self)
