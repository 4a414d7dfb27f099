"""What a family of ops says about its launches without a GPU, and the tensors they are made of.

A family is a module with CALLS, for each of its ops the calls that use one row of the configuration
tables, and RULES, what the compiled code of each op may and must show. The shapes are those the row
is meant for; a call's `variant` says in what it differs from the plain one.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

import torch

from syncline.model_ops_rocm.triton.configs.base import ANY_WIDTH, ConfigKey

Arguments = dict[str, object]
# One row of the tables and a number of tokens -> each call's variant and keywords.
Calls = Callable[[ConfigKey, int], Iterator[tuple[str, Arguments]]]
_TWO_GIB: Final = 2**31
# The width that stands for a bucket without a bound.
_WIDE: Final = 12_288


def operands_of_dtype(key: ConfigKey) -> tuple[str, ...]:
    """Matrix instructions multiply the row's own dtype; NVIDIA has none for whole float32."""
    names = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
    if key.dtype == torch.float32 and key.arch.startswith("sm_"):
        return ()
    return (f"{names[key.dtype]} {names[key.dtype]}",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What the code of one op may and must show, in every configuration."""

    # Vector loads per kernel that may be narrower than 128 bits: ids and slots, which are one
    # number each, and what a whole tile shares.
    max_narrow_loads: int = 0
    max_narrow_stores: int = 0
    # The same of single kernels, by name, that have more of what is one number each.
    narrow_loads: Mapping[str, int] = field(default_factory=dict)
    narrow_stores: Mapping[str, int] = field(default_factory=dict)
    # Whether the op multiplies matrices: then its kernels have matrix instructions, else none.
    is_matrix: bool = False
    # What those multiply, as `CodeFacts.operands` says it: a compiler that lacks an instruction for
    # a type converts without a word, and then another type stands here. Exactly these, all of them.
    operands: Callable[[ConfigKey], tuple[str, ...]] = operands_of_dtype
    # Of the op's kernels, by name, those that multiply nothing.
    without_matrix: frozenset[str] = frozenset()
    # Moves between AMD's vector registers and accumulators.
    max_accumulator_moves: int = 0
    # arch -> the least number of waves of a SIMD, or warps of an SM, that registers and shared
    # memory must allow, in any configuration; the table beside has each one's own.
    min_occupancy: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One call that uses the configuration `key`."""

    key: ConfigKey
    variant: str
    arguments: Arguments

    @property
    def name(self) -> str:
        dtype = str(self.key.dtype).removeprefix("torch.")
        up_to = "any" if self.key.up_to == ANY_WIDTH else str(self.key.up_to)
        kind = f"{self.key.kind}/" if self.key.kind else ""
        return f"{self.key.op}/{dtype}/{kind}{up_to}/{self.variant}"


def empty(key: ConfigKey, *shape: int) -> torch.Tensor:
    """A tensor of the row's dtype that holds nothing."""
    return torch.empty(shape, dtype=key.dtype, device="meta")


def ids(*shape: int) -> torch.Tensor:
    """int64 numbers that nobody reads."""
    return torch.empty(shape, dtype=torch.int64, device="meta")


def width_of(key: ConfigKey) -> int:
    """The row's bucket, or a width that stands for all beyond the last bound."""
    return min(key.up_to, _WIDE)


def pools(key: ConfigKey, block_elements: int) -> Iterator[tuple[str, int]]:
    """Storage up to 2 GiB is addressed by 32-bit offsets on AMD, beyond it by pointers."""
    yield "under-2-GiB", 8
    yield "over-2-GiB", _TWO_GIB // (block_elements * key.dtype.itemsize) + 1
