"""How long outputs get: the chance that one goes on to a length, from those seen so far.

Outputs that have ended say where they ended; running and cut ones only how far they got, which
counts as well: a scheduler that waited for ends would take the quick ones for all. Knows no blocks.
Unit: output tokens, in bins of four to the octave; chances are integers, `ONE` is certain.
Source: the product-limit estimate (Kaplan, Meier 1958), with a prior in place of nothing.
"""

from collections.abc import Sequence as SequenceABC
from typing import Final

ONE: Final = 1 << 30
"""A chance of 1."""

PRIOR_HALF_LENGTH: Final = 1024
"""Before anything is known half of all outputs are longer than this; an output that has got to
this length plus x goes on for as much again in half of all cases."""

_PRIOR_WEIGHT = 1  # Outputs that the prior is worth, in each bin.
_MAX_SEEN = 2048  # Outputs remembered, about: then all count half, so that the newest tell most.
_NUM_BINS = 128


def bin_of(length: int) -> int:
    """The bin of an output length: 0, 1, 2, 3, and four to each octave from 4 on."""
    if length < 4:
        return length
    shift = length.bit_length() - 3
    return 4 * shift + (length >> shift)


def first_in(index: int) -> int:
    """The smallest length in a bin."""
    if index < 4:
        return index
    shift = index // 4 - 1
    return (4 + index % 4) << shift


class Survival:
    """The chance to reach a length; a reading at one moment. Built of chances at bin edges."""

    __slots__ = ("_edges",)

    def __init__(self, edges: list[int]) -> None:
        self._edges = edges

    def reaches(self, length: int) -> int:
        """Chance of an output of at least `length` tokens, between edges a straight line."""
        edges = self._edges
        if length < 4:
            return edges[length]
        shift = length.bit_length() - 3
        index = 4 * shift + (length >> shift)
        if index + 1 >= len(edges):
            return edges[-1]
        here = edges[index]
        rest = length & ((1 << shift) - 1)
        return here - ((here - edges[index + 1]) * rest >> shift)


class OutputLengths:
    """What has been seen of output lengths, with the older ones fading."""

    __slots__ = ("_cut", "_ended", "_num_seen")

    def __init__(self) -> None:
        self._ended = [0] * _NUM_BINS
        self._cut = [0] * _NUM_BINS
        self._num_seen = 0

    def note(self, num_output_tokens: int, *, is_whole: bool) -> None:
        """An output is over. is_whole: it ended by itself, not at a limit or by an abort."""
        counts = self._ended if is_whole else self._cut
        counts[bin_of(num_output_tokens)] += 1
        self._num_seen += 1
        if self._num_seen >= _MAX_SEEN:
            self._ended = [count >> 1 for count in self._ended]
            self._cut = [count >> 1 for count in self._cut]
            self._num_seen >>= 1

    def survival(self, num_running: SequenceABC[int]) -> Survival:
        """num_running: how many running outputs are in each bin now."""
        num_bins = len(num_running)
        ended, cut = self._ended, self._cut
        reached = sum(ended[num_bins:]) + sum(cut[num_bins:])
        hazards = [(0, 1)] * num_bins
        for i in range(num_bins - 1, -1, -1):
            unfinished = cut[i] + num_running[i]
            reached += ended[i] + unfinished
            # In half outputs, as one that is inside the bin has seen half of it.
            stop = first_in(i + 1)
            span = stop - first_in(i)
            scale = PRIOR_HALF_LENGTH + stop
            hazards[i] = (
                2 * ended[i] * scale + 2 * _PRIOR_WEIGHT * span,
                (2 * reached - unfinished + 2 * _PRIOR_WEIGHT) * scale,
            )
        edges = [ONE]
        chance = ONE
        for numerator, denominator in hazards:
            chance -= chance * numerator // denominator
            edges.append(chance)
        return Survival(edges)
