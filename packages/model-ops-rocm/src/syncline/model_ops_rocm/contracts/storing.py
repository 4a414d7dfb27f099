"""Contracts of the ops that store weights; know no name of a weight and no transport."""

from collections.abc import Sequence as SequenceABC
from typing import Protocol

import torch

from syncline.model_ops_rocm.formats.coded import CodedSource
from syncline.model_ops_rocm.formats.jobs import EncodeJob
from syncline.model_ops_rocm.formats.partials import AmaxPartial
from syncline.model_ops_rocm.formats.storage_format import StorageFormat
from syncline.model_ops_rocm.regions import Region


class Encode(Protocol):
    """A region of a weight, stored: what `StorageFormat.encode_into` writes, to the same bytes."""

    def workspace_bytes(
        self, storage_format: StorageFormat, logical_shape: SequenceABC[int]
    ) -> int:
        """What a call for any region of such a weight needs; 0 where one pass is enough."""
        ...

    def __call__(
        self,
        job: EncodeJob,
        *,
        nonfinite: torch.Tensor | None = None,
        workspace: torch.Tensor | None = None,
    ) -> None:
        """Store the job's source, with the rounding and the refusals of `encode_into`.

        `nonfinite` is its flag: a bool of one element, which becomes true if a number or a given
        scale is none that can be stored. A backend that does not wait for the device cannot refuse
        such a number: there a recipe with scales needs the flag.
        """
        ...


class EncodeGrouped(Protocol):
    """Many weights stored, by a launch for each kind of them; the bytes are those of `Encode`."""

    def workspace_bytes(self, max_jobs: int) -> int:
        """What a call with so many jobs needs, for a table of them on the device."""
        ...

    def __call__(
        self,
        jobs: SequenceABC[EncodeJob],
        *,
        nonfinite: torch.Tensor | None = None,
        workspace: torch.Tensor | None = None,
    ) -> None:
        """Store each job's source; one flag for all. No two of them may write the same bytes.

        Each is whole in the domains of its scales or has them given. Not to be recorded in a graph
        where it copies a table from the host; all jobs are checked before anything is stored.
        """
        ...


class AmaxInto(Protocol):
    """Maxima of a region added to a partial: what `StorageFormat.amax_into` does, equal bits."""

    def __call__(
        self,
        storage_format: StorageFormat,
        partial: AmaxPartial,
        source: torch.Tensor | CodedSource,
        region: Region,
    ) -> None:
        """Add `source`, the elements of `region`, any rectangle, to `partial` in place."""
        ...
