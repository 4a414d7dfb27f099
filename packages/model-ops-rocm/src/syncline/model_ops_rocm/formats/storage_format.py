"""StorageFormat: from a full tensor, or a part of it, to stored bytes and back.

Unit: logical elements in, stored bytes out. First load and every later update go through
`encode_into`, so both leave the same bytes. Knows no tensor's name, rank or transport.
"""

from collections.abc import Mapping
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass
from typing import NoReturn

import torch

from syncline.model_ops_rocm.errors import FormatError
from syncline.model_ops_rocm.formats.padding import Padding
from syncline.model_ops_rocm.formats.partials import AmaxPartial
from syncline.model_ops_rocm.formats.quantised import Quantised
from syncline.model_ops_rocm.formats.recipes import (
    WEIGHT,
    WEIGHT_SCALE,
    Encoded,
    Recipe,
    TensorSpec,
)
from syncline.model_ops_rocm.layouts import RowMajor, WeightLayout
from syncline.model_ops_rocm.layouts.base import region_is_whole_tiles
from syncline.model_ops_rocm.quant.blocks import amax_of_bits
from syncline.model_ops_rocm.regions import (
    Region,
    check_region,
    full_region,
    region_numel,
    region_shape,
    region_view,
)

_SOURCE_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageFormat:
    """A recipe, the layout of its "weight" tensor, and padding if any; compared by value."""

    recipe: Recipe
    layout: WeightLayout = RowMajor()  # noqa: RUF009 (frozen, without fields)
    padding: Padding | None = None

    def describe(self) -> str:
        padding = "" if self.padding is None else f"/{self.padding.describe()}"
        return f"{self.recipe.describe()}/{self.layout.describe()}{padding}"

    def storage_spec(self, logical_shape: SequenceABC[int]) -> dict[str, TensorSpec]:
        """The tensors to allocate, by name: "weight", and the recipe's scales.

        LayoutError, FormatError or ValueError if a weight of this shape cannot be stored so.
        """
        spec = self.recipe.storage_spec(self._padded_shape(logical_shape))
        weight = spec[WEIGHT]
        stored_shape = self.layout.stored_shape(weight.shape, weight.dtype)
        if stored_shape != weight.shape:
            # The logical shape is read off the stored weight, which padding would falsify: what is
            # padded is padded by the format, which records it.
            self._refuse(f"a layout that keeps the shape {list(weight.shape)}", list(stored_shape))
        return spec

    def region_is_encodable(
        self, logical_shape: SequenceABC[int], region: Region, *, scales_given: bool = False
    ) -> bool:
        """Whether the region can be encoded alone: no scale's domain and no layout tile is cut.

        With the scales given only tiles, and elements that hold two codes, must not be cut.
        """
        spec = self.storage_spec(logical_shape)
        check_region(logical_shape, region)
        stored = self._padded_region(region)
        codes = self.recipe.code_region(stored)
        if codes is None or not region_is_whole_tiles(self.layout, spec[WEIGHT].dtype, codes):
            return False
        return scales_given or self.recipe.is_whole_domain(
            self._padded_shape(logical_shape), stored
        )

    def scale_domain(self, logical_shape: SequenceABC[int], region: Region) -> bool:
        """The same question as `region_is_encodable`, by its other name."""
        return self.region_is_encodable(logical_shape, region)

    def region_bytes(self, logical_shape: SequenceABC[int], region: Region) -> int:
        """Stored bytes that the region owns: its codes, and the scales whose domain it holds whole.

        Padding belongs to the region before it. Encodable regions that partition the shape add up
        to the bytes of the whole storage. A region that holds a part of a scale's domain does not
        own that scale, so parts of a domain add up to less, never to more; and two that share an
        element of two codes count it half each, rounded down.
        """
        spec = self.storage_spec(logical_shape)
        check_region(logical_shape, region)
        padded, stored = self._padded_shape(logical_shape), self._padded_region(region)
        numel = region_numel(stored)
        whole = spec[WEIGHT].num_bytes
        num_bytes = 0 if numel == 0 else numel * whole // region_numel(full_region(padded))
        if num_bytes and self.recipe.is_whole_domain(padded, stored):
            for name, part in self.recipe.scale_region(padded, stored).items():
                num_bytes += region_numel(part) * spec[name].dtype.itemsize
        return num_bytes

    def encode_into(
        self,
        out: Mapping[str, torch.Tensor],
        source: torch.Tensor,
        region: Region,
        *,
        scales: torch.Tensor | None = None,
        nonfinite: torch.Tensor | None = None,
    ) -> None:
        """Store `source`, the logical elements of `region`, in `out`, the whole slot's tensors.

        Casts, quantises, permutes once; changes no byte outside the region, and no byte at all if
        it raises. `source` is float64, float32, bfloat16 or float16; a recipe with scales rounds
        float64 to float32 first.
        With `scales`, the whole slot's as `scales` makes them, the region may cut their domains;
        those that it touches are stored too.
        A source that is not finite, or a given scale that is no positive number, has no codes. It
        is refused; but with `nonfinite`, a bool tensor of one element, it is stored as zeros, and
        the tensor becomes true: nothing waits for the device, and the caller reads it later.
        Without given scales such a block's scale is NaN, and so is all that it decodes to.
        Raises ValueError for a region outside the slot or values the recipe refuses, LayoutError or
        FormatError for a broken precondition.
        """
        logical_shape = self._check_storage(out)
        self._check_source(source, region, logical_shape)
        self._check_flag(nonfinite)
        if scales is not None:
            self._check_scales(out, scales)
        if not self.region_is_encodable(logical_shape, region, scales_given=scales is not None):
            self._refuse_region(out, region, scales_given=scales is not None)
        if region_numel(region) == 0:
            return
        encoded = self._encode(source, region, logical_shape, scales)
        if encoded.nonfinite is not None:
            if nonfinite is not None:
                nonfinite.logical_or_(encoded.nonfinite.to(nonfinite.device))
            elif bool(encoded.nonfinite):
                raise ValueError(
                    f"{self.describe()}: source must be finite, and given scales positive numbers;"
                    " got an infinity, a NaN, or a scale that is not"
                )
        padded, stored = self._padded_shape(logical_shape), self._padded_region(region)
        codes = self.recipe.code_region(stored)
        assert codes is not None
        weight = encoded.tensors[WEIGHT]
        self.layout.apply_into(
            out[WEIGHT], weight.to(out[WEIGHT].device), codes, shape=out[WEIGHT].shape
        )
        for name, part in self.recipe.scale_region(padded, stored).items():
            region_view(out[name], part).copy_(encoded.tensors[name])

    def new_amax(
        self, logical_shape: SequenceABC[int], device: torch.device | str = "cpu"
    ) -> AmaxPartial:
        """Maxima of nothing yet. FormatError for a recipe without scales."""
        self._quantised()
        grid = self.storage_spec(logical_shape)[WEIGHT_SCALE].shape
        return AmaxPartial(
            logical_shape=tuple(logical_shape),
            bits=torch.zeros(grid, dtype=torch.int32, device=device),
            counts=torch.zeros(grid, dtype=torch.int64, device=device),
        )

    def amax_into(self, partial: AmaxPartial, source: torch.Tensor, region: Region) -> None:
        """Add `source`, the logical elements of `region`, any rectangle, to the maxima in place."""
        recipe, shape = self._quantised(), partial.logical_shape
        grid = self.storage_spec(shape)[WEIGHT_SCALE].shape
        if tuple(partial.bits.shape) != grid:
            self._refuse(f"maxima on a grid of {list(grid)}", list(partial.bits.shape))
        self._check_source(source, region, shape)
        if region_numel(region) == 0:
            return
        padded, stored = self._padded_shape(shape), self._padded_region(region)
        bits = recipe.amax(
            self._padded_source(source, region), logical_shape=padded, region=stored
        ).to(partial.bits.device)
        touched = recipe.scale_region(padded, stored)[WEIGHT_SCALE]
        seen = region_view(partial.bits, touched)
        seen.copy_(torch.maximum(seen, bits))
        counts = recipe.blocks(padded, stored).counts().to(partial.counts.device)
        region_view(partial.counts, touched).add_(counts if len(region) > 1 else counts[0])

    def amax(
        self, source: torch.Tensor, region: Region, logical_shape: SequenceABC[int]
    ) -> AmaxPartial:
        """The maxima of one region; combine them with those of the others."""
        partial = self.new_amax(logical_shape, source.device)
        self.amax_into(partial, source, region)
        return partial

    def scales(self, partial: AmaxPartial) -> torch.Tensor:
        """The whole slot's scales, as they are stored, for `encode_into`.

        FormatError unless every element was counted once: a scale of a part is no scale.
        """
        recipe = self._quantised()
        padded = self._padded_shape(partial.logical_shape)
        wanted = recipe.blocks(padded, full_region(padded)).counts() if partial.bits.numel() else 0
        missing = partial.counts != torch.as_tensor(wanted, device=partial.counts.device)
        if bool(missing.any()):
            self._refuse(
                "maxima of every element, each counted once",
                f"{int(missing.sum())} of {missing.numel()} scales whose domain is not",
            )
        return recipe.scales_of(amax_of_bits(partial.bits))

    def decode(self, stored: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The logical tensor: in the stored dtype if unquantised, else float32."""
        self._check_storage(stored)
        logical = dict(stored)
        logical[WEIGHT] = self.layout.inverse(stored[WEIGHT], shape=stored[WEIGHT].shape)
        decoded = self.recipe.decode(logical)
        return decoded if self.padding is None else self.padding.crop(decoded)

    def _encode(
        self,
        source: torch.Tensor,
        region: Region,
        logical_shape: tuple[int, ...],
        scales: torch.Tensor | None,
    ) -> Encoded:
        return self.recipe.encode(
            self._padded_source(source.detach(), region),
            logical_shape=self._padded_shape(logical_shape),
            region=self._padded_region(region),
            scales=scales,
        )

    def _quantised(self) -> Quantised:
        if not isinstance(self.recipe, Quantised):
            self._refuse("a recipe with scales", self.recipe.describe())
        return self.recipe

    def _padded_shape(self, logical_shape: SequenceABC[int]) -> tuple[int, ...]:
        if self.padding is None:
            return tuple(logical_shape)
        return self.padding.padded_shape(logical_shape)

    def _padded_region(self, region: Region) -> Region:
        return region if self.padding is None else self.padding.padded_region(region)

    def _padded_source(self, source: torch.Tensor, region: Region) -> torch.Tensor:
        return source if self.padding is None else self.padding.pad(source, region)

    def _check_source(
        self, source: torch.Tensor, region: Region, logical_shape: tuple[int, ...]
    ) -> None:
        check_region(logical_shape, region)
        if tuple(source.shape) != region_shape(region):
            self._refuse(f"a source of shape {list(region_shape(region))}", list(source.shape))
        if source.is_meta:
            self._refuse("a source with storage", "a meta tensor")
        if source.dtype not in _SOURCE_DTYPES:
            # Codes of a narrower type mean nothing without their scale; integers are no weights.
            self._refuse("a source of 16-bit or wider floating point", source.dtype)

    def _check_flag(self, nonfinite: torch.Tensor | None) -> None:
        if nonfinite is not None and (
            nonfinite.dtype != torch.bool or nonfinite.numel() != 1 or nonfinite.is_meta
        ):
            self._refuse("a nonfinite of one bool", f"{nonfinite.dtype} {list(nonfinite.shape)}")

    def _check_scales(self, out: Mapping[str, torch.Tensor], scales: torch.Tensor) -> None:
        self._quantised()
        wanted = out[WEIGHT_SCALE]
        if scales.shape != wanted.shape or scales.dtype != wanted.dtype or scales.is_meta:
            self._refuse(
                f"scales of {wanted.dtype} {list(wanted.shape)}",
                f"{scales.dtype} {list(scales.shape)}",
            )

    def _check_storage(self, stored: Mapping[str, torch.Tensor]) -> tuple[int, ...]:
        """The logical shape, or FormatError unless `stored` is exactly this format's tensors."""
        if WEIGHT not in stored:
            self._refuse(f"a stored tensor named {WEIGHT!r}", sorted(stored))
        logical_shape = self.recipe.logical_shape(stored[WEIGHT].shape)
        if self.padding is not None:
            logical_shape = (*logical_shape[:-2], self.padding.rows, self.padding.columns)
        spec = self.storage_spec(logical_shape)
        if spec.keys() != stored.keys():
            self._refuse(f"stored tensors named {sorted(spec)}", sorted(stored))
        for name, wanted in spec.items():
            tensor = stored[name]
            if tuple(tensor.shape) != wanted.shape or tensor.dtype != wanted.dtype:
                self._refuse(
                    f"{name} of {wanted.dtype} {list(wanted.shape)}",
                    f"{tensor.dtype} {list(tensor.shape)}",
                )
            if tensor.is_meta or not tensor.is_contiguous():
                self._refuse(f"{name} in contiguous storage", f"strides {tensor.stride()}")
        return logical_shape

    def _refuse_region(
        self, out: Mapping[str, torch.Tensor], region: Region, *, scales_given: bool
    ) -> NoReturn:
        rows, columns = self.layout.tile(out[WEIGHT].dtype)
        domain = "" if scales_given else "whole in the domain of its scales and "
        self._refuse(f"a region {domain}in layout tiles of {rows} x {columns}", region)

    def _refuse(self, precondition: str, got: object) -> NoReturn:
        raise FormatError(storage_format=self.describe(), precondition=precondition, got=str(got))
