"""Will the pool still do when the running sequences have grown? The peak of block use, foreseen.

For moments ahead, nearer ones closer together: how much the sequences that will still be running
then are expected to hold, and how far that may be off. Sequences of like age and limit are counted
together. Integers only, so every process foresees the same. Decides nothing about order.
Source: the idea of LightLLM's past-future scheduler (arXiv:2507.10150), the peak of future use from
lengths seen in the past. Differs: chances instead of sampled lengths, running outputs count among
the past, and the uncertainty is part of the peak.
"""

from bisect import bisect_left
from math import isqrt
from typing import Final

from syncline.kv_cache import KVCacheManager
from syncline.scheduler_core.lifecycle import Lifecycle
from syncline.scheduler_core.sequence import Sequence
from syncline.scheduler_core.survival import Survival, bin_of

# A candidate should get on for this many times the tokens that it would have to compute again if it
# were preempted then. Looking farther ahead would leave more of the pool empty than it saves.
_LOOKAHEAD = 2
_HALF_DEVIATIONS = 3  # Half standard deviations above the mean that must fit.
_MAX_AGE = 64  # Plans that a forecast lasts.
_SEQUENCES_PER_PLAN = 64  # Looked at on average, however many run.
_BITS: Final = 16
_ONE: Final = 1 << _BITS


class Forecast:
    """Asked for each candidate in order; those with room are counted until it is made anew.

    At `offsets[k]` tokens ahead the sequences counted are expected to hold blocks of `means[k]`
    tokens, with the variance `variances[k]`. The peak of mean and deviation may reach `limit`.
    """

    __slots__ = (
        "_has_lumped",
        "_kv",
        "_life",
        "_limit",
        "_made_at",
        "_means",
        "_num_blocks",
        "_num_gone",
        "_offsets",
        "_peak",
        "_survival",
        "_variances",
    )

    def __init__(self, kv: KVCacheManager, life: Lifecycle) -> None:
        self._kv = kv
        self._life = life
        self._offsets: list[int] = []
        self._means: list[int] = []
        self._variances: list[int] = []
        self._limit = 0
        self._has_lumped = False  # Some were counted as taking all they may, for ever.
        self._peak = 0
        self._survival = Survival([0])
        self._made_at = -_MAX_AGE
        self._num_blocks = 0
        self._num_gone = 0

    def has_room(self, sequence: Sequence, num_new_blocks: int) -> bool:
        """Whether the peak fits with this one too, which takes so many free blocks now.

        If so it is counted from here on: the caller admits it.
        """
        if not self._life.running:
            return True  # Nobody's growth is in the way, and somebody has to run.
        if num_new_blocks > self._kv.num_free_blocks:
            return False
        if self._fits(sequence, num_new_blocks):
            return True
        if not self._is_improvable():
            return False
        self._make()
        return self._fits(sequence, num_new_blocks)

    def may_say_otherwise(self) -> bool:
        """False while a refusal would only be repeated."""
        return self._is_old() or self._is_improvable()

    def _is_old(self) -> bool:
        age = self._life.pending.next_id - self._made_at
        return age >= _MAX_AGE or self._kv.num_blocks != self._num_blocks

    def _is_improvable(self) -> bool:
        """Sequences are counted that are gone, or at their worst; and it is not too soon to look at
        all the others again.
        """
        life = self._life
        num_gone = life.counters.num_admissions - len(life.running)
        if num_gone == self._num_gone and not self._has_lumped:
            return False
        num_plans = life.pending.next_id - self._made_at
        return num_plans * _SEQUENCES_PER_PLAN >= len(life.running)

    def _fits(self, sequence: Sequence, num_new_blocks: int) -> bool:
        if self._is_old():
            self._make()
        own = num_new_blocks * self._kv.block_size
        age = sequence.num_output_tokens
        remaining = sequence.max_total_tokens - sequence.num_tokens
        if own + remaining <= self._limit - self._peak:
            self._limit -= own + remaining  # However long it gets. Saves the work below.
            self._has_lumped = True
            return True
        means, variances = list(self._means), list(self._variances)
        self._count(means, variances, (1, own, age, remaining))
        horizon = bisect_left(self._offsets, _LOOKAHEAD * sequence.num_tokens) + 1
        if _peak(means[:horizon], variances[:horizon]) > self._limit:
            return False
        self._means, self._variances = means, variances
        self._peak = _peak(means, variances)
        return True

    def _make(self) -> None:
        """Count every running sequence anew, those of like age and limit as one."""
        life, size = self._life, self._kv.block_size
        # (bin of age, octave of what remains) -> how many, and sums of tokens held, age, remaining
        groups: dict[tuple[int, int], list[int]] = {}
        num_held = 0
        longest = 0
        for sequence in life.running.values():
            age = sequence.num_output_tokens
            # Of a shared prompt, the one who computed it counts the blocks.
            num_hits = min(sequence.num_cached_tokens, sequence.num_prompt_tokens) // size
            own = len(sequence.table.block_ids) - num_hits
            num_held += own
            remaining = sequence.max_total_tokens - sequence.num_prompt_tokens - age
            key = (bin_of(age), remaining.bit_length())
            group = groups.get(key)
            if group is None:
                groups[key] = [1, own * size, age, remaining]
            else:
                group[0] += 1
                group[1] += own * size
                group[2] += age
                group[3] += remaining
            longest = max(longest, age + remaining)
        num_running_by_bin = [0] * (bin_of(longest + 1) + 1)
        for (index, _), group in groups.items():
            num_running_by_bin[index] += group[0]
        self._survival = life.output_lengths.survival(num_running_by_bin)
        self._offsets = _offsets(size, longest)
        self._means = [0] * len(self._offsets)
        self._variances = [0] * len(self._offsets)
        for num, own, age, remaining in groups.values():
            self._count(self._means, self._variances, (num, own, age // num, remaining // num))
        self._peak = _peak(self._means, self._variances)
        # Blocks held beside these (leases, loads, hits whose first owner is gone) may stay.
        self._num_blocks = self._kv.num_blocks
        num_others = self._num_blocks - self._kv.num_free_blocks - num_held
        self._limit = (self._num_blocks - max(0, num_others)) * size
        self._has_lumped = False
        self._made_at = life.pending.next_id
        self._num_gone = life.counters.num_admissions - len(life.running)

    def _count(
        self, means: list[int], variances: list[int], group: tuple[int, int, int, int]
    ) -> None:
        """Add `num` sequences that hold `own` tokens in all, each of this age and remainder."""
        num, own, age, remaining = group
        reaches = self._survival.reaches
        so_far = reaches(age)
        for k, offset in enumerate(self._offsets):
            ahead = min(offset, remaining)
            alive = (reaches(age + ahead) << _BITS) // so_far if so_far else _ONE
            mean = alive * (own + num * ahead)
            means[k] += mean >> _BITS
            variances[k] += (mean >> _BITS) * ((_ONE - alive) * (own // num + ahead) >> _BITS)
            if offset >= remaining:
                break  # At its limit there, and gone afterwards.


def _offsets(first: int, last: int) -> list[int]:
    """Two to the octave from `first` until `last` is reached; of small ones every integer."""
    offsets = [first]
    while offsets[-1] < last:
        latest = offsets[-1]
        offsets.append(latest + max(1, latest // 2 if len(offsets) % 2 else latest // 3))
    return offsets


def _peak(means: list[int], variances: list[int]) -> int:
    return max(
        mean + _HALF_DEVIATIONS * isqrt(variance) // 2
        for mean, variance in zip(means, variances, strict=True)
    )
