"""Storing weights, and the maxima that their scales are made of, by Triton."""

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
from syncline.model_ops_rocm.layouts.places import Places, places_of
from syncline.model_ops_rocm.regions import Region, region_numel, region_view
from syncline.model_ops_rocm.triton.configs.base import ANY_WIDTH
from syncline.model_ops_rocm.triton.encode_facts import Scales
from syncline.model_ops_rocm.triton.encode_plan import (
    SlotPlan,
    Source,
    bits_plan,
    parts_of,
    scales_for,
)
from syncline.model_ops_rocm.triton.launch import LAUNCHER, require_reachable
from syncline.model_ops_rocm.triton.ops.encode_launch import (
    AMAX,
    ENCODE,
    fill,
    launch_amax,
    launch_encode,
    launch_parts,
    raw,
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
        shape = job.check(nonfinite=nonfinite, allows_meta=LAUNCHER.is_compiling)
        check_job(ENCODE, job, nonfinite)
        mode = mode_of(job, shape)
        if mode == "keep":
            keep_codes(job, shape, nonfinite)
            return
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
            launch_amax(job.storage_format, shape, (read, None), job.source, job.region)
        launch_encode(job, shape, mode, (read, nonfinite))


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
    codes = storage_format.codes(shape)
    places = places_of(storage_format.layout, codes.shape, codes.dtype)
    assert places is not None
    _copy(places, weight, kept.tensors[WEIGHT], storage_format.padded_region(region))
    touched = storage_format.touched_scales(shape, region)
    if storage_format.scale_layout == RowMajor():
        region_view(scale, touched).copy_(kept.tensors[WEIGHT_SCALE])
        return
    plan = _copy(storage_format.scale_places(shape), scale, kept.tensors[WEIGHT_SCALE], touched)
    facts = replace(plan.facts, scale_places=plan.facts.weight)
    whole = storage_format.scale_part(touched, shape)
    fill(replace(plan, scale=plan.weight, facts=facts), raw(scale), touched, whole)


def encode_coded(job: EncodeJob, shape: tuple[int, ...], nonfinite: torch.Tensor | None) -> None:
    """A checked job of codes with scales, which needs no workspace."""
    mode = mode_of(job, shape)
    if mode == "keep":
        keep_codes(job, shape, nonfinite)
        return
    if mode == "amax":
        limit = "have scales given where one pass over the source cannot make them"
        refuse(ENCODE, "job", limit, job.storage_format.describe())
    if region_numel(job.region):
        launch_encode(job, shape, mode, (job.scales, nonfinite))


def _copy(places: Places, out: torch.Tensor, source: torch.Tensor, region: Region) -> SlotPlan:
    plan = bits_plan(places, tuple(out.shape[:-2]), out.itemsize)
    source, out = raw(source), raw(out)
    parts = parts_of(plan, region, region, Source(source), out)
    is_bytes = source.dtype is torch.uint8
    kind = "bytes" if is_bytes else "spread"
    chosen = LAUNCHER.config(ENCODE, source.dtype, ANY_WIDTH, kind)
    launch_parts(plan, parts, chosen, Source(source), (out, out, out, out))
    return plan


def amax_into(
    storage_format: StorageFormat,
    partial: AmaxPartial,
    source: torch.Tensor | CodedSource,
    region: Region,
) -> None:
    """See `contracts.AmaxInto`."""
    storage_format.check_amax(partial, source, region, allows_meta=LAUNCHER.is_compiling)
    values = source.weight.codes if isinstance(source, CodedSource) else source
    if not isinstance(source, CodedSource):
        require_float(AMAX, "source", source)
    require_reachable(AMAX, source=values, bits=partial.bits, counts=partial.counts)
    if region_numel(region):
        grids = (partial.bits, partial.counts)
        launch_amax(storage_format, partial.logical_shape, grids, source, region)


ENCODE_BY_TRITON: Final = TritonEncode()
