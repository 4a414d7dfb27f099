"""StorageFormat: from a full tensor, or a part of it, to stored bytes and back.

Unit: logical elements in, stored bytes out. First load and every later update go through
`encode_into`, so both leave the same bytes. Knows no tensor's name, rank or transport.
"""

import math
from collections.abc import Mapping
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass, replace
from typing import NoReturn

import torch

from syncline.model_ops_rocm.formats import fitting
from syncline.model_ops_rocm.formats.coded import CodedSource
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
from syncline.model_ops_rocm.layouts.base import as_bits, region_is_whole_tiles
from syncline.model_ops_rocm.layouts.places import Places, places_of, write_padded
from syncline.model_ops_rocm.quant.blocks import amax_of_bits
from syncline.model_ops_rocm.regions import (
    Region,
    check_region,
    full_region,
    region_numel,
    region_shape,
    region_view,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageFormat:
    """A recipe, the layouts of "weight" and of "weight_scale", and padding; compared by value.

    `scale_layout` may pad and merge rows, as the scale layouts do: then "weight_scale" has its
    stored shape, and who stores the last row or column of scales stores the padding behind them.
    """

    recipe: Recipe
    layout: WeightLayout = RowMajor()  # noqa: RUF009 (frozen, without fields)
    padding: Padding | None = None
    scale_layout: WeightLayout = RowMajor()  # noqa: RUF009 (as above)

    def describe(self) -> str:
        padding = "" if self.padding is None else f"/{self.padding.describe()}"
        layouts = self.layout.describe()
        if self.scale_layout != RowMajor():
            layouts += f"/scales_{self.scale_layout.describe()}"
        return f"{self.recipe.describe()}/{layouts}{padding}"

    def storage_spec(self, logical_shape: SequenceABC[int]) -> dict[str, TensorSpec]:
        """The tensors to allocate, by name: "weight", and the recipe's scales.

        LayoutError, FormatError or ValueError if a weight of this shape cannot be stored so.
        """
        spec = self.recipe.storage_spec(self._padded_shape(logical_shape))
        if WEIGHT_SCALE in spec:
            scale = spec[WEIGHT_SCALE]
            self.scale_places(logical_shape)
            stored = self.scale_layout.stored_shape(scale.shape, scale.dtype)
            spec[WEIGHT_SCALE] = TensorSpec(shape=stored, dtype=scale.dtype)
        weight = spec[WEIGHT]
        stored = self.layout.stored_shape(weight.shape, weight.dtype)
        if math.prod(stored) != math.prod(weight.shape):
            # The logical shape is read off the stored weight, which padding would falsify: what is
            # padded is padded by the format, which records it.
            self._refuse(f"a layout that pads nothing of {list(weight.shape)}", list(stored))
        return spec | {WEIGHT: TensorSpec(shape=stored, dtype=weight.dtype)}

    def codes(self, logical_shape: SequenceABC[int]) -> TensorSpec:
        """The weight in logical order, with its padding: e2m1 has two codes in an element."""
        return self.recipe.storage_spec(self._padded_shape(logical_shape))[WEIGHT]

    def scale_grid(self, logical_shape: SequenceABC[int]) -> TensorSpec:
        """The scales in logical order, as `scales` makes them. FormatError if there are none."""
        return self._quantised().storage_spec(self._padded_shape(logical_shape))[WEIGHT_SCALE]

    def scale_places(self, logical_shape: SequenceABC[int]) -> Places:
        """Where a scale of the grid is stored within its matrix."""
        grid = self.scale_grid(logical_shape)
        places = places_of(self.scale_layout, grid.shape, grid.dtype)
        if places is None:
            self._refuse("a scale layout that is an order of digits", self.scale_layout.describe())
        return places

    def region_is_encodable(
        self, logical_shape: SequenceABC[int], region: Region, *, scales_given: bool = False
    ) -> bool:
        """Whether the region can be encoded alone: no scale's domain and no layout tile is cut.

        With the scales given only tiles, and elements that hold two codes, must not be cut.
        """
        spec = self.storage_spec(logical_shape)
        check_region(logical_shape, region)
        stored = self.padded_region(region)
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
        padded, stored = self._padded_shape(logical_shape), self.padded_region(region)
        numel = region_numel(stored)
        whole = spec[WEIGHT].num_bytes
        num_bytes = 0 if numel == 0 else numel * whole // region_numel(full_region(padded))
        if num_bytes and self.recipe.is_whole_domain(padded, stored):
            for name, part in self.recipe.scale_region(padded, stored).items():
                part = self.scale_part(part, logical_shape)
                num_bytes += region_numel(part) * spec[name].dtype.itemsize
        return num_bytes

    def encode_into(
        self,
        out: Mapping[str, torch.Tensor],
        source: torch.Tensor | CodedSource,
        region: Region,
        *,
        scales: torch.Tensor | None = None,
        nonfinite: torch.Tensor | None = None,
        backend: str = "torch",
    ) -> None:
        """Store `source`, the logical elements of `region`, in `out`, the whole slot's tensors.

        Casts, quantises, permutes once; changes no byte outside the region, and no byte at all if
        it raises. `source` is float64, float32, bfloat16 or float16; a recipe with scales rounds
        float64 to float32 first. A `CodedSource` is kept bit for bit if it fits the recipe and no
        scales are given, else its numbers are encoded.
        With `scales`, the whole slot's in logical order as `scales` makes them, the region may cut
        their domains; those that it touches are stored too.
        A source that is not finite, or a given scale that is no positive number, has no codes. It
        is refused; but with `nonfinite`, a bool tensor of one element, it is stored as zeros, and
        the tensor becomes true: nothing waits for the device, and the caller reads it later.
        Without given scales such a block's scale is NaN, and so is all that it decodes to. (Codes
        that are kept are kept, whatever they mean.)
        `backend` names the op "encode" that does it, on the GPU at hand; the bytes are the same.
        Raises ValueError for a region outside the slot or values the recipe refuses, LayoutError or
        FormatError for a broken precondition, and what `select` raises for another backend.
        """
        if backend != "torch":
            # Here, since the registry's contracts know this class.
            from syncline.model_ops_rocm.formats.by_backend import encode_by
            from syncline.model_ops_rocm.formats.jobs import EncodeJob

            encode_by(backend, EncodeJob(self, out, source, region, scales), nonfinite)
            return
        logical_shape = self.check_encode(out, source, region, scales=scales, nonfinite=nonfinite)
        read = fitting.read_of(self.scale_layout, out, source, scales)
        fitting.check_apart(self.describe, out, read, nonfinite)
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
        padded, stored = self._padded_shape(logical_shape), self.padded_region(region)
        codes = self.recipe.code_region(stored)
        assert codes is not None
        weight = encoded.tensors[WEIGHT]
        self.layout.apply_into(
            out[WEIGHT],
            weight.to(out[WEIGHT].device),
            codes,
            shape=self.codes(logical_shape).shape,
        )
        for name, part in self.recipe.scale_region(padded, stored).items():
            part_scales = encoded.tensors[name]
            if self.scale_layout == RowMajor():
                region_view(out[name], part).copy_(part_scales)
            else:
                whole = self.scale_part(part, logical_shape)
                write_padded(self.scale_places(logical_shape), out[name], part_scales, whole)

    def check_encode(
        self,
        out: Mapping[str, torch.Tensor],
        source: torch.Tensor | CodedSource,
        region: Region,
        *,
        scales: torch.Tensor | None = None,
        nonfinite: torch.Tensor | None = None,
        allows_meta: bool = False,
    ) -> tuple[int, ...]:
        """The slot's logical shape; raises what `encode_into` raises before it looks at a value."""
        logical_shape = self._check_storage(out, allows_meta)
        fitting.check_source(self.describe, source, region, logical_shape, allows_meta=allows_meta)
        fitting.check_flag(self.describe, nonfinite, allows_meta=allows_meta)
        if scales is not None:
            wanted = self.scale_grid(logical_shape)
            fitting.check_scales(self.describe, wanted, scales, allows_meta=allows_meta)
        if not self.region_is_encodable(logical_shape, region, scales_given=scales is not None):
            self._refuse_region(out, region, scales_given=scales is not None)
        return logical_shape

    def new_amax(
        self, logical_shape: SequenceABC[int], device: torch.device | str = "cpu"
    ) -> AmaxPartial:
        """Maxima of nothing yet. FormatError for a recipe without scales."""
        grid = self.scale_grid(logical_shape).shape
        return AmaxPartial(
            logical_shape=tuple(logical_shape),
            bits=torch.zeros(grid, dtype=torch.int32, device=device),
            counts=torch.zeros(grid, dtype=torch.int64, device=device),
        )

    def check_amax(
        self,
        partial: AmaxPartial,
        source: torch.Tensor | CodedSource,
        region: Region,
        *,
        allows_meta: bool = False,
    ) -> None:
        """Raises what `amax_into` raises."""
        grid = self.scale_grid(partial.logical_shape).shape
        if tuple(partial.bits.shape) != grid:
            self._refuse(f"maxima on a grid of {list(grid)}", list(partial.bits.shape))
        shape = partial.logical_shape
        fitting.check_source(self.describe, source, region, shape, allows_meta=allows_meta)
        maxima = {"bits": partial.bits, "counts": partial.counts}
        fitting.check_apart(self.describe, maxima, fitting.tensors_of(source))

    def amax_into(
        self, partial: AmaxPartial, source: torch.Tensor | CodedSource, region: Region
    ) -> None:
        """Add `source`, the logical elements of `region`, any rectangle, to the maxima in place."""
        recipe, shape = self._quantised(), partial.logical_shape
        self.check_amax(partial, source, region)
        if region_numel(region) == 0:
            return
        padded, stored = self._padded_shape(shape), self.padded_region(region)
        numbers = source.numbers() if isinstance(source, CodedSource) else source
        bits = recipe.amax(
            self._padded_source(numbers, region), logical_shape=padded, region=stored
        ).to(partial.bits.device)
        touched = recipe.scale_region(padded, stored)[WEIGHT_SCALE]
        seen = region_view(partial.bits, touched)
        seen.copy_(torch.maximum(seen, bits))
        counts = recipe.blocks(padded, stored).counts().to(partial.counts.device)
        region_view(partial.counts, touched).add_(counts if len(region) > 1 else counts[0])

    def amax(
        self, source: torch.Tensor | CodedSource, region: Region, logical_shape: SequenceABC[int]
    ) -> AmaxPartial:
        """The maxima of one region; combine them with those of the others."""
        holder = source.weight.codes if isinstance(source, CodedSource) else source
        partial = self.new_amax(logical_shape, holder.device)
        self.amax_into(partial, source, region)
        return partial

    def scales(self, partial: AmaxPartial) -> torch.Tensor:
        """The whole slot's scales, in logical order, for `encode_into`.

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
        logical_shape = self._check_storage(stored)
        logical = dict(stored)
        shape = self.codes(logical_shape).shape
        logical[WEIGHT] = self.layout.inverse(stored[WEIGHT], shape=shape)
        if WEIGHT_SCALE in stored:
            grid = self.scale_grid(logical_shape).shape
            logical[WEIGHT_SCALE] = self.scale_layout.inverse(stored[WEIGHT_SCALE], shape=grid)
        decoded = self.recipe.decode(logical)
        return decoded if self.padding is None else self.padding.crop(decoded)

    def _encode(
        self,
        source: torch.Tensor | CodedSource,
        region: Region,
        logical_shape: tuple[int, ...],
        scales: torch.Tensor | None,
    ) -> Encoded:
        if isinstance(source, CodedSource):
            if scales is None and self.keeps(source):
                return self.keep(source, region, logical_shape)
            source = source.numbers()
        return self.recipe.encode(
            self._padded_source(source.detach(), region),
            logical_shape=self._padded_shape(logical_shape),
            region=self.padded_region(region),
            scales=scales,
        )

    def keeps(self, source: CodedSource) -> bool:
        """Whether the source's codes and scales are stored bit for bit, unless scales are given."""
        return isinstance(self.recipe, Quantised) and source.fits(self.recipe)

    def keep(self, source: CodedSource, region: Region, logical_shape: tuple[int, ...]) -> Encoded:
        """What is stored of a source that `keeps` says yes to, with the zeros of its padding."""
        grid = region_shape(self.touched_scales(logical_shape, region))
        kept = source.kept(self._quantised(), grid)
        codes = self._padded_source(as_bits(kept.tensors[WEIGHT]), region)
        weight = codes.view(kept.tensors[WEIGHT].dtype)
        return replace(kept, tensors={**kept.tensors, WEIGHT: weight})

    def touched_scales(self, logical_shape: SequenceABC[int], region: Region) -> Region:
        """The part of the grid of scales that a region, not empty, has elements of."""
        stored = self.padded_region(region)
        return self._quantised().scale_region(self._padded_shape(logical_shape), stored)[
            WEIGHT_SCALE
        ]

    def scale_part(self, part: Region, logical_shape: SequenceABC[int]) -> Region:
        """A part of the grid, with the layout's padding behind what reaches the last scale."""
        if len(part) < 2:
            return part
        grid, padded = self.scale_grid(logical_shape).shape, self.scale_places(logical_shape).shape
        last = tuple(
            (start, end if stop == size and start < stop else stop)
            for (start, stop), size, end in zip(part[-2:], grid[-2:], padded, strict=True)
        )
        return (*part[:-2], *last)

    def _quantised(self) -> Quantised:
        if not isinstance(self.recipe, Quantised):
            self._refuse("a recipe with scales", self.recipe.describe())
        return self.recipe

    def _padded_shape(self, logical_shape: SequenceABC[int]) -> tuple[int, ...]:
        if self.padding is None:
            return tuple(logical_shape)
        return self.padding.padded_shape(logical_shape)

    def padded_region(self, region: Region) -> Region:
        """With the padding that continues it."""
        return region if self.padding is None else self.padding.padded_region(region)

    def _padded_source(self, source: torch.Tensor, region: Region) -> torch.Tensor:
        return source if self.padding is None else self.padding.pad(source, region)

    def _check_storage(
        self, stored: Mapping[str, torch.Tensor], allows_meta: bool = False
    ) -> tuple[int, ...]:
        """The logical shape, or FormatError unless `stored` is exactly this format's tensors."""
        if WEIGHT not in stored:
            self._refuse(f"a stored tensor named {WEIGHT!r}", sorted(stored))
        codes_shape = self.layout.logical_shape(stored[WEIGHT].shape)
        logical_shape = self.recipe.logical_shape(codes_shape)
        if self.padding is not None:
            logical_shape = (*logical_shape[:-2], self.padding.rows, self.padding.columns)
        fitting.check_stored(
            self.describe, self.storage_spec(logical_shape), stored, allows_meta=allows_meta
        )
        return logical_shape

    def _refuse_region(
        self, out: Mapping[str, torch.Tensor], region: Region, *, scales_given: bool
    ) -> NoReturn:
        rows, columns = self.layout.tile(out[WEIGHT].dtype)
        domain = "" if scales_given else "whole in the domain of its scales and "
        self._refuse(f"a region {domain}in layout tiles of {rows} x {columns}", region)

    def _refuse(self, precondition: str, got: object) -> NoReturn:
        fitting.refuse(self.describe, precondition, got)
