"""Numbers that follow from a seed and counters alone: the same on every machine, in any order.

The transcendental functions are made here of operations that IEEE 754 fixes to the last bit,
because those of the platform's library differ in it. Knows nothing of requests.
Source: the mixing function of SplitMix64 (Steele, Lea, Flood 2014), as in the oracle's model.
"""

import math
from dataclasses import dataclass

from syncline.scheduler_core.oracle.model import mix

_LN_2 = 0.6931471805599453
_NUM_UNIFORMS = 12  # Their sum has variance 1.


@dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    """Every draw names its counters, so one more draw elsewhere changes no other."""

    seed: int

    def bits(self, *counters: int) -> int:
        """64 bits, uniform."""
        state = mix(0, self.seed)
        for counter in counters:
            state = mix(state, counter)
        return state

    def below(self, limit: int, *counters: int) -> int:
        """Uniform in [0, limit); biased by less than limit / 2**64."""
        return self.bits(*counters) * limit >> 64

    def unit(self, *counters: int) -> float:
        """Uniform in [0, 1), a multiple of 2**-53."""
        return (self.bits(*counters) >> 11) * 2.0**-53

    def normal(self, *counters: int) -> float:
        """Mean 0, variance 1, within +-6: the sum of twelve uniform draws."""
        total = 0.0
        for i in range(_NUM_UNIFORMS):
            total += self.unit(*counters, i)
        return total - _NUM_UNIFORMS / 2


def exp(x: float) -> float:
    """e ** x for |x| <= 700, within 1e-12 of it."""
    y = x / 1024
    term = total = 1.0
    for i in range(1, 12):
        term *= y / i
        total += term
    for _ in range(10):
        total *= total
    return total


def ln(x: float) -> float:
    """The natural logarithm of x > 0, within 1e-13 of it."""
    mantissa, exponent = math.frexp(x)
    t = (mantissa - 1.0) / (mantissa + 1.0)
    power, total = t, 0.0
    for i in range(1, 40, 2):
        total += power / i
        power *= t * t
    return 2.0 * total + exponent * _LN_2
