"""Whether tensors fit a storage format, in one wording; looks at no value and knows no recipe.

`who` names the format; it is asked only when something is refused.
"""

from collections.abc import Callable, Mapping
from typing import NoReturn

import torch

from syncline.model_ops_rocm.errors import FormatError
from syncline.model_ops_rocm.formats.coded import CodedSource
from syncline.model_ops_rocm.formats.recipes import WEIGHT_SCALE, TensorSpec
from syncline.model_ops_rocm.layouts import RowMajor, WeightLayout
from syncline.model_ops_rocm.memory import first_shared, is_same_view
from syncline.model_ops_rocm.regions import Region, check_region, region_shape

_SOURCE_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
Who = Callable[[], str]


def refuse(who: Who, precondition: str, got: object) -> NoReturn:
    raise FormatError(storage_format=who(), precondition=precondition, got=str(got))


def check_source(
    who: Who,
    source: torch.Tensor | CodedSource,
    region: Region,
    logical_shape: tuple[int, ...],
    *,
    allows_meta: bool,
) -> None:
    check_region(logical_shape, region)
    if tuple(source.shape) != region_shape(region):
        refuse(who, f"a source of shape {list(region_shape(region))}", list(source.shape))
    if isinstance(source, CodedSource):
        return
    if source.is_meta and not allows_meta:
        refuse(who, "a source with storage", "a meta tensor")
    if source.dtype not in _SOURCE_DTYPES:
        # Codes of a narrower type mean nothing without their scale; integers are no weights.
        refuse(who, "a source of 16-bit or wider floating point", source.dtype)


def check_flag(who: Who, nonfinite: torch.Tensor | None, *, allows_meta: bool) -> None:
    if nonfinite is not None and (
        nonfinite.dtype != torch.bool
        or nonfinite.numel() != 1
        or (nonfinite.is_meta and not allows_meta)
    ):
        refuse(who, "a nonfinite of one bool", f"{nonfinite.dtype} {list(nonfinite.shape)}")


def check_scales(who: Who, wanted: TensorSpec, scales: torch.Tensor, *, allows_meta: bool) -> None:
    if scales.is_meta and not allows_meta:
        refuse(who, "scales with storage", "a meta tensor")
    if tuple(scales.shape) != wanted.shape or scales.dtype != wanted.dtype:
        refuse(
            who,
            f"scales of {wanted.dtype} {list(wanted.shape)}",
            f"{scales.dtype} {list(scales.shape)}",
        )


def tensors_of(source: torch.Tensor | CodedSource) -> dict[str, torch.Tensor]:
    return source.tensors() if isinstance(source, CodedSource) else {"source": source}


def read_of(
    scale_layout: WeightLayout,
    out: Mapping[str, torch.Tensor],
    source: torch.Tensor | CodedSource,
    scales: torch.Tensor | None,
) -> dict[str, torch.Tensor]:
    """What storing reads, by the names in refusals.

    Scales that are given may be those that are stored: each is stored where it is read.
    """
    read = tensors_of(source)
    if scales is not None:
        stored = out.get(WEIGHT_SCALE)
        is_in_order = scale_layout == RowMajor()
        if stored is None or not is_in_order or not is_same_view(scales, stored):
            read["scales"] = scales
    return read


def check_apart(
    who: Who,
    out: Mapping[str, torch.Tensor],
    read: Mapping[str, torch.Tensor],
    nonfinite: torch.Tensor | None = None,
) -> None:
    """FormatError if what is written, whole tensors, shares a byte with what is read."""
    found = first_shared({**out, "nonfinite": nonfinite}, read)
    if found is not None:
        refuse(who, f"{found[0]} apart from {found[1]}", "tensors that share bytes")


def check_stored(
    who: Who,
    spec: Mapping[str, TensorSpec],
    stored: Mapping[str, torch.Tensor],
    *,
    allows_meta: bool,
) -> None:
    """FormatError unless `stored` is exactly the tensors of `spec`."""
    if spec.keys() != stored.keys():
        refuse(who, f"stored tensors named {sorted(spec)}", sorted(stored))
    for name, wanted in spec.items():
        tensor = stored[name]
        if tuple(tensor.shape) != wanted.shape or tensor.dtype != wanted.dtype:
            refuse(
                who,
                f"{name} of {wanted.dtype} {list(wanted.shape)}",
                f"{tensor.dtype} {list(tensor.shape)}",
            )
        if tensor.is_meta and not allows_meta:
            refuse(who, f"{name} with storage", "a meta tensor")
        if not tensor.is_contiguous():
            refuse(who, f"{name} in contiguous storage", f"strides {tensor.stride()}")
