"""Storing many weights by Triton: a table of them on the device, and a launch for each kind."""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceABC
from operator import is_, itemgetter
from typing import Final

import torch

from syncline.model_ops_rocm.arguments.jobs import faults_of_jobs
from syncline.model_ops_rocm.arguments.storing import (
    ENCODE_GROUPED,
    check_jobs,
    refuse_jobs,
)
from syncline.model_ops_rocm.checks import refuse, workspace_of
from syncline.model_ops_rocm.errors import OpError
from syncline.model_ops_rocm.formats.coded import CodedSource
from syncline.model_ops_rocm.formats.jobs import EncodeJob
from syncline.model_ops_rocm.formats.quantised import Quantised
from syncline.model_ops_rocm.formats.recipes import WEIGHT
from syncline.model_ops_rocm.formats.storage_format import StorageFormat
from syncline.model_ops_rocm.regions import full_region, region_numel
from syncline.model_ops_rocm.triton.encode_plan import scales_for
from syncline.model_ops_rocm.triton.encode_table import NUM_FIELDS, ROW_BYTES
from syncline.model_ops_rocm.triton.launch import IS_INTERPRETED, LAUNCHER, require_reachable
from syncline.model_ops_rocm.triton.ops.encode_jobs import JobTable
from syncline.model_ops_rocm.triton.ops.encode_kept import with_kept_codes
from syncline.model_ops_rocm.triton.ops.encode_rows import Kind

_ALIGNMENT: Final = 16


class TritonPreparedEncode:
    """See `contracts.PreparedEncode`; the tables and the maxima are in the workspace."""

    __slots__ = ("_jobs", "_launches", "_maxima", "_workspace")

    def __init__(
        self, jobs: SequenceABC[EncodeJob], kinds: list[Kind], workspace: torch.Tensor, at: int
    ) -> None:
        self._jobs = tuple(jobs)  # whose tensors must not go
        self._workspace = workspace
        self._maxima = workspace[:at].view(torch.int32)
        self._launches = []
        for kind in kinds:
            rows = workspace[at : at + ROW_BYTES * kind.num_rows].view(torch.int64)
            self._launches.append((kind, rows))
            at += ROW_BYTES * kind.num_rows

    @property
    def num_launches(self) -> int:
        return len(self._launches) + bool(self._maxima.numel())

    def __call__(self) -> None:
        require_reachable(ENCODE_GROUPED, workspace=self._workspace)
        if self._maxima.numel() and not LAUNCHER.is_compiling:
            self._maxima.zero_()
        for kind, rows in self._launches:
            LAUNCHER.launch(
                kind.kernel,
                (-(-kind.num_tiles // kind.chosen[1].constants["TILES"]),),
                kind.chosen,
                (rows, *kind.samples, kind.num_rows, kind.num_tiles),
                kind.constants,
            )


class TritonEncodeGrouped:
    """See `contracts.EncodeGrouped`."""

    __slots__ = ()

    def workspace_bytes(self, weights: Iterable[tuple[StorageFormat, SequenceABC[int]]]) -> int:
        num_rows = num_maxima = 0
        for storage_format, logical_shape in weights:
            shape = tuple(logical_shape)
            per_run = 1
            if isinstance(storage_format.recipe, Quantised):
                whole = full_region(storage_format.scale_grid(shape).shape)
                is_padded = storage_format.scale_part(whole, shape) != whole
                # Maxima, or the scales of codes that are kept; and what is behind the scales.
                per_run += 1 + is_padded + (storage_format.padding is not None)
                if scales_for(storage_format, shape) == "amax":
                    num_maxima += region_numel(whole)
            num_rows += per_run * region_numel(full_region(shape[:-3]))
        return _table_at(num_maxima) + ROW_BYTES * num_rows

    def __call__(
        self,
        jobs: SequenceABC[EncodeJob],
        *,
        nonfinite: torch.Tensor | None = None,
        workspace: torch.Tensor | None = None,
    ) -> None:
        _prepared(jobs, nonfinite, workspace, may_look=True)()

    def prepare(
        self,
        jobs: SequenceABC[EncodeJob],
        *,
        nonfinite: torch.Tensor | None = None,
        workspace: torch.Tensor | None = None,
    ) -> TritonPreparedEncode:
        prepared = _prepared(jobs, nonfinite, workspace, may_look=False)
        if not IS_INTERPRETED and not LAUNCHER.is_compiling:
            with LAUNCHER.compiling() as compiled:
                prepared()
            for one in compiled:
                one.load()
        return prepared


def _table_at(num_maxima: int) -> int:
    """Where the table is: behind the maxima."""
    return -(-4 * num_maxima // _ALIGNMENT) * _ALIGNMENT


def _convert(jobs: list[EncodeJob]) -> dict[int, Exception]:
    """Give codes the type that is stored, which may take a look at the host; what is wrong."""
    refused: dict[int, Exception] = {}
    for index, job in enumerate(jobs):
        source = job.source
        if isinstance(source, CodedSource) and job.scales is None:
            try:
                if job.storage_format.keeps(source):
                    jobs[index] = with_kept_codes(job)
            except (ValueError, OpError) as error:
                refused[index] = error
    return refused


def _table_of(jobs: list[EncodeJob], nonfinite: torch.Tensor | None, *, may_look: bool) -> JobTable:
    """Of all jobs, in which codes may be replaced by those that are stored; ValueError else."""
    table, given = JobTable(nonfinite), tuple(jobs)
    # Of a job whose codes cannot be converted that alone is told.
    unconverted = _convert(jobs) if may_look else {}
    refused = table.add(jobs) | unconverted
    refuse_jobs(ENCODE_GROUPED, sorted(refused.items(), key=itemgetter(0)))
    # Codes that were converted are copies: what was given is what may share bytes.
    bounds = table.bounds() if all(map(is_, given, jobs)) else None
    refuse_jobs(ENCODE_GROUPED, faults_of_jobs(given, nonfinite, bounds))
    return table


def _prepared(
    jobs: SequenceABC[EncodeJob],
    nonfinite: torch.Tensor | None,
    workspace: torch.Tensor | None,
    *,
    may_look: bool,
) -> TritonPreparedEncode:
    is_on_device = not IS_INTERPRETED and not LAUNCHER.is_compiling
    if is_on_device and torch.cuda.is_current_stream_capturing():
        refuse(ENCODE_GROUPED, "jobs", "be prepared before a graph is recorded", "a recording")
    check_jobs(jobs)
    taken = list(jobs)
    table = _table_of(taken, nonfinite, may_look=may_look)
    at = _table_at(table.num_maxima)
    num_bytes = at + ROW_BYTES * table.num_rows
    if workspace is None:
        here = torch.device("cuda" if is_on_device else "cpu")
        device = taken[0].out[WEIGHT].device if taken else here
        memory = workspace_of(ENCODE_GROUPED, None, num_bytes + _ALIGNMENT, device)
        workspace = memory[-memory.data_ptr() % _ALIGNMENT :]
    base = workspace.data_ptr()
    staged = workspace_of(ENCODE_GROUPED, workspace, num_bytes, workspace.device)
    require_reachable(ENCODE_GROUPED, workspace=staged)
    if base % _ALIGNMENT:
        limit = f"start at a multiple of {_ALIGNMENT} bytes"
        refuse(ENCODE_GROUPED, "workspace", limit, f"{base % _ALIGNMENT} bytes behind one")
    if not LAUNCHER.is_compiling and table.num_rows:
        # Pinned memory, so that the copy waits for nothing that the device still has to do.
        shape = table.num_rows, NUM_FIELDS
        rows = torch.empty(shape, dtype=torch.int64, pin_memory=not IS_INTERPRETED)
        table.write(rows, base)
        staged[at:num_bytes].view(torch.int64).view(shape).copy_(rows, non_blocking=True)
    return TritonPreparedEncode(taken, table.kinds, staged, at)


ENCODE_GROUPED_BY_TRITON: Final = TritonEncodeGrouped()
