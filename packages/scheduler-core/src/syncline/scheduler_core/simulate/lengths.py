"""Distributions of token counts, written as short texts; draws are at least 1.

135                 always 135
64-206              uniform, both ends included
geometric:846       each further token with the same chance, by mean
lognormal:846,0.8   by mean and sigma of the logarithm (1.0 if left out): a heavy tail
100|1600            one of the alternatives, each with the same chance
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from syncline.scheduler_core.simulate.draws import Draws, exp, ln

Draw: TypeAlias = Callable[[Draws, tuple[int, ...]], int]

_FORMS = "N, LOW-HIGH, geometric:MEAN, lognormal:MEAN[,SIGMA], or alternatives joined by |"


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution. `draw(draws, counters)` is a function of its arguments alone."""

    text: str
    draw: Draw

    def __str__(self) -> str:
        return self.text


def parse_lengths(text: str) -> Lengths:
    """Raises ValueError for a text that is none of the forms, or an impossible distribution."""
    parts = text.split("|")
    if len(parts) == 1:
        return Lengths(text, _parse_one(text))
    alternatives = [_parse_one(part) for part in parts]

    def draw(draws: Draws, counters: tuple[int, ...]) -> int:
        chosen = alternatives[draws.below(len(alternatives), *counters, 0)]
        return chosen(draws, (*counters, 1))

    return Lengths(text, draw)


def _parse_one(text: str) -> Draw:
    name, _, arguments = text.partition(":")
    if name == "geometric" and arguments:
        return _geometric(text, _number(text, arguments))
    if name == "lognormal" and arguments:
        mean, _, sigma = arguments.partition(",")
        return _lognormal(text, _number(text, mean), _number(text, sigma) if sigma else 1.0)
    low, dash, high = text.partition("-")
    if low.isdecimal() and (not dash or high.isdecimal()):
        return _uniform(text, int(low), int(high) if dash else int(low))
    raise ValueError(f"must be {_FORMS}, got {text!r}")


def _number(text: str, part: str) -> float:
    try:
        return float(part)
    except ValueError:
        raise ValueError(f"must be {_FORMS}, got {text!r}") from None


def _uniform(text: str, low: int, high: int) -> Draw:
    if not 1 <= low <= high:
        raise ValueError(f"must have 1 <= LOW <= HIGH, got {text!r}")
    return lambda draws, counters: low + draws.below(high - low + 1, *counters)


def _geometric(text: str, mean: float) -> Draw:
    if not 1 < mean <= 1e9:
        raise ValueError(f"must have a MEAN above 1 and at most 1e9, got {text!r}")
    log_of_going_on = ln(1.0 - 1.0 / mean)
    return lambda draws, counters: 1 + int(ln(1.0 - draws.unit(*counters)) / log_of_going_on)


def _lognormal(text: str, mean: float, sigma: float) -> Draw:
    if not 1 <= mean <= 1e9:
        raise ValueError(f"must have a MEAN of at least 1 and at most 1e9, got {text!r}")
    if not 0 <= sigma <= 3:
        raise ValueError(f"must have a SIGMA between 0 and 3, got {text!r}")

    def draw(draws: Draws, counters: tuple[int, ...]) -> int:
        return max(1, round(mean * exp(sigma * draws.normal(*counters) - sigma * sigma / 2)))

    return draw
