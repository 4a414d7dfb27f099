"""Configurations of the ops that store weights; imports no Triton.

Kinds: token, a row per scale, whose buckets are widths of a row; 128x128; block, 1x128 and 1x32;
spread, scales that are known, or none; maxima, of which scales are made; bytes, codes that are
copied, and scales, theirs; fill, padding of scales. The other buckets hold any width.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import torch

from syncline.model_ops_rocm.triton.configs.base import ANY_WIDTH, ConfigKey, Row
from syncline.model_ops_rocm.triton.targets import LaunchConfig

_ARCHS: Final = ("gfx942", "gfx950", "sm_90")


def _tile(num_warps: int, rows: int, columns: int = 0) -> LaunchConfig:
    constants = {"BLOCK_ROWS": rows}
    return LaunchConfig(
        num_warps=num_warps,
        constants=constants | ({"BLOCK_COLUMNS": columns} if columns else {}),
    )


# Measured on an H200 with bfloat16 sources and e4m3fn codes; no AMD GPU was at hand.
_TOKEN: Final = {
    2_048: _tile(4, 2),
    8_192: _tile(4, 1),
    12_288: _tile(4, 1, 4_096),
    32_768: _tile(8, 1, 8_192),
}
_TILES: Final = {
    "128x128": _tile(8, 64, 128),
    "block": _tile(4, 16, 256),
    "spread": _tile(4, 32, 128),
}
_MAXIMA: Final = _tile(8, 64, 256)
_COPIES: Final = (
    (torch.uint8, "bytes", _TILES["spread"]),
    (torch.uint8, "scales", _tile(4, 32, 8)),
    (torch.float32, "scales", _tile(4, 32, 8)),
    (torch.uint8, "fill", _tile(4, 32, 32)),
)


def _many(config: LaunchConfig, kind: str) -> LaunchConfig:
    """Of a program that takes several tiles in a row, so that it looks up their weight once."""
    tiles = 2 if kind in ("128x128", "maxima") else 8
    return replace(config, constants={**config.constants, "TILES": tiles})


def table() -> Iterator[Row]:
    """Every row; float16 has the rows of bfloat16."""
    for arch in _ARCHS:
        for dtype in (torch.bfloat16, torch.float32):
            rows = [(width, "token", config) for width, config in _TOKEN.items()]
            rows += [(ANY_WIDTH, kind, config) for kind, config in _TILES.items()]
            for width, kind, config in rows:
                yield ConfigKey("encode", arch, dtype, width, kind), config
                yield ConfigKey("encode_grouped", arch, dtype, width, kind), _many(config, kind)
            yield ConfigKey("amax_into", arch, dtype, ANY_WIDTH), _MAXIMA
            key = ConfigKey("encode_grouped", arch, dtype, ANY_WIDTH, "maxima")
            yield key, _many(_MAXIMA, "maxima")
        for dtype, kind, config in _COPIES:
            yield ConfigKey("encode", arch, dtype, ANY_WIDTH, kind), config
            key = ConfigKey("encode_grouped", arch, dtype, ANY_WIDTH, kind)
            yield key, _many(config, kind)
