"""The calls that every backend must answer as the reference does, one module per family of ops.

TOLERANCES holds (rtol, atol) per (op, dtype), where sums are taken in another order, or exp is
another, so that the roundings of the contract fall differently now and then. An op that is not in
it copies, or rounds each product, and is bit-equal.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import torch

from syncline.model_ops_rocm.testing.cases import (
    attention,
    decoding,
    dense,
    fused,
    kv,
    linear,
    logits,
    logits_rules,
    moe,
    storing,
)
from syncline.model_ops_rocm.testing.parity import Case

CASES: Final[tuple[Case, ...]] = (
    *attention.CASES,
    *decoding.CASES,
    *dense.CASES,
    *fused.CASES,
    *kv.CASES,
    *storing.CASES,
    *linear.CASES,
    *moe.CASES,
    *logits.CASES,
    *logits_rules.CASES,
)
TOLERANCES: Final[Mapping[tuple[str, torch.dtype], tuple[float, float]]] = MappingProxyType(
    {
        **attention.TOLERANCES,
        **dense.TOLERANCES,
        **fused.TOLERANCES,
        **linear.TOLERANCES,
        **moe.TOLERANCES,
        **logits.TOLERANCES,
    }
)


def tolerance_of(op: str, dtype: torch.dtype) -> tuple[float, float]:
    """(rtol, atol); zeros for an op that is bit-equal."""
    return TOLERANCES.get((op, dtype), (0.0, 0.0))
