"""From one part of a weight to the numbers that a kernel stores it by; imports no Triton.

Unit: one region of one slot. What depends on the format and the shape alone is worked out once; a
region adds its box, its tiles and its alignment. Knows no configuration.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final, NamedTuple

import torch

from syncline.model_ops_rocm.checks import FLOAT_DTYPES
from syncline.model_ops_rocm.formats.quantised import Quantised
from syncline.model_ops_rocm.formats.recipes import WEIGHT, Unquantised
from syncline.model_ops_rocm.formats.storage_format import StorageFormat
from syncline.model_ops_rocm.layouts.places import Places, places_of
from syncline.model_ops_rocm.quant.scheme import CodeType, Granularity
from syncline.model_ops_rocm.regions import Region
from syncline.model_ops_rocm.triton.encode_facts import (
    EncodeFacts,
    PlaceFacts,
    Scales,
    dtype_name,
    has_place_facts,
    recipe_facts,
    refuse_format,
)

# The widest row whose scale is made in one pass: it is one tile.
MAX_TOKEN_WIDTH: Final = 32_768
_VECTOR_BYTES: Final = 16


class Axis3(NamedTuple):
    """The run-time half of an `Axis`, and what lies between two matrices."""

    matrix: int
    stride: int
    part: int
    part_stride: int


class Box(NamedTuple):
    """A range of a dimension: where tiles start, the range, and its end with the padding."""

    origin: int
    start: int
    stop: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotPlan:
    """What is known of a slot before a region of it is."""

    facts: EncodeFacts
    shape: tuple[int, int]  # padded rows and columns
    weight: Axis3
    scale: Axis3
    grid: tuple[int, int]  # scales of one matrix
    lead: tuple[int, ...]
    is_unit_wide: bool  # the stored strides are whole vectors


@lru_cache(maxsize=4_096)
def slot_plan(
    storage_format: StorageFormat,
    logical_shape: tuple[int, ...],
    source: str,
    scales: Scales,
    target: tuple[str, bool],
) -> SlotPlan:
    """`source` is the name of its dtype; `target` the architecture, and whether it has an fma.

    FormatError for a layout that is no order of digits, or has too many of them.
    """
    spec = storage_format.storage_spec(logical_shape)
    weight = spec[WEIGHT]
    places = places_of(storage_format.layout, weight.shape, weight.dtype)
    if places is None or not has_place_facts(places):
        raise refuse_format(
            *(storage_format, "a layout of at most two digits under the rest in each dimension"),
            storage_format.layout.describe(),
        )
    recipe, scale, grid = storage_format.recipe, Axis3(0, 0, 0, 0), (1, 1)
    if isinstance(recipe, Quantised):
        facts = recipe_facts(recipe, scales, arch=target[0], has_fma=target[1])
        scale_places = storage_format.scale_places(logical_shape)
        if not has_place_facts(scale_places):
            raise refuse_format(
                *(storage_format, "a scale layout of at most two digits under the rest"),
                storage_format.scale_layout.describe(),
            )
        logical_grid = (1, *storage_format.scale_grid(logical_shape).shape)[-2:]
        scale, grid = _axis(scale_places), (logical_grid[0], logical_grid[1])
        facts = replace(facts, source=source, scale_places=PlaceFacts.of(scale_places))
    else:
        assert isinstance(recipe, Unquantised)
        name = dtype_name(recipe.dtype)
        if recipe.dtype not in FLOAT_DTYPES:
            raise refuse_format(storage_format, "float32, bfloat16 or float16 storage", name)
        facts = EncodeFacts(source=source, code=name, has_fma=target[1])
        if source == name:
            facts = replace(facts, source="bits", code="bits")
    axis, vector = _axis(places), _VECTOR_BYTES // weight.dtype.itemsize
    per_code = 2 if facts.code == CodeType.E2M1 else 1
    return SlotPlan(
        facts=replace(facts, weight=PlaceFacts.of(places)),
        shape=(places.shape[0], places.shape[1] * per_code),
        weight=axis,
        scale=scale,
        grid=grid,
        lead=tuple(logical_shape[:-2]),
        is_unit_wide=_is_wide(axis, vector),
    )


def bits_plan(places: Places, lead: tuple[int, ...], itemsize: int) -> SlotPlan:
    """Elements that are copied as they are."""
    axis, vector = _axis(places), _VECTOR_BYTES // itemsize
    return SlotPlan(
        facts=EncodeFacts(source="bits", code="bits", weight=PlaceFacts.of(places)),
        shape=places.shape,
        weight=axis,
        scale=Axis3(0, 0, 0, 0),
        grid=(1, 1),
        lead=lead,
        is_unit_wide=_is_wide(axis, vector),
    )


def _is_wide(axis: Axis3, vector: int) -> bool:
    return all(stride % vector == 0 for stride in (axis.matrix, axis.stride, axis.part_stride))


def _axis(places: Places) -> Axis3:
    rows = places.rows
    return Axis3(places.numel, rows.stride, rows.part_size, rows.part_stride)


def scales_for(storage_format: StorageFormat, logical_shape: tuple[int, ...]) -> Scales:
    """How the scales of such a weight are made where none are given."""
    recipe = storage_format.recipe
    if not isinstance(recipe, Quantised):
        return "none"
    if recipe.granularity is Granularity.TENSOR:
        return "amax"
    if recipe.granularity is not Granularity.TOKEN:
        return "own"
    padding = storage_format.padding
    columns = logical_shape[-1] if padding is None else padding.padded[1]
    return "own" if columns <= MAX_TOKEN_WIDTH else "amax"


class Part(NamedTuple):
    """A region of a slot as a kernel takes it: boxes of each of `matrices` from `first` on."""

    facts: EncodeFacts
    rows: Box
    columns: Box
    first: int
    matrices: int
    source_strides: tuple[int, int, int]  # matrix, row, column
    weight: Axis3
    source_at: int  # elements from the source's start


def parts_of(
    plan: SlotPlan,
    padded: Region,
    region: Region,
    source: torch.Tensor,
    weight: torch.Tensor,
) -> list[Part]:
    """One part for each index of the leading dimensions but the last of them."""
    rows, columns = ((0, 1), (0, 1), *region)[-2:]
    (_, row_end), (_, column_end) = ((0, 1), (0, 1), *padded)[-2:]
    strides = (0, 0, *source.stride())[-3:] if source.ndim > 1 else (0, 0, *source.stride(), 1)[:3]
    high, wide = plan.facts.share
    row_box = Box(rows[0] // max(high, 1) * max(high, 1), *rows, row_end)
    column_box = Box(columns[0] // max(wide, 1) * max(wide, 1), *columns, column_end)
    facts = _with_units(plan, (*column_box, *strides[:2]), strides[2], source, weight)
    unit, stored_unit = facts.unit, facts.stored_unit
    weight_axis = Axis3(
        plan.weight.matrix // stored_unit,
        plan.weight.stride // stored_unit,
        plan.weight.part,
        plan.weight.part_stride // stored_unit,
    )
    return [
        Part(
            facts=facts,
            rows=row_box,
            columns=Box(*(bound // unit for bound in column_box)),
            first=first,
            matrices=matrices,
            source_strides=(strides[0] // unit, strides[1] // unit, strides[2]),
            weight=weight_axis,
            source_at=source_at,
        )
        for first, matrices, source_at in matrix_runs(plan.lead, region[:-2], source.stride())
    ]


def _with_units(
    plan: SlotPlan,
    multiples: tuple[int, ...],
    column_stride: int,
    source: torch.Tensor,
    weight: torch.Tensor,
) -> EncodeFacts:
    """The facts, with the widest units that all these numbers and addresses are multiples of."""
    unit = 32 if plan.facts.code == CodeType.E2M1 else 16
    is_wide = column_stride == 1 and all(number % unit == 0 for number in multiples)
    is_wide = is_wide and source.data_ptr() % _VECTOR_BYTES == 0
    is_stored_wide = plan.is_unit_wide and weight.data_ptr() % _VECTOR_BYTES == 0
    return replace(
        plan.facts,
        unit=unit if is_wide else 1,
        stored_unit=_VECTOR_BYTES // weight.itemsize if is_stored_wide else 1,
    )


def matrix_runs(
    lead: tuple[int, ...], region: Region, strides: tuple[int, ...]
) -> list[tuple[int, int, int]]:
    """(first matrix, how many, where the source has them) for runs of the last leading index."""
    if not lead:
        return [(0, 1, 0)]
    runs = [(0, 0)]
    for size, (start, stop), stride in zip(lead[:-1], region[:-1], strides, strict=False):
        runs = [
            (first * size + start + step, at + step * stride)
            for first, at in runs
            for step in range(stop - start)
        ]
    start, stop = region[-1]
    return [(first * lead[-1] + start, stop - start, at) for first, at in runs]
