"""The launches that store weights, and those that look for maxima: knows checked arguments alone.

Unit: one region of one slot, or the grid of its scales.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Final, NamedTuple

import torch

from syncline.model_ops_rocm.arguments.storing import AMAX, ENCODE
from syncline.model_ops_rocm.formats.coded import CodedSource
from syncline.model_ops_rocm.formats.jobs import EncodeJob
from syncline.model_ops_rocm.formats.quantised import Quantised
from syncline.model_ops_rocm.formats.recipes import WEIGHT, WEIGHT_SCALE
from syncline.model_ops_rocm.formats.storage_format import StorageFormat
from syncline.model_ops_rocm.layouts.base import as_bits
from syncline.model_ops_rocm.regions import Region
from syncline.model_ops_rocm.triton.configs.base import ANY_WIDTH
from syncline.model_ops_rocm.triton.encode_facts import (
    EncodeFacts,
    PlaceFacts,
    Scales,
    dtype_name,
)
from syncline.model_ops_rocm.triton.encode_plan import (
    Axis3,
    Box,
    Part,
    SlotPlan,
    Source,
    axis_of,
    coded_plan,
    matrix_runs,
    parts_of,
    places_of_scales,
    slot_plan,
)
from syncline.model_ops_rocm.triton.geometry import power_of_two
from syncline.model_ops_rocm.triton.kernels.encode import encode_kernel
from syncline.model_ops_rocm.triton.kernels.scale_grid import amax_kernel, fill_scales_kernel
from syncline.model_ops_rocm.triton.launch import IS_INTERPRETED, LAUNCHER, Chosen

_MAX_GRID: Final = 65_535  # of the second and third dimension


def kind_of(facts: EncodeFacts) -> str:
    """Which configurations serve such a kernel."""
    if facts.scales != "own":
        return "spread"
    if facts.share[1] == 0:
        return "token"
    return "128x128" if facts.share[0] == 128 else "block"


class Tile(NamedTuple):
    """What one program stores at a time, and the blocks that it takes one after another."""

    rows: int
    columns: int
    block_columns: int
    across: int


def tile_of(chosen: Chosen, plan: SlotPlan) -> Tile:
    """A row whose scale is its own is one tile wide, and a square that shares one is one tile."""
    constants, facts = chosen[1].constants, plan.facts
    rows, columns = constants["BLOCK_ROWS"], constants.get("BLOCK_COLUMNS")
    if kind_of(facts) != "token":
        assert columns is not None
        high = facts.share[0] if facts.scales == "own" else 0
        return Tile(max(rows, high), columns, columns, 1)
    columns = max(power_of_two(plan.shape[1]), 32) if columns is None else columns
    across = -(-plan.shape[1] // columns)
    return Tile(rows, columns * across, columns, across)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """As kernels take it: bfloat16 and what has no arithmetic of its own as integers."""
    if tensor.dtype in (torch.float32, torch.float16, torch.int32):
        return tensor
    return as_bits(tensor)


def numbers_of(source: torch.Tensor) -> torch.Tensor:
    """A source that is not copied but converted: the interpreter takes bfloat16 as integers."""
    return raw(source) if IS_INTERPRETED else source


def plan_of(
    storage_format: StorageFormat,
    shape: tuple[int, ...],
    mode: Scales,
    source: torch.Tensor | CodedSource,
) -> tuple[SlotPlan, Source, torch.dtype]:
    """The plan for a source, the source as kernels take it, and the dtype whose rows serve it."""
    if isinstance(source, CodedSource):
        dtype = torch.bfloat16
        plan = slot_plan(storage_format, shape, source.recipe.code.value, mode, target(dtype))
        scales = raw(source.weight.scale.contiguous())
        return coded_plan(plan, source.recipe), Source(raw(source.weight.codes), scales), dtype
    dtype = source.dtype
    plan = slot_plan(storage_format, shape, dtype_name(dtype), mode, target(dtype))
    taken = raw(source) if plan.facts.source == "bits" else numbers_of(source)
    return plan, Source(taken), dtype


def launch_encode(
    job: EncodeJob,
    shape: tuple[int, ...],
    mode: Scales,
    others: tuple[torch.Tensor | None, torch.Tensor | None],
) -> None:
    """Of a checked job; `others` are the scales or maxima to read, and the flag."""
    storage_format, region = job.storage_format, job.region
    plan, source, dtype = plan_of(storage_format, shape, mode, job.source)
    tensors = tensors_of(job.out, others)
    parts = parts_of(plan, storage_format.padded_region(region), region, source, tensors[0])
    launch_parts(plan, parts, chosen_for(plan, dtype), source, tensors)
    if plan.facts.scales != "none":
        for padding in paddings_of(job, shape):
            fill(padding, tensors[1])


def tensors_of(
    out: Mapping[str, torch.Tensor], others: tuple[torch.Tensor | None, torch.Tensor | None]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weight, scales, what is read and the flag; the weight stands for what is not there."""
    read, nonfinite = others
    weight = raw(out[WEIGHT])
    scale = raw(out.get(WEIGHT_SCALE, out[WEIGHT]))
    flag = weight if nonfinite is None else nonfinite.view(torch.uint8)
    return weight, scale, scale if read is None else raw(read), flag


def chosen_for(plan: SlotPlan, dtype: torch.dtype, op: str = ENCODE) -> Chosen:
    """The configuration for sources of a dtype."""
    kind = kind_of(plan.facts)
    width = plan.shape[1] if kind == "token" else ANY_WIDTH
    return LAUNCHER.config(op, row_dtype(dtype), width, kind)


def row_dtype(dtype: torch.dtype) -> torch.dtype:
    """Whose rows of the tables serve a source: float16's are those of bfloat16."""
    return torch.bfloat16 if dtype is torch.float16 else dtype


def launch_parts(
    plan: SlotPlan,
    parts: list[Part],
    chosen: Chosen,
    source: Source,
    others: tuple[torch.Tensor, ...],
) -> None:
    tile = tile_of(chosen, plan)
    for part in parts:
        for grid, first_row, matrix in grids_of(part, tile):
            LAUNCHER.launch(
                encode_kernel,
                grid,
                chosen,
                (
                    *(*_from(source, part, matrix), *others),
                    *(first_row, *part.rows[1:], *part.columns),
                    *(*part.source_strides, *part.scale_strides, part.first + matrix),
                    *(*part.weight, *plan.scale, plan.grid[0] * plan.grid[1], plan.grid[1]),
                ),
                {
                    "FACTS": part.facts,
                    "BLOCK_COLUMNS": tile.block_columns,
                    "ACROSS": tile.across,
                },
            )


def target(dtype: torch.dtype) -> tuple[str, bool]:
    """The architecture at hand, and whether it adds to a product without rounding it first."""
    key, _ = LAUNCHER.config(ENCODE, row_dtype(dtype), ANY_WIDTH, "spread")
    return key.arch, not IS_INTERPRETED


def tiles_of(part: Part, tile: Tile) -> tuple[int, int]:
    """Tiles across and down one matrix."""
    across = -(-(part.columns.end - part.columns.origin) * part.facts.unit // tile.columns)
    return across, -(-(part.rows.end - part.rows.origin) // tile.rows)


def grids_of(part: Part, tile: Tile) -> Iterator[tuple[tuple[int, int, int], int, int]]:
    """Grids of tiles across, down and matrices; the first row and matrix of each, of the part's.

    One, unless a dimension is longer than a grid may be.
    """
    across, down = tiles_of(part, tile)
    for matrix in range(0, part.matrices, _MAX_GRID):
        for row in range(0, down, _MAX_GRID):
            grid = (across, min(down - row, _MAX_GRID), min(part.matrices - matrix, _MAX_GRID))
            yield grid, part.rows.origin + row * tile.rows, matrix


def _from(source: Source, part: Part, matrix: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Source and its scales from a matrix of the part on; the source stands for no scales."""
    at = part.source_at + matrix * part.source_strides[0] * part.facts.unit
    values = _moved(source.values, at)
    if source.scales is None:
        return values, values
    return values, _moved(source.scales, part.scale_at + matrix * part.scale_strides[0])


def _moved(tensor: torch.Tensor, offset: int) -> torch.Tensor:
    """An address: what lies there is reached by the strides that the kernel is given."""
    if not offset:
        return tensor
    return tensor.as_strided((1,), (1,), tensor.storage_offset() + offset)


class Padding(NamedTuple):
    """A rectangle of scales that nothing is known of: all of `whole` behind `touched`."""

    places: PlaceFacts  # whose `fill` is stored
    scale: Axis3
    lead: tuple[int, ...]
    touched: Region
    whole: Region

    @property
    def boxes(self) -> tuple[Box, Box]:
        """Of rows and of columns."""
        (rows, columns), (all_rows, all_columns) = self.touched[-2:], self.whole[-2:]
        return Box(rows[0], *rows, all_rows[1]), Box(columns[0], *columns, all_columns[1])

    @property
    def runs(self) -> list[tuple[int, int, int]]:
        """As `matrix_runs` says."""
        return matrix_runs(self.lead, self.touched[:-2], (0,) * len(self.lead))


def paddings_of(job: EncodeJob, shape: tuple[int, ...]) -> list[Padding]:
    """What has scales behind those that a job, not empty, gives: its layout's, and kept codes'."""
    storage_format, source = job.storage_format, job.source
    touched = storage_format.touched_scales(shape, job.region)
    whole, own = storage_format.scale_part(touched, shape), touched
    if job.scales is None and isinstance(source, CodedSource) and storage_format.keeps(source):
        own = scales_of_source(source, touched)
    if own == touched == whole:
        return []
    places, found = places_of_scales(storage_format, shape), []
    facts, scale = PlaceFacts.of(places), axis_of(places)
    if own != touched:
        assert isinstance(storage_format.recipe, Quantised)
        zeros = replace(facts, fill=_bits_of_zero(storage_format.recipe))
        found.append(Padding(zeros, scale, shape[:-2], own, touched))
    if touched != whole:
        found.append(Padding(facts, scale, shape[:-2], touched, whole))
    return found


def scales_of_source(source: CodedSource, touched: Region) -> Region:
    """Of the scales that a region has elements of, those that come with it: not of its padding."""
    sizes = source.weight.scale.shape
    return tuple((start, start + size) for (start, _), size in zip(touched, sizes, strict=True))


@lru_cache(maxsize=256)
def _bits_of_zero(recipe: Quantised) -> int:
    """The scale of zeros."""
    return int(as_bits(recipe.scales_of(torch.zeros(1))).item())


def tiles_of_padding(padding: Padding, chosen: Chosen) -> tuple[int, int]:
    """Tiles across and down one matrix."""
    rows, columns = padding.boxes
    block = chosen[1].constants
    across = -(-(columns.end - columns.start) // block["BLOCK_COLUMNS"])
    return across, -(-(rows.end - rows.start) // block["BLOCK_ROWS"])


def fill(padding: Padding, scale: torch.Tensor) -> None:
    chosen = LAUNCHER.config(ENCODE, torch.uint8, ANY_WIDTH, "fill")
    across, down = tiles_of_padding(padding, chosen)
    rows, columns = padding.boxes
    for first, matrices, _ in padding.runs:
        for matrix in range(0, matrices, _MAX_GRID):
            LAUNCHER.launch(
                fill_scales_kernel,
                (across, down, min(matrices - matrix, _MAX_GRID)),
                chosen,
                (as_bits(scale), *rows[1:], *columns[1:], first + matrix, *padding.scale),
                {"PLACES": padding.places},
            )


def launch_amax(
    storage_format: StorageFormat,
    shape: tuple[int, ...],
    grids: tuple[torch.Tensor, torch.Tensor | None],
    source: torch.Tensor | CodedSource,
    region: Region,
) -> None:
    """Add to the maxima and, where there are any, the counts of the whole grid."""
    bits, counts = grids
    plan, taken, dtype = plan_of(storage_format, shape, "amax", source)
    chosen = LAUNCHER.config(AMAX, row_dtype(dtype), ANY_WIDTH)
    tile = tile_of(chosen, plan)
    padded = storage_format.padded_region(region)
    for part in parts_of(plan, padded, region, taken, taken.values):
        facts = amax_facts(part.facts)
        for grid, first_row, matrix in grids_of(part, tile):
            LAUNCHER.launch(
                amax_kernel,
                grid,
                chosen,
                (
                    *(*_from(taken, part, matrix), bits, bits if counts is None else counts),
                    *(first_row, *part.rows[1:], *part.columns),
                    *(*part.source_strides, *part.scale_strides, part.first + matrix),
                    *(plan.grid[0] * plan.grid[1], plan.grid[1]),
                ),
                {"FACTS": facts, "HAS_COUNTS": counts is not None},
            )


def amax_facts(facts: EncodeFacts) -> EncodeFacts:
    """What the pass that makes maxima knows of a part that is stored."""
    return EncodeFacts(
        source=facts.source,
        source_share=facts.source_share,
        source_is_e8m0=facts.source_is_e8m0,
        source_is_aligned=facts.source_is_aligned,
        code="",
        share=facts.share,
        unit=facts.unit,
        max_is_float=facts.max_is_float,
    )
