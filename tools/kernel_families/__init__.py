"""Every launch that is compiled without a GPU: each op's wrapper with tensors that hold nothing."""

from collections.abc import Mapping
from types import ModuleType
from typing import Final

from kernel_families import (
    attention,
    decoding,
    elementwise,
    fused,
    kv,
    linear,
    logits,
    moe,
    storing,
)
from kernel_families.base import Launch, Rules
from syncline.model_ops_rocm.triton.configs import CONFIGS

FAMILIES: Final[Mapping[str, ModuleType]] = {
    "decoding": decoding,
    "elementwise": elementwise,
    "fused": fused,
    "attention": attention,
    "kv": kv,
    "storing": storing,
    "linear": linear,
    "moe": moe,
    "logits": logits,
}


def launches_for(arch: str, family: str, num_tokens: int = 64) -> list[Launch]:
    """At least one for each row of the tables that belongs to the family and `arch`."""
    calls = FAMILIES[family].CALLS
    return [
        Launch(key=key, variant=variant, arguments=arguments)
        for key in CONFIGS
        if key.arch == arch and key.op in calls
        for variant, arguments in calls[key.op](key, num_tokens)
    ]


def rules_of(op: str) -> Rules:
    """What the code of `op` may and must show."""
    (rules,) = (family.RULES[op] for family in FAMILIES.values() if op in family.RULES)
    assert isinstance(rules, Rules)
    return rules
