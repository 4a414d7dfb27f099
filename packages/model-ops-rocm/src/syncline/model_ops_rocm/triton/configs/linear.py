"""Configurations of the products with a stored weight; imports no Triton.

Buckets are rows of x. Rows of `linear` have x's dtype; those of `linear_quantised` the weight's
codes as dtype, and as kind how they are multiplied. SWAP: the weight is the left operand, so that
few rows are the narrow side of a matrix instruction. All rows that a batch-invariant call may take
have one family of instructions and one BLOCK_K, and no splits. Products that warps of their own
feed have their configurations in `configs.linear_specialised`, many rows of codes in
`configs.linear_many`.

The rows of sm_90 for codes and for 16-bit numbers were measured on an H200; no row of an AMD GPU
was, nor one of decoded weights or of float32.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final, NamedTuple

import torch

from syncline.model_ops_rocm.triton.configs.base import (
    ANY_WIDTH,
    HALF_DTYPES,
    Buckets,
    ConfigKey,
    Row,
)
from syncline.model_ops_rocm.triton.targets import LaunchConfig

# How codes are multiplied: with codes of x, whose scales multiply the whole sum or one of each 128
# of K; decoded, with x in 16 bits or in float32; with MX codes of x.
CODES: Final = "codes"
CODES_OF_BLOCKS: Final = "codes-of-blocks"
DECODED: Final = "decoded"
DECODED_FP32: Final = "decoded-fp32"
MX: Final = "mx"
# One row of x, whose buckets are columns of the weight; with `kind_for_vector`'s additions.
VECTOR: Final = "vector"
NARROW_VECTOR_ROWS: Final = 1_024  # of the weight, at most, are NARROW
# (arch, dtype) -> the most rows of x that Triton multiplies with a row-major weight as fast as the
# vendor's library, which takes all beyond: cuBLAS, on an H200. Batch-invariant calls stay, and so
# do the products of `configs.linear_specialised`.
FEWER_THAN_LIBRARY: Final[Mapping[tuple[str, torch.dtype], int]] = MappingProxyType(
    {("sm_90", dtype): 16 for dtype in HALF_DTYPES}
)
_AMD: Final = ("gfx942", "gfx950")
# What is added to a kind for weights that a plain row does not serve well. INVARIANT: few rows, in
# an order of sums that the widest bucket has too. NARROW: fewer tiles than processors share them.
# QUARTERS and HALVES: parts of so few tiles; LONE: tiles for nearly every processor, whole. DEEP:
# few tiles of so much K that more rows than FEWER_THAN_LIBRARY stay. SQUARE: not much more K.
# SMALL and SHALLOW: so few bytes that a launch weighs more, and of those the ones of little K.
INVARIANT: Final = "invariant"
NARROW: Final = "narrow"
QUARTERS: Final = "quarters"
HALVES: Final = "halves"
LONE: Final = "lone"
DEEP: Final = "deep"
SQUARE: Final = "square"
SMALL: Final = "small"
SHALLOW: Final = "shallow"
# One row of x and a weight of so few rows that all of it is asked for at once. LOW: up to 2,048.
LOW: Final = "low"
_FEW_ROWS: Final = 16
_MORE_ROWS: Final = 64
_INVARIANT_ROWS: Final = {"": 512, CODES: 512, CODES_OF_BLOCKS: 64}
_QUARTERED_COLUMNS: Final = 4_096
_HALVED_COLUMNS: Final = 6_143
_FEW_COLUMNS: Final = 8_192
_SOME_ROWS: Final = 256
_SMALL_WEIGHT: Final = 12 * 2**20
_MUCH_K: Final = 2_048
_DEEP_K: Final = 8_192


class Sizes(NamedTuple):
    """Of one product."""

    num_rows: int
    num_columns: int
    depth: int


def is_square(num_columns: int) -> bool:
    """Whether a weight has about as many rows as were measured: 4,096."""
    return _MUCH_K < num_columns <= _QUARTERED_COLUMNS


def kind_for_numbers(arch: str, dtype: torch.dtype, sizes: Sizes) -> str:
    """The kind of `linear`'s rows for a product that is not batch-invariant."""
    if arch in _AMD or dtype == torch.float32:
        return ""
    if sizes.num_rows > _FEW_ROWS:
        is_narrow = is_square(sizes.num_columns) and sizes.depth >= _DEEP_K
        return DEEP if is_narrow and sizes.num_rows <= _MORE_ROWS else ""
    if sizes.num_columns * sizes.depth <= _SMALL_WEIGHT:
        return SMALL if sizes.depth >= _MUCH_K else SHALLOW
    if sizes.num_columns > _FEW_COLUMNS:
        return ""
    if sizes.num_columns > _HALVED_COLUMNS:
        return LONE
    return HALVES if sizes.num_columns > _QUARTERED_COLUMNS else QUARTERS


def kind_for_codes(arch: str, kind: str, sizes: Sizes) -> str:
    """The kind of the rows for codes times codes of a row-major weight, not batch-invariant."""
    is_narrow = sizes.num_columns <= _FEW_COLUMNS and sizes.depth >= 2 * _MUCH_K
    if arch in _AMD or not is_narrow or sizes.num_rows > _SOME_ROWS:
        return kind
    return f"{kind}-{NARROW}"


def kind_for_vector(kind: str, num_columns: int) -> str:
    """The kind of the rows for one row of x, where those for more rows are of `kind`."""
    size = NARROW if num_columns <= NARROW_VECTOR_ROWS else ""
    if not kind and is_square(num_columns):
        size = SQUARE
    if not (kind or size) and num_columns <= _MUCH_K:
        size = LOW
    return "-".join(filter(None, (VECTOR, kind, size)))


def invariant_bucket(arch: str, kind: str, num_rows: int) -> tuple[int, str]:
    """(rows to look up, kind) of a batch-invariant product.

    On sm_90 wgmma sums in one order whatever the tile is, so few rows may have a narrow one; the
    shapes of AMD's instructions differ, so there the widest bucket serves all.
    """
    most = _INVARIANT_ROWS.get(kind, 0)
    if arch in _AMD or num_rows > most:
        return ANY_WIDTH, kind
    return num_rows, f"{kind}-{INVARIANT}" if kind else INVARIANT


def _few(
    block: tuple[int, int, int],
    num_warps: int,
    num_stages: int,
    *,
    splits: int = 1,
    head: int = 0,
    overlap: tuple[int, int] | None = None,
) -> LaunchConfig:
    """Tiles for few rows; `block` is rows of x, rows of the weight, and K.

    `head` columns of K of each row of the weight are read before the loop, and before all waits.
    With `overlap`, for CUDA alone, a launch begins before the kernel ahead of it has ended, asks
    for so much of K of each row of the weight meanwhile, and lets the next kernel begin after so
    many eighths of its own blocks; at once, if that is negative.
    """
    prefetch, release = overlap or (0, 0)
    return LaunchConfig(
        num_warps=num_warps,
        num_stages=num_stages,
        fuses_multiply_add=True,
        launch_pdl=None if overlap is None else True,
        constants={
            **_blocks(block),
            "SWAP": 1,
            "SPLITS": splits,
            "PREFETCH": prefetch,
            "RELEASE": release,
            "MERGES": 0,
            "HEAD": head,
            "GROUP_M": 1,
        },
    )


def _merged(config: LaunchConfig) -> LaunchConfig:
    """The same where the last program of a tile adds its parts sooner than a second launch does."""
    return replace(config, constants={**config.constants, "MERGES": 1})


def _straight(config: LaunchConfig) -> LaunchConfig:
    """The same with the weight as the right operand: as many rows as fill an instruction."""
    return replace(config, constants={**config.constants, "SWAP": 0})


def _many(block: tuple[int, int, int], num_warps: int, num_stages: int) -> LaunchConfig:
    """Tiles for many rows, eight of which share the weight's tile in turn."""
    return LaunchConfig(
        num_warps=num_warps,
        num_stages=num_stages,
        fuses_multiply_add=True,
        constants={
            **_blocks(block),
            "SWAP": 0,
            "SPLITS": 1,
            "PREFETCH": 0,
            "RELEASE": 0,
            "MERGES": 0,
            "HEAD": 0,
            "GROUP_M": 8,
        },
    )


def _blocks(block: tuple[int, int, int]) -> dict[str, int]:
    return dict(zip(("BLOCK_M", "BLOCK_N", "BLOCK_K"), block, strict=True))


_HALF: Final[Mapping[str, Buckets]] = {
    "amd": {
        16: _few((16, 64, 128), 4, 2),
        64: _few((64, 64, 64), 4, 2),
        ANY_WIDTH: _many((128, 128, 64), 8, 2),
    },
    "nvidia": {
        16: _few((16, 64, 128), 4, 3, overlap=(0, 7)),
        64: _few((64, 128, 64), 4, 4),
        ANY_WIDTH: _many((128, 128, 64), 8, 3),
    },
    INVARIANT: {64: _few((64, 64, 64), 4, 5), 512: _many((64, 128, 64), 4, 4)},
    QUARTERS: {16: _merged(_few((16, 64, 128), 4, 3, splits=4, head=256, overlap=(256, 4)))},
    HALVES: {16: _few((16, 64, 128), 4, 4, splits=2, overlap=(0, 4))},
    LONE: {16: _few((16, 64, 128), 4, 5, overlap=(0, 4))},
    DEEP: {64: _few((64, 64, 128), 4, 5, splits=2, overlap=(256, 7))},
    SMALL: {16: _few((16, 32, 128), 4, 4, splits=2, overlap=(0, 7))},
    SHALLOW: {16: _few((16, 32, 128), 4, 4, overlap=(0, 7))},
}


def _vector(block_n: int, block_k: int, num_warps: int) -> LaunchConfig:
    return LaunchConfig(
        num_warps=num_warps,
        fuses_multiply_add=True,
        launch_pdl=True,
        constants={"BLOCK_N": block_n, "BLOCK_K": block_k},
    )


_VECTOR: Final[Mapping[str, Buckets]] = {
    "nvidia": {
        2_048: _vector(4, 1_024, 4),
        ANY_WIDTH: _vector(4, 2_048, 8),
    },
    SQUARE: {4_096: _vector(4, 1_024, 4), ANY_WIDTH: _vector(4, 2_048, 8)},
    LOW: {
        1_024: _vector(4, 1_024, 4),
        2_048: _vector(2, 2_048, 8),
        4_096: _vector(2, 4_096, 4),
        ANY_WIDTH: _vector(4, 2_048, 8),
    },
    NARROW: {
        2_048: _vector(2, 2_048, 8),
        4_096: _vector(2, 4_096, 4),
        ANY_WIDTH: _vector(8, 1_024, 4),
    },
}
# A thread has 16 codes of each of BLOCK_N rows, where BLOCK_K is 512 for each warp: the more rows,
# the fewer conversions of x for each byte of the weight, and the more registers.
_VECTOR_CODES: Final[Mapping[str, Buckets]] = {
    "nvidia": {
        2_048: _vector(4, 1_024, 2),
        4_096: _vector(8, 1_024, 2),
        ANY_WIDTH: _vector(4, 2_048, 2),
    },
    NARROW: {2_048: _vector(2, 1_024, 2), ANY_WIDTH: _vector(2, 2_048, 4)},
}
_FULL: Final[Mapping[str, Buckets]] = {
    "amd": {64: _few((16, 64, 32), 4, 2), ANY_WIDTH: _many((128, 64, 32), 8, 2)},
    "nvidia": {64: _few((16, 64, 32), 4, 3), ANY_WIDTH: _many((128, 64, 16), 8, 3)},
}
_CODES: Final[Mapping[str, Buckets]] = {
    "amd": {
        16: _few((16, 64, 128), 4, 2),
        64: _few((64, 64, 128), 4, 2),
        ANY_WIDTH: _many((128, 128, 128), 8, 2),
    },
    "nvidia": {
        16: _few((16, 64, 128), 4, 5, head=256, overlap=(0, 4)),
        64: _few((64, 64, 128), 4, 4),
        256: _straight(_few((64, 128, 128), 4, 4, overlap=(0, 7))),
        ANY_WIDTH: _many((256, 128, 128), 8, 3),
    },
    INVARIANT: {64: _few((64, 64, 128), 4, 4), 512: _many((64, 128, 128), 4, 4)},
    NARROW: {
        16: _few((16, 64, 128), 4, 6, splits=4, overlap=(0, 4)),
        64: _few((64, 64, 128), 4, 6, splits=3, overlap=(0, 4)),
        128: _few((128, 64, 128), 4, 4, splits=4, overlap=(0, 7)),
        256: _few((128, 64, 128), 4, 4, splits=2, overlap=(0, 7)),
    },
}
_CODES_OF_BLOCKS: Final[Mapping[str, Buckets]] = {
    "amd": _CODES["amd"],
    "nvidia": {
        16: _few((16, 64, 128), 4, 5),
        64: _straight(_few((64, 64, 128), 4, 4, overlap=(0, 7))),
        ANY_WIDTH: _many((64, 128, 128), 4, 4),
    },
    INVARIANT: {64: _few((64, 64, 128), 4, 4)},
    NARROW: {
        16: _few((16, 64, 128), 4, 5, splits=4, overlap=(0, 0)),
        64: _straight(_few((64, 128, 128), 4, 4, splits=4, overlap=(0, 4))),
        256: _straight(_few((64, 128, 128), 4, 4, splits=2, overlap=(0, 7))),
    },
}
_DECODED: Final[Mapping[str, Buckets]] = {
    "amd": {16: _few((16, 64, 128), 4, 2), ANY_WIDTH: _many((128, 128, 64), 8, 2)},
    "nvidia": {16: _few((16, 64, 128), 4, 4), ANY_WIDTH: _many((128, 128, 64), 8, 3)},
}
_DECODED_FP32: Final[Buckets] = {ANY_WIDTH: _few((16, 64, 32), 4, 2)}
_MX: Final[Buckets] = {
    16: _few((16, 64, 256), 4, 2),
    ANY_WIDTH: _many((128, 128, 128), 8, 2),
}


def table() -> Iterator[Row]:
    """Every row."""
    for arch in (*_AMD, "sm_90"):
        for dtype in HALF_DTYPES:
            yield from _rows("linear", arch, dtype, "", _HALF)
            yield from _rows("linear", arch, dtype, VECTOR, _VECTOR)
        yield from _rows("linear", arch, torch.float32, "", _FULL)
        yield from _quantised(arch)


def _quantised(arch: str) -> Iterator[Row]:
    fn, fnuz, e2m1 = torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float4_e2m1fn_x2
    op, native = "linear_quantised", fnuz if arch == "gfx942" else fn
    yield from _rows(op, arch, native, CODES, _CODES)
    yield from _rows(op, arch, native, CODES_OF_BLOCKS, _CODES_OF_BLOCKS)
    yield from _rows(op, arch, native, f"{VECTOR}-{CODES}", _VECTOR_CODES)
    yield from _rows(op, arch, native, f"{VECTOR}-{CODES_OF_BLOCKS}", _VECTOR_CODES)
    for dtype in (fn, fnuz, e2m1):
        decoded = _DECODED["amd" if arch in _AMD else "nvidia"]
        if dtype not in (native, e2m1):
            decoded = {ANY_WIDTH: decoded[ANY_WIDTH]}
        yield from _buckets(op, arch, dtype, DECODED, decoded)
        yield from _buckets(op, arch, dtype, DECODED_FP32, _DECODED_FP32)
        if arch == "gfx950" and dtype is not fnuz:
            yield from _buckets(op, arch, dtype, MX, _MX)


def _rows(
    op: str, arch: str, dtype: torch.dtype, kind: str, by_vendor: Mapping[str, Buckets]
) -> Iterator[Row]:
    for name, buckets in by_vendor.items():
        if name in ("amd", "nvidia"):
            if (name == "amd") == (arch in _AMD):
                yield from _buckets(op, arch, dtype, kind, buckets)
        elif arch not in _AMD:
            yield from _buckets(op, arch, dtype, f"{kind}-{name}" if kind else name, buckets)


def _buckets(op: str, arch: str, dtype: torch.dtype, kind: str, buckets: Buckets) -> Iterator[Row]:
    for up_to, config in buckets.items():
        yield ConfigKey(op, arch, dtype, up_to, kind), config
