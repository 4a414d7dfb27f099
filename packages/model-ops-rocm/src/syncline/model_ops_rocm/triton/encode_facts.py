"""What a kernel that stores weights is compiled for, from a storage format; imports no Triton.

Unit: one kind of weight. Facts are equal for many weights; their sizes, strides and addresses are
read at run time, from arguments or from a table on the device.
"""

import math
from dataclasses import dataclass
from typing import Final, Literal

import torch

from syncline.model_ops_rocm.errors import FormatError
from syncline.model_ops_rocm.formats.quantised import Quantised
from syncline.model_ops_rocm.formats.storage_format import StorageFormat
from syncline.model_ops_rocm.layouts.places import Axis, Places
from syncline.model_ops_rocm.quant.scheme import (
    MINI_FLOATS,
    CodeType,
    Granularity,
    ScaleType,
    ZeroRule,
)
from syncline.model_ops_rocm.triton.targets import Target, casts_natively

# own: from the elements of the tile; given: scales; amax: maxima, as bits.
Scales = Literal["none", "own", "given", "amax"]
Digits = tuple[int, int, int, int]
_NO_DIGITS: Final[Digits] = (1, 0, 1, 0)
# Rows and columns that share a scale; 0 is all of them.
SHARES: Final = {
    Granularity.TENSOR: (0, 0),
    Granularity.TOKEN: (1, 0),
    Granularity.BLOCK_1X128: (1, 128),
    Granularity.BLOCK_128X128: (128, 128),
    Granularity.BLOCK_1X32: (1, 32),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceFacts:
    """The compile-time half of `Places`: digits as (size, stride, size, stride), size 1 for none.

    Least significant first. `column_outer` is stride, part_size and part_stride.
    """

    row_inner: Digits = _NO_DIGITS
    has_row_parts: bool = False
    column_inner: Digits = _NO_DIGITS
    column_outer: tuple[int, int, int] = (1, 0, 0)
    fill: int = 0

    @classmethod
    def of(cls, places: Places) -> "PlaceFacts":
        """Of a layout with at most two digits under the rest."""
        return cls(
            row_inner=_digits(places.rows),
            has_row_parts=places.rows.part_size > 0,
            column_inner=_digits(places.columns),
            column_outer=(
                places.columns.stride,
                places.columns.part_size,
                places.columns.part_stride,
            ),
            fill=places.fill,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeFacts:
    """One kind of kernel. Every field is a plain value, and takes part in the compiled name."""

    # float32, bfloat16, float16, "bits" that are copied, or the type of codes that have scales.
    source: str
    code: str  # a CodeType, a floating dtype, or "bits"
    # Of bits: the type of codes, "float32" or "e8m0" scales, of which what is no number is flagged.
    flags: str = ""
    weight: PlaceFacts = PlaceFacts()
    # Where all columns and strides of the source are multiples of `unit`, they come divided by it;
    # so do the strides of the stored weight, by `stored_unit`: 16 bytes.
    unit: int = 1
    stored_unit: int = 1
    source_share: tuple[int, int] = (0, 0)
    source_is_e8m0: bool = False
    source_is_aligned: bool = False  # tiles start where the source's blocks do
    scales: Scales = "none"
    share: tuple[int, int] = (0, 0)
    scale_places: PlaceFacts = PlaceFacts()
    is_e8m0: bool = False
    mode: int = 0  # of e8m0
    power: int = 0  # of the largest power of two in `limit`
    mantissa: int = 0  # bits of the code's mantissa
    limit: float = 0.0
    zero_is_one: bool = False
    is_native: bool = False  # the target converts to `code` itself
    clamps: bool = False  # whether a quotient may exceed the limit by more than a rounding
    has_fma: bool = True  # the interpreter rounds a product before it adds
    # NVIDIA has a maximum of magnitudes that keeps NaN in one instruction; AMD compares integers.
    max_is_float: bool = False


def _digits(axis: Axis) -> Digits:
    first, second = (*axis.inner, (1, 0), (1, 0))[:2]
    return (*first, *second)


def has_place_facts(places: Places | None) -> bool:
    """Whether kernels can store in such an order."""
    return places is not None and max(len(places.rows.inner), len(places.columns.inner)) <= 2


def recipe_facts(recipe: Quantised, scales: Scales, *, arch: str, has_fma: bool) -> EncodeFacts:
    """What a quantised recipe says, for a source of float32 in row-major order."""
    kind = MINI_FLOATS.get(recipe.code)
    native = has_fma and casts_natively(arch, recipe.code)
    # NVIDIA's cast saturates at the type's largest value.
    saturates = native and Target.of_arch(arch).vendor == "cuda" and recipe.clamp is None
    return EncodeFacts(
        source="float32",
        code=recipe.code.value,
        scales=scales,
        share=SHARES[recipe.granularity],
        is_e8m0=recipe.scale is ScaleType.E8M0,
        mode=0 if recipe.e8m0_mode is None else recipe.e8m0_mode.value,
        power=math.floor(math.log2(recipe.limit)),
        mantissa=0 if kind is None else kind.mantissa_bits,
        limit=recipe.limit,
        zero_is_one=recipe.zero is ZeroRule.ONE,
        is_native=native,
        clamps=(scales == "given" or recipe.scale is ScaleType.E8M0) and not saturates,
        has_fma=has_fma,
        max_is_float=has_fma and Target.of_arch(arch).vendor == "cuda",
    )


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def refuse_format(storage_format: StorageFormat, precondition: str, got: object) -> FormatError:
    """The error to raise."""
    return FormatError(
        storage_format=storage_format.describe(), precondition=precondition, got=str(got)
    )


__all__ = [
    "SHARES",
    "CodeType",
    "EncodeFacts",
    "PlaceFacts",
    "Scales",
    "dtype_name",
    "has_place_facts",
    "recipe_facts",
    "refuse_format",
]
