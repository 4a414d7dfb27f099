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
from syncline.model_ops_rocm.formats.recipes import Unquantised
from syncline.model_ops_rocm.formats.storage_format import StorageFormat
from syncline.model_ops_rocm.layouts.places import Places, places_of
from syncline.model_ops_rocm.quant.scheme import CodeType, Granularity, ScaleType
from syncline.model_ops_rocm.regions import Region
from syncline.model_ops_rocm.triton.encode_facts import (
    SHARES,
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
_CODED: Final = (CodeType.E4M3FN, CodeType.E4M3FNUZ)


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


def weight_places(storage_format: StorageFormat, logical_shape: tuple[int, ...]) -> Places:
    """Of the codes. FormatError for a layout that is no order of digits, or has too many."""
    weight = storage_format.codes(logical_shape)
    places = places_of(storage_format.layout, weight.shape, weight.dtype)
    if places is None or not has_place_facts(places):
        raise refuse_format(
            *(storage_format, "a layout of at most two digits under the rest in each dimension"),
            storage_format.layout.describe(),
        )
    return places


def places_of_scales(storage_format: StorageFormat, logical_shape: tuple[int, ...]) -> Places:
    """The same of the scales."""
    places = storage_format.scale_places(logical_shape)
    if not has_place_facts(places):
        raise refuse_format(
            *(storage_format, "a scale layout of at most two digits under the rest"),
            storage_format.scale_layout.describe(),
        )
    return places


@lru_cache(maxsize=4_096)
def slot_plan(
    storage_format: StorageFormat,
    logical_shape: tuple[int, ...],
    source: str,
    scales: Scales,
    target: tuple[str, bool],
) -> SlotPlan:
    """`source` is the name of its dtype; `target` the architecture, and whether it has an fma."""
    places = weight_places(storage_format, logical_shape)
    recipe, scale, grid = storage_format.recipe, Axis3(0, 0, 0, 0), (1, 1)
    if isinstance(recipe, Quantised):
        facts = recipe_facts(recipe, scales, arch=target[0], has_fma=target[1])
        scale_places = places_of_scales(storage_format, logical_shape)
        logical_grid = (1, *storage_format.scale_grid(logical_shape).shape)[-2:]
        scale, grid = axis_of(scale_places), (logical_grid[0], logical_grid[1])
        facts = replace(facts, source=source, scale_places=PlaceFacts.of(scale_places))
    else:
        assert isinstance(recipe, Unquantised)
        name = dtype_name(recipe.dtype)
        if recipe.dtype not in FLOAT_DTYPES:
            raise refuse_format(storage_format, "float32, bfloat16 or float16 storage", name)
        facts = EncodeFacts(source=source, code=name, has_fma=target[1])
        if source == name:
            facts = replace(facts, source="bits", code="bits")
    code_bytes = storage_format.codes(logical_shape).dtype.itemsize
    axis, vector = axis_of(places), _VECTOR_BYTES // code_bytes
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


def bits_plan(places: Places, lead: tuple[int, ...], itemsize: int, flags: str = "") -> SlotPlan:
    """Elements that are copied as they are; `flags` as in `EncodeFacts`."""
    axis, vector = axis_of(places), _VECTOR_BYTES // itemsize
    return SlotPlan(
        facts=EncodeFacts(source="bits", code="bits", flags=flags, weight=PlaceFacts.of(places)),
        shape=places.shape,
        weight=axis,
        scale=Axis3(0, 0, 0, 0),
        grid=(1, 1),
        lead=lead,
        is_unit_wide=_is_wide(axis, vector),
    )


def _is_wide(axis: Axis3, vector: int) -> bool:
    return all(stride % vector == 0 for stride in (axis.matrix, axis.stride, axis.part_stride))


def axis_of(places: Places) -> Axis3:
    """Of rows."""
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
    scale_strides: tuple[int, int]  # of the scales of a source of codes: matrix, row
    weight: Axis3
    source_at: int  # elements from the source's start
    scale_at: int


class Source(NamedTuple):
    """What is stored: numbers, or codes and their scales, whose last dimension is contiguous."""

    values: torch.Tensor
    scales: torch.Tensor | None = None

    @property
    def strides(self) -> tuple[int, int, int]:
        """Of a matrix, a row and a column; a vector is one row."""
        stride = self.values.stride()
        if len(stride) > 1:
            matrix, row, column = (0, *stride)[-3:]
            return matrix, row, column
        return 0, 0, stride[0] if stride else 1

    @property
    def scale_strides(self) -> tuple[int, ...]:
        return () if self.scales is None else self.scales.stride()


def parts_of(
    plan: SlotPlan,
    padded: Region,
    region: Region,
    source: Source,
    weight: torch.Tensor,
) -> list[Part]:
    """One part for each index of the leading dimensions but the last of them."""
    rows, columns = ((0, 1), (0, 1), *region)[-2:]
    (_, row_end), (_, column_end) = ((0, 1), (0, 1), *padded)[-2:]
    strides = source.strides
    high, wide = plan.facts.share
    row_box = Box(rows[0] // max(high, 1) * max(high, 1), *rows, row_end)
    column_box = Box(columns[0] // max(wide, 1) * max(wide, 1), *columns, column_end)
    is_aligned = row_box.origin == row_box.start and column_box.origin == column_box.start
    facts = _with_units(
        plan, is_aligned, (*column_box, *strides[:2]), strides[2], source.values, weight
    )
    unit, stored_unit = facts.unit, facts.stored_unit
    weight_axis = Axis3(
        plan.weight.matrix // stored_unit,
        plan.weight.stride // stored_unit,
        plan.weight.part,
        plan.weight.part_stride // stored_unit,
    )
    scale_strides = (0, 0, 0, *source.scale_strides)[-3:-1]
    return [
        Part(
            facts=facts,
            rows=row_box,
            columns=Box(*(bound // unit for bound in column_box)),
            first=first,
            matrices=matrices,
            source_strides=(strides[0] // unit, strides[1] // unit, strides[2]),
            scale_strides=(scale_strides[0], scale_strides[1]),
            weight=weight_axis,
            source_at=source_at,
            scale_at=scale_at,
        )
        for (first, matrices, source_at), (_, _, scale_at) in zip(
            matrix_runs(plan.lead, region[:-2], source.values.stride()),
            matrix_runs(plan.lead, region[:-2], source.scale_strides or (0,) * len(plan.lead)),
            strict=True,
        )
    ]


def _with_units(
    plan: SlotPlan,
    is_aligned: bool,
    multiples: tuple[int, ...],
    column_stride: int,
    source: torch.Tensor,
    weight: torch.Tensor,
) -> EncodeFacts:
    """The facts, with the widest units that all these numbers and addresses are multiples of."""
    unit = _unit(plan.facts)
    is_wide = column_stride == 1 and all(number % unit == 0 for number in multiples)
    is_wide = is_wide and source.data_ptr() % _VECTOR_BYTES == 0
    is_stored_wide = plan.is_unit_wide and weight.data_ptr() % _VECTOR_BYTES == 0
    return _facts_with(
        *(plan.facts, unit if is_wide else 1),
        _VECTOR_BYTES // weight.itemsize if is_stored_wide else 1,
        is_aligned and plan.facts.source in _CODED,
    )


def _unit(facts: EncodeFacts) -> int:
    """Elements: 16 bytes of codes."""
    return 32 if facts.code == CodeType.E2M1 else 16


def coded_plan(plan: SlotPlan, made_by: Quantised) -> SlotPlan:
    """For a source of codes that such a recipe would store."""
    facts = replace(
        plan.facts,
        source=made_by.code.value,
        source_share=SHARES[made_by.granularity],
        source_is_e8m0=made_by.scale is ScaleType.E8M0,
    )
    return replace(plan, facts=facts)


@lru_cache(maxsize=4_096)
def _facts_with(facts: EncodeFacts, unit: int, stored_unit: int, is_aligned: bool) -> EncodeFacts:
    return replace(facts, unit=unit, stored_unit=stored_unit, source_is_aligned=is_aligned)


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
