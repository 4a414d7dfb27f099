"""The table: what a reader wants to know of one or several runs, a column for each.

Holds no wall time, so that two runs with one seed print the same bytes.
"""

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as SequenceABC

from syncline.scheduler_core.simulate.history import CostModel
from syncline.scheduler_core.simulate.loop import Result
from syncline.scheduler_core.types import IdleCause


def facts(result: Result, cost: CostModel) -> list[tuple[str, str]]:
    """(name, value) in order; the same names for every run, save the causes that occurred."""
    stats, history = result.stats, result.history
    num_blocks = result.setup.num_blocks
    num_samples = sum(result.num_ended.values())
    return [
        ("blocks in the pool", f"{num_blocks:,}"),
        ("steps", f"{history.num_steps:,}"),
        ("pretended time", f"{cost.starts_us(history)[-1] / 1e6:,.3f} s"),
        ("preemptions", f"{stats.num_preemptions:,}"),
        ("samples preempted", _share(result.num_preempted_samples, num_samples)),
        ("prefill tokens", f"{stats.num_prefill_tokens:,}"),
        ("decode tokens", f"{stats.num_decode_tokens:,}"),
        ("prefill / decode", _ratio(stats.num_prefill_tokens, stats.num_decode_tokens)),
        ("recomputed tokens", f"{stats.num_recomputed_tokens:,}"),
        ("cached tokens", f"{stats.num_cached_tokens:,}"),
        ("output tokens", f"{stats.num_accepted_tokens:,}"),
        ("drafts accepted", _share(stats.num_accepted_draft_tokens, stats.num_draft_tokens)),
        ("surplus tokens", f"{stats.num_surplus_tokens:,}"),
        ("blocks held, mean", _share(_mean(history.held), num_blocks)),
        ("blocks held, peak", _share(max(history.held, default=0), num_blocks)),
        ("blocks free but cached, mean", _share(_mean(history.cached), num_blocks)),
        ("running, mean", f"{_mean(history.running):,.1f}"),
        ("running, peak", f"{max(history.running, default=0):,}"),
        ("waiting, mean", f"{_mean(history.waiting):,.1f}"),
        ("ended", _counts(sorted(result.num_ended.items()))),
        ("cut short by the pool", f"{result.num_cut_by_pool:,}"),
        ("idle steps", _causes(history.idle_causes)),
        ("steps with some left waiting", _causes(history.waiting_causes)),
    ]


def table(columns: SequenceABC[list[tuple[str, str]]]) -> str:
    """Names, then the values of each run, aligned; a value of several lines keeps its column."""
    names = [name for name, _ in columns[0]]
    rows: list[list[list[str]]] = []
    for i, name in enumerate(names):
        rows.append([[name], *(column[i][1].split("\n") for column in columns)])
    widths = [max(len(line) for row in rows for line in row[k]) for k in range(len(columns) + 1)]
    lines: list[str] = []
    for row in rows:
        for i in range(max(map(len, row))):
            cells = [cell[i] if i < len(cell) else "" for cell in row]
            texts = [cells[0].ljust(widths[0])]
            texts += [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
            lines.append("  ".join(texts).rstrip())
    return "\n".join(lines)


def _mean(values: SequenceABC[int]) -> float:
    return sum(values) / len(values) if values else 0.0


def _share(part: float, whole: int) -> str:
    share = 100 * part / whole if whole else 0.0
    number = f"{part:,}" if isinstance(part, int) else f"{part:,.1f}"
    return f"{number} ({share:.1f} %)"


def _ratio(part: int, whole: int) -> str:
    return f"{part / whole:.3f}" if whole else "-"


def _causes(causes: Counter[IdleCause]) -> str:
    return _counts((str(cause), count) for cause, count in sorted(causes.items()))


def _counts(items: Iterable[tuple[str, int]]) -> str:
    return "\n".join(f"{name} {count:,}" for name, count in items) or "none"
