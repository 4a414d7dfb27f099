"""Speed and size of the two pure packages: what a step, an admission and a sequence cost.

Each decode figure stands beside the floor, measured in the same run: a plain Python loop that
appends a token, checks a block boundary and a stop id per sequence. Ids and logprobs are made
before the clock starts; times are CPU time of this thread. Exits 1 if a promise is not kept.
"""

import argparse
import gc
import platform
import random
import statistics
import sys
import time
import tracemalloc
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from syncline.kv_cache import KVCacheManager
from syncline.scheduler_core import (
    Request,
    Scheduler,
    SchedulerConfig,
    SchedulerStats,
    StepPlan,
    StepResult,
    StopRules,
)

BLOCK_SIZE = 16
EOS_ID, STOP_ID = 1, 2
MAX_FLOOR_RATIO = 2.5
MAX_ADMISSION_MS = 100.0
MAX_PREEMPTING_US = 1.5
MAX_SEQUENCE_MB = 1.5
MAX_POOL_S = 1.0
LONG = 32_768


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One row of the table. limit: the promise, if there is one, for `value`."""

    name: str
    value: float
    unit: str
    limit: float | None = None
    detail: str = ""

    @property
    def is_kept(self) -> bool:
        return self.limit is None or self.value <= self.limit


def _ids(step: int, count: int) -> list[int]:
    return [(step * 7 + i * 13) % 1000 + 300 for i in range(count)]


def _settle_heap(*, freeze: bool) -> None:
    gc.collect()
    if freeze:
        gc.freeze()


def _p10(values: list[float]) -> float:
    return sorted(values)[len(values) // 10]


def _prompt(rng: random.Random, num_tokens: int) -> tuple[int, ...]:
    return tuple(rng.choices(range(3, 50_000), k=num_tokens))


class _FloorSequence:
    __slots__ = ("block_ids", "stop_ids", "token_ids")

    def __init__(self) -> None:
        self.token_ids = list(range(512))
        self.block_ids = [0] * 40
        self.stop_ids = frozenset({EOS_ID, STOP_ID})


class Floor:
    """The least that a scheduler in Python could do for each row: `step` returns its time."""

    def __init__(self, num_sequences: int) -> None:
        self._sequences = [_FloorSequence() for _ in range(num_sequences)]
        self._num_steps = 0

    def step(self) -> float:
        self._num_steps += 1
        token_ids = _ids(self._num_steps, len(self._sequences))
        ended: list[_FloorSequence] = []
        start = time.thread_time()
        for sequence, token_id in zip(self._sequences, token_ids, strict=True):
            sequence.token_ids.append(token_id)
            if len(sequence.token_ids) % BLOCK_SIZE == 0:
                sequence.block_ids.append(1)
            if token_id in sequence.stop_ids:
                ended.append(sequence)
        return time.thread_time() - start


class Loop:
    """An engine's loop without an engine: plans out, made-up results in."""

    def __init__(
        self,
        num_blocks: int,
        *,
        max_num_seqs: int = 1024,
        max_num_batched_tokens: int = 16_384,
        depth: int = 2,
        is_greedy: bool = False,
    ) -> None:
        config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=2 * LONG,
            max_steps_in_flight=depth,
            admission_policy="greedy" if is_greedy else "forecast",
        )
        self.scheduler = Scheduler(config, KVCacheManager(num_blocks, BLOCK_SIZE))
        self._depth = depth
        self._plans: deque[StepPlan] = deque()
        self._num_added = 0

    def request(self, prompt: tuple[int, ...], max_tokens: int) -> Request:
        rules = StopRules(
            max_tokens=max_tokens,
            eos_token_ids=frozenset({EOS_ID}),
            stop_token_ids=frozenset({STOP_ID}),
        )
        self._num_added += 1
        return Request(request_id=str(self._num_added), prompt_token_ids=prompt, stop=rules)

    def add(self, prompt: tuple[int, ...], max_tokens: int) -> None:
        self.scheduler.add(self.request(prompt, max_tokens))

    def step(self) -> float:
        """Apply the oldest result if the device has all it may have, then plan; the time."""
        is_full = len(self._plans) == self._depth
        result = self._result(self._plans.popleft()) if is_full else None
        start = time.thread_time()
        if result is not None:
            self.scheduler.apply(result)
        plan = self.scheduler.plan()
        seconds = time.thread_time() - start
        if plan is not None:
            self._plans.append(plan)
        elif self._plans:
            result = self._result(self._plans.popleft())
            start = time.thread_time()
            self.scheduler.apply(result)
            seconds += time.thread_time() - start
        return seconds

    def _result(self, plan: StepPlan) -> StepResult:
        count = len(plan.decode_rows) + sum(chunk.is_final for chunk in plan.prefill_chunks)
        token_ids = _ids(plan.step_id, count)
        logprobs = [-0.001 * token_id for token_id in token_ids]
        return StepResult(step_id=plan.step_id, token_ids=token_ids, logprobs=logprobs)

    def run_until_decoding(self, num_running: int) -> None:
        """Until every plan in flight has so many decode rows."""
        while not self._plans or len(self._plans[0].decode_rows) < num_running:
            self.step()


def _decoding_loop(num_running: int, *, num_context: int = 512, num_waiting: int = 0) -> Loop:
    """So many sequences in steady decode, spread over the phases of a block."""
    rng = random.Random(0)
    loop = Loop(num_running * (num_context // BLOCK_SIZE + 80), max_num_seqs=num_running)
    for i in range(num_running):
        loop.add(_prompt(rng, num_context + i % BLOCK_SIZE), 100_000)
    loop.run_until_decoding(num_running)
    for _ in range(num_waiting):
        loop.add(_prompt(rng, 8), 8)
    return loop


def _steady(num_running: int, num_rounds: int, *, freeze: bool) -> Figure:
    """Plan + apply of one decode step, in turns with the floor."""
    floor, loop = Floor(num_running), _decoding_loop(num_running)
    _settle_heap(freeze=freeze)
    floors: list[float] = []
    steps: list[float] = []
    for _ in range(num_rounds):
        floors += [floor.step() for _ in range(50)]
        steps += [loop.step() for _ in range(50)]
    gc.unfreeze()
    heap = "heap frozen" if freeze else "gc as it is"
    return Figure(
        name=f"decode step / floor, {num_running} running, {heap}",
        value=statistics.median(steps) / statistics.median(floors),
        unit="x",
        limit=MAX_FLOOR_RATIO,
        detail=(
            f"median {1e6 * statistics.median(steps):.0f} us, p10 {1e6 * _p10(steps):.0f}; "
            f"floor {1e6 * statistics.median(floors):.0f}, p10 {1e6 * _p10(floors):.0f}"
        ),
    )


def _busy(num_running: int, num_steps: int) -> Figure:
    """The same when a sequence ends and another joins in every third step."""
    rng = random.Random(1)
    loop = Loop(num_running * 120, max_num_seqs=num_running)
    for i in range(num_running):
        loop.add(_prompt(rng, 256), 100 + 3 * i)
    loop.run_until_decoding(num_running)
    for _ in range(num_steps):
        loop.add(_prompt(rng, 256), 3 * num_running)
    gc.collect()
    steps = [loop.step() for _ in range(num_steps)]
    return Figure(
        name=f"decode step, {num_running} running, one joins in every third step",
        value=1e6 * statistics.mean(steps),
        unit="us",
        detail=f"mean; median {1e6 * statistics.median(steps):.0f}",
    )


def _growth(num_steps: int) -> Iterator[Figure]:
    """What a step costs beside long contexts, or a long line, against the plain case."""
    loops = {
        "context 512": _decoding_loop(256),
        "context 16k": _decoding_loop(256, num_context=16_384),
        "5,000 waiting": _decoding_loop(256, num_waiting=5_000),
    }
    _settle_heap(freeze=True)
    times: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(num_steps // 50):
        for name, loop in loops.items():
            times[name] += [loop.step() for _ in range(50)]
    gc.unfreeze()
    plain = statistics.median(times["context 512"])
    for name in ("context 16k", "5,000 waiting"):
        yield Figure(
            name=f"decode step, 256 running, {name} / plain",
            value=statistics.median(times[name]) / plain,
            unit="x",
            detail=f"median {1e6 * statistics.median(times[name]):.0f} us",
        )


def _admission(
    name: str, prompts: list[tuple[int, ...]], num_rounds: int, *, freeze: bool
) -> Figure:
    """From the first `add` to the step that has yielded everybody's first token."""
    totals: list[float] = []
    num_steps = 0
    for _ in range(num_rounds):
        loop = Loop(60_000, depth=1)
        requests = [loop.request(prompt, 100) for prompt in prompts]
        _settle_heap(freeze=freeze)
        start = time.thread_time()
        for request in requests:
            loop.scheduler.add(request)
        seconds = time.thread_time() - start
        num_steps = 0
        while loop.scheduler.num_waiting or loop.scheduler.num_running < len(prompts):
            seconds += loop.step()
            num_steps += 1
        seconds += loop.step()
        totals.append(seconds)
        gc.unfreeze()
    return Figure(
        name=f"admission of {name}, {'heap frozen' if freeze else 'gc as it is'}",
        value=1e3 * min(totals),
        unit="ms",
        limit=MAX_ADMISSION_MS,
        detail=(
            f"best of {num_rounds}; median {1e3 * statistics.median(totals):.0f}; {num_steps} steps"
        ),
    )


def _admissions(num_rounds: int) -> Iterator[Figure]:
    rng = random.Random(2)
    prompts = [_prompt(rng, 900) for _ in range(768)]
    copies = [prompts[i // 8] for i in range(768)]
    for freeze in (False, True):
        yield _admission("768 prompts of 900 tokens", prompts, num_rounds, freeze=freeze)
        yield _admission("96 x 8 prompts of 900 tokens", copies, num_rounds, freeze=freeze)


def _preempting(num_rounds: int) -> Figure:
    """256 sequences of 256 + 512 tokens in a pool for little more than half of them."""
    costs: list[float] = []
    stats = SchedulerStats()
    for _ in range(num_rounds):
        rng = random.Random(3)
        # The forecast would prevent half of what is measured here.
        loop = Loop(256 * 48 * 55 // 100, max_num_seqs=256, is_greedy=True)
        for _ in range(256):
            loop.add(_prompt(rng, 256), 512)
        gc.collect()
        seconds = 0.0
        while loop.scheduler.has_unfinished:
            seconds += loop.step()
        stats = loop.scheduler.stats
        costs.append(seconds / stats.num_accepted_tokens)
    return Figure(
        name="output token in a pool that preempts",
        value=1e6 * min(costs),
        unit="us",
        limit=MAX_PREEMPTING_US,
        detail=f"best of {num_rounds}; {stats.num_preemptions} preemptions of 256 sequences",
    )


def _sequence_size(num_prompt_tokens: int) -> Figure:
    """All that was allocated between `add` and the last token, the caller's prompt left out."""
    loop = Loop(LONG // BLOCK_SIZE + 8, max_num_seqs=8)
    prompt = _prompt(random.Random(4), num_prompt_tokens)
    gc.collect()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    loop.add(prompt, LONG)
    (sequence,) = loop.scheduler.sequences
    while sequence.num_tokens < LONG:
        loop.step()
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return Figure(
        name=f"sequence of 32k tokens, {num_prompt_tokens} of them prompt",
        value=(after - before) / 1e6,
        unit="MB",
        limit=MAX_SEQUENCE_MB,
    )


def _pool_of_a_million() -> Figure:
    start = time.thread_time()
    KVCacheManager(1_000_000, BLOCK_SIZE)
    seconds = time.thread_time() - start
    tracemalloc.start()
    kv = KVCacheManager(1_000_000, BLOCK_SIZE)
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return Figure(
        name=f"pool of {kv.num_blocks} blocks",
        value=seconds,
        unit="s",
        limit=MAX_POOL_S,
        detail=f"{num_bytes / 1e6:.0f} MB",
    )


def measure(num_rounds: int) -> Iterator[Figure]:
    """Every figure, in the order of the table."""
    for num_running in (256, 1024):
        for freeze in (False, True):
            yield _steady(num_running, 2 * num_rounds, freeze=freeze)
        yield _busy(num_running, 60 * num_rounds)
    yield from _growth(100 * num_rounds)
    yield from _admissions(num_rounds)
    yield _preempting(min(num_rounds, 3))
    for num_prompt_tokens in (16, LONG // 2, LONG - 16):
        yield _sequence_size(num_prompt_tokens)
    yield _pool_of_a_million()


def _machine() -> str:
    return f"{platform.python_implementation()} {platform.python_version()}, {platform.platform()}"


def _show(figures: Iterable[Figure]) -> list[Figure]:
    """Print each as it comes; returns them all."""
    shown: list[Figure] = []
    print(f"{_machine()}; CPU time of one thread", flush=True)
    for figure in figures:
        limit = "" if figure.limit is None else f"<= {figure.limit:g}"
        mark = "" if figure.is_kept else "  MISSED"
        print(
            f"{figure.name:66} {figure.value:8.2f} {figure.unit:2} {limit:7} {figure.detail}{mark}",
            flush=True,
        )
        shown.append(figure)
    return shown


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="more rounds, steadier figures")
    chosen = parser.parse_args()
    figures = _show(measure(chosen.rounds))
    return 0 if all(figure.is_kept for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
