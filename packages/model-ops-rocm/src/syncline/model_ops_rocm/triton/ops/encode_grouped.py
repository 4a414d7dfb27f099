"""Storing many weights by Triton: a table of them on the device, and a launch for each kind.

What is checked and worked out of a job is kept for the jobs like it, of the same format, shapes,
strides and region: of those only the tensors themselves are looked at.
"""

from array import array
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass, field
from typing import Final

import torch

from syncline.model_ops_rocm.checks import refuse, require_workspace
from syncline.model_ops_rocm.formats.coded import CodedSource
from syncline.model_ops_rocm.formats.jobs import EncodeJob
from syncline.model_ops_rocm.formats.recipes import WEIGHT, WEIGHT_SCALE, TensorSpec
from syncline.model_ops_rocm.regions import region_numel
from syncline.model_ops_rocm.triton.encode_facts import EncodeFacts
from syncline.model_ops_rocm.triton.encode_plan import Part, SlotPlan, parts_of
from syncline.model_ops_rocm.triton.kernels.encode_grouped import encode_grouped_kernel
from syncline.model_ops_rocm.triton.launch import IS_INTERPRETED, LAUNCHER, require_reachable
from syncline.model_ops_rocm.triton.ops.encode import check_job, encode_coded, mode_of
from syncline.model_ops_rocm.triton.ops.encode_launch import (
    Chosen,
    Tile,
    chosen_for,
    fill_padding,
    numbers_of,
    plan_of,
    raw,
    tensors_of,
    tile_of,
    tiles_of,
)

ENCODE_GROUPED: Final = "encode_grouped"
FIELDS: Final = 32  # int64 of one job; those behind the last one used are zeros
_NUM_ADDRESSES: Final = 4
_Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(slots=True, kw_only=True, eq=False)
class _Kind:
    """The jobs of one launch, as they are found."""

    facts: EncodeFacts
    chosen: Chosen
    tile: Tile
    source: torch.Tensor  # of one of the jobs, for their types
    tensors: _Tensors
    num_jobs: int = 0
    num_tiles: int = 0
    table: "array[int]" = field(default_factory=lambda: array("q"))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Like:
    """What jobs that differ in their tensors alone have in common."""

    spec: dict[str, TensorSpec]
    device: torch.device
    scales: TensorSpec | None
    shape: tuple[int, ...]
    plan: SlotPlan
    has_padded_scales: bool
    # (kind, its numbers behind the addresses, tiles, bytes from the source's start)
    parts: tuple[tuple[_Kind, tuple[int, ...], int, int], ...]

    def fits(self, job: EncodeJob) -> bool:
        """Whether the job's tensors are what those of the first one were."""
        out, spec, source = job.out, self.spec, job.source
        if len(out) != len(spec) or source.device != self.device:  # type: ignore[union-attr]  # a tensor
            return False
        for name, tensor in out.items():
            wanted = spec.get(name)
            if (
                wanted is None
                or tensor.shape != wanted.shape
                or tensor.dtype is not wanted.dtype
                or tensor.device != self.device
                or not tensor.is_contiguous()
            ):
                return False
        if job.scales is None or self.scales is None:
            return job.scales is None
        return (
            job.scales.shape == self.scales.shape
            and job.scales.dtype is self.scales.dtype
            and job.scales.device == self.device
            and job.scales.is_contiguous()
        )


class _Table:
    """Sorts jobs into kinds; knows them by what they are like."""

    __slots__ = ("_kinds", "_like", "_nonfinite", "padded")

    def __init__(self, nonfinite: torch.Tensor | None) -> None:
        self._nonfinite = nonfinite
        self._kinds: dict[object, _Kind] = {}
        self._like: dict[object, _Like] = {}
        self.padded: list[tuple[EncodeJob, _Like]] = []

    @property
    def kinds(self) -> list[_Kind]:
        return list(self._kinds.values())

    def add(self, job: EncodeJob) -> None:
        source, weight = job.source, job.out.get(WEIGHT)
        assert isinstance(source, torch.Tensor)
        at = source.data_ptr(), -1 if weight is None else weight.data_ptr()
        key = (
            *(id(job.storage_format), job.region, source.dtype, source.shape, source.stride()),
            *(job.scales is None, at[0] % 16 == 0, at[1] % 16 == 0),
        )
        like = self._like.get(key)
        if like is None or not like.fits(job):
            like = self._like[key] = self._first(job)
        scale, scales = job.out.get(WEIGHT_SCALE), job.scales
        scale_at = at[1] if scale is None else scale.data_ptr()
        read_at = scale_at if scales is None else scales.data_ptr()
        for kind, numbers, tiles, offset in like.parts:
            addresses = (kind.num_tiles, at[0] + offset, at[1], scale_at, read_at)
            kind.table.extend(addresses + numbers)
            kind.num_jobs += 1
            kind.num_tiles += tiles
        if like.has_padded_scales:
            self.padded.append((job, like))

    def _first(self, job: EncodeJob) -> _Like:
        """Checks all there is to check."""
        shape = job.check(nonfinite=self._nonfinite, allows_meta=LAUNCHER.is_compiling)
        check_job(ENCODE_GROUPED, job, self._nonfinite)
        storage_format, source, region = job.storage_format, job.source, job.region
        assert isinstance(source, torch.Tensor)
        mode = mode_of(job, shape)
        if mode == "amax":
            limit = "have scales given where one pass over the source cannot make them"
            refuse(ENCODE_GROUPED, "jobs", limit, storage_format.describe())
        assert mode != "keep"
        plan, taken, _ = plan_of(storage_format, shape, mode, source)
        padded, touched = storage_format.padded_region(region), None
        parts = parts_of(plan, padded, region, taken, job.out[WEIGHT])
        if mode != "none" and region_numel(region):
            touched = storage_format.touched_scales(shape, region)
        scales = job.scales
        return _Like(
            spec=storage_format.storage_spec(shape),
            device=source.device,
            scales=None
            if scales is None
            else TensorSpec(shape=tuple(scales.shape), dtype=scales.dtype),
            shape=shape,
            plan=plan,
            has_padded_scales=touched is not None
            and storage_format.scale_part(touched, shape) != touched,
            parts=tuple(self._row(job, plan, part) for part in parts if region_numel(region)),
        )

    def _row(
        self, job: EncodeJob, plan: SlotPlan, part: Part
    ) -> tuple[_Kind, tuple[int, ...], int, int]:
        source = job.source
        assert isinstance(source, torch.Tensor)
        chosen = chosen_for(plan, source.dtype, ENCODE_GROUPED)
        tile = tile_of(chosen, plan)
        key = (part.facts, chosen[0], tile)
        if key not in self._kinds:
            taken = raw(source) if part.facts.source == "bits" else numbers_of(source)
            tensors = tensors_of(job.out, (job.scales, self._nonfinite))
            self._kinds[key] = _Kind(
                facts=part.facts, chosen=chosen, tile=tile, source=taken, tensors=tensors
            )
        across, down = tiles_of(part, tile)
        numbers = (
            *(across, across * down, *part.rows, *part.columns, *part.source_strides, part.first),
            *(*part.weight, *plan.scale, plan.grid[0] * plan.grid[1], plan.grid[1]),
        )
        blank = (0,) * (FIELDS - 1 - _NUM_ADDRESSES - len(numbers))
        offset = part.source_at * source.itemsize
        return self._kinds[key], numbers + blank, across * down * part.matrices, offset


class TritonEncodeGrouped:
    """See `contracts.EncodeGrouped`; codes that come with scales have launches of their own."""

    __slots__ = ()

    def workspace_bytes(self, max_jobs: int) -> int:
        return 8 * FIELDS * max_jobs

    def __call__(
        self,
        jobs: SequenceABC[EncodeJob],
        *,
        nonfinite: torch.Tensor | None = None,
        workspace: torch.Tensor | None = None,
    ) -> None:
        table, coded = _Table(nonfinite), []
        for job in jobs:
            if isinstance(job.source, CodedSource):
                coded.append((job, job.check(nonfinite=nonfinite)))
                check_job(ENCODE_GROUPED, job, nonfinite)
            else:
                table.add(job)
        num_rows = sum(kind.num_jobs for kind in table.kinds)
        staged = require_workspace(ENCODE_GROUPED, workspace, self.workspace_bytes(num_rows))
        require_reachable(ENCODE_GROUPED, workspace=staged)
        _launch(table.kinds, staged)
        for job, like in table.padded:
            fill_padding(job, like.shape, like.plan)
        for job, shape in coded:
            encode_coded(job, shape, nonfinite)


def _launch(kinds: list[_Kind], workspace: torch.Tensor) -> None:
    rows = workspace[: 8 * FIELDS * sum(kind.num_jobs for kind in kinds)].view(torch.int64)
    if not LAUNCHER.is_compiling and rows.numel():
        numbers = array("q")
        for kind in kinds:
            numbers.extend(kind.table)
        staged = torch.frombuffer(numbers, dtype=torch.int64)
        # From pinned memory, so that the copy waits for nothing that the device still has to do.
        rows.copy_(staged if IS_INTERPRETED else staged.pin_memory(), non_blocking=True)
    start = 0
    for kind in kinds:
        stop = start + FIELDS * kind.num_jobs
        tiles = kind.chosen[1].constants["TILES"]
        LAUNCHER.launch(
            encode_grouped_kernel,
            (-(-kind.num_tiles // tiles),),
            kind.chosen,
            (rows[start:stop], kind.source, *kind.tensors, kind.num_jobs, kind.num_tiles),
            {
                "FACTS": kind.facts,
                "FIELDS": FIELDS,
                "BLOCK_COLUMNS": kind.tile.block_columns,
                "ACROSS": kind.tile.across,
            },
        )
        start = stop


ENCODE_GROUPED_BY_TRITON: Final = TritonEncodeGrouped()
