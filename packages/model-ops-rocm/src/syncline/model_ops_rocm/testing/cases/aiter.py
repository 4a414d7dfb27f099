"""How near AITER's functions come to a contract that rounds elsewhere than they do.

(rtol, atol) per (op, dtype), for the ops whose rounding is on record as another one; the rest has
the tolerance of every backend. Seen on a stand-in that computes in float32 and rounds once: nothing
here was measured on an AMD GPU.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import torch

from syncline.model_ops_rocm.testing.cases import tolerance_of

TOLERANCES: Final[Mapping[tuple[str, torch.dtype], tuple[float, float]]] = MappingProxyType(
    {
        # The products of the contract are rounded before they are summed.
        ("rotary_embedding", torch.float16): (2**-9, 2**-9),
        ("rotary_embedding", torch.bfloat16): (2**-6, 2**-6),
        # silu that rounds to a subnormal number, times a large one.
        ("silu_and_mul", torch.float16): (2**-9, 2**-18),
        # The order of a sum is the backend's.
        ("linear", torch.float16): (2**-9, 2**-9),
        ("linear", torch.bfloat16): (2**-6, 2**-6),
    }
)


def aiter_tolerance_of(op: str, dtype: torch.dtype) -> tuple[float, float]:
    return TOLERANCES.get((op, dtype), tolerance_of(op, dtype))
