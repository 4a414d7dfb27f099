"""Configurations of what lies between two decode steps; imports no Triton.

The bucket is the number of tokens of a row, and the dtype that of ids, whatever the model's is; by
rejection, the number of ids of the vocabulary, and the dtype of the logits.
"""

from collections.abc import Iterator, Mapping
from typing import Final

import torch

from syncline.model_ops_rocm.checks import FLOAT_DTYPES
from syncline.model_ops_rocm.triton.configs.base import ConfigKey, Row
from syncline.model_ops_rocm.triton.targets import SUPPORTED_ARCHS, LaunchConfig

MAX_QUERIES: Final = 64
MAX_IDS: Final = 2**20
# Tokens of a row -> rows of a program: its tile of rows x tokens x stop ids stays in registers.
_BLOCK_ROWS: Final[Mapping[int, int]] = {1: 32, 8: 8, MAX_QUERIES: 1}


def table() -> Iterator[Row]:
    """Every row."""
    for arch in SUPPORTED_ARCHS:
        for up_to, block_rows in _BLOCK_ROWS.items():
            constants = {"BLOCK_ROWS": block_rows, "BLOCK_STOP_IDS": 8}
            config = LaunchConfig(num_warps=1, constants=constants)
            yield ConfigKey("advance", arch, torch.int32, up_to), config
            config = LaunchConfig(num_warps=1, constants={"BLOCK_ROWS": block_rows})
            yield ConfigKey("verify_drafts", arch, torch.int32, up_to), config
        for dtype in FLOAT_DTYPES:
            key = ConfigKey("verify_drafts", arch, dtype, MAX_IDS, kind="rejection-tiles")
            yield key, LaunchConfig(num_warps=4, constants={"TILES": 4})
            key = ConfigKey("verify_drafts", arch, dtype, MAX_IDS, kind="rejection-rows")
            yield key, LaunchConfig(num_warps=4)
