"""The configurations, as tables keyed by (op, arch, dtype, shape bucket, kind); imports no Triton.

One module per family of ops gives its rows by `table()`. A bucket is the largest width it is meant
for: of a normalised row, of a row of the result, of a head, of a block; each family says of what.
A shape takes the narrowest bucket that holds it.
"""

from collections.abc import Mapping
from functools import lru_cache
from itertools import chain
from types import MappingProxyType
from typing import Final

import torch

from syncline.model_ops_rocm.errors import NoConfigurationError
from syncline.model_ops_rocm.triton.configs import (
    attention,
    decoding,
    elementwise,
    fused,
    linear,
    linear_many,
    linear_specialised,
    logits,
    moe,
    storing,
)
from syncline.model_ops_rocm.triton.configs.base import ConfigKey
from syncline.model_ops_rocm.triton.targets import LaunchConfig

_FAMILIES: Final = (
    attention,
    decoding,
    elementwise,
    fused,
    storing,
    linear,
    linear_many,
    linear_specialised,
    moe,
    logits,
)
CONFIGS: Final[Mapping[ConfigKey, LaunchConfig]] = MappingProxyType(
    dict(chain.from_iterable(family.table() for family in _FAMILIES))
)


@lru_cache(maxsize=8_192)  # a call must not read hundreds of keys
def key_for(op: str, arch: str, dtype: torch.dtype, width: int, kind: str = "") -> ConfigKey:
    """The narrowest bucket that holds `width`; NoConfigurationError if there is none."""
    wanted = (op, arch, dtype)
    found = [
        key for key in CONFIGS if key[:3] == wanted and key.kind == kind and key.up_to >= width
    ]
    if not found:
        raise NoConfigurationError(op=op, arch=arch, dtype=dtype, width=width)
    return min(found, key=lambda key: key.up_to)
