"""What a simulated engine is asked: requests, when they come, and where each sample ends.

A sample's length is drawn here and told to the model alone: the scheduler sees an ordinary
end-of-sequence token, and knows no more of a length in advance than a real one does. Unit: tokens,
and for times steps.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from syncline.scheduler_core.oracle.model import HashModel
from syncline.scheduler_core.request import Request, StopRules
from syncline.scheduler_core.simulate.draws import Draws, ln
from syncline.scheduler_core.simulate.lengths import Lengths, parse_lengths

VOCAB_SIZE: Final = 64
END_TOKEN_ID: Final = VOCAB_SIZE
"""Outside the ids that the model draws, so that only a sample's own length ends it."""

_PROMPTS, _OUTPUTS, _ARRIVALS, _TOKENS = range(4)  # Streams of draws.


@dataclass(frozen=True, slots=True)
class Arrivals:
    """When requests come. `steps(draws, n)`: the step of each of n requests, in order."""

    text: str
    steps: Callable[[Draws, int], list[int]]

    def __str__(self) -> str:
        return self.text


def parse_arrivals(text: str) -> Arrivals:
    """`at-once`, `every:STEPS`, or `poisson:RATE` in requests per step. Raises ValueError."""
    name, _, argument = text.partition(":")
    if text == "at-once":
        return Arrivals(text, lambda draws, num_requests: [0] * num_requests)
    if name == "every" and argument.isdecimal() and int(argument) > 0:
        interval = int(argument)
        return Arrivals(text, lambda draws, n: [i * interval for i in range(n)])
    if name == "poisson":
        try:
            rate = float(argument)
        except ValueError:
            rate = 0.0
        if 1e-6 <= rate <= 1e6:
            return Arrivals(text, lambda draws, n: _poisson_steps(draws, n, rate))
    raise ValueError(
        f"must be at-once, every:STEPS (at least 1) or poisson:RATE (1e-6 to 1e6), got {text!r}"
    )


def _poisson_steps(draws: Draws, num_requests: int, rate: float) -> list[int]:
    """Gaps are exponential with mean 1 / rate."""
    steps: list[int] = []
    now = 0.0
    for i in range(num_requests):
        now -= ln(1.0 - draws.unit(_ARRIVALS, i)) / rate
        steps.append(int(now))
    return steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Every request of a run, from a few numbers.

    prompt, output   token counts: a prompt's own tokens, a sample's output
    prefix_len       tokens that precede a prompt's own, equal for all requests of a group
    num_prefixes     how many such groups; request i belongs to group i modulo this
    num_samples      samples per request
    max_tokens       the limit that the scheduler is told; None: whatever max_model_len leaves
    """

    num_requests: int = 768
    prompt: Lengths = field(default_factory=lambda: parse_lengths("68-202"))
    output: Lengths = field(default_factory=lambda: parse_lengths("423-1269"))
    arrival: Arrivals = field(default_factory=lambda: parse_arrivals("at-once"))
    prefix_len: int = 0
    num_prefixes: int = 1
    num_samples: int = 1
    max_tokens: int | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A workload drawn. output_lens: (request_id, sample_index) -> tokens, the end one included."""

    requests: tuple[Request, ...]
    arrival_steps: tuple[int, ...]
    output_lens: dict[tuple[str, int], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class EndingModel(HashModel):
    """The hash model, except that the contexts in `ends` are followed by the end token.

    ends: (hash of the context, sample index)
    """

    vocab_size: int = VOCAB_SIZE
    ends: frozenset[tuple[int, int]] = frozenset()

    def sample(self, context: int, sample_index: int) -> tuple[int, float]:
        # Not `super()`: a slotted dataclass is a second class of the same name.
        drawn = HashModel.sample(self, context, sample_index)
        return (END_TOKEN_ID, drawn[1]) if (context, sample_index) in self.ends else drawn


def draw_load(workload: Workload, max_model_len: int) -> Load:
    """Raises ValueError for a prompt that leaves no room under max_model_len."""
    draws = Draws(seed=workload.seed)
    prefixes: dict[int, tuple[int, ...]] = {}  # Of the groups that occur.
    requests: list[Request] = []
    output_lens: dict[tuple[str, int], int] = {}
    for i in range(workload.num_requests):
        num_own = workload.prompt.draw(draws, (_PROMPTS, i))
        num_prompt = workload.prefix_len + num_own
        if num_prompt >= max_model_len:
            raise ValueError(
                f"a prompt must be shorter than max_model_len ({max_model_len}), "
                f"request {i} draws {num_prompt} tokens"
            )
        group = i % workload.num_prefixes
        if group not in prefixes:
            prefixes[group] = tuple(
                draws.below(VOCAB_SIZE, _TOKENS, group, 0, k) for k in range(workload.prefix_len)
            )
        # The first own token is the request's alone: no two prompts are equal.
        own = (VOCAB_SIZE + 1 + i, *_token_ids(draws, i, num_own - 1))
        request = Request(
            request_id=f"r{i}",
            prompt_token_ids=prefixes[group] + own,
            stop=StopRules(
                max_tokens=workload.max_tokens or max_model_len - num_prompt,
                eos_token_ids=frozenset({END_TOKEN_ID}),
            ),
            num_samples=workload.num_samples,
        )
        requests.append(request)
        for sample in range(workload.num_samples):
            num_output = workload.output.draw(draws, (_OUTPUTS, i, sample))
            output_lens[request.request_id, sample] = num_output
    return Load(
        requests=tuple(requests),
        arrival_steps=tuple(workload.arrival.steps(draws, workload.num_requests)),
        output_lens=output_lens,
    )


def _token_ids(draws: Draws, request: int, num_tokens: int) -> list[int]:
    """Ten ids from each draw of 64 bits."""
    ids: list[int] = []
    for i in range(-(-num_tokens // 10)):
        bits = draws.bits(_TOKENS, request, 1, i)
        ids += [bits >> shift & (VOCAB_SIZE - 1) for shift in range(0, 60, 6)]
    return ids[:num_tokens]


def ending_model(load: Load, max_model_len: int) -> EndingModel:
    """The model under which every sample of the load has its length."""
    plain = EndingModel()
    ends: set[tuple[int, int]] = set()
    for request in load.requests:
        prompt_context = 0
        for token_id in request.prompt_token_ids:
            prompt_context = plain.extend(prompt_context, token_id, 0)
        limit = min(request.stop.max_tokens, max_model_len - len(request.prompt_token_ids))
        for sample in range(request.num_samples):
            context = prompt_context
            num_before_end = load.output_lens[request.request_id, sample] - 1
            if num_before_end >= limit:
                continue  # It ends by length before its end token would come.
            for _ in range(num_before_end):
                context = plain.extend(context, plain.sample(context, sample)[0], 0)
            ends.add((context, sample))
    return EndingModel(ends=frozenset(ends))
