"""One weight, or a part of one, to be stored: the arguments of an op, as a value."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from syncline.model_ops_rocm.formats.coded import CodedSource
from syncline.model_ops_rocm.formats.fitting import check_apart, read_of
from syncline.model_ops_rocm.formats.storage_format import StorageFormat
from syncline.model_ops_rocm.regions import Region, full_region


@dataclass(frozen=True, slots=True, eq=False)
class EncodeJob:
    """The arguments of `StorageFormat.encode_into`: `source` are the elements of `region`.

    `out` are the whole slot's tensors, by the names of `storage_spec`.
    """

    storage_format: StorageFormat
    out: Mapping[str, torch.Tensor]
    source: torch.Tensor | CodedSource
    region: Region
    scales: torch.Tensor | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for a region that is no tuple of (start, stop): it is hashed."""
        is_region = isinstance(self.region, tuple) and all(
            isinstance(bounds, tuple) and len(bounds) == 2 for bounds in self.region
        )
        if not is_region:
            limit = "region must be a tuple of (start, stop) per dimension"
            raise ValueError(f"EncodeJob: {limit}, got {self.region!r}")

    @classmethod
    def whole(
        cls,
        storage_format: StorageFormat,
        out: Mapping[str, torch.Tensor],
        source: torch.Tensor | CodedSource,
    ) -> "EncodeJob":
        """Of a source that is all of the slot."""
        return cls(storage_format, out, source, full_region(source.shape))

    def check(
        self, *, nonfinite: torch.Tensor | None = None, allows_meta: bool = False
    ) -> tuple[int, ...]:
        """The slot's logical shape; raises what `encode_into` raises before it looks at a value."""
        return self.storage_format.check_encode(
            self.out,
            self.source,
            self.region,
            scales=self.scales,
            nonfinite=nonfinite,
            allows_meta=allows_meta,
        )

    def check_apart(self, nonfinite: torch.Tensor | None) -> None:
        """Likewise: FormatError for tensors that share bytes."""
        check_apart(self.storage_format.describe, self.out, self.read(), nonfinite)

    def read(self) -> dict[str, torch.Tensor]:
        """What storing reads beside what it writes, by the names in refusals."""
        return read_of(self.storage_format.scale_layout, self.out, self.source, self.scales)
