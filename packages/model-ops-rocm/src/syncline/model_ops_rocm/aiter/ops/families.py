"""Which class is which op; says what an installed AITER lacks for it."""

from collections.abc import Mapping
from typing import Final

from syncline.model_ops_rocm.aiter.detect import Aiter
from syncline.model_ops_rocm.aiter.interface import OP_ENUMERATIONS, OP_FUNCTIONS
from syncline.model_ops_rocm.aiter.ops.attention import AiterPagedAttention
from syncline.model_ops_rocm.aiter.ops.common import AiterOp
from syncline.model_ops_rocm.aiter.ops.dense import (
    AiterRMSNorm,
    AiterRotaryEmbedding,
    AiterSiluAndMul,
)
from syncline.model_ops_rocm.aiter.ops.kv import AiterKVWrite
from syncline.model_ops_rocm.aiter.ops.linear import AiterLinear, AiterLinearQuantised
from syncline.model_ops_rocm.aiter.ops.moe import AiterMoeExperts, AiterMoeRoute
from syncline.model_ops_rocm.aiter.ops.quantise import AiterQuantiseActivation, AiterRMSNormQuant
from syncline.model_ops_rocm.backends import Missing

_CLASSES: Final[Mapping[str, type[AiterOp]]] = {
    "rms_norm": AiterRMSNorm,
    "rotary_embedding": AiterRotaryEmbedding,
    "silu_and_mul": AiterSiluAndMul,
    "linear": AiterLinear,
    "linear_quantised": AiterLinearQuantised,
    "quantise_activation": AiterQuantiseActivation,
    "rms_norm_quant": AiterRMSNormQuant,
    "kv_write": AiterKVWrite,
    "paged_attention": AiterPagedAttention,
    "moe_route": AiterMoeRoute,
    "moe_experts": AiterMoeExperts,
}


def implementations(aiter: Aiter) -> dict[str, AiterOp | Missing]:
    """Every op: what implements it, or what it would call and is not there."""
    return {
        op: Missing(why=why) if (why := _why_missing(aiter, op)) else of_aiter(aiter)
        for op, of_aiter in _CLASSES.items()
    }


def _why_missing(aiter: Aiter, op: str) -> str | None:
    """None if one of the op's functions is there: a call that needs another is refused then."""
    members = [aiter.problems.get(name) for name in OP_ENUMERATIONS.get(op, ())]
    functions = [aiter.problems.get(name) for name in OP_FUNCTIONS[op]]
    missing = [why for why in members if why is not None]
    if None not in functions:
        missing += [why for why in functions if why is not None]
    return "; ".join(missing) or None
