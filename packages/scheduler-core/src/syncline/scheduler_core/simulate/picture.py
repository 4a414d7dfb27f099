"""A run as one page that needs nothing else: the pool and the queue over time, and the table.

Well-formed XML as well as HTML; drawn as inline SVG; colours follow the reader's light or dark
setting. Long runs are drawn in columns of several steps: means, and sums of preemptions.
"""

from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass
from html import escape

from syncline.scheduler_core.simulate.history import CostModel
from syncline.scheduler_core.simulate.loop import Result
from syncline.scheduler_core.simulate.report import facts

_WIDTH, _HEIGHT = 900, 220  # Of the plotted area, in SVG units.
_LEFT, _TOP, _RIGHT, _BOTTOM = 78, 26, 16, 44
_MAX_COLUMNS = 450

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #5c6670; --line: #d4dae0; --page: #ffffff;
  --held: #2f6fb3; --cached: #9cc3e8; --free: #eef1f4; --running: #1a7f52; --waiting: #c77700;
  --mark: #c62839; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6eaee; --soft: #9aa5b0; --line: #3a434c;
  --page: #14181c; --held: #4f93da; --cached: #2c4f73; --free: #20262c; --running: #4cc38a;
  --waiting: #f0a63c; --mark: #ff6b78; } }
body { margin: 2rem auto; max-width: 62rem; padding: 0 1rem; background: var(--page);
  color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
p { color: var(--soft); } svg { width: 100%; height: auto; display: block; margin: 0.5rem 0; }
svg text { fill: var(--soft); font: 12px system-ui, sans-serif; }
svg text.title { fill: var(--ink); font-weight: 600; }
.axis { stroke: var(--line); fill: none; } .held { fill: var(--held); }
.cached { fill: var(--cached); } .free { fill: var(--free); } .mark { stroke: var(--mark); }
.running { stroke: var(--running); fill: none; stroke-width: 1.6; }
.waiting { stroke: var(--waiting); fill: none; stroke-width: 1.6; }
rect.running { fill: var(--running); } rect.waiting { fill: var(--waiting); }
rect.mark { fill: var(--mark); }
table { border-collapse: collapse; } th, td { text-align: right; padding: 0.15rem 0.8rem;
  border-bottom: 1px solid var(--line); white-space: pre-line; vertical-align: top; }
th:first-child { text-align: left; font-weight: 400; color: var(--soft); }
"""


def page(results: SequenceABC[Result], cost: CostModel, headline: str) -> str:
    """The whole file."""
    parts = [
        "<!DOCTYPE html>",
        '<html xmlns="http://www.w3.org/1999/xhtml" lang="en"><head><meta charset="utf-8"/>',
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>',
        f"<title>Scheduler simulation</title><style>{_STYLE}</style></head><body>",
        "<h1>Scheduler simulation</h1>",
        *(f"<p>{escape(line)}</p>" for line in headline.split("\n")),
    ]
    for result in results:
        parts.append(f"<h2>Pool of {result.setup.num_blocks:,} blocks</h2>")
        parts += [_pool_chart(result), _queue_chart(result)]
    columns = [facts(result, cost) for result in results]
    parts.append("<h2>In numbers</h2><table>")
    for i, (name, _) in enumerate(columns[0]):
        cells = "".join(f"<td>{escape(column[i][1])}</td>" for column in columns)
        parts.append(f"<tr><th>{escape(name)}</th>{cells}</tr>")
    parts.append("</table></body></html>\n")
    return "\n".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scale:
    """Steps and a quantity to places in the picture. Steps are grouped `step_width` to a column."""

    num_steps: int
    maximum: int
    step_width: int

    def x(self, step: float) -> str:
        return f"{_LEFT + _WIDTH * step / max(1, self.num_steps):.1f}"

    def y(self, value: float) -> str:
        return f"{_TOP + _HEIGHT * (1 - value / max(1, self.maximum)):.1f}"

    def columns(self, values: list[int]) -> list[float]:
        """Means."""
        width = self.step_width
        parts = [values[i : i + width] for i in range(0, len(values), width)]
        return [sum(part) / len(part) for part in parts]


def _scale(result: Result, maximum: int) -> _Scale:
    num_steps = result.history.num_steps
    return _Scale(
        num_steps=num_steps, maximum=maximum, step_width=-(-num_steps // _MAX_COLUMNS) or 1
    )


def _pool_chart(result: Result) -> str:
    history = result.history
    scale = _scale(result, result.setup.num_blocks)
    held = scale.columns(history.held)
    used = [a + b for a, b in zip(held, scale.columns(history.cached), strict=True)]
    marks: list[str] = []
    for i in range(0, history.num_steps, scale.step_width):
        num_preempted = sum(history.preempted[i : i + scale.step_width])
        if num_preempted:
            x = scale.x(i + scale.step_width / 2)
            marks.append(
                f'<line class="mark" x1="{x}" x2="{x}" y1="{_TOP - 8}" y2="{_TOP}">'
                f"<title>{num_preempted} preempted near step {i:,}</title></line>"
            )
    shapes = [
        f'<rect class="free" x="{_LEFT}" y="{_TOP}" width="{_WIDTH}" height="{_HEIGHT}"/>',
        f'<path class="cached" d="{_area(scale, used)}"/>',
        f'<path class="held" d="{_area(scale, held)}"/>',
        *marks,
    ]
    legend = (("held", "held"), ("cached", "free but cached"), ("free", "free"))
    return _chart(scale, "KV blocks", shapes, (*legend, ("mark", "preemption")))


def _queue_chart(result: Result) -> str:
    history = result.history
    scale = _scale(result, max([*history.running, *history.waiting], default=1))
    shapes = [
        f'<path class="{name}" d="{_line(scale, scale.columns(values))}"/>'
        for name, values in (("waiting", history.waiting), ("running", history.running))
    ]
    return _chart(scale, "Sequences", shapes, (("running", "running"), ("waiting", "waiting")))


def _line(scale: _Scale, values: list[float]) -> str:
    points = [f"{scale.x(i * scale.step_width)},{scale.y(value)}" for i, value in enumerate(values)]
    return "M" + " L".join([*points, f"{scale.x(scale.num_steps)},{scale.y(values[-1])}"])


def _area(scale: _Scale, values: list[float]) -> str:
    end = f"{scale.x(scale.num_steps)},{scale.y(0)}"
    return f"{_line(scale, values)} L{end} L{scale.x(0)},{scale.y(0)} Z"


def _quarters(maximum: int) -> list[int]:
    """Where an axis is numbered: each whole number once, however few there are."""
    return sorted({maximum * i // 4 for i in range(5)})


def _chart(
    scale: _Scale, title: str, shapes: list[str], legend: SequenceABC[tuple[str, str]]
) -> str:
    """Shapes with a frame, numbered axes and a legend."""
    bottom = _TOP + _HEIGHT
    parts = [
        f'<svg viewBox="0 0 {_LEFT + _WIDTH + _RIGHT} {bottom + _BOTTOM}" role="img" '
        f'aria-label="{title} over steps">',
        *shapes,
        f'<rect class="axis" x="{_LEFT}" y="{_TOP}" width="{_WIDTH}" height="{_HEIGHT}"/>',
        f'<text class="title" x="4" y="14">{title}</text>',
    ]
    for value in _quarters(scale.maximum):
        parts.append(
            f'<text x="{_LEFT - 6}" y="{float(scale.y(value)) + 4:.1f}" text-anchor="end">'
            f"{value:,}</text>"
        )
    for step in _quarters(scale.num_steps):
        anchor = "end" if step == scale.num_steps else "middle"
        parts.append(
            f'<text x="{scale.x(step)}" y="{bottom + 16}" text-anchor="{anchor}">{step:,}</text>'
        )
    parts.append(
        f'<text x="{_LEFT + _WIDTH // 2}" y="{bottom + 36}" text-anchor="middle">step</text>'
    )
    x = _LEFT + 120
    for kind, text in legend:
        parts.append(f'<rect class="{kind}" x="{x}" y="4" width="10" height="10"/>')
        parts.append(f'<text x="{x + 15}" y="13">{text}</text>')
        x += 40 + 8 * len(text)
    parts.append("</svg>")
    return "".join(parts)
