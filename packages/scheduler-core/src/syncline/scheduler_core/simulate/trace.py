"""A run as events for chrome://tracing and ui.perfetto.dev.

A process for each pool; in it a slice for each step, counters, and a track for each sequence that
was preempted. Times are pretended, by the cost model; unit: microseconds.
"""

import json
from collections.abc import Iterator
from collections.abc import Sequence as SequenceABC
from typing import TypeAlias

from syncline.scheduler_core.simulate.history import CostModel, Visit
from syncline.scheduler_core.simulate.loop import Result
from syncline.scheduler_core.types import SequenceId

Event: TypeAlias = dict[str, object]

_STEPS = 0  # The thread of the steps; a sequence's is its id + 1.


def trace_json(results: SequenceABC[Result], cost: CostModel, headline: str) -> str:
    """The whole file, an event on each line."""
    events: list[Event] = []
    for process, result in enumerate(results, start=1):
        events += _events(process, result, cost)
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events)
    about = json.dumps({"run": headline})
    return f'{{"displayTimeUnit":"ms","otherData":{about},"traceEvents":[\n{lines}\n]}}\n'


def _events(process: int, result: Result, cost: CostModel) -> Iterator[Event]:
    starts = cost.starts_us(result.history)
    pool = f"pool of {result.setup.num_blocks:,} blocks"
    yield _name("process_name", process, 0, pool)
    yield _name("thread_name", process, _STEPS, "steps")
    yield from _steps(process, result, starts)
    yield from _counters(process, result, starts)
    yield from _sequences(process, result, starts)


def _name(kind: str, process: int, thread: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}


def _steps(process: int, result: Result, starts: list[int]) -> Iterator[Event]:
    history = result.history
    for i in range(history.num_steps):
        prefill, decode = history.prefill[i], history.decode[i]
        yield {
            "ph": "X",
            "name": "step" if prefill + decode else "idle",
            "pid": process,
            "tid": _STEPS,
            "ts": starts[i],
            "dur": starts[i + 1] - starts[i],
            "args": {
                "step": i,
                "prefill": prefill,
                "decode": decode,
                "preempted": history.preempted[i],
            },
        }


def _counters(process: int, result: Result, starts: list[int]) -> Iterator[Event]:
    """Each counter when it changes."""
    history, num_blocks = result.history, result.setup.num_blocks
    last: dict[str, dict[str, int]] = {}
    for i in range(history.num_steps):
        held, cached = history.held[i], history.cached[i]
        values = {
            "blocks": {"held": held, "cached": cached, "free": num_blocks - held - cached},
            "sequences": {"running": history.running[i], "waiting": history.waiting[i]},
        }
        for name, value in values.items():
            if last.get(name) != value:
                last[name] = value
                yield {"ph": "C", "name": name, "pid": process, "ts": starts[i], "args": value}


def _sequences(process: int, result: Result, starts: list[int]) -> Iterator[Event]:
    visits: dict[SequenceId, list[Visit]] = {}
    for visit in result.history.visits:
        visits.setdefault(visit.seq_id, []).append(visit)
    for seq_id, stays in sorted(visits.items()):
        if not any(visit.is_preempted for visit in stays):
            continue
        place = {"pid": process, "tid": seq_id + 1}
        yield _name("thread_name", process, seq_id + 1, stays[0].name)
        for visit in stays:
            first, last = starts[visit.first_step], starts[visit.last_step]
            about = {"known": visit.num_known, "cached": visit.num_cached}
            yield {"ph": "B", "name": "running", "ts": first, "args": about, **place}
            yield {"ph": "E", "ts": last, **place}
            if visit.is_preempted:
                yield {"ph": "i", "name": "preempted", "s": "t", "ts": last, **place}
