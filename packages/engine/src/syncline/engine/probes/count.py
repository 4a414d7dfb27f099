"""The count probe: many requests count in ranges of their own; any wrong KV shows in the numbers.

A model that has learnt to count needs its whole cached context to go on, so a token that is not
there, a position that was not computed or a block of somebody else's breaks the sequence, and the
number that comes instead tells whose it was.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from syncline.engine.engine import LLMEngine
from syncline.engine.errors import EngineError, MissingResultsError
from syncline.engine.outputs import Sample
from syncline.engine.probes.counting import (
    MAX_REQUESTS,
    PROMPT_NUMBERS,
    Counts,
    Stream,
    count_text,
    range_start,
    read_stream,
    sum_streams,
)
from syncline.engine.sampling_params import SamplingParams

OnStep = Callable[[int, int], None]  # (samples ended, preemptions so far)


@dataclass(frozen=True, slots=True, kw_only=True)
class CountProbe:
    """What is asked of an engine whose model counts.

    force_preempt_every  preempt the scheduler's victim every so many steps; 0 = never.
    until_preemptions    stop forcing at this many, and fail the run if it has fewer; 0 = no end.
    """

    num_requests: int = 64
    max_tokens: int = 512
    force_preempt_every: int = 0
    until_preemptions: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.num_requests <= MAX_REQUESTS:
            raise ValueError(f"requests must be in [1, {MAX_REQUESTS}], got {self.num_requests}")
        for field, minimum in (
            ("max_tokens", 1),
            ("force_preempt_every", 0),
            ("until_preemptions", 0),
        ):
            value = int(object.__getattribute__(self, field))
            if value < minimum:
                raise ValueError(f"{field} must be at least {minimum}, got {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CountReport:
    """The run in numbers; `passed` is the verdict."""

    probe: CountProbe
    counts: Counts
    streams: tuple[Stream, ...]
    num_short: int  # Samples that ended early, for whatever reason.
    num_preemptions: int
    num_forced_preemptions: int
    num_recomputed_tokens: int
    num_tokens: int
    seconds: float

    @property
    def passed(self) -> bool:
        return (
            self.counts.num_clean == self.probe.num_requests
            and self.num_short == 0
            and self.num_preemptions >= self.probe.until_preemptions
        )

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds

    def to_json(self) -> dict[str, object]:
        """Numbers, and the streams that are not clean."""
        return {
            "passed": self.passed,
            "requests": self.probe.num_requests,
            "clean": self.counts.num_clean,
            "broken": self.counts.num_broken,
            "drifted": self.counts.num_drifted,
            "breaks": self.counts.num_breaks,
            "foreign_numbers": self.counts.num_foreign_numbers,
            "short": self.num_short,
            "preemptions": self.num_preemptions,
            "forced_preemptions": self.num_forced_preemptions,
            "recomputed_tokens": self.num_recomputed_tokens,
            "tokens": self.num_tokens,
            "seconds": self.seconds,
            "tokens_per_s": self.tokens_per_s,
            "streams": [asdict(stream) for stream in self.streams if not stream.is_clean],
        }


class _Forcer:
    """The policy that preempts the victim every S steps, until enough have been."""

    __slots__ = ("_engine", "_num_steps", "_probe", "num_forced")

    def __init__(self, engine: LLMEngine, probe: CountProbe) -> None:
        self._engine = engine
        self._probe = probe
        self._num_steps = 0
        self.num_forced = 0

    def after_step(self, num_preemptions: int) -> None:
        every, until = self._probe.force_preempt_every, self._probe.until_preemptions
        self._num_steps += 1
        if every == 0 or self._num_steps % every or (until and num_preemptions >= until):
            return
        if self._engine.preempt_one() is not None:
            self.num_forced += 1


def run_count_probe(
    engine: LLMEngine, probe: CountProbe, on_step: OnStep | None = None
) -> CountReport:
    """Run the requests to their end; MissingResultsError when one never ends."""
    params = SamplingParams(max_tokens=probe.max_tokens, temperature=0.0, ignore_eos=True)
    before = engine.stats
    began = time.perf_counter()
    index_of: dict[str, int] = {}
    for index in range(probe.num_requests):
        request_id = f"count-{index}"
        index_of[request_id] = index
        engine.add_request(request_id, count_text(range_start(index), PROMPT_NUMBERS), params)
    samples: dict[int, Sample] = {}
    forcer = _Forcer(engine, probe)
    while len(samples) < probe.num_requests and engine.has_work:
        for sample in engine.step():
            samples[index_of[sample.request_id]] = sample
        num_preemptions = engine.stats.num_preemptions - before.num_preemptions
        if engine.stalled() is not None:
            raise EngineError(f"nothing can move: {engine.stalled()}")
        forcer.after_step(num_preemptions)
        if on_step is not None:
            on_step(len(samples), num_preemptions)
    engine.drain_if_done()
    seconds = time.perf_counter() - began
    missing = [(index, 0) for index in range(probe.num_requests) if index not in samples]
    if missing:
        raise MissingResultsError(missing, probe.num_requests)
    # With special tokens in the text, one that slipped in is seen.
    texts = {
        index: engine.parts.tokenizer.decode(sample.output.token_ids, skip_special_tokens=False)
        for index, sample in samples.items()
    }
    streams = tuple(
        read_stream(index, texts[index], probe.num_requests) for index in range(probe.num_requests)
    )
    after = engine.stats
    return CountReport(
        probe=probe,
        counts=sum_streams(streams),
        streams=streams,
        num_short=sum(len(s.output.token_ids) < probe.max_tokens for s in samples.values()),
        num_preemptions=after.num_preemptions - before.num_preemptions,
        num_forced_preemptions=forcer.num_forced,
        num_recomputed_tokens=after.num_recomputed_tokens - before.num_recomputed_tokens,
        num_tokens=sum(len(sample.output.token_ids) for sample in samples.values()),
        seconds=seconds,
    )
