"""What is on record of AITER's functions: names, order of parameters, faults by version.

Unit: one function. Data alone: nothing here was run on an AMD GPU, and nothing imports AITER. A
function that is not here is not called.
Source: ROCm/aiter e4048607a (August 2026), read; the names of positional parameters are as they are
written there or shorter, so their number and order are checked, and a name where it is the same.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from syncline.model_ops_rocm.aiter.distribution import release_of


@dataclass(frozen=True, slots=True, kw_only=True)
class AiterFunction:
    """How this package calls a function: what goes by position, and what by name."""

    name: str  # with a dot: an attribute of an object, such as `tgemm.mm`
    positional: tuple[str, ...]
    keywords: tuple[str, ...] = ()
    places: tuple[str, ...] = ("aiter",)  # modules to look in, in this order


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownFault:
    """A case in which a function gives wrong numbers."""

    function: str
    case: str
    fixed_in: tuple[int, ...] | None  # the first release known to be right; None: none is known

    def is_in(self, version: str) -> bool:
        """Whether a version must be taken to have it; one that cannot be read has it."""
        return self.fixed_in is None or release_of(version) < self.fixed_in


PARTIAL_16_PAGES: Final = KnownFault(
    function="pa_fwd_asm",
    case="a context of 16 pages of which the last is partial, 241 to 255 tokens at page 16",
    fixed_in=None,
)
KNOWN_FAULTS: Final = (PARTIAL_16_PAGES,)

_RECORD: Final = (
    AiterFunction(
        name="rmsnorm2d_fwd",
        positional=("x", "w", "eps"),
        keywords=("use_model_sensitive_rmsnorm",),
    ),
    AiterFunction(name="silu_and_mul", positional=("out", "x")),
    AiterFunction(
        name="rope_cached_positions_2c_fwd_inplace",
        positional=(
            *("q", "k", "cos", "sin", "positions"),
            *("rotate_style", "reuse_freqs_front_part", "nope_first"),
        ),
    ),
    AiterFunction(
        name="tgemm.mm",
        positional=("A", "B", "bias", "otype"),
        places=("aiter", "aiter.tuned_gemm"),
    ),
)
RECORD: Final[Mapping[str, AiterFunction]] = {one.name: one for one in _RECORD}

# The functions of each op, for one case of it each; an op is there if one of its cases is.
OP_FUNCTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "rms_norm": ("rmsnorm2d_fwd",),
    "rotary_embedding": ("rope_cached_positions_2c_fwd_inplace",),
    "silu_and_mul": ("silu_and_mul",),
    "linear": ("tgemm.mm",),
}
