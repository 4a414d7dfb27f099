"""A whole engine without a device: workload and pool in, what the scheduler did out.

`python -m syncline.scheduler_core.simulate --help` is the command; `simulate` runs one workload on
one pool for other programs.
"""

from syncline.scheduler_core.simulate.history import CostModel, History, Visit
from syncline.scheduler_core.simulate.lengths import Lengths, parse_lengths
from syncline.scheduler_core.simulate.loop import (
    BrokenInvariantError,
    Result,
    Setup,
    simulate,
)
from syncline.scheduler_core.simulate.report import facts, table
from syncline.scheduler_core.simulate.workload import (
    Arrivals,
    Load,
    Workload,
    draw_load,
    ending_model,
    parse_arrivals,
)

__all__ = [
    "Arrivals",
    "BrokenInvariantError",
    "CostModel",
    "History",
    "Lengths",
    "Load",
    "Result",
    "Setup",
    "Visit",
    "Workload",
    "draw_load",
    "ending_model",
    "facts",
    "parse_arrivals",
    "parse_lengths",
    "simulate",
    "table",
]
