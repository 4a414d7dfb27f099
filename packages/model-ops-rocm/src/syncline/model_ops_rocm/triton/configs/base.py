"""What a row of a configuration table is; imports no Triton."""

from collections.abc import Mapping
from typing import Final, NamedTuple

import torch

from syncline.model_ops_rocm.triton.targets import LaunchConfig

HALF_DTYPES: Final = (torch.bfloat16, torch.float16)
ANY_WIDTH: Final = 2**31 - 1


class ConfigKey(NamedTuple):
    """Which launches one configuration serves."""

    op: str
    arch: str
    dtype: torch.dtype
    up_to: int  # the bucket: the widest shape
    kind: str = ""  # what else tells launches of one op apart, in the op's own words


Buckets = Mapping[int, LaunchConfig]
Row = tuple[ConfigKey, LaunchConfig]
