"""Configurations of the ops from logits to tokens; imports no Triton. The bucket is a vocabulary.

Kinds: `row` is the program that finishes a row; the others, which come before it, are those of
`sample` for every op. `tiles` and `kept` are passes over the logits, TILES of VOCAB_TILE ids to a
program; `filter` finds a row's cut, CHUNKS x WIDTH ids to a step. Those of sm_90 were measured on
an H200, the others were not.
"""

from collections.abc import Iterator
from typing import Final

import torch

from syncline.model_ops_rocm.triton.configs.base import ANY_WIDTH, HALF_DTYPES, ConfigKey, Row
from syncline.model_ops_rocm.triton.targets import SUPPORTED_ARCHS, LaunchConfig

_ROW_OPS: Final = ("sample", "token_logprobs", "top_logprobs", "logits_partials")


def _pass(num_warps: int, tiles: int) -> LaunchConfig:
    return LaunchConfig(num_warps=num_warps, constants={"TILES": tiles})


_SEARCHES: Final = {
    "gfx942": LaunchConfig(num_warps=4, constants={"CHUNKS": 1, "WIDTH": 2_048}),
    "gfx950": LaunchConfig(num_warps=4, constants={"CHUNKS": 1, "WIDTH": 2_048}),
    "sm_90": LaunchConfig(num_warps=8, constants={"CHUNKS": 4, "WIDTH": 2_048}),
}


def table() -> Iterator[Row]:
    """Every row."""
    for arch in SUPPORTED_ARCHS:
        # Its numbers are float64, whatever the logits were.
        combined = ConfigKey("combine_partials", arch, torch.float32, ANY_WIDTH)
        yield combined, LaunchConfig(num_warps=1)
        counted = ConfigKey("count_tokens", arch, torch.int32, ANY_WIDTH)
        yield counted, LaunchConfig(num_warps=1, constants={"BLOCK_WIDTH": 128})
        for dtype in (*HALF_DTYPES, torch.float32):
            yield ConfigKey("sample", arch, dtype, ANY_WIDTH, "tiles"), _pass(2, 2)
            yield ConfigKey("sample", arch, dtype, ANY_WIDTH, "kept"), _pass(2, 2)
            yield ConfigKey("sample", arch, dtype, ANY_WIDTH, "filter"), _SEARCHES[arch]
            ruled = ConfigKey("apply_logits_rules", arch, dtype, ANY_WIDTH)
            yield ruled, LaunchConfig(num_warps=4, constants={"BLOCK_WIDTH": 1_024})
            for op in _ROW_OPS:
                yield ConfigKey(op, arch, dtype, ANY_WIDTH, "row"), LaunchConfig(num_warps=4)
