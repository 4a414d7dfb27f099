"""StorageFormat: from a full tensor, or a part of it, to stored bytes and back.

Unit: logical elements in, stored bytes out. First load and every later update go through
`encode_into`, so both leave the same bytes. Knows no tensor's name, rank or transport.
"""

from collections.abc import Mapping
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass

import torch

from syncline.model_ops_rocm.errors import FormatError
from syncline.model_ops_rocm.formats.recipes import WEIGHT, Recipe, TensorSpec
from syncline.model_ops_rocm.layouts import RowMajor, WeightLayout
from syncline.model_ops_rocm.layouts.base import region_is_whole_tiles
from syncline.model_ops_rocm.regions import (
    Region,
    check_region,
    region_numel,
    region_shape,
    region_view,
)

_SOURCE_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageFormat:
    """A recipe and the layout of its "weight" tensor; compared by value."""

    recipe: Recipe
    layout: WeightLayout = RowMajor()  # noqa: RUF009 (frozen, without fields)

    def describe(self) -> str:
        return f"{self.recipe.describe()}/{self.layout.describe()}"

    def storage_spec(self, logical_shape: SequenceABC[int]) -> dict[str, TensorSpec]:
        """The tensors to allocate, by name: "weight", and the recipe's scales.

        LayoutError, FormatError or ValueError if a weight of this shape cannot be stored so.
        """
        spec = self.recipe.storage_spec(logical_shape)
        weight = spec[WEIGHT]
        stored_shape = self.layout.stored_shape(weight.shape, weight.dtype)
        if stored_shape != weight.shape:
            # The logical shape is read off the stored weight, which padding would falsify.
            self._refuse(f"a layout that keeps the shape {list(weight.shape)}", list(stored_shape))
        return spec

    def region_is_encodable(self, logical_shape: SequenceABC[int], region: Region) -> bool:
        """Whether the region can be encoded alone: no scale's domain and no layout tile is cut."""
        spec = self.storage_spec(logical_shape)
        check_region(logical_shape, region)
        return self.recipe.is_whole_domain(logical_shape, region) and region_is_whole_tiles(
            self.layout, spec[WEIGHT].dtype, region
        )

    def scale_domain(self, logical_shape: SequenceABC[int], region: Region) -> bool:
        """The same question as `region_is_encodable`, by its other name."""
        return self.region_is_encodable(logical_shape, region)

    def region_bytes(self, logical_shape: SequenceABC[int], region: Region) -> int:
        """Stored bytes that the region owns: its codes, and the scales whose domain it holds whole.

        Encodable regions that partition the shape add up to the bytes of the whole storage. A
        region that holds a part of a scale's domain does not own that scale, so parts of a domain
        add up to less, never to more.
        """
        spec = self.storage_spec(logical_shape)
        check_region(logical_shape, region)
        num_bytes = region_numel(region) * spec[WEIGHT].dtype.itemsize
        if num_bytes and self.recipe.is_whole_domain(logical_shape, region):
            for name, part in self.recipe.scale_region(region).items():
                num_bytes += region_numel(part) * spec[name].dtype.itemsize
        return num_bytes

    def encode_into(
        self, out: Mapping[str, torch.Tensor], source: torch.Tensor, region: Region
    ) -> None:
        """Store `source`, the logical elements of `region`, in `out`, the whole slot's tensors.

        Casts, quantises, permutes once; changes no byte outside the region, and no byte at all if
        it raises. `source` is float64, float32, bfloat16 or float16.
        Raises ValueError for a region outside the slot or values the recipe refuses, LayoutError or
        FormatError for a broken precondition.
        """
        logical_shape = self._check_storage(out)
        check_region(logical_shape, region)
        if tuple(source.shape) != region_shape(region):
            self._refuse(f"a source of shape {list(region_shape(region))}", list(source.shape))
        if source.is_meta:
            self._refuse("a source with storage", "a meta tensor")
        if source.dtype not in _SOURCE_DTYPES:
            # Codes of a narrower type mean nothing without their scale; integers are no weights.
            self._refuse("a source of 16-bit or wider floating point", source.dtype)
        if not self.region_is_encodable(logical_shape, region):
            rows, columns = self.layout.tile(out[WEIGHT].dtype)
            self._refuse(
                "a region whole in the domain of its scales and in layout tiles of"
                f" {rows} x {columns}",
                region,
            )
        if region_numel(region) == 0:
            return
        encoded = self.recipe.encode(source.detach())
        codes = encoded[WEIGHT].to(out[WEIGHT].device)
        self.layout.apply_into(out[WEIGHT], codes, region, shape=logical_shape)
        for name, part in self.recipe.scale_region(region).items():
            region_view(out[name], part).copy_(encoded[name])

    def decode(self, stored: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The logical tensor: in the stored dtype if unquantised, else float32."""
        logical_shape = self._check_storage(stored)
        logical = dict(stored)
        logical[WEIGHT] = self.layout.inverse(stored[WEIGHT], shape=logical_shape)
        return self.recipe.decode(logical)

    def _check_storage(self, stored: Mapping[str, torch.Tensor]) -> tuple[int, ...]:
        """The logical shape, or FormatError unless `stored` is exactly this format's tensors."""
        if WEIGHT not in stored:
            self._refuse(f"a stored tensor named {WEIGHT!r}", sorted(stored))
        logical_shape = tuple(stored[WEIGHT].shape)
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

    def _refuse(self, precondition: str, got: object) -> None:
        raise FormatError(storage_format=self.describe(), precondition=precondition, got=str(got))
