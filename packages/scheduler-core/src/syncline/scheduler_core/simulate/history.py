"""What a run was like: one entry per step in each column, and one visit per stay in a row.

Written by the loop, read by the table, the trace and the picture. Unit: steps, blocks, tokens.
"""

from collections import Counter
from dataclasses import dataclass

from syncline.scheduler_core.types import IdleCause, SequenceId


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """A sequence held a row during the steps [first_step, last_step).

    num_cached, num_known   tokens whose KV it found, and tokens it had, when it came
    is_preempted            it lost its row to scarcity; else it had ended
    """

    seq_id: SequenceId
    name: str
    first_step: int
    last_step: int
    num_cached: int
    num_known: int
    is_preempted: bool


class History:
    """Columns of equal length, one entry per step; a step in which nothing is planned counts too.

    running, waiting         sequences after planning
    held, cached             blocks held, and blocks free but cached
    prefill, decode          tokens planned
    preempted                sequences preempted
    idle_causes              why nothing was planned, how often
    waiting_causes           why the first sequence left waiting was not admitted, how often
    """

    __slots__ = (
        "cached",
        "decode",
        "held",
        "idle_causes",
        "preempted",
        "prefill",
        "running",
        "visits",
        "waiting",
        "waiting_causes",
    )

    def __init__(self) -> None:
        self.running: list[int] = []
        self.waiting: list[int] = []
        self.held: list[int] = []
        self.cached: list[int] = []
        self.prefill: list[int] = []
        self.decode: list[int] = []
        self.preempted: list[int] = []
        self.idle_causes: Counter[IdleCause] = Counter()
        self.waiting_causes: Counter[IdleCause] = Counter()
        self.visits: list[Visit] = []

    @property
    def num_steps(self) -> int:
        return len(self.running)


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Pretended time: what a step costs, and each token that it computes. Unit: microseconds.

    The defaults say that a step costs as much as 200 tokens: reading all weights once against
    computing with them. Only the proportion says anything.
    """

    us_per_step: int = 1000
    us_per_token: int = 5

    def starts_us(self, history: History) -> list[int]:
        """When each step starts, and at last when the run ends."""
        starts = [0]
        for prefill, decode in zip(history.prefill, history.decode, strict=True):
            starts.append(starts[-1] + self.us_per_step + self.us_per_token * (prefill + decode))
        return starts
