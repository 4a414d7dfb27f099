"""Which class is which op; says what an installed AITER lacks for it."""

from collections.abc import Mapping
from typing import Final

from syncline.model_ops_rocm.aiter.detect import Aiter
from syncline.model_ops_rocm.aiter.interface import OP_FUNCTIONS
from syncline.model_ops_rocm.aiter.ops.common import AiterOp
from syncline.model_ops_rocm.aiter.ops.dense import (
    AiterLinear,
    AiterRMSNorm,
    AiterRotaryEmbedding,
    AiterSiluAndMul,
)
from syncline.model_ops_rocm.backends import Missing

_CLASSES: Final[Mapping[str, type[AiterOp]]] = {
    "rms_norm": AiterRMSNorm,
    "rotary_embedding": AiterRotaryEmbedding,
    "silu_and_mul": AiterSiluAndMul,
    "linear": AiterLinear,
}


def implementations(aiter: Aiter) -> dict[str, AiterOp | Missing]:
    """Every op: what implements it, or what it would call and is not there."""
    return {
        op: Missing(why=why) if (why := _why_missing(aiter, op)) else of_aiter(aiter)
        for op, of_aiter in _CLASSES.items()
    }


def _why_missing(aiter: Aiter, op: str) -> str | None:
    """None if one of the op's functions is there: a call that needs another is refused then."""
    problems = [aiter.problems.get(name) for name in OP_FUNCTIONS[op]]
    missing = [why for why in problems if why is not None]
    return "; ".join(missing) if len(missing) == len(problems) else None
