"""Storing weights, and the maxima that their scales are made of, by Triton."""

from collections.abc import Sequence as SequenceABC
from typing import Final, Literal

import torch

from syncline.model_ops_rocm.arguments.storing import AMAX, ENCODE, check_amax, check_encode
from syncline.model_ops_rocm.checks import (
    refuse,
    require_contiguous,
    require_float,
    workspace_of,
)
from syncline.model_ops_rocm.formats.coded import CodedSource
from syncline.model_ops_rocm.formats.jobs import EncodeJob
from syncline.model_ops_rocm.formats.partials import AmaxPartial
from syncline.model_ops_rocm.formats.quantised import Quantised
from syncline.model_ops_rocm.formats.recipes import WEIGHT, WEIGHT_SCALE
from syncline.model_ops_rocm.formats.storage_format import StorageFormat
from syncline.model_ops_rocm.regions import Region, region_numel
from syncline.model_ops_rocm.triton.encode_facts import Scales
from syncline.model_ops_rocm.triton.encode_plan import scales_for
from syncline.model_ops_rocm.triton.launch import LAUNCHER, require_reachable
from syncline.model_ops_rocm.triton.ops.encode_kept import copies_of, with_kept_codes
from syncline.model_ops_rocm.triton.ops.encode_launch import (
    fill,
    launch_amax,
    launch_encode,
    launch_parts,
    paddings_of,
)


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
        check_encode(job)
        shape = job.check(nonfinite=nonfinite, allows_meta=LAUNCHER.is_compiling)
        check_job(ENCODE, job, nonfinite)
        job.check_apart(nonfinite)
        mode = mode_of(job, shape)
        if mode == "keep":
            keep_codes(job, shape, nonfinite)
            return
        read = job.scales
        if mode == "amax":
            num_bytes = self.workspace_bytes(job.storage_format, shape)
            staged = workspace_of(ENCODE, workspace, num_bytes, job.out[WEIGHT].device)[:num_bytes]
            require_reachable(ENCODE, workspace=staged)
            read = staged.view(torch.int32)
        if region_numel(job.region) == 0:
            return
        if mode == "amax":
            assert read is not None
            if not LAUNCHER.is_compiling:
                read.zero_()
            launch_amax(job.storage_format, shape, (read, None), job.source, job.region)
        launch_encode(job, shape, mode, (read, nonfinite))


def check_job(op: str, job: EncodeJob, nonfinite: torch.Tensor | None) -> None:
    """What this backend asks of a job beyond its format."""
    source = job.source
    if isinstance(source, CodedSource):
        weight = source.weight
        require_reachable(op, source_codes=weight.codes, source_scale=weight.scale)
    else:
        require_float(op, "source", source)
        require_reachable(op, source=source)
    require_reachable(op, scales=job.scales, nonfinite=nonfinite, **job.out)
    if job.scales is not None:
        require_contiguous(op, "scales", job.scales)
    if nonfinite is None and isinstance(job.storage_format.recipe, Quantised):
        refuse(op, "nonfinite", "be given: this backend does not wait for the device", None)


def mode_of(job: EncodeJob, shape: tuple[int, ...]) -> Scales | Literal["keep"]:
    """Where the scales of a checked job come from; keep: with its codes, as they are."""
    if job.scales is not None:
        return "given"
    if isinstance(job.source, CodedSource) and job.storage_format.keeps(job.source):
        return "keep"
    return scales_for(job.storage_format, shape)


def keep_codes(job: EncodeJob, shape: tuple[int, ...], nonfinite: torch.Tensor | None) -> None:
    """Codes and scales copied to their places."""
    assert nonfinite is not None
    if region_numel(job.region) == 0:
        return
    kept = with_kept_codes(job)
    for copy in copies_of(kept, shape):
        others = copy.out, copy.out, copy.out, nonfinite.view(torch.uint8)
        launch_parts(copy.plan, copy.parts, copy.chosen, copy.source, others)
    for padding in paddings_of(kept, shape):
        fill(padding, job.out[WEIGHT_SCALE])


def amax_into(
    storage_format: StorageFormat,
    partial: AmaxPartial,
    source: torch.Tensor | CodedSource,
    region: Region,
) -> None:
    """See `contracts.AmaxInto`."""
    check_amax(storage_format, partial)
    storage_format.check_amax(partial, source, region, allows_meta=LAUNCHER.is_compiling)
    values = source.weight.codes if isinstance(source, CodedSource) else source
    if not isinstance(source, CodedSource):
        require_float(AMAX, "source", source)
    require_reachable(AMAX, source=values, bits=partial.bits, counts=partial.counts)
    if region_numel(region):
        grids = (partial.bits, partial.counts)
        launch_amax(storage_format, partial.logical_shape, grids, source, region)


ENCODE_BY_TRITON: Final = TritonEncode()
