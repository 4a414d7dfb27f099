"""A language model made of one hash: the next token depends on every token before it.

Pure functions of ids, weight version and sample index. Knows no scheduler and no block.
"""

from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass

from syncline.scheduler_core.request import Request
from syncline.scheduler_core.types import FinishReason

_MASK = 2**64 - 1


def mix(state: int, value: int) -> int:
    """Scramble 64 bits. Source: the output function of SplitMix64 (Steele, Lea, Flood 2014)."""
    z = (state * 3 + value + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


@dataclass(frozen=True, slots=True, kw_only=True)
class HashModel:
    """`vocab_size` ids. What a slot holds is the hash of the context up to its token."""

    vocab_size: int = 64

    def extend(self, context: int, token_id: int, weight_version: int) -> int:
        """The hash after one more token; `context` is the hash before it, 0 at the start."""
        return mix(mix(context, token_id), weight_version)

    def sample(self, context: int, sample_index: int) -> tuple[int, float]:
        """(token id, logprob): another one for each sample index, always the same otherwise."""
        drawn = mix(context, sample_index + 1)
        return drawn % self.vocab_size, -1.0 - (drawn >> 40) % 4096 / 1024

    def next_token(
        self, token_ids: SequenceABC[int], *, sample_index: int = 0, weight_version: int = 0
    ) -> tuple[int, float]:
        """What a model with these weights samples after these tokens."""
        context = 0
        for token_id in token_ids:
            context = self.extend(context, token_id, weight_version)
        return self.sample(context, sample_index)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceOutput:
    """What a sample of a request is, if nothing ever disturbs it."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason


def reference_output(
    model: HashModel, request: Request, sample_index: int, *, max_model_len: int
) -> ReferenceOutput:
    """One sample, token by token, without scheduler, blocks or steps; stop strings excepted."""
    rules = request.stop
    max_output = min(rules.max_tokens, max_model_len - len(request.prompt_token_ids))
    context = 0
    for token_id in request.prompt_token_ids:
        context = model.extend(context, token_id, 0)
    token_ids: list[int] = []
    logprobs: list[float] = []
    reason: FinishReason | None = None
    while reason is None:
        token_id, logprob = model.sample(context, sample_index)
        token_ids.append(token_id)
        logprobs.append(logprob)
        context = model.extend(context, token_id, 0)
        ends = token_id in rules.stop_token_ids
        ends = ends or (token_id in rules.eos_token_ids and not rules.ignore_eos)
        ends = ends or any(tuple(token_ids[-len(run) :]) == run for run in rules.stop_sequences)
        if ends and len(token_ids) >= rules.min_tokens:
            reason = FinishReason.STOP
        elif len(token_ids) == max_output:
            reason = FinishReason.LENGTH
    return ReferenceOutput(
        token_ids=tuple(token_ids), logprobs=tuple(logprobs), finish_reason=reason
    )
