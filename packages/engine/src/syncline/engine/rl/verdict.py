"""What a demo run must show, and whether it did: numbers in, reasons out."""

import math
from collections.abc import Sequence as SequenceABC
from dataclasses import asdict, dataclass
from typing import Final

MIN_REWARD_GAIN: Final = 0.15
MAX_K3_KL: Final = 1e-6
EDGE_STEPS: Final = 2  # Steps averaged at either end.


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoStep:
    """One row of the demo's table.

    mean_reward  nan when rows were missing and nothing could be trained.
    coverage     share of the weights' stored bytes that the sync wrote.
    """

    step: int
    mean_reward: float
    tokens_per_s: float
    num_preemptions: int
    num_missing: int
    sync_s: float
    sync_bytes: int
    coverage: float
    slept_bytes: int
    k3_kl: float
    chi2_token: float

    def to_json(self) -> dict[str, object]:
        """Not-a-number as None: JSON has no word for it."""
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in asdict(self).items()
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Passed when `failures` is empty."""

    reward_gain: float
    num_preemptions: int
    max_k3_kl: float
    failures: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return not self.failures


def judge(steps: SequenceABC[DemoStep], num_planned: int) -> Verdict:
    """Every comparison is written so that nan fails it."""
    first = [step.mean_reward for step in steps[:EDGE_STEPS]]
    last = [step.mean_reward for step in steps[-EDGE_STEPS:]]
    gain = sum(last) / len(last) - sum(first) / len(first) if steps else math.nan
    failures = []
    if len(steps) < num_planned:
        failures.append(f"only {len(steps)} of {num_planned} steps ran")
    if not gain >= MIN_REWARD_GAIN:
        failures.append(f"the reward rose by {gain:.3f}, less than {MIN_REWARD_GAIN}")
    for step in steps:
        if not step.k3_kl < MAX_K3_KL:
            failures.append(f"step {step.step}: k3_kl {step.k3_kl:.2e} is not below {MAX_K3_KL:g}")
        if step.coverage != 1.0:
            failures.append(f"step {step.step}: the sync covered {step.coverage:.2%} of the bytes")
        if step.num_missing:
            failures.append(f"step {step.step}: {step.num_missing} rows are missing")
    num_preemptions = sum(step.num_preemptions for step in steps)
    if num_preemptions == 0:
        failures.append("no sequence was preempted: the KV pool was not small enough")
    return Verdict(
        reward_gain=gain,
        num_preemptions=num_preemptions,
        max_k3_kl=max((step.k3_kl for step in steps), default=math.nan),
        failures=tuple(failures),
    )
