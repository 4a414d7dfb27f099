"""Configurations of the ops from logits to tokens; imports no Triton. The bucket is a vocabulary.

Kinds: `row` is the program that finishes a row; the others, which come before it, are those of
`sample` for every op. `tiles` is a pass over the logits. Of the filters, `bracket` draws a sample
of FEW or MANY parts, of runs of WIDTH ids, in which it searches ROUNDS times, and sets no bound
from above where MOST logits lie over the lower one; `collect` is a pass over what may lie between,
each of LANES with a run of ids; `settle` counts up to BINS values, COUNTED logits of a region at
once and MORE then, or searches a list of one of three sizes in ACROSS columns; `filter` reads a
row, CHUNKS x WIDTH ids to a step, and `kept` its tiles, or what was collected of TILES of them,
DEEP x ACROSS at a time. Those of sm_90 were measured on an H200, the others were not.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final

import torch

from syncline.model_ops_rocm.triton.configs.base import ANY_WIDTH, HALF_DTYPES, ConfigKey, Row
from syncline.model_ops_rocm.triton.targets import SUPPORTED_ARCHS, LaunchConfig

_ROW_OPS: Final = ("sample", "token_logprobs", "top_logprobs", "logits_partials")
# A program of the pass over the logits takes up to so many tiles, while so many programs are left.
_MOST_TILES: Final = 3
_ENOUGH_PROGRAMS: Final = 4_096
# Of `kept`, for each row: for min_p alone, which reads all its tiles again, and where only what no
# bracket held is left for them.
KEPT_PROGRAMS: Final = 30
RARE_PROGRAMS: Final = 10
_SAMPLES: Final = {"ROUNDS": 2, "WIDTH": 32, "MOST": 1_700}
_COUNTS: Final = {"ACROSS": 256, "BINS": 64, "COUNTED": 128, "MORE": 32}
_LISTS: Final = {"SMALL": 512, "MEDIUM": 2_048, "LARGE": 4_096, **_COUNTS}
_SHORTER: Final = {"SMALL": 256, "MEDIUM": 1_024, "LARGE": 2_048, **_COUNTS}
# How many bits more than these the fraction of a float32 has.
SHIFTS: Final = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}


def tiles_of_a_program(num_rows: int, num_tiles: int) -> int:
    """Of the pass over `num_rows` rows of so many tiles."""
    return min(-(-num_rows * num_tiles // _ENOUGH_PROGRAMS), _MOST_TILES)


def _launch(
    arch: str, num_warps: int, constants: Mapping[str, int] = MappingProxyType({})
) -> LaunchConfig:
    """Of kernels that follow one another at once: on sm_90 each starts while the last one ends."""
    is_pdl = True if arch.startswith("sm_") else None
    return LaunchConfig(num_warps=num_warps, constants=constants, launch_pdl=is_pdl)


def _searches(arch: str, dtype: torch.dtype) -> Iterator[tuple[str, LaunchConfig]]:
    """What comes before a row's own program, in order."""
    is_nvidia = arch.startswith("sm_")
    is_one_warp = is_nvidia and dtype in HALF_DTYPES
    yield "tiles", _launch(arch, 1 if is_one_warp else 2)
    num_warps = 4 if is_nvidia else 8
    lanes = 32 * num_warps
    # 2,048 ids and 16,384; of bfloat16, of which there are few values in a bracket, 12,288.
    few = 2_048 // (lanes * 16 // dtype.itemsize)
    many = (6 if dtype == torch.bfloat16 else 8) * few
    counts = {"FEW": few, "MANY": many, "LANES": lanes}
    yield "bracket", _launch(arch, num_warps, _SAMPLES | counts)
    yield "collect", _launch(arch, 1, {"LANES": 32 if is_nvidia else 64})
    # On AMD a comparison of 64 lanes takes two scalar registers, so a lane has few elements there.
    yield "settle", _launch(arch, 8, _LISTS) if is_nvidia else _launch(arch, 16, _SHORTER)
    yield "filter", _launch(arch, 8, {"CHUNKS": 4 if is_nvidia else 1, "WIDTH": 2_048})
    yield "kept", _launch(arch, 1, {"TILES": 16, "DEEP": 2, "ACROSS": 8})


def table() -> Iterator[Row]:
    """Every row."""
    for arch in SUPPORTED_ARCHS:
        # Its numbers are float64, whatever the logits were.
        combined = ConfigKey("combine_partials", arch, torch.float32, ANY_WIDTH)
        yield combined, LaunchConfig(num_warps=1)
        counted = ConfigKey("count_tokens", arch, torch.int32, ANY_WIDTH)
        yield counted, LaunchConfig(num_warps=1, constants={"BLOCK_WIDTH": 128})
        for dtype in (*HALF_DTYPES, torch.float32):
            for kind, config in _searches(arch, dtype):
                yield ConfigKey("sample", arch, dtype, ANY_WIDTH, kind), config
            ruled = ConfigKey("apply_logits_rules", arch, dtype, ANY_WIDTH)
            yield ruled, LaunchConfig(num_warps=4, constants={"BLOCK_WIDTH": 1_024})
            for op in _ROW_OPS:
                yield ConfigKey(op, arch, dtype, ANY_WIDTH, "row"), _launch(arch, 4)
