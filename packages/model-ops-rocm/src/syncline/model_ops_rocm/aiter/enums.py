"""AITER's enumerations with values of our own, and the way across; knows no op.

AITER's are made by a C++ module and do not equal integers, so a member is looked up by its value at
the border and goes nowhere else.
Source: ROCm/aiter e4048607a `csrc/include/aiter_enum.h`.
"""

from enum import IntEnum
from typing import Final


class QuantType(IntEnum):
    """Who shares a scale; `aiter.QuantType`."""

    NONE = 0
    PER_TENSOR = 1
    PER_TOKEN = 2
    PER_1X32 = 3
    PER_1X128 = 4
    PER_128X128 = 5


class ActivationType(IntEnum):
    """What an expert's gate goes through; `aiter.ActivationType`."""

    SILU = 0
    GELU = 1
    SWIGLU = 2


ENUMS: Final[dict[type[IntEnum], str]] = {
    QuantType: "QuantType",
    ActivationType: "ActivationType",
}


def members_by_value(theirs: object) -> dict[int, object]:
    """Each member of one of AITER's enumerations by its value; empty for what is none."""
    members = getattr(theirs, "__members__", {})
    return {int(member.value): member for member in members.values()}
