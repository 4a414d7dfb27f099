"""Storing weights, and the maxima that their scales are made of, by Triton."""

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceABC
from dataclasses import replace
from typing import Final, Literal

import torch

from syncline.model_ops_rocm.checks import refuse, require_float, require_workspace
from syncline.model_ops_rocm.formats.coded import CodedSource
from syncline.model_ops_rocm.formats.jobs import EncodeJob
from syncline.model_ops_rocm.formats.partials import AmaxPartial
from syncline.model_ops_rocm.formats.quantised import Quantised
from syncline.model_ops_rocm.formats.recipes import WEIGHT, WEIGHT_SCALE
from syncline.model_ops_rocm.formats.storage_format import StorageFormat
from syncline.model_ops_rocm.layouts import RowMajor
from syncline.model_ops_rocm.layouts.base import as_bits
from syncline.model_ops_rocm.layouts.places import Places, places_of
from syncline.model_ops_rocm.regions import Region, region_numel, region_view
from syncline.model_ops_rocm.triton.configs.base import ANY_WIDTH, ConfigKey
from syncline.model_ops_rocm.triton.encode_facts import EncodeFacts, Scales, dtype_name
from syncline.model_ops_rocm.triton.encode_plan import (
    Part,
    SlotPlan,
    bits_plan,
    matrix_runs,
    parts_of,
    scales_for,
    slot_plan,
)
from syncline.model_ops_rocm.triton.geometry import power_of_two
from syncline.model_ops_rocm.triton.kernels.encode import encode_kernel
from syncline.model_ops_rocm.triton.kernels.scale_grid import amax_kernel, fill_scales_kernel
from syncline.model_ops_rocm.triton.launch import IS_INTERPRETED, LAUNCHER, require_reachable
from syncline.model_ops_rocm.triton.targets import LaunchConfig

ENCODE: Final = "encode"
AMAX: Final = "amax_into"
Chosen = tuple[ConfigKey, LaunchConfig]
_MAX_GRID: Final = 65_535  # of the second and third dimension


def kind_of(facts: EncodeFacts) -> str:
    """Which configurations serve such a kernel."""
    if facts.share == (128, 128) and facts.scales != "none":
        return "128x128"
    if facts.scales == "own":
        return "token" if facts.share[1] == 0 else "block"
    return "spread"


def tile_of(chosen: Chosen, columns: int) -> tuple[int, int]:
    """Rows and columns of a tile; a row whose scale is its own is one tile wide."""
    constants = chosen[1].constants
    return constants["BLOCK_ROWS"], constants.get("BLOCK_COLUMNS", max(power_of_two(columns), 32))


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """As kernels take it: bfloat16 and what has no arithmetic of its own as integers."""
    if tensor.dtype in (torch.float32, torch.float16, torch.int32):
        return tensor
    return as_bits(tensor)


def numbers_of(source: torch.Tensor) -> torch.Tensor:
    """A source that is not copied but converted: the interpreter takes bfloat16 as integers."""
    return raw(source) if IS_INTERPRETED else source


class TritonEncode:
    """See `contracts.Encode`."""

    __slots__ = ()

    def workspace_bytes(
        self, storage_format: StorageFormat, logical_shape: SequenceABC[int]
    ) -> int:
        shape = tuple(logical_shape)
        if scales_for(storage_format, shape) != "amax":
            return 0
        grid = storage_format.scale_grid(shape).shape
        return 4 * region_numel(tuple((0, size) for size in grid))

    def __call__(
        self,
        job: EncodeJob,
        *,
        nonfinite: torch.Tensor | None = None,
        workspace: torch.Tensor | None = None,
    ) -> None:
        shape = job.check(nonfinite=nonfinite, allows_meta=LAUNCHER.is_compiling)
        check_job(ENCODE, job, nonfinite)
        mode = mode_of(job, shape)
        if mode == "keep":
            keep_codes(job, shape, nonfinite)
            return
        source = job.source.numbers() if isinstance(job.source, CodedSource) else job.source
        read = job.scales
        if mode == "amax":
            num_bytes = self.workspace_bytes(job.storage_format, shape)
            staged = require_workspace(ENCODE, workspace, num_bytes)[:num_bytes]
            require_reachable(ENCODE, workspace=staged)
            read = staged.view(torch.int32)
        if region_numel(job.region) == 0:
            return
        if mode == "amax":
            assert read is not None
            if not LAUNCHER.is_compiling:
                read.zero_()
            launch_amax(job.storage_format, shape, (read, None), source, job.region)
        launch_encode(replace(job, source=source), shape, mode, (read, nonfinite))


def check_job(op: str, job: EncodeJob, nonfinite: torch.Tensor | None) -> None:
    """What this backend asks of a job beyond its format."""
    source = job.source.weight.codes if isinstance(job.source, CodedSource) else job.source
    if not isinstance(job.source, CodedSource):
        require_float(op, "source", source)
    require_reachable(op, source=source, scales=job.scales, nonfinite=nonfinite, **job.out)
    if nonfinite is None and isinstance(job.storage_format.recipe, Quantised):
        refuse(op, "nonfinite", "be given: this backend does not wait for the device", None)


def mode_of(job: EncodeJob, shape: tuple[int, ...]) -> Scales | Literal["keep"]:
    """Where the scales of a checked job come from; keep: with its codes, as they are."""
    if job.scales is not None:
        return "given"
    if isinstance(job.source, CodedSource) and job.storage_format.keeps(job.source):
        return "keep"
    return scales_for(job.storage_format, shape)


def launch_encode(
    job: EncodeJob,
    shape: tuple[int, ...],
    mode: Scales,
    others: tuple[torch.Tensor | None, torch.Tensor | None],
) -> None:
    """Of a checked job; `others` are the scales or maxima to read, and the flag."""
    storage_format, source, region = job.storage_format, job.source, job.region
    assert isinstance(source, torch.Tensor)
    plan = slot_plan(storage_format, shape, dtype_name(source.dtype), mode, target(source.dtype))
    tensors = tensors_of(job.out, others)
    taken = raw(source) if plan.facts.source == "bits" else numbers_of(source)
    parts = parts_of(plan, storage_format.padded_region(region), region, source, tensors[0])
    launch_parts(plan, parts, chosen_for(plan, source.dtype), taken, tensors)
    if plan.facts.scales != "none":
        fill_padding(job, shape, plan)


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
    source: torch.Tensor,
    others: tuple[torch.Tensor, ...],
) -> None:
    tile = tile_of(chosen, plan.shape[1])
    for part in parts:
        for grid, first_row, first, at in grids_of(part, tile):
            LAUNCHER.launch(
                encode_kernel,
                grid,
                chosen,
                (
                    *(_from(source, at), *others, first_row, *part.rows[1:], *part.columns),
                    *(*part.source_strides, first, *part.weight, *plan.scale),
                    *(plan.grid[0] * plan.grid[1], plan.grid[1]),
                ),
                {"FACTS": part.facts, "BLOCK_COLUMNS": tile[1]},
            )


def target(dtype: torch.dtype) -> tuple[str, bool]:
    """The architecture at hand, and whether it adds to a product without rounding it first."""
    key, _ = LAUNCHER.config(ENCODE, row_dtype(dtype), ANY_WIDTH, "spread")
    return key.arch, not IS_INTERPRETED


def tiles_of(part: Part, tile: tuple[int, int]) -> tuple[int, int]:
    """Tiles across and down one matrix."""
    across = -(-(part.columns.end - part.columns.origin) * part.facts.unit // tile[1])
    return across, -(-(part.rows.end - part.rows.origin) // tile[0])


def grids_of(
    part: Part, tile: tuple[int, int]
) -> Iterator[tuple[tuple[int, int, int], int, int, int]]:
    """Grids of tiles across, down and matrices; the first row and matrix of each, and its source.

    One, unless a dimension is longer than a grid may be.
    """
    across, down = tiles_of(part, tile)
    for matrix in range(0, part.matrices, _MAX_GRID):
        for row in range(0, down, _MAX_GRID):
            grid = (across, min(down - row, _MAX_GRID), min(part.matrices - matrix, _MAX_GRID))
            at = part.source_at + matrix * part.source_strides[0] * part.facts.unit
            yield grid, part.rows.origin + row * tile[0], part.first + matrix, at


def _from(source: torch.Tensor, offset: int) -> torch.Tensor:
    if not offset:
        return source
    return source.as_strided(source.shape, source.stride(), source.storage_offset() + offset)


def fill_padding(job: EncodeJob, shape: tuple[int, ...], plan: SlotPlan) -> None:
    """What the scale layout has behind the job's region, not empty, if it reaches the edge."""
    touched = job.storage_format.touched_scales(shape, job.region)
    whole = job.storage_format.scale_part(touched, shape)
    _fill(plan, raw(job.out[WEIGHT_SCALE]), touched, whole)


def _fill(plan: SlotPlan, scale: torch.Tensor, touched: Region, whole: Region) -> None:
    """The padding of the scale layout behind a region that reaches the last scale."""
    if whole == touched:
        return
    rows, columns = touched[-2:]
    row_end, column_end = whole[-2][1], whole[-1][1]
    chosen = LAUNCHER.config(ENCODE, torch.uint8, ANY_WIDTH, "fill")
    tile = tile_of(chosen, column_end)
    down = -(-(row_end - rows[0]) // tile[0])
    across = -(-(column_end - columns[0]) // tile[1])
    for first, matrices, _ in matrix_runs(plan.lead, touched[:-2], (0,) * len(plan.lead)):
        for matrix in range(0, matrices, _MAX_GRID):
            LAUNCHER.launch(
                fill_scales_kernel,
                (across, down, min(matrices - matrix, _MAX_GRID)),
                chosen,
                (scale, *rows, row_end, *columns, column_end, first + matrix, *plan.scale),
                {"PLACES": plan.facts.scale_places},
            )


def keep_codes(job: EncodeJob, shape: tuple[int, ...], nonfinite: torch.Tensor | None) -> None:
    """Codes and scales copied to their places."""
    storage_format, region = job.storage_format, job.region
    if region_numel(region) == 0:
        return
    assert isinstance(job.source, CodedSource)
    kept = storage_format.keep(job.source, region, shape)
    assert kept.nonfinite is not None
    assert nonfinite is not None
    nonfinite.logical_or_(kept.nonfinite)
    weight, scale = job.out[WEIGHT], job.out[WEIGHT_SCALE]
    places = places_of(storage_format.layout, tuple(weight.shape), weight.dtype)
    assert places is not None
    _copy(places, weight, kept.tensors[WEIGHT], storage_format.padded_region(region))
    touched = storage_format.touched_scales(shape, region)
    if storage_format.scale_layout == RowMajor():
        region_view(scale, touched).copy_(kept.tensors[WEIGHT_SCALE])
        return
    plan = _copy(storage_format.scale_places(shape), scale, kept.tensors[WEIGHT_SCALE], touched)
    facts = replace(plan.facts, scale_places=plan.facts.weight)
    whole = storage_format.scale_part(touched, shape)
    _fill(replace(plan, scale=plan.weight, facts=facts), raw(scale), touched, whole)


def encode_coded(job: EncodeJob, shape: tuple[int, ...], nonfinite: torch.Tensor | None) -> None:
    """A checked job of codes with scales, which needs no workspace."""
    mode = mode_of(job, shape)
    if mode == "keep":
        keep_codes(job, shape, nonfinite)
        return
    if mode == "amax":
        limit = "have scales given where one pass over the source cannot make them"
        refuse(ENCODE, "job", limit, job.storage_format.describe())
    assert isinstance(job.source, CodedSource)
    if region_numel(job.region):
        numbers = replace(job, source=job.source.numbers())
        launch_encode(numbers, shape, mode, (job.scales, nonfinite))


def _copy(places: Places, out: torch.Tensor, source: torch.Tensor, region: Region) -> SlotPlan:
    plan = bits_plan(places, tuple(out.shape[:-2]), out.itemsize)
    source, out = raw(source), raw(out)
    parts = parts_of(plan, region, region, source, out)
    is_bytes = source.dtype is torch.uint8
    kind = "bytes" if is_bytes else "spread"
    chosen = LAUNCHER.config(ENCODE, source.dtype, ANY_WIDTH, kind)
    launch_parts(plan, parts, chosen, source, (out, out, out, out))
    return plan


def launch_amax(
    storage_format: StorageFormat,
    shape: tuple[int, ...],
    grids: tuple[torch.Tensor, torch.Tensor | None],
    source: torch.Tensor,
    region: Region,
) -> None:
    """Add to the maxima and, where there are any, the counts of the whole grid."""
    bits, counts = grids
    plan = slot_plan(storage_format, shape, dtype_name(source.dtype), "amax", target(source.dtype))
    chosen = LAUNCHER.config(AMAX, row_dtype(source.dtype), ANY_WIDTH)
    tile = tile_of(chosen, plan.shape[1])
    for part in parts_of(plan, storage_format.padded_region(region), region, source, source):
        facts = EncodeFacts(
            source=part.facts.source,
            code="",
            share=part.facts.share,
            unit=part.facts.unit,
            max_is_float=part.facts.max_is_float,
        )
        for grid, first_row, first, at in grids_of(part, tile):
            LAUNCHER.launch(
                amax_kernel,
                grid,
                chosen,
                (
                    *(_from(numbers_of(source), at), bits, bits if counts is None else counts),
                    *(first_row, *part.rows[1:], *part.columns, *part.source_strides, first),
                    *(plan.grid[0] * plan.grid[1], plan.grid[1]),
                ),
                {"FACTS": facts, "HAS_COUNTS": counts is not None},
            )


def amax_into(
    storage_format: StorageFormat,
    partial: AmaxPartial,
    source: torch.Tensor | CodedSource,
    region: Region,
) -> None:
    """See `contracts.AmaxInto`."""
    storage_format.check_amax(partial, source, region, allows_meta=LAUNCHER.is_compiling)
    if isinstance(source, CodedSource):
        source = source.numbers()
    require_float(AMAX, "source", source)
    require_reachable(AMAX, source=source, bits=partial.bits, counts=partial.counts)
    if region_numel(region):
        grids = (partial.bits, partial.counts)
        launch_amax(storage_format, partial.logical_shape, grids, source, region)


ENCODE_BY_TRITON: Final = TritonEncode()
