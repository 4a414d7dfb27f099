"""Configurations of mixture of experts; imports no Triton.

Buckets: experts, for routing and sorting; the width of a row, for the sum; for the projections the
mean number of pairs of an expert, rounded up, so that most experts fill one block. Kinds of
projections: `gate_up` and `down` in blocks of sorted pairs, `invariant` the same in one bucket,
`direct` a pair at a time, with the number of pairs as bucket, `codes` in blocks where codes
multiply codes; there the widest bucket also serves batch-invariant calls.
The rows of sm_90 for x in bfloat16 were chosen by measurement on an H200, with 128 experts, 8 of a
token, 2,048 x 768, and so were those of codes and of single pairs in fp8; the others are guesses.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final

import torch

from syncline.model_ops_rocm.triton.configs.base import ANY_WIDTH, HALF_DTYPES, ConfigKey, Row
from syncline.model_ops_rocm.triton.targets import LaunchConfig

MAX_EXPERTS: Final = 1_024
# A step with more pairs than that sorts them: then several often go to one expert.
MAX_DIRECT_PAIRS: Final = 32
MAX_BLOCK_PAIRS: Final = 128  # BLOCK_M of any row below
GATE_UP: Final = "gate_up"
DOWN: Final = "down"
DIRECT: Final = "direct"
INVARIANT: Final = "invariant"
CODES: Final = "codes"
MANY_PAIRS: Final = "many"  # of sorting: counted by a launch of their own
SORTING_PROGRAMS: Final = 256  # share them then, or one for each group if those are more
# Rows of weights in fp8, of either kind, under an x of 2 bytes.
FP8_ROWS: Final = torch.float8_e4m3fn


def rows_of(dtype: torch.dtype, *, is_fp8: bool) -> torch.dtype:
    """Whose rows serve experts with an x of `dtype`: float16 has those of bfloat16."""
    if dtype not in HALF_DTYPES:
        return dtype
    return FP8_ROWS if is_fp8 else torch.bfloat16


def kind_of_sort(num_pairs: int) -> str:
    """Which row sorts so many pairs: more at a time where there are many."""
    return MANY_PAIRS if num_pairs > 1_024 else ""


def _blocks(
    m: int, n: int, k: int, *, num_warps: int = 4, num_stages: int = 3, group: int = 1
) -> LaunchConfig:
    constants = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP_BLOCKS": group}
    return LaunchConfig(num_warps=num_warps, num_stages=num_stages, constants=constants)


def _vectors(n: int, k: int, *, num_warps: int) -> LaunchConfig:
    constants = {"BLOCK_N": n, "BLOCK_K": k}
    return LaunchConfig(num_warps=num_warps, constants=constants, fuses_multiply_add=True)


def _routing(arch: str, dtype: torch.dtype) -> Iterator[Row]:
    for up_to, num_warps in ((256, 1), (MAX_EXPERTS, 4)):
        config = LaunchConfig(num_warps=num_warps, constants={"BLOCK_ROWS": 1})
        yield ConfigKey("moe_route", arch, dtype, up_to), config
    # 16 bytes of each lane: a wavefront of AMD has 64 of them, a warp of NVIDIA 32.
    width = (64 if arch.startswith("gfx") else 32) * 4 * 16 // dtype.itemsize
    config = LaunchConfig(num_warps=4, constants={"BLOCK_WIDTH": width})
    for op in ("moe_permute", "moe_combine"):
        yield ConfigKey(op, arch, dtype, ANY_WIDTH), config


_Projections = Mapping[str, Mapping[int, LaunchConfig]]

_SM_90: Final[_Projections] = {
    GATE_UP: {
        4: _blocks(16, 32, 128),
        16: _blocks(32, 64, 128),
        64: _blocks(64, 64, 64),
        ANY_WIDTH: _blocks(128, 128, 64, num_stages=4, num_warps=8),
    },
    DOWN: {
        4: _blocks(16, 64, 128),
        16: _blocks(32, 128, 64),
        64: _blocks(64, 128, 64),
        ANY_WIDTH: _blocks(128, 256, 64, num_stages=4, num_warps=8, group=8),
    },
    f"{GATE_UP}-{INVARIANT}": {ANY_WIDTH: _blocks(64, 64, 64)},
    f"{DOWN}-{INVARIANT}": {ANY_WIDTH: _blocks(64, 128, 64)},
    f"{GATE_UP}-{DIRECT}": {ANY_WIDTH: _vectors(1, 2_048, num_warps=4)},
    f"{DOWN}-{DIRECT}": {ANY_WIDTH: _vectors(2, 256, num_warps=2)},
}
_SM_90_FP8: Final[_Projections] = {
    GATE_UP: {
        4: _blocks(16, 32, 128),
        ANY_WIDTH: _blocks(32, 64, 128),
    },
    DOWN: {
        4: _blocks(16, 64, 128),
        ANY_WIDTH: _blocks(32, 128, 128),
    },
    f"{GATE_UP}-{CODES}": {
        4: _blocks(16, 64, 128, num_stages=5),
        16: _blocks(32, 128, 128, num_warps=8),
        ANY_WIDTH: _blocks(64, 64, 128, num_stages=4),
    },
    f"{DOWN}-{CODES}": {
        4: _blocks(16, 64, 128),
        16: _blocks(32, 128, 128, num_warps=8),
        ANY_WIDTH: _blocks(64, 128, 128, num_stages=4),
    },
    f"{GATE_UP}-{INVARIANT}": {ANY_WIDTH: _blocks(64, 64, 64)},
    f"{DOWN}-{INVARIANT}": {ANY_WIDTH: _blocks(64, 128, 64)},
    f"{GATE_UP}-{DIRECT}": {ANY_WIDTH: _vectors(16, 128, num_warps=4)},
    f"{DOWN}-{DIRECT}": {ANY_WIDTH: _vectors(4, 128, num_warps=4)},
}
_AMD: Final[_Projections] = {
    GATE_UP: {
        16: _blocks(16, 64, 64, num_stages=2),
        ANY_WIDTH: _blocks(64, 64, 64, num_stages=2, group=8),
    },
    DOWN: {
        16: _blocks(16, 64, 128, num_stages=2),
        ANY_WIDTH: _blocks(64, 128, 64, num_stages=2, group=8),
    },
    f"{GATE_UP}-{INVARIANT}": {ANY_WIDTH: _blocks(32, 64, 64, num_stages=2)},
    f"{DOWN}-{INVARIANT}": {ANY_WIDTH: _blocks(32, 64, 64, num_stages=2)},
    f"{GATE_UP}-{DIRECT}": {ANY_WIDTH: _vectors(16, 512, num_warps=4)},
    f"{DOWN}-{DIRECT}": {ANY_WIDTH: _vectors(8, 128, num_warps=4)},
}
_AMD_FP8: Final[_Projections] = {
    GATE_UP: {ANY_WIDTH: _blocks(16, 64, 128, num_stages=2)},
    DOWN: {ANY_WIDTH: _blocks(16, 64, 128, num_stages=2)},
    f"{GATE_UP}-{CODES}": {ANY_WIDTH: _blocks(16, 64, 128, num_stages=2)},
    f"{DOWN}-{CODES}": {ANY_WIDTH: _blocks(16, 64, 128, num_stages=2)},
    f"{GATE_UP}-{INVARIANT}": {ANY_WIDTH: _blocks(32, 64, 64, num_stages=2)},
    f"{DOWN}-{INVARIANT}": {ANY_WIDTH: _blocks(32, 64, 64, num_stages=2)},
    f"{GATE_UP}-{DIRECT}": {ANY_WIDTH: _vectors(16, 128, num_warps=2)},
    f"{DOWN}-{DIRECT}": {ANY_WIDTH: _vectors(8, 128, num_warps=4)},
}


def _float32(kind: str) -> LaunchConfig:
    if kind == f"{GATE_UP}-{DIRECT}":
        return _vectors(8, 128, num_warps=4)
    if kind == f"{DOWN}-{DIRECT}":
        return _vectors(8, 64, num_warps=4)
    return _blocks(16, 32, 32, num_stages=2)


def table() -> Iterator[Row]:
    """Every row.

    On sm_90 small launches start while the kernel before them ends; those of blocks do not, as what
    waited beside them was measured to cost more.
    """
    for key, config in _table():
        is_small = key.op != "moe_experts" or key.kind.endswith(DIRECT)
        starts_early = key.arch == "sm_90" and is_small
        yield key, replace(config, launch_pdl=True) if starts_early else config


def _table() -> Iterator[Row]:
    for arch, projections, of_fp8 in (
        ("gfx942", _AMD, _AMD_FP8),
        ("gfx950", _AMD, _AMD_FP8),
        ("sm_90", _SM_90, _SM_90_FP8),
    ):
        for kind, (num_warps, pairs) in (("", (4, 1_024)), (MANY_PAIRS, (8, 2_048))):
            config = LaunchConfig(num_warps=num_warps, constants={"BLOCK_PAIRS": pairs})
            yield ConfigKey("moe_sort", arch, torch.int32, MAX_EXPERTS, kind), config
        for dtype in (*HALF_DTYPES, torch.float32):
            yield from _routing(arch, dtype)
        for kind, buckets in projections.items():
            for up_to, config in buckets.items():
                yield ConfigKey("moe_experts", arch, torch.bfloat16, up_to, kind), config
            yield ConfigKey("moe_experts", arch, torch.float32, ANY_WIDTH, kind), _float32(kind)
        for kind, buckets in of_fp8.items():
            for up_to, config in buckets.items():
                yield ConfigKey("moe_experts", arch, FP8_ROWS, up_to, kind), config
