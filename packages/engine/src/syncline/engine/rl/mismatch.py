"""How far two policies disagree about the same tokens: `k3_kl` and `chi2_token`.

Both compare the logprobs that the engine recorded while it sampled (`roll`) with those that the
trainer computes for the same tokens under the same weights (`old`). Zero means equal.

Source: k3 is Schulman's third KL estimator, http://joschu.net/blog/kl-approx.html; the chi-square
of token ratios sees a handful of wrecked tokens that a mean hides.
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

MAX_LOG_RATIO: Final = 20.0  # e**20 is wreck enough; beyond it the square overflows.


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """Means over all tokens; delta = old - roll, rho = e**delta.

    k3_kl       mean(rho - delta - 1), never negative.
    chi2_token  mean(rho**2) - 1, delta clamped to +-20.
    """

    k3_kl: float
    chi2_token: float


def measure_mismatch(old: Tensor, roll: Tensor) -> Mismatch:
    """Logprobs of the same shape; computed in float64."""
    if old.shape != roll.shape or old.numel() == 0:
        raise ValueError(
            f"old and roll must have one non-empty shape, got {tuple(old.shape)} "
            f"and {tuple(roll.shape)}"
        )
    delta = old.double() - roll.double()
    k3 = torch.expm1(delta) - delta
    rho = torch.exp(delta.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    return Mismatch(k3_kl=float(k3.mean()), chi2_token=float((rho * rho).mean() - 1.0))
