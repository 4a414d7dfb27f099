"""From what a caller asks to what the scheduler and the runner are given, with every refusal.

Pure but for the counter behind the seeds of requests that name none. Nothing is added here: a batch
is prepared whole before its first request enters the engine, so a bad prompt leaves no trace.
"""

import operator
from collections.abc import Callable, Iterable, Mapping, Set, Sized
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass
from typing import SupportsIndex

from torch import Tensor

from syncline.engine.errors import PromptError, PromptTooLongError, TokenIdError
from syncline.engine.runner.protocol import PROMPT_LOGPROBS_COLUMN
from syncline.engine.sampling.resolved import ResolvedSampling
from syncline.engine.sampling_params import SamplingParams
from syncline.engine.stop_strings import StopStringMatcher
from syncline.engine.tokenizer import MAX_TEXT_SHOWN, Tokenizer
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

    __slots__ = ("_limits", "_seed", "_tokenizer", "num_derived_seeds")

    def __init__(self, tokenizer: Tokenizer, limits: ModelLimits, seed: int) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._seed = seed
        # Set back by whoever refuses a call that drew some: see `LLMEngine.all_or_nothing`.
        self.num_derived_seeds = 0

    def prepare(
        self, request_id: str, prompt: Prompt, params: SamplingParams, *, priority: int = 0
    ) -> PreparedRequest:
        """Raises PromptError, or ValueError for parameters that the model cannot honour."""
        if not isinstance(params, SamplingParams):
            raise ValueError(f"sampling_params must be SamplingParams, got {params!r}")
        text = prompt if isinstance(prompt, str) else None
        token_ids = token_ids_of(prompt) if text is None else self._tokenizer.encode(text)
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
        self.num_derived_seeds += 1
        return split_mix(self._seed + self.num_derived_seeds * 0x9E3779B97F4A7C15)


def require_list(value: object, what: str) -> Iterable[object]:
    """The value if its items, in order, can be prompts or token ids; PromptError otherwise.

    Refused among what Python can iterate: bytes, which would pass for ids; sets, which have no
    order; tensors, because an id in one is a tensor.
    """
    if isinstance(value, Mapping):
        hint = " (take the text or the list of token ids out of it)"
    elif isinstance(value, Tensor):
        hint = " (its tolist() is one)"
    elif isinstance(value, Iterable) and not isinstance(value, str | bytes | bytearray | Set):
        return value
    else:
        hint = ""
    raise PromptError(f"{what}, got {type(value).__name__}{hint}: {_shorten(repr(value))}")


def token_ids_of(prompt: object) -> tuple[int, ...]:
    """Integers of any kind, numpy's too, as ints; PromptError for what is no list of them."""
    listed = require_list(prompt, "a prompt must be a text or a list of token ids")
    return tuple(
        item if type(item) is int else _token_id_of(item, position)
        for position, item in enumerate(listed)
    )


def _token_id_of(item: object, position: int) -> int:
    # bool is an int in Python, and would index the embedding table without a word; an array of one
    # item passes for an integer.
    if isinstance(item, SupportsIndex) and not isinstance(item, bool | Sized):
        try:
            return operator.index(item)
        except TypeError:
            pass  # numpy's bool: it has the method, which refuses.
    raise PromptError(
        f"prompt token ids must be integers, got {_shorten(repr(item))} "
        f"({type(item).__name__}) at position {position}"
    )


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_TEXT_SHOWN else text[:MAX_TEXT_SHOWN] + "..."


def split_mix(state: int) -> int:
    """Scramble 64 bits one to one.

    Source: SplitMix64 (Steele, Lea, Flood 2014), its output function.
    """
    z = state & _SEED_MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _SEED_MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _SEED_MASK
    return z ^ (z >> 31)
