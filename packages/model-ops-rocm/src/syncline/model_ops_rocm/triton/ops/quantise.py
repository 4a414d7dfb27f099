"""Activations to codes and scales by Triton, and what the fused ops share of it."""

import math
from typing import NamedTuple

import torch

from syncline.model_ops_rocm.arguments.fused import (
    GROUPS,
    QUANTISE,
    check_quantise,
    num_groups,
)
from syncline.model_ops_rocm.checks import refuse
from syncline.model_ops_rocm.formats.quantised import Quantised
from syncline.model_ops_rocm.layouts.base import empty_storage
from syncline.model_ops_rocm.quant.scheme import (
    MINI_FLOATS,
    SCALE_DTYPES,
    Granularity,
    ZeroRule,
)
from syncline.model_ops_rocm.triton.configs.elementwise import MAX_NORM_WIDTH
from syncline.model_ops_rocm.triton.geometry import power_of_two, rows_of
from syncline.model_ops_rocm.triton.kernels.quantise import quantise_kernel
from syncline.model_ops_rocm.triton.launch import (
    IS_INTERPRETED,
    LAUNCHER,
    Chosen,
    overlaps,
    require_reachable,
)
from syncline.model_ops_rocm.triton.targets import casts_natively

Encoded = tuple[torch.Tensor, torch.Tensor]


class Destination(NamedTuple):
    """Where codes and scales of rows go."""

    codes: torch.Tensor
    scales: torch.Tensor
    nonfinite: torch.Tensor | None

    @property
    def result(self) -> Encoded:
        return self.codes, self.scales

    @property
    def pointers(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As a kernel takes them: bytes, numbers or bytes, and anything where there is no flag."""
        codes, scales, nonfinite = self
        is_byte = scales.dtype.itemsize == 1
        flag = scales if nonfinite is None else nonfinite
        return (
            codes.view(torch.uint8),
            scales.view(torch.uint8) if is_byte else scales,
            flag.view(torch.uint8) if is_byte and nonfinite is None else flag,
        )

    def strides(self, op: str) -> tuple[int, ...]:
        """Of codes and of scales. A scale that was given has none that matter."""
        codes, scales = self.codes, self.scales
        walked = scales if scales.shape[:-1] == codes.shape[:-1] and scales.ndim else codes
        return (*rows_of(op, "out[0]", codes).strides, *rows_of(op, "out[1]", walked).strides)


def destination_of(
    shape: tuple[int, ...],
    source: torch.Tensor,
    recipe: Quantised,
    scale: torch.Tensor | None,
    out: Encoded | None,
    nonfinite: torch.Tensor | None,
) -> Destination:
    """`out`, or new tensors beside `source`."""
    if out is not None:
        return Destination(out[0], out[1], nonfinite)
    codes = empty_storage(shape, recipe.dtype, source.device)
    if scale is None:
        scale = torch.empty(
            (*shape[:-1], num_groups(recipe, shape[-1])),
            dtype=SCALE_DTYPES[recipe.scale],
            device=source.device,
        )
    return Destination(codes, scale, nonfinite)


def recipe_constants(recipe: Quantised, arch: str) -> dict[str, object]:
    """What a kernel is compiled with for a recipe on a into."""
    return {
        "CODE": str(recipe.code),
        "CLAMP": recipe.limit,
        "POWER": math.floor(math.log2(recipe.limit)),
        "MANTISSA": MINI_FLOATS[recipe.code].mantissa_bits,
        "E8M0_MODE": -1 if recipe.e8m0_mode is None else recipe.e8m0_mode.value,
        "ZERO_IS_ONE": recipe.zero is ZeroRule.ONE,
        "IS_GIVEN": recipe.granularity is Granularity.TENSOR,
        "NATIVE": not IS_INTERPRETED and casts_natively(arch, recipe.code),
    }


def choose_groups(
    op: str, recipe: Quantised, dtype: torch.dtype, width: int
) -> tuple[Chosen, dict[str, object], int]:
    """The configuration, a kernel's constants, and how many groups, or pieces, a row has.

    Per token a tile is whole rows, which must fit.
    """
    is_row = recipe.granularity is Granularity.TOKEN
    if is_row and width > MAX_NORM_WIDTH:
        refuse(op, "x", f"have rows up to {MAX_NORM_WIDTH} to be encoded per token", width)
    chosen = LAUNCHER.config(op, dtype, width, "rows" if is_row else "groups")
    group = GROUPS[recipe.granularity]
    if group is None:
        group = width if is_row else chosen[1].constants["BLOCK_ELEMENTS"]
    constants: dict[str, object] = {
        "GROUP": group,
        "BLOCK_WIDTH": power_of_two(group),
        "OVERLAP": overlaps(chosen[1]),
    }
    return chosen, constants | recipe_constants(recipe, chosen[0].arch), -(-width // group)


def num_programs(chosen: Chosen, constants: dict[str, object], num_tiles: int) -> int:
    """As many as cover `num_tiles` groups."""
    block_width = constants["BLOCK_WIDTH"]
    assert isinstance(block_width, int)
    return -(-num_tiles // max(chosen[1].constants["BLOCK_ELEMENTS"] // block_width, 1))


def quantise_activation(
    x_TK: torch.Tensor,
    recipe: Quantised,
    *,
    scale: torch.Tensor | None = None,
    out: Encoded | None = None,
    nonfinite: torch.Tensor | None = None,
) -> Encoded:
    """See `contracts.QuantiseActivation`."""
    check_quantise(x_TK, recipe, scale=scale, out=out, nonfinite=nonfinite)
    into = destination_of(tuple(x_TK.shape), x_TK, recipe, scale, out, nonfinite)
    require_reachable(QUANTISE, x=x_TK, codes=into.codes, scales=into.scales)
    require_reachable(QUANTISE, nonfinite=nonfinite)
    x, width = rows_of(QUANTISE, "x", x_TK), x_TK.shape[-1]
    strides = into.strides(QUANTISE)
    if x.num_rows == 0:
        return into.result
    chosen, constants, per_row = choose_groups(QUANTISE, recipe, x_TK.dtype, width)
    LAUNCHER.launch(
        quantise_kernel,
        (num_programs(chosen, constants, x.num_rows * per_row),),
        chosen,
        (x_TK, *into.pointers, x.num_rows, *x.strides, *strides),
        {"INNER": x.inner, "WIDTH": width, "HAS_FLAG": nonfinite is not None, **constants},
    )
    return into.result
