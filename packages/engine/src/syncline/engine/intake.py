"""From what a caller asks to what the scheduler and the runner are given, with every refusal.

Pure but for the counter behind the seeds of requests that name none. Nothing is added here: a batch
is prepared whole before its first request enters the engine, so a bad prompt leaves no trace.
"""

from collections.abc import Callable
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass

from syncline.engine.errors import PromptError, PromptTooLongError, TokenIdError
from syncline.engine.runner.protocol import PROMPT_LOGPROBS_COLUMN
from syncline.engine.sampling.resolved import ResolvedSampling
from syncline.engine.sampling_params import SamplingParams
from syncline.engine.stop_strings import StopStringMatcher
from syncline.engine.tokenizer import Tokenizer
from syncline.scheduler_core import Request, StopMatcher, StopRules

Prompt = str | SequenceABC[int]

_SEED_MASK = 2**64 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """What the checkpoint and the configuration together allow.

    eos_token_ids may be empty: then only stop ids, stop strings and lengths end a sequence.
    """

    max_model_len: int
    true_vocab_size: int
    eos_token_ids: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRequest:
    """One request, ready to be added."""

    request: Request
    sampling: ResolvedSampling
    prompt: str | None

    @property
    def params(self) -> SamplingParams:
        return self.sampling.params


class Intake:
    """Validates prompts and fixes what the parameters leave open."""

    __slots__ = ("_limits", "_num_derived_seeds", "_seed", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, limits: ModelLimits, seed: int) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._seed = seed
        self._num_derived_seeds = 0

    def prepare(
        self, request_id: str, prompt: Prompt, params: SamplingParams, *, priority: int = 0
    ) -> PreparedRequest:
        """Raises PromptError, or ValueError for parameters that the model cannot honour."""
        text = prompt if isinstance(prompt, str) else None
        token_ids = self._tokenizer.encode(prompt) if isinstance(prompt, str) else tuple(prompt)
        self._check_prompt(token_ids)
        sampling = ResolvedSampling(
            params=params,
            seed=self._derive_seed() if params.seed is None else params.seed,
            true_vocab_size=self._limits.true_vocab_size,
            eos_token_ids=self._limits.eos_token_ids,
        )
        wants_prompt = params.prompt_logprobs is not None
        request = Request(
            request_id=request_id,
            prompt_token_ids=token_ids,
            stop=self._stop_rules(params),
            num_samples=params.n,
            priority=priority,
            required_prompt_columns=frozenset({PROMPT_LOGPROBS_COLUMN} if wants_prompt else ()),
            make_stop_matcher=self._matcher_factory(params),
        )
        return PreparedRequest(request=request, sampling=sampling, prompt=text)

    def _check_prompt(self, token_ids: tuple[int, ...]) -> None:
        if not token_ids:
            raise PromptError("the prompt is empty: at least one token id is needed")
        limit = self._limits.true_vocab_size
        for position, token_id in enumerate(token_ids):
            # bool is an int in Python, and would index the embedding table without a word.
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise PromptError(f"prompt token ids must be integers, got {token_id!r}")
            if not 0 <= token_id < limit:
                raise TokenIdError(token_id, position, limit)
        if len(token_ids) >= self._limits.max_model_len:
            raise PromptTooLongError(len(token_ids), self._limits.max_model_len)

    def _stop_rules(self, params: SamplingParams) -> StopRules:
        return StopRules(
            max_tokens=params.max_tokens,
            min_tokens=params.min_tokens,
            stop_token_ids=frozenset(params.stop_token_ids),
            eos_token_ids=self._limits.eos_token_ids,
            ignore_eos=params.ignore_eos,
        )

    def _matcher_factory(self, params: SamplingParams) -> Callable[[], StopMatcher] | None:
        stop_strings = params.stop_strings
        if not stop_strings:
            return None
        return lambda: StopStringMatcher(self._tokenizer, stop_strings, params.min_tokens)

    def _derive_seed(self) -> int:
        """The next seed of this engine: as many requests have come, so far is the stream along."""
        self._num_derived_seeds += 1
        return split_mix(self._seed + self._num_derived_seeds * 0x9E3779B97F4A7C15)


def split_mix(state: int) -> int:
    """Scramble 64 bits one to one.

    Source: SplitMix64 (Steele, Lea, Flood 2014), its output function.
    """
    z = state & _SEED_MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _SEED_MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _SEED_MASK
    return z ^ (z >> 31)
