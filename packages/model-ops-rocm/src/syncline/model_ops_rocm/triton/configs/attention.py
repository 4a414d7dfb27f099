"""Configurations of paged attention and of merging its parts; imports no Triton.

Buckets are head_dims. Kinds: `decode`, rows of few queries, which reading KV bounds; `prefill`,
rows of many, which multiplying bounds; `invariant`, all rows of the batch-invariant variant, which
has one shape of tile and no fused roundings, so that the two loops of the kernel round alike;
`decode_split`, as `decode`, for rows in parts, where there is too little to read to hide what a
tile takes: APART lanes of warps walk it, and AHEAD tiles are asked for before the wait;
`decode_short`, where it was measured, the same for parts of one tile, beside which nothing is
loaded; `decode_few_` and what follows, where it was measured, few rows, each with a cluster of
programs. With `_fp8`, for a cache of codes and queries of 16 bits, of either kind: what
is multiplied is float16. BLOCK_N is tokens of KV, BLOCK_M query heads times tokens. The rows of
sm_90 were chosen among a few each by their time on an H200, those of AMD by what the compiled code
shows, without one.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final, NamedTuple

import torch

from syncline.model_ops_rocm.triton.configs.base import HALF_DTYPES, ConfigKey, Row
from syncline.model_ops_rocm.triton.targets import LaunchConfig

MAX_HEAD_DIM: Final = 256
# Programs that fill a device: compute units twice, or, as measured, multiprocessors once.
WANTED_PROGRAMS: Final[Mapping[str, int]] = MappingProxyType(
    {"gfx942": 608, "gfx950": 512, "sm_90": 132}
)
# Merging, by kind: elements of the result that a program has. Few, where there are few in all, so
# that each multiprocessor has some.
MANY: Final = "many"
MERGED_ELEMENTS: Final[Mapping[str, int]] = MappingProxyType({"": 256, MANY: 2_048})
_MANY_ELEMENTS: Final = 2**19
FEW_PARTS: Final = 4  # of MANY elements, at most

EIGHTHS: Final = "decode_few_eighths"
QUARTERS: Final = "decode_few_quarters"
HALVES: Final = "decode_few_halves"
CLOSE: Final = "decode_few_close"
CLOSE_LONG: Final = "decode_few_close_long"


class _Few(NamedTuple):
    """Decode rows of sm_90 that a kind serves, as measured."""

    kind: str
    units: range  # rows times heads of KV: clusters
    longest: range  # tokens of KV of the longest row
    max_columns: int = 16  # heads of a group, times the queries of a row


# The first that fits. Programs of a launch are 64 at most, so that the next one's find their
# multiprocessors free; for more than 32 units they are up to twice as many, of which two share a
# multiprocessor if columns are 8 at most.
_FEW: Final = (
    _Few(EIGHTHS, range(1, 9), range(513, 4_097), 8),
    _Few(QUARTERS, range(1, 17), range(1, 2_049)),
    _Few(HALVES, range(17, 33), range(1, 2_049)),
    _Few(CLOSE, range(33, 65), range(1, 513)),
    _Few(CLOSE_LONG, range(33, 65), range(513, 1_025)),
)


def few_kind(num_rows: int, num_kv_heads: int, longest: int, num_columns: int) -> str | None:
    """The kind of the rows for decode rows that are few, if these are."""
    for few in _FEW:
        has_units = num_rows * num_kv_heads in few.units
        if has_units and longest in few.longest and num_columns <= few.max_columns:
            return few.kind
    return None


def few_kinds(num_kv_heads: int, num_columns: int) -> list[str]:
    """All that some number of rows may have, of some length."""
    return [
        few.kind
        for few in _FEW
        if any(units % num_kv_heads == 0 for units in few.units) and num_columns <= few.max_columns
    ]


def kind_of_merge(num_parts: int, num_elements: int) -> str:
    """The kind of the rows of `merge_states` for a result of so many elements."""
    return MANY if num_parts <= FEW_PARTS and num_elements >= _MANY_ELEMENTS else ""


def _tiles(
    num_warps: int, num_stages: int, block_n: int, block_m: int | None = None
) -> LaunchConfig:
    constants = {"BLOCK_N": block_n}
    if block_m is not None:
        constants["BLOCK_M"] = block_m
    return LaunchConfig(
        num_warps=num_warps, num_stages=num_stages, constants=constants, fuses_multiply_add=True
    )


def _overlapping(config: LaunchConfig, ahead: int = 0, apart: int = 1) -> LaunchConfig:
    constants = {**config.constants, "AHEAD": ahead, "APART": apart}
    return replace(config, launch_pdl=True, constants=constants)


def _alone(num_warps: int, num_stages: int, block_n: int) -> LaunchConfig:
    config = _tiles(num_warps, num_stages, block_n)
    return replace(config, constants={**config.constants, "AHEAD": 0, "APART": 1})


def _shared(
    num_ctas: int, num_pages: int, num_stages: int, *, ahead: int, release: int
) -> LaunchConfig:
    """Rows that a cluster of `num_ctas` shares, of `num_pages` to each of its stages."""
    constants = {"PAGES": num_pages, "STAGES": num_stages, "AHEAD": ahead, "RELEASE": release}
    return LaunchConfig(
        num_warps=4,
        fuses_multiply_add=True,
        maxnreg=128,
        launch_pdl=True,
        num_ctas=num_ctas,
        constants=constants,
    )


def _unfused(config: LaunchConfig) -> LaunchConfig:
    return replace(config, fuses_multiply_add=False)


Kinds = Mapping[str, Mapping[int, LaunchConfig]]
_SM_90: Final[Kinds] = {
    "decode": {
        64: _overlapping(_tiles(4, 3, 64)),
        128: _overlapping(_tiles(4, 4, 64)),
        256: _overlapping(_tiles(8, 2, 64)),
    },
    "decode_split": {
        64: _overlapping(_tiles(4, 3, 64), ahead=1, apart=4),
        128: _overlapping(_tiles(4, 4, 64), ahead=1, apart=4),
        256: _overlapping(_tiles(8, 2, 64)),
    },
    "decode_short": {
        64: _overlapping(_tiles(4, 1, 64), ahead=1, apart=4),
        128: _overlapping(_tiles(8, 1, 64), ahead=1, apart=4),
    },
    EIGHTHS: {128: _shared(8, 2, 4, ahead=4, release=0)},
    QUARTERS: {128: _shared(4, 2, 2, ahead=2, release=1)},
    HALVES: {128: _shared(2, 2, 4, ahead=4, release=1)},
    CLOSE: {128: _shared(2, 2, 3, ahead=2, release=1)},
    CLOSE_LONG: {128: _shared(2, 2, 3, ahead=2, release=2)},
    "prefill": {64: _tiles(4, 3, 64, 128), 128: _tiles(8, 3, 64, 128), 256: _tiles(8, 3, 32, 128)},
    "decode_fp8": {
        128: _overlapping(_tiles(4, 3, 64)),
        256: _overlapping(_tiles(8, 2, 64)),
    },
    "decode_split_fp8": {
        128: _overlapping(_tiles(4, 3, 64)),
        256: _overlapping(_tiles(8, 2, 64)),
    },
    "prefill_fp8": {128: _tiles(4, 3, 64, 64), 256: _tiles(8, 2, 16, 128)},
    "invariant": {
        128: _unfused(_tiles(4, 3, 64, 64)),
        256: _unfused(_tiles(4, 2, 32, 64)),
    },
}
_DECODE_AMD: Final = {64: _alone(4, 2, 64), 128: _alone(4, 2, 32), 256: _alone(4, 1, 32)}
_DECODE_FP8_AMD: Final = {128: _alone(4, 2, 32), 256: _alone(4, 1, 32)}
_AMD: Final[Kinds] = {
    "decode": _DECODE_AMD,
    "decode_split": _DECODE_AMD,
    "prefill": {64: _tiles(4, 2, 64, 128), 128: _tiles(8, 1, 64, 128), 256: _tiles(8, 1, 32, 128)},
    "decode_fp8": _DECODE_FP8_AMD,
    "decode_split_fp8": _DECODE_FP8_AMD,
    "prefill_fp8": {128: _tiles(8, 1, 64, 128), 256: _tiles(8, 1, 32, 64)},
    "invariant": {
        128: _unfused(_tiles(4, 1, 64, 64)),
        256: _unfused(_tiles(4, 1, 32, 64)),
    },
}
# Products in float32 are no matrix instructions: it is here to test the rest.
_FLOAT32: Final[Kinds] = {
    "decode": {256: _alone(4, 1, 16)},
    "decode_split": {256: _alone(4, 1, 16)},
    "prefill": {256: _tiles(4, 1, 16, 16)},
    "invariant": {256: _unfused(_tiles(4, 1, 16, 16))},
}


def has_short_row(key: ConfigKey, head_dim: int) -> bool:
    """Whether parts of one tile have a row of their own, beside that of all parts, `key`."""
    is_measured = key.arch == "sm_90" and key.dtype in HALF_DTYPES and key.kind == "decode_split"
    return is_measured and head_dim <= max(_SM_90["decode_short"])


def _rows(arch: str, dtype: torch.dtype, kinds: Kinds) -> Iterator[Row]:
    for kind, buckets in kinds.items():
        for up_to, config in buckets.items():
            # Models come in bfloat16: of float16 the narrow heads have no row of their own.
            if dtype != torch.float16 or not (up_to == 64 or kind.endswith("_fp8")):
                yield ConfigKey("paged_attention", arch, dtype, up_to, kind), config


def table() -> Iterator[Row]:
    """Every row."""
    for arch, halves in (("gfx942", _AMD), ("gfx950", _AMD), ("sm_90", _SM_90)):
        for dtype in HALF_DTYPES:
            yield from _rows(arch, dtype, halves)
        yield from _rows(arch, torch.float32, _FLOAT32)
        for dtype in (*HALF_DTYPES, torch.float32):
            overlap = True if arch == "sm_90" else None
            for kind, elements in MERGED_ELEMENTS.items():
                merge = LaunchConfig(num_warps=-(-elements // 512), launch_pdl=overlap)
                yield ConfigKey("merge_states", arch, dtype, MAX_HEAD_DIM, kind), merge
