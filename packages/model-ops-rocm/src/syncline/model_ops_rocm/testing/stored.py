"""Helpers for tests of storage formats: recipes to try, storage that shows what nobody wrote."""

from collections.abc import Mapping
from typing import Final

import torch

from syncline.model_ops_rocm.formats import Quantised, StorageFormat
from syncline.model_ops_rocm.quant import CodeType, E8m0Mode, Granularity, ScaleType, ZeroRule
from syncline.model_ops_rocm.regions import Region, full_region, region_view

Stored = Mapping[str, torch.Tensor]


def every_recipe() -> list[Quantised]:
    """Every quantised recipe there is, but for a clamp below the largest code."""
    plain = [
        Quantised(granularity=granularity, code=code, zero=zero)
        for granularity in Granularity
        for code in CodeType
        for zero in ZeroRule
    ]
    powers = [
        Quantised(
            granularity=granularity, code=code, scale=ScaleType.E8M0, zero=zero, e8m0_mode=mode
        )
        for granularity in Granularity
        for code in CodeType
        for zero in ZeroRule
        for mode in E8m0Mode
        if code is not CodeType.INT8
    ]
    return plain + powers


# Every granularity, with every code and both types of scale among them.
SOME_RECIPES: Final = (
    Quantised(granularity=Granularity.TENSOR, code=CodeType.E4M3FN),
    Quantised(granularity=Granularity.TOKEN, code=CodeType.INT8),
    Quantised(granularity=Granularity.BLOCK_128X128, code=CodeType.E4M3FNUZ),
    Quantised(
        granularity=Granularity.BLOCK_1X32,
        code=CodeType.E2M1,
        scale=ScaleType.E8M0,
        e8m0_mode=E8m0Mode.EVEN,
    ),
    Quantised(granularity=Granularity.BLOCK_1X128, code=CodeType.E2M1, zero=ZeroRule.SMALLEST),
    Quantised(
        granularity=Granularity.TENSOR,
        code=CodeType.E4M3FN,
        scale=ScaleType.E8M0,
        e8m0_mode=E8m0Mode.ROUND_UP,
    ),
)


def uneven(*shape: int) -> torch.Tensor:
    """Numbers in rows of very different size, some of them zero; the same on every call."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(7))
    x.view(-1)[:: max(1, x.numel() // 5)] = 0
    if x.ndim > 1:
        x *= 2.0 ** (torch.arange(shape[-2]) % 13 - 6)[:, None]
        x[..., 3:4, :] = 0
    return x


def allocate(storage: StorageFormat, shape: tuple[int, ...], fill: int = 0xA5) -> Stored:
    """Storage whose every byte is `fill`, so that a byte nobody wrote is seen."""
    stored = {}
    for name, spec in storage.storage_spec(shape).items():
        raw = torch.full((spec.num_bytes,), fill, dtype=torch.uint8)
        stored[name] = raw.view(spec.dtype).view(spec.shape)
    return stored


def encode_whole(storage: StorageFormat, x: torch.Tensor) -> Stored:
    """New storage of all of `x`."""
    stored = allocate(storage, tuple(x.shape))
    storage.encode_into(stored, x, full_region(x.shape))
    return stored


def part_of(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    """The elements of a region, as a view."""
    return region_view(tensor, region)


def block_of(recipe: Quantised, rows: int, columns: int) -> tuple[int, int]:
    """Rows and columns that share a scale in a matrix of this size."""
    return {
        Granularity.TENSOR: (rows, columns),
        Granularity.TOKEN: (1, columns),
        Granularity.BLOCK_1X128: (1, 128),
        Granularity.BLOCK_128X128: (128, 128),
        Granularity.BLOCK_1X32: (1, 32),
    }[recipe.granularity]
