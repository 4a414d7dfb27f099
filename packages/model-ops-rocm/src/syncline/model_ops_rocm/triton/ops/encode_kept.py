"""Codes that are stored as they come: copies of them and of their scales; launches nothing.

Unit: one job whose format keeps its codes.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch

from syncline.model_ops_rocm.arguments.storing import ENCODE
from syncline.model_ops_rocm.formats.coded import CodedSource
from syncline.model_ops_rocm.formats.jobs import EncodeJob
from syncline.model_ops_rocm.formats.quantised import Quantised
from syncline.model_ops_rocm.formats.recipes import WEIGHT, WEIGHT_SCALE
from syncline.model_ops_rocm.quant.fnuz import E4m3fnWeight, to_e4m3fnuz
from syncline.model_ops_rocm.quant.scheme import ScaleType
from syncline.model_ops_rocm.triton.configs.base import ANY_WIDTH
from syncline.model_ops_rocm.triton.encode_plan import (
    Part,
    SlotPlan,
    Source,
    bits_plan,
    parts_of,
    places_of_scales,
    weight_places,
)
from syncline.model_ops_rocm.triton.launch import LAUNCHER, Chosen
from syncline.model_ops_rocm.triton.ops.encode_launch import (
    raw,
    scales_of_source,
)


class Copy(NamedTuple):
    """One tensor of a job to its place."""

    plan: SlotPlan
    parts: list[Part]
    chosen: Chosen
    source: Source
    out: torch.Tensor


def converts(job: EncodeJob) -> bool:
    """Whether codes that are kept change their type, for which their scales are looked at."""
    recipe, source = job.storage_format.recipe, job.source
    assert isinstance(recipe, Quantised) and isinstance(source, CodedSource)
    return recipe.code is not source.recipe.code


def with_kept_codes(job: EncodeJob) -> EncodeJob:
    """The job, with codes of the type that is stored."""
    if not converts(job):
        return job
    source = job.source
    assert isinstance(source, CodedSource) and isinstance(source.weight, E4m3fnWeight)
    return replace(job, source=replace(source, weight=to_e4m3fnuz(source.weight)))


def copies_of(job: EncodeJob, shape: tuple[int, ...], op: str = ENCODE) -> Iterator[Copy]:
    """Of a job, not empty, whose codes have the type that is stored."""
    storage_format, source = job.storage_format, job.source
    assert isinstance(source, CodedSource)
    recipe, codes, scale = source.recipe, raw(source.weight.codes), raw(source.weight.scale)
    places = weight_places(storage_format, shape)
    plan = bits_plan(places, shape[:-2], codes.itemsize, recipe.code.value)
    padded = storage_format.padded_region(job.region)
    out, chosen = raw(job.out[WEIGHT]), LAUNCHER.config(op, codes.dtype, ANY_WIDTH, "bytes")
    parts = parts_of(plan, padded, job.region, Source(codes), out)
    yield Copy(plan, parts, chosen, Source(codes), out)
    flags = "e8m0" if recipe.scale is ScaleType.E8M0 else "float32"
    places = places_of_scales(storage_format, shape)
    plan = bits_plan(places, shape[:-2], scale.itemsize, flags)
    region = scales_of_source(source, storage_format.touched_scales(shape, job.region))
    out, chosen = raw(job.out[WEIGHT_SCALE]), LAUNCHER.config(op, scale.dtype, ANY_WIDTH, "scales")
    parts = parts_of(plan, region, region, Source(scale), out)
    yield Copy(plan, parts, chosen, Source(scale), out)
