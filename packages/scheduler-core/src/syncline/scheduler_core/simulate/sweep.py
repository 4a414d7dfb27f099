"""The smallest pool in which nothing is preempted, by bisection.

A larger pool does not always preempt less, so a smaller one that fits may be passed over.

A pool fits if no sequence is preempted and none is cut short by it. One block less than the answer
has been tried and does not fit; of the pools further below only those listed.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from syncline.scheduler_core.errors import SchedulerError
from syncline.scheduler_core.simulate.loop import MakeScheduler, Result, Setup, simulate
from syncline.scheduler_core.simulate.workload import Load

_MAX_DOUBLINGS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """tried: (blocks, preemptions, samples cut short), in the order of trying."""

    num_blocks: int
    tried: tuple[tuple[int, int, int], ...]


def find_smallest_pool(load: Load, setup: Setup, make_scheduler: MakeScheduler) -> Sweep:
    """Runs are not checked. Raises SchedulerError if no pool fits, whatever its size."""
    tried: list[tuple[int, int, int]] = []

    def fits(num_blocks: int) -> bool:
        unchecked = replace(setup, num_blocks=num_blocks, check_interval=0, model=None)
        result: Result = simulate(load, unchecked, make_scheduler)
        tried.append((num_blocks, result.stats.num_preemptions, result.num_cut_by_pool))
        return not result.stats.num_preemptions and not result.num_cut_by_pool

    too_small, large_enough = _bounds(load, setup, fits)
    while large_enough - too_small > 1:
        middle = (too_small + large_enough) // 2
        if fits(middle):
            large_enough = middle
        else:
            too_small = middle
    return Sweep(num_blocks=large_enough, tried=tuple(tried))


def _bounds(load: Load, setup: Setup, fits: Callable[[int], bool]) -> tuple[int, int]:
    """A pool that cannot hold the longest prompt, and one that fits."""
    longest = max(len(request.prompt_token_ids) for request in load.requests)
    too_small = -(-longest // setup.block_size) - 1
    num_blocks = _blocks_of_the_longest(load, setup)
    for _ in range(_MAX_DOUBLINGS):
        if fits(num_blocks):
            return too_small, num_blocks
        too_small, num_blocks = num_blocks, 2 * num_blocks
    raise SchedulerError(f"even a pool of {too_small:,} blocks preempts")


def _blocks_of_the_longest(load: Load, setup: Setup) -> int:
    """Enough for as many sequences as may run at once, each at the end of its output."""
    config = setup.config
    reach = setup.window * (1 + setup.num_draft_tokens) * config.max_steps_in_flight
    needs: list[int] = []
    for request in load.requests:
        for sample in range(request.num_samples):
            num_output = min(
                load.output_lens[request.request_id, sample] + reach, request.stop.max_tokens
            )
            num_tokens = min(len(request.prompt_token_ids) + num_output, config.max_model_len)
            needs.append(-(-num_tokens // setup.block_size))
    return sum(sorted(needs)[-config.max_num_seqs :]) + 1
